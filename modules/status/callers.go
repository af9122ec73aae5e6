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
	"github.com/openai-lb/caddy-openai-lb/internal/callers"
	"github.com/openai-lb/caddy-openai-lb/internal/cli"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// Caller is the use and the limits of a caller of a pool.
type Caller = callers.Report

// CallerLimit is one limit of a caller.
type CallerLimit = callers.LimitReport

// Callers returns the callers of a pool, the busiest first: by the used part of
// their fullest limit and, among equals, by their tokens today. It returns nil
// if the pool does not limit callers.
func Callers(now time.Time, pool string) (all []Caller) {
	limiters := callers.LimitersOf(pool)
	if limiters == nil {
		return nil
	}
	for _, entry := range pools.Default.Entries() {
		if entry.Name == pool && entry.CallerNames != nil {
			limiters.Name(now, entry.CallerNames())
		}
	}
	for _, c := range limiters.All() {
		s := c.Snapshot(now)
		of := callers.ReportOf(now, pool, s)
		if of.LastHour = s.Hour; s.Hour.Refused == nil {
			of.LastHour.Refused = map[string]uint64{} // in JSON, none is an empty object
		}
		all = append(all, of)
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
	hours map[string]map[limiter.CallerID]limiter.LastHour
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
		if !inPool(c.Pool) || !slices.Contains(a.Pools, c.Pool) || len(c.Limits) > limiter.MaxLimits ||
			len(c.LastHour.Refused) > maxReasons {
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
		if hour, ok := o.hours[row.Pool][limiter.IDOf(row.Name)]; ok {
			all.rows[i].LastHour.Add(hour)
		}
	}
	for i := range all.rows {
		row := &all.rows[i]
		row.MaxRequests *= o.read.Times(row.Pool) // each replica allows so many
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
			for _, name := range entry.CallerNames() {
				if _, ok := hours[limiter.IDOf(name)]; ok {
					entry.Callers.Get(now, name)
				}
			}
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
		i := slices.IndexFunc(c.Limits, func(l CallerLimit) bool { return l.Kind == o.Kind && l.Window == o.Window })
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
