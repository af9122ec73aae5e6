package status

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/admin"
	"github.com/openai-lb/caddy-openai-lb/internal/cli"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// Caller is the use and the limits of a caller of a pool.
type Caller struct {
	Pool string `json:"pool"`
	Name string `json:"name"`
	// Tier is the caller's own tier. It is empty if it has none.
	Tier string `json:"tier"`

	InFlight    int `json:"in_flight"`
	MaxRequests int `json:"max_requests"`
	// Limits are sorted: requests before tokens, and then by window. Those of
	// single models follow, by model.
	Limits []CallerLimit `json:"limits"`
	// Refused are the requests that a limit or MaxRequests has refused since
	// the process started.
	Refused uint64 `json:"refused"`
	// LastHour has the caller's requests of the last hour.
	LastHour ratelimit.LastHour `json:"last_hour,omitzero"`
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

// CallerLimit is one limit of a caller.
type CallerLimit struct {
	// Kind is requests or tokens, and Window second, minute, hour, day or
	// month.
	Kind   string `json:"kind"`
	Window string `json:"window"`
	// Model is the only model whose requests count. It is empty if requests for
	// all models count.
	Model string `json:"model"`
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
func (l CallerLimit) UsedRatio() float64 { return float64(l.Used) / float64(max(1, l.Limit)) }

// callerOf returns the use and the limits of a caller of a pool.
func callerOf(now time.Time, pool string, s ratelimit.Snapshot) Caller {
	c := Caller{
		Pool: pool, Name: s.Name, Tier: s.Tier, InFlight: s.InFlight, MaxRequests: s.MaxRequests,
		Limits:  []CallerLimit{},
		Refused: s.Busy, TokensToday: s.Today, TokensMonth: s.Month, Replicas: s.Replicas, Own: true,
	}
	for _, u := range s.Limits {
		c.Refused += u.Refused
		l := CallerLimit{u.Limit.Kind.String(), u.Limit.Unit.String(), u.Limit.Model, u.Allowed, u.Used, u.Left(),
			u.Limit.Then, u.Refused, u.Demoted, moment(u.Ends), nil}
		if u.Reset > 0 {
			l.Resets = new(moment(now.Add(u.Reset)))
		}
		c.Limits = append(c.Limits, l)
	}
	return c
}

// Callers returns the callers of a pool, the busiest first: by the used part of
// their fullest limit and, among equals, by their tokens today. It returns nil
// if the pool does not limit callers.
func Callers(now time.Time, pool string) (all []Caller) {
	var callers pools.Callers
	for _, entry := range pools.Default.Entries() {
		if entry.Name == pool && entry.Callers != nil {
			callers = entry.Callers
		}
	}
	if callers == nil {
		return nil
	}
	callers.Include(now, nil)
	for _, s := range callers.Snapshots(now) {
		caller := callerOf(now, pool, s)
		if caller.LastHour = s.Hour; s.Hour.Refused == nil {
			caller.LastHour.Refused = map[string]uint64{} // in JSON, none is an empty object
		}
		all = append(all, caller)
	}
	slices.SortStableFunc(all, busier)
	return all
}

func busier(a, b Caller) int {
	return cmp.Or(cmp.Compare(busy(b), busy(a)), cmp.Compare(b.TokensToday, a.TokensToday))
}

// OtherCallers is the sum of the callers of other replicas.
type OtherCallers struct {
	// Number is how many rows they sent. Asked is when they were asked.
	Number int
	Asked  time.Time
	read   admin.Read
	sum    sum[Caller]
	// hours has the last hour at replicas that have not answered, by pool.
	hours map[string]map[ratelimit.CallerID]ratelimit.LastHour
}

// askCallers asks the replicas with this name for the callers of these pools.
func askCallers(ctx context.Context, replica string, inPool func(string) bool) (o OtherCallers, err error) {
	o = OtherCallers{Asked: time.Now(), sum: newCallers()}
	o.read, err = admin.AskAll(ctx, replica, callersQuestion, askPatience, admin.MaxRow, o.take(inPool))
	if err == nil && replica == admin.EveryReplica {
		o.askHours(ctx)
	}
	return o, err
}

// askHours reads from the store the last hour at the replicas that have not
// answered.
func (o *OtherCallers) askHours(ctx context.Context) {
	var answers []string
	for _, seen := range o.read.Replicas {
		if seen.Included {
			answers = append(answers, seen.ID)
		}
	}
	o.hours = seam.LastHours(ctx, answers)
}

func newCallers() sum[Caller] {
	return sum[Caller]{name: func(c *Caller) named { return named{c.Pool, c.Name} }, plus: addCaller}
}

// take returns a function that adds a caller from another replica's answer, if
// it is in these pools.
func (o *OtherCallers) take(inPool func(string) bool) func(a seam.PeerAnswer, c Caller) (pool string, full bool) {
	return func(a seam.PeerAnswer, c Caller) (pool string, full bool) {
		if !inPool(c.Pool) || !slices.Contains(a.Pools, c.Pool) || len(c.Limits) > maxLimits ||
			len(c.LastHour.Refused) > maxReasons {
			return "", false
		}
		words := slices.AppendSeq([]string{c.Name, c.Tier}, maps.Keys(c.LastHour.Refused))
		for _, l := range c.Limits {
			words = append(words, l.Kind, l.Window, l.Model, l.Then)
		}
		if !areWords(words...) {
			return "", false
		}
		o.Number++
		return c.Pool, !o.sum.add(c)
	}
}

// With returns the sum of these callers and of this process's own in these
// pools, the busiest first.
func (o OtherCallers) With(now time.Time, inPool func(string) bool) admin.All[Caller] {
	all := newCallers()
	if o.read.Self || o.read.Replicas == nil {
		o.nameEnded(now)
		all.add(callersIn(now, inPool)...)
	}
	all.add(o.sum.rows...)
	for i, row := range all.rows {
		if hour, ok := o.hours[row.Pool][ratelimit.IDOf(row.Name)]; ok {
			all.rows[i].LastHour.Add(hour)
		}
	}
	slices.SortStableFunc(all.rows, busier)
	return admin.All[Caller]{Connected: o.read.Connected, Replicas: o.read.Replicas, Rows: all.rows}
}

// nameEnded makes callersIn also return callers of replicas that have ended. It
// can do so only for callers that the config names, because these replicas have
// stored no names.
func (o OtherCallers) nameEnded(now time.Time) {
	for _, entry := range pools.Default.Entries() {
		if hours := o.hours[entry.Name]; len(hours) > 0 && entry.Callers != nil {
			entry.Callers.Include(now, func(id ratelimit.CallerID) bool {
				_, ok := hours[id]
				return ok
			})
		}
	}
}

// addCaller adds the report of another replica about a caller. Each replica
// knows the use at all of them, perhaps with a delay, so the larger use counts.
func addCaller(c, other *Caller) {
	c.InFlight, c.Refused = c.InFlight+other.InFlight, c.Refused+other.Refused
	c.LastHour.Add(other.LastHour)
	c.TokensToday, c.TokensMonth = max(c.TokensToday, other.TokensToday), max(c.TokensMonth, other.TokensMonth)
	c.Limits = slices.Clone(c.Limits)
	for _, o := range other.Limits {
		i := slices.IndexFunc(c.Limits,
			func(l CallerLimit) bool { return l.Kind == o.Kind && l.Window == o.Window && l.Model == o.Model })
		if i < 0 {
			continue // its configuration differs
		}
		l := &c.Limits[i]
		l.Refused, l.Demoted = l.Refused+o.Refused, l.Demoted+o.Demoted
		if !c.Own && o.Used > l.Used {
			l.Used, l.Left, l.Ends, l.Resets = o.Used, o.Left, o.Ends, o.Resets
		}
	}
}

// busy returns the used part of the caller's fullest limit.
func busy(c Caller) (most float64) {
	for _, l := range c.Limits {
		most = max(most, l.UsedRatio())
	}
	return most
}

// showCallers prints callers as a table, with a line for each limit.
func showCallers(to io.Writer, answer []byte) error {
	var all []Caller
	if err := admin.Decode(answer, &all); err != nil {
		return err
	}
	table := cli.NewTable(to, "POOL", "CALLER", "TIER", "LIMIT", "USED", "IN FLIGHT", "REFUSED", "TODAY", "MONTH")
	for _, c := range all {
		var limits [][2]string
		for _, l := range c.Limits {
			limit := fmt.Sprintf("%d %s/%s", l.Limit, cli.Printable(l.Kind), cli.Printable(l.Window))
			if l.Model != "" {
				limit += " of " + cli.Printable(l.Model)
			}
			if l.Then != "" {
				limit += " then " + cli.Printable(l.Then)
			}
			limits = append(limits, [2]string{limit, fmt.Sprintf("%d (%.0f%%)", l.Used, 100*l.UsedRatio())})
		}
		if limits == nil {
			limits = [][2]string{{"-", "-"}}
		}
		inFlight := strconv.Itoa(c.InFlight)
		if c.MaxRequests > 0 {
			inFlight += " of " + strconv.Itoa(c.MaxRequests)
		}
		table.Row(cli.Printable(c.Pool), cli.Printable(c.Name), cmp.Or(cli.Printable(c.Tier), "-"),
			limits[0][0], limits[0][1], inFlight, strconv.FormatUint(c.Refused, 10),
			strconv.FormatInt(c.TokensToday, 10),
			strconv.FormatInt(c.TokensMonth, 10))
		for _, l := range limits[1:] {
			table.Row("", "", "", l[0], l[1], "", "", "", "")
		}
	}
	return table.Flush()
}
