package metrics

import (
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// maxShutdowns is how many models of a backend are kept. OpenAI lists some hundred with a date.
const maxShutdowns = 1000

// shutdowns are the models that a backend's provider will shut down, or has shut down, by the latest lists that passed by.
type shutdowns struct {
	mu     sync.Mutex
	models map[string]shutdown
}

type shutdown struct {
	at time.Time
	// warned is the day of the last warning.
	warned time.Time
}

// Listed records which models have a date, and returns those to warn of: once a day, each that is shut down soon and
// that the member is configured with or has served.
func (b *Backend) Listed(models []openaiapi.ListedModel, m *pool.Member, now time.Time) (news []openaiapi.ListedModel) {
	today := now.UTC().Truncate(24 * time.Hour)
	b.shutdowns.mu.Lock()
	defer b.shutdowns.mu.Unlock()
	for _, listed := range models {
		its, known := b.shutdowns.models[listed.ID]
		switch {
		case listed.Shutdown.IsZero():
			delete(b.shutdowns.models, listed.ID)
			continue
		case !known && len(b.shutdowns.models) >= maxShutdowns:
			continue
		case b.shutdowns.models == nil:
			b.shutdowns.models = make(map[string]shutdown)
		}
		its.at = listed.Shutdown
		if listed.EndsSoon(now) && m.Knows(listed.ID) && its.warned != today {
			its.warned, news = today, append(news, listed)
		}
		b.shutdowns.models[listed.ID] = its
	}
	return news
}

// collect collects the dates of the models that the member is configured with or has served. A model has its own
// series, even if the config does not name it: only names of the provider's that requests had can be one.
func (s *shutdowns) collect(m *pool.Member, collect func(model string, at time.Time)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for model, its := range s.models {
		if m.Knows(model) {
			collect(clean(model), its.at)
		}
	}
}
