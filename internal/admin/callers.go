package admin

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/callers"
	"github.com/openai-lb/caddy-openai-lb/internal/ledger"
	"github.com/openai-lb/caddy-openai-lb/internal/meter"
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
	// TokensToday and TokensMonth are the tokens of this day and month, requests in flight included.
	TokensToday int64 `json:"tokens_today"`
	TokensMonth int64 `json:"tokens_month"`
	// Replicas is how many replicas share the limits without hearing each other, or 0.
	Replicas int `json:"replicas_apart"`
}

// OwnUse is what a caller is told of its use.
type OwnUse struct {
	Caller
	// Models are those that it has used in this month, in UTC.
	Models []ledger.ModelUse `json:"models"`
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
		all = append(all, CallerOf(pool, c.Snapshot(now)))
	}
	slices.SortStableFunc(all, func(a, b Caller) int {
		return cmp.Or(cmp.Compare(b.busy(), a.busy()), cmp.Compare(b.TokensToday, a.TokensToday))
	})
	return all
}

// CallerOf returns what a caller of a pool has used.
func CallerOf(pool string, s meter.Snapshot) Caller {
	c := Caller{
		Pool: pool, Name: s.Name, Tier: s.Tier, InFlight: s.InFlight, MaxRequests: s.MaxRequests, Limits: []CallerLimit{},
		Refused: s.Busy, TokensToday: s.Today, TokensMonth: s.Month, Replicas: s.Replicas,
	}
	for _, u := range s.Limits {
		c.Refused += u.Refused
		c.Limits = append(c.Limits, CallerLimit{u.Limit.Kind.String(), u.Limit.Unit.String(), u.Allowed, u.Used, u.Left(), u.Limit.Then, u.Refused, u.Demoted, moment(u.Ends)})
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
	if err := decode(answer, &all); err != nil {
		return err
	}
	table := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "POOL\tCALLER\tTIER\tLIMIT\tUSED\tIN FLIGHT\tREFUSED\tTODAY\tMONTH")
	for _, c := range all {
		limits, inFlight := [][2]string{{"-", "-"}}, strconv.Itoa(c.InFlight)
		if len(c.Limits) > 0 {
			limits = nil
		}
		for _, l := range c.Limits {
			limits = append(limits, [2]string{fmt.Sprintf("%d %s/%s", l.Limit, l.Kind, l.Window), fmt.Sprintf("%d (%.0f%%)", l.Used, 100*l.UsedRatio())})
		}
		if c.MaxRequests > 0 {
			inFlight += " of " + strconv.Itoa(c.MaxRequests)
		}
		row := []string{printable(c.Pool), printable(c.Name), cmp.Or(printable(c.Tier), "-"), limits[0][0], limits[0][1],
			inFlight, strconv.FormatUint(c.Refused, 10), strconv.FormatInt(c.TokensToday, 10), strconv.FormatInt(c.TokensMonth, 10)}
		fmt.Fprintln(table, strings.Join(row, "\t"))
		for _, l := range limits[1:] {
			fmt.Fprintln(table, strings.Join([]string{"", "", "", l[0], l[1], "", "", "", ""}, "\t"))
		}
	}
	return table.Flush()
}
