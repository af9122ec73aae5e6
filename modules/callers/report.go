package callers

import "time"

// use is what a caller sees of its own use. It contains nothing that replicas
// count separately, so that all replicas give the same answer: a caller does
// not know which replica it asks.
type use struct {
	Pool        string     `json:"pool"`
	Name        string     `json:"name"`
	Tier        string     `json:"tier"`
	MaxRequests int        `json:"max_requests"`
	Limits      []limitUse `json:"limits"`
	TokensToday int64      `json:"tokens_today"`
	TokensMonth int64      `json:"tokens_month"`
	Replicas    int        `json:"replicas_apart"`
	// ModelsOf is storageModels if replicas that keep their records elsewhere
	// may have served other requests. Otherwise it is omitted.
	ModelsOf string `json:"models_of,omitempty"`
	// Models are the models that the caller has used.
	Models any `json:"models"`
}

// storageModels means that Models covers only the replicas that share a storage
// with the one that answers.
const storageModels = "storage"

// limitUse is a limit as its caller sees it. The fields are those that
// operators see, without the counts.
type limitUse struct {
	Kind   string    `json:"kind"`
	Window string    `json:"window"`
	Model  string    `json:"model"`
	Limit  int64     `json:"limit"`
	Used   int64     `json:"used"`
	Left   int64     `json:"left"`
	Then   string    `json:"then"`
	Ends   time.Time `json:"ends"`
	// Resets is when nothing is used any more, if nothing else is, or nil.
	Resets *time.Time `json:"resets"`
}

// Use implements seam.Admission.
func (c *Callers) Use(now time.Time, name string, models any) any {
	s := c.Caller(now, name).Snapshot(now)
	result := use{
		Pool: c.name, Name: s.Name, Tier: s.Tier, MaxRequests: s.MaxRequests, Limits: []limitUse{},
		TokensToday: s.Today, TokensMonth: s.Month, Replicas: s.Replicas, Models: models,
	}
	if c.replicated {
		result.ModelsOf = storageModels
	}
	for _, u := range s.Limits {
		l := limitUse{u.Limit.Kind.String(), u.Limit.Unit.String(), u.Limit.Model, u.Allowed, u.Used, u.Left(),
			u.Limit.Then, moment(u.Ends), nil}
		if u.Reset > 0 {
			l.Resets = new(moment(now.Add(u.Reset)))
		}
		result.Limits = append(result.Limits, l)
	}
	return result
}

// moment returns a time in the precision and zone of reports.
func moment(t time.Time) time.Time { return t.UTC().Truncate(time.Millisecond) }
