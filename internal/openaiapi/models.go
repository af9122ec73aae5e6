package openaiapi

import (
	"encoding/json"
	"time"
)

// MaxModelList is how much of a list of models is read. OpenAI's has some ten
// kilobytes.
const MaxModelList = 4 << 20

// noticePeriod is how long before its shutdown a model is reported.
const noticePeriod = 60 * 24 * time.Hour

// ListedModel is a model in a provider's list of models.
type ListedModel struct {
	ID string
	// Shutdown is when the provider shuts the model down: the beginning of a
	// day in UTC. It is zero if the list has no date.
	Shutdown time.Time
}

// EndsSoon reports whether the model is shut down within 60 days, or has been.
func (m ListedModel) EndsSoon(now time.Time) bool {
	return !m.Shutdown.IsZero() && m.Shutdown.Before(now.Add(noticePeriod))
}

// ReadModels reads a list of models, or one model. It reports whether the list
// goes on on another page, and whether the text is either of them.
func ReadModels(text []byte) (models []ListedModel, more, ok bool) {
	type model struct {
		ID       string
		Shutdown json.RawMessage `json:"shutdown_date"`
	}
	var list struct {
		model
		Object  string
		Data    []model
		HasMore bool `json:"has_more"`
	}
	if err := json.Unmarshal(text, &list); err != nil || list.Data == nil && list.Object != "model" {
		return nil, false, false
	}
	if list.Data == nil {
		list.Data = []model{list.model}
	}
	models = make([]ListedModel, len(list.Data))
	for i, m := range list.Data {
		var date string
		_ = json.Unmarshal(m.Shutdown, &date) // a list with an odd date is a list
		models[i].ID = m.ID
		models[i].Shutdown, _ = time.Parse(time.DateOnly, date)
	}
	return models, list.HasMore, true
}
