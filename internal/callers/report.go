package callers

import (
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
)

// Report is the use and the limits of a caller of a pool.
type Report struct {
	Pool string `json:"pool"`
	Name string `json:"name"`
	// Tier is the caller's own tier. It is empty if it has none.
	Tier string `json:"tier"`

	InFlight    int `json:"in_flight"`
	MaxRequests int `json:"max_requests"`
	// Limits are sorted: requests before tokens, and then by window.
	Limits []LimitReport `json:"limits"`
	// Refused are the requests that a limit or MaxRequests has refused since
	// the process started.
	Refused uint64 `json:"refused"`
	// LastHour has the caller's requests of the last hour.
	LastHour limiter.LastHour `json:"last_hour,omitzero"`
	// TokensToday and TokensMonth are the tokens of this day and month,
	// requests in flight included.
	TokensToday int64 `json:"tokens_today"`
	TokensMonth int64 `json:"tokens_month"`
	// Replicas is how many replicas share the limits without hearing each
	// other, or 0.
	Replicas int `json:"replicas_apart"`

	// Own reports whether this process knows the caller. The use is then that
	// of all replicas.
	Own bool `json:"-"`
}

// OwnUse is the use that a caller sees of itself. It contains nothing that
// replicas count separately, so that all replicas give the same answer: a
// caller does not know which replica it asks.
type OwnUse struct {
	Pool        string     `json:"pool"`
	Name        string     `json:"name"`
	Tier        string     `json:"tier"`
	MaxRequests int        `json:"max_requests"`
	Limits      []OwnLimit `json:"limits"`
	TokensToday int64      `json:"tokens_today"`
	TokensMonth int64      `json:"tokens_month"`
	Replicas    int        `json:"replicas_apart"`
	// ModelsOf is [StorageModels] if replicas that keep their records elsewhere
	// may have served other requests. Otherwise it is omitted.
	ModelsOf string `json:"models_of,omitempty"`
	// Models are the models that the caller has used, from the first recorder
	// of usage.
	Models any `json:"models"`
}

// StorageModels means that Models covers only the replicas that share a storage
// with the one that answers.
const StorageModels = "storage"

// OwnLimit is a limit as its caller sees it. The fields are those of
// [LimitReport].
type OwnLimit struct {
	Kind   string     `json:"kind"`
	Window string     `json:"window"`
	Limit  int64      `json:"limit"`
	Used   int64      `json:"used"`
	Left   int64      `json:"left"`
	Then   string     `json:"then"`
	Ends   time.Time  `json:"ends"`
	Resets *time.Time `json:"resets"`
}

// OwnUseOf returns the part of a report that the caller itself may see.
func OwnUseOf(c Report, models any) OwnUse {
	own := OwnUse{
		Pool: c.Pool, Name: c.Name, Tier: c.Tier, MaxRequests: c.MaxRequests, Limits: []OwnLimit{},
		TokensToday: c.TokensToday, TokensMonth: c.TokensMonth, Replicas: c.Replicas, Models: models,
	}
	for _, l := range c.Limits {
		own.Limits = append(own.Limits, OwnLimit{l.Kind, l.Window, l.Limit, l.Used, l.Left, l.Then, l.Ends, l.Resets})
	}
	return own
}

// LimitReport is one limit of a caller.
type LimitReport struct {
	// Kind is requests or tokens, and Window second, minute, hour, day or
	// month.
	Kind   string `json:"kind"`
	Window string `json:"window"`
	// Limit is how much this replica may use: all of the limit, or its share.
	Limit int64 `json:"limit"`
	Used  int64 `json:"used"`
	Left  int64 `json:"left"`
	// Then is the tier of requests over the limit. It is empty if they are
	// refused.
	Then string `json:"then"`
	// Refused and Demoted are the requests that this limit has refused or given
	// another tier.
	Refused uint64 `json:"refused"`
	Demoted uint64 `json:"demoted"`
	// Ends is when the window ends.
	Ends time.Time `json:"ends"`
	// Resets is when nothing is used any more, if nothing else is, or nil.
	Resets *time.Time `json:"resets"`
}

// UsedRatio returns the used fraction of the limit.
func (l LimitReport) UsedRatio() float64 { return float64(l.Used) / float64(max(1, l.Limit)) }

// ReportOf returns the report of a caller of a pool.
func ReportOf(now time.Time, pool string, s limiter.Snapshot) Report {
	c := Report{
		Pool: pool, Name: s.Name, Tier: s.Tier, InFlight: s.InFlight, MaxRequests: s.MaxRequests,
		Limits:  []LimitReport{},
		Refused: s.Busy, TokensToday: s.Today, TokensMonth: s.Month, Replicas: s.Replicas, Own: true,
	}
	for _, u := range s.Limits {
		c.Refused += u.Refused
		l := LimitReport{u.Limit.Kind.String(), u.Limit.Unit.String(), u.Allowed, u.Used, u.Left(), u.Limit.Then,
			u.Refused, u.Demoted, moment(u.Ends), nil}
		if u.Reset > 0 {
			l.Resets = new(moment(now.Add(u.Reset)))
		}
		c.Limits = append(c.Limits, l)
	}
	return c
}

// moment returns a time in the precision and zone of reports.
func moment(t time.Time) time.Time { return t.UTC().Truncate(time.Millisecond) }
