package admin

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/callers"
	"github.com/openai-lb/caddy-openai-lb/internal/cli"
	"github.com/openai-lb/caddy-openai-lb/internal/meter"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
)

// Caller is what a caller of a pool has used, and may use.
type Caller struct {
	Pool string `json:"pool"`
	Name string `json:"name"`
	// Tier is the caller's own tier. It is empty if it has none.
	Tier string `json:"tier"`

	InFlight    int `json:"in_flight"`
	MaxRequests int `json:"max_requests"`
	// Limits are sorted: requests before tokens, and then by window.
	Limits []CallerLimit `json:"limits"`
	// Refused are the requests that a limit or MaxRequests has refused since the process started.
	Refused uint64 `json:"refused"`
	// LastHour is what it has done in the last hour. A caller is not told that: each replica counts for itself.
	LastHour meter.LastHour `json:"last_hour,omitzero"`
	// TokensToday and TokensMonth are the tokens of this day and month, requests in flight included.
	TokensToday int64 `json:"tokens_today"`
	TokensMonth int64 `json:"tokens_month"`
	// Replicas is how many replicas share the limits without hearing each other, or 0.
	Replicas int `json:"replicas_apart"`

	// own reports whether this process knows it: what is used is then that of all replicas.
	own bool
}

// OwnUse is the use that a caller sees of itself.
type OwnUse struct {
	Caller
	// Models are those that it has used, as the first recorder of usage says.
	Models any `json:"models"`
}

// CallerLimit is one limit of a caller.
type CallerLimit struct {
	// Kind is requests or tokens, and Window second, minute, hour, day or month.
	Kind   string `json:"kind"`
	Window string `json:"window"`
	// Limit is how much this replica may use: all of the limit, or its share.
	Limit int64 `json:"limit"`
	Used  int64 `json:"used"`
	Left  int64 `json:"left"`
	// Then is the tier of requests over the limit. It is empty if they are refused.
	Then string `json:"then"`
	// Refused and Demoted are the requests that this limit has refused or given another tier.
	Refused uint64 `json:"refused"`
	Demoted uint64 `json:"demoted"`
	// Ends is when the window ends.
	Ends time.Time `json:"ends"`
	// Resets is when nothing is used any more, if nothing else is, or nil.
	Resets *time.Time `json:"resets"`
}

// UsedRatio returns which part of the limit is used.
func (l CallerLimit) UsedRatio() float64 { return float64(l.Used) / float64(max(1, l.Limit)) }

// Callers returns the callers of a pool, the busiest first: those of which a limit is used most and, among
// equals, those with the most tokens today. It is empty if the pool does not limit callers.
func Callers(now time.Time, pool string) (all []Caller) {
	meters := callers.MetersOf(pool)
	if meters == nil {
		return nil
	}
	for _, c := range meters.All() {
		s := c.Snapshot(now)
		of := CallerOf(now, pool, s)
		if of.LastHour = s.Hour; s.Hour.Refused == nil {
			of.LastHour.Refused = map[string]uint64{} // in JSON, none is an empty object
		}
		all = append(all, of)
	}
	slices.SortStableFunc(all, busier)
	return all
}

func busier(a, b Caller) int {
	return cmp.Or(cmp.Compare(b.busy(), a.busy()), cmp.Compare(b.TokensToday, a.TokensToday))
}

// OtherCallers are the callers of other replicas, added up.
type OtherCallers struct {
	// Number is how many rows they had, and Asked when they were asked.
	Number int
	Asked  time.Time
	read   Read
	sum    sum[Caller]
}

// AskAllCallers asks all other replicas for their callers.
func AskAllCallers(ctx context.Context) OtherCallers {
	o, _ := askCallers(ctx, EveryReplica, func(string) bool { return true }) // there is no name that could be wrong
	return o
}

// askCallers asks the replicas with this name for the callers of these pools.
func askCallers(ctx context.Context, replica string, inPool func(string) bool) (o OtherCallers, err error) {
	o = OtherCallers{Asked: time.Now(), sum: newCallers()}
	o.read, err = AskAll(ctx, replica, callersQuestion, askPatience, MaxRow, o.take(inPool))
	return o, err
}

func newCallers() sum[Caller] {
	return sum[Caller]{name: func(c *Caller) named { return named{c.Pool, c.Name} }, plus: (*Caller).add}
}

// take returns what adds those in these pools that another replica answers with.
func (o *OtherCallers) take(inPool func(string) bool) func(a replicas.Answer, c Caller) (pool string, full bool) {
	return func(a replicas.Answer, c Caller) (pool string, full bool) {
		if !inPool(c.Pool) || !slices.Contains(a.Pools, c.Pool) || len(c.Limits) > meter.MaxLimits || len(c.LastHour.Refused) > maxReasons {
			return "", false
		}
		words := slices.AppendSeq([]string{c.Name, c.Tier}, maps.Keys(c.LastHour.Refused))
		for _, l := range c.Limits {
			words = append(words, l.Kind, l.Window, l.Then)
		}
		if !areWords(words...) {
			return "", false
		}
		o.Number++
		return c.Pool, !o.sum.add(c)
	}
}

// With returns them together with those of this process in these pools, the busiest first.
func (o OtherCallers) With(now time.Time, inPool func(string) bool) All[Caller] {
	all := newCallers()
	if o.read.Self || o.read.Replicas == nil {
		all.add(callersIn(now, inPool)...)
	}
	all.add(o.sum.rows...)
	for i := range all.rows {
		row := &all.rows[i]
		row.MaxRequests *= o.read.Times(row.Pool) // each replica allows so many
	}
	slices.SortStableFunc(all.rows, busier)
	return All[Caller]{o.read.Connected, o.read.Replicas, all.rows}
}

// add adds what another replica says of the caller. It knows what was used at all of them, perhaps a little later.
func (c *Caller) add(other *Caller) {
	c.InFlight, c.Refused = c.InFlight+other.InFlight, c.Refused+other.Refused
	c.LastHour.Add(other.LastHour)
	c.TokensToday, c.TokensMonth = max(c.TokensToday, other.TokensToday), max(c.TokensMonth, other.TokensMonth)
	c.Limits = slices.Clone(c.Limits)
	for _, o := range other.Limits {
		i := slices.IndexFunc(c.Limits, func(l CallerLimit) bool { return l.Kind == o.Kind && l.Window == o.Window })
		if i < 0 {
			continue // its configuration differs
		}
		l := &c.Limits[i]
		l.Refused, l.Demoted = l.Refused+o.Refused, l.Demoted+o.Demoted
		if !c.own && o.Used > l.Used {
			l.Used, l.Left, l.Ends, l.Resets = o.Used, o.Left, o.Ends, o.Resets
		}
	}
}

// CallerOf returns what a caller of a pool has used.
func CallerOf(now time.Time, pool string, s meter.Snapshot) Caller {
	c := Caller{
		Pool: pool, Name: s.Name, Tier: s.Tier, InFlight: s.InFlight, MaxRequests: s.MaxRequests, Limits: []CallerLimit{},
		Refused: s.Busy, TokensToday: s.Today, TokensMonth: s.Month, Replicas: s.Replicas, own: true,
	}
	for _, u := range s.Limits {
		c.Refused += u.Refused
		l := CallerLimit{u.Limit.Kind.String(), u.Limit.Unit.String(), u.Allowed, u.Used, u.Left(), u.Limit.Then, u.Refused, u.Demoted, moment(u.Ends), nil}
		if u.Reset > 0 {
			l.Resets = new(moment(now.Add(u.Reset)))
		}
		c.Limits = append(c.Limits, l)
	}
	return c
}

// busy returns which part is used of the limit of which the most is used.
func (c Caller) busy() (most float64) {
	for _, l := range c.Limits {
		most = max(most, l.UsedRatio())
	}
	return most
}

// showCallers prints callers as a table, with a line for each limit.
func showCallers(to io.Writer, answer []byte) error {
	var all []Caller
	if err := Decode(answer, &all); err != nil {
		return err
	}
	table := cli.NewTable(to, "POOL", "CALLER", "TIER", "LIMIT", "USED", "IN FLIGHT", "REFUSED", "TODAY", "MONTH")
	for _, c := range all {
		var limits [][2]string
		for _, l := range c.Limits {
			limit := fmt.Sprintf("%d %s/%s", l.Limit, cli.Printable(l.Kind), cli.Printable(l.Window))
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
		table.Row(cli.Printable(c.Pool), cli.Printable(c.Name), cmp.Or(cli.Printable(c.Tier), "-"), limits[0][0], limits[0][1],
			inFlight, strconv.FormatUint(c.Refused, 10), strconv.FormatInt(c.TokensToday, 10), strconv.FormatInt(c.TokensMonth, 10))
		for _, l := range limits[1:] {
			table.Row("", "", "", l[0], l[1], "", "", "", "")
		}
	}
	return table.Flush()
}
