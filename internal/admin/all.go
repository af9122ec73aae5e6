package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
)

// With the option state, an operator asks one replica, and sees the sum of all. That replica asks the others, and adds
// what they answer to its own rows.

// All is what a route answers with `?replica=`: the sum of rows over all replicas, or the rows of one.
type All[T any] struct {
	// Connected reports whether this replica is connected to the others.
	Connected bool   `json:"connected"`
	Replicas  []Seen `json:"replicas"`
	Rows      []T    `json:"rows"`
}

// Seen is a replica that counts, or has been heard until a few seconds ago.
type Seen struct {
	ID    string    `json:"id"`
	Host  string    `json:"host"`
	Heard time.Time `json:"heard"`
	// Self reports whether it is the one that answers, and Included whether its rows are in the sum.
	Self     bool `json:"self"`
	Included bool `json:"included"`
}

// everyReplica is the `?replica=` of all.
const everyReplica = "*"

// The first words of the questions that replicas ask each other.
const (
	backendsQuestion = "backends"
	callersQuestion  = "callers"
	pagesQuestion    = "pages" // of a period: without their rows
	pageQuestion     = "page"  // the pages of these ids
)

const (
	// askPatience is how long the other replicas have for an answer.
	askPatience = time.Second
	// maxAnswered is how many rows of an answer count.
	maxAnswered = 100_000
)

func init() { replicas.OnQuestion(answerQuestion) }

// answerQuestion answers another replica, about the pools that it shares. Anyone who can write to the engine may ask.
func answerQuestion(question string, shared []string) []byte {
	has := func(pool string) bool { return slices.Contains(shared, pool) }
	word, rest, _ := strings.Cut(question, " ")
	var rows any
	var err error
	switch word {
	case backendsQuestion:
		rows = Backends(time.Now(), func(pool, _ string) bool { return has(pool) })
	case callersQuestion:
		rows = callersIn(time.Now(), has)
	case pagesQuestion:
		rows, err = listPages(rest, has)
	case pageQuestion:
		rows, err = pagesWith(strings.Fields(rest), has)
	default:
		return nil
	}
	text, failed := json.Marshal(rows)
	if err != nil || failed != nil {
		return nil
	}
	return text
}

// callersIn returns the callers of these pools.
func callersIn(now time.Time, inPool func(string) bool) []Caller {
	all := []Caller{} // in JSON, none is an empty list
	for _, entry := range pools.Default.Entries() {
		if inPool(entry.Name) {
			all = append(all, Callers(now, entry.Name)...)
		}
	}
	return all
}

// answered are the rows of a replica, of the pools that it shares. This one has none.
type answered[T any] struct {
	seen  *Seen
	rows  []T
	pools []string
}

// sharing returns how many replicas with a pool are in a sum.
func sharing[T any](answers []answered[T], pool string) (n int) {
	for _, a := range answers {
		if a.seen.Included && slices.Contains(a.pools, pool) {
			n++
		}
	}
	return max(1, n)
}

// askAll asks the replicas with this name, and returns what they answer. Without an engine of state, there are none.
func askAll[T any](ctx context.Context, name, question string, patience time.Duration, keep func(row T, shared func(pool string) bool) bool) (a All[T], rows []answered[T], err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	answers, err := chosen(replicas.Ask(ctx, question), name)
	if err != nil {
		return a, nil, err
	}
	a, rows = readAnswers(answers, keep)
	if name != everyReplica && !slices.ContainsFunc(a.Replicas, func(s Seen) bool { return s.Included }) {
		return a, nil, refuse(http.StatusBadGateway, "replica '%s' has not answered, see `caddy openai-lb replicas`", name)
	}
	return a, rows, nil
}

// readAnswers returns the rows of answers that keep selects. Whoever can write to the engine may have made them up.
func readAnswers[T any](answers []replicas.Answer, keep func(row T, shared func(pool string) bool) bool) (a All[T], rows []answered[T]) {
	a = All[T]{Connected: true, Replicas: make([]Seen, len(answers)), Rows: []T{}}
	for i, answer := range answers {
		its := []T{}
		ok := answer.Text != nil && json.Unmarshal(answer.Text, &its) == nil
		its = slices.DeleteFunc(its[:min(len(its), maxAnswered)], func(row T) bool {
			return !ok || !keep(row, func(pool string) bool { return slices.Contains(answer.Pools, pool) })
		})
		a.Replicas[i] = Seen{answer.ID, answer.Host, answer.Heard, answer.Self, answer.Self || ok}
		a.Connected = a.Connected && answer.Connected
		rows = append(rows, answered[T]{&a.Replicas[i], its, answer.Pools})
	}
	return a, rows
}

// chosen returns the answers of the replicas with this name: a host, or the beginning of an id. Several engines may have one.
func chosen(answers []replicas.Answer, name string) (its []replicas.Answer, err error) {
	var names []string
	for _, a := range answers {
		names = append(names, printable(a.Host)+" "+a.ID)
	}
	engines := make(map[int]bool)
	for _, a := range answers {
		if name != everyReplica && (a.Host != name || name == "") && (len(name) < 4 || !strings.HasPrefix(a.ID, name)) {
			continue
		}
		if engines[a.Engine] && name != everyReplica {
			return nil, refuse(http.StatusBadRequest, "several replicas are called '%s': use the id of one: %s", name, listed(names))
		}
		engines[a.Engine] = true
		its = append(its, a)
	}
	if len(its) == 0 && name != everyReplica {
		return nil, refuse(http.StatusNotFound, "no replica is called '%s': there are %s", name, listed(names))
	}
	return its, nil
}

// withoutSelf reports whether this replica is not among those that were asked for.
func withoutSelf[T any](answers []answered[T]) bool {
	return len(answers) > 0 && !slices.ContainsFunc(answers, func(a answered[T]) bool { return a.seen.Self })
}

// sum adds answers to the rows of this replica.
func sum[T any, K comparable](own []T, answers []answered[T], key func(*T) K, add func(sum, row *T)) []T {
	rows, at := append([]T{}, own...), make(map[K]int)
	for i := range rows {
		at[key(&rows[i])] = i
	}
	for _, answer := range answers {
		for i := range answer.rows {
			row := &answer.rows[i]
			if its, known := at[key(row)]; known {
				add(&rows[its], row)
			} else {
				at[key(row)] = len(rows)
				rows = append(rows, *row)
			}
		}
	}
	return rows
}

// named is the name of a row: that of a pool, and of a backend or a caller.
type named struct{ pool, name string }

// allBackends returns the backends of these pools, of all replicas or of one.
func allBackends(ctx context.Context, replica string, inPool func(string) bool) (All[Backend], error) {
	a, answers, err := askAll(ctx, replica, backendsQuestion, askPatience, func(b Backend, shared func(string) bool) bool { return inPool(b.Pool) && shared(b.Pool) })
	if err != nil {
		return a, err
	}
	var own []Backend
	if !withoutSelf(answers) {
		own = Backends(time.Now(), func(pool, _ string) bool { return inPool(pool) })
	}
	a.Rows = sumBackends(own, answers)
	return a, nil
}

// sumBackends adds answers to the backends of this replica.
func sumBackends(own []Backend, answers []answered[Backend]) []Backend {
	for _, rows := range append([]answered[Backend]{{rows: own}}, answers...) {
		for i := range rows.rows {
			rows.rows[i].States = map[string]int{rows.rows[i].State: 1}
		}
	}
	all := sum(own, answers, func(b *Backend) named { return named{b.Pool, b.Name} }, (*Backend).add)
	for i := range all {
		all[i].MaxRequests *= int64(sharing(answers, all[i].Pool))
	}
	return all
}

// states are the states of a backend in their order.
var states = []string{Drained, Benched, Silent, Slow, Probing, Available}

// add adds what another replica says of the backend.
func (b *Backend) add(other *Backend) {
	for state, n := range other.States {
		b.States[state] += n
	}
	if i := slices.Index(states, other.State); i >= 0 && i < slices.Index(states, b.State) {
		b.State = other.State
	}
	b.InFlight, b.Healthy = b.InFlight+other.InFlight, b.Healthy && other.Healthy
	c, o := &b.Counts, other.Counts
	*c = Counts{c.Requests + o.Requests, c.Attempts + o.Attempts, c.Throttles + o.Throttles, c.Failures + o.Failures, c.Failovers + o.Failovers, c.Tokens + o.Tokens}
	b.Drain = cmp.Or(b.Drain, other.Drain)
	if b.LastError == nil || other.LastError != nil && other.LastError.Time.After(b.LastError.Time) {
		b.LastError = other.LastError
	}
	b.Benches = union(b.Benches, other.Benches, func(x Bench) any { return [...]string{x.Scope, x.Model, x.Deployment, x.ServiceTier, x.Class} },
		func(x, y Bench) bool { return x.Until.Before(y.Until) })
	b.Silences = union(b.Silences, other.Silences, func(x Silence) any { return [...]string{x.Model, x.Deployment} },
		func(x, y Silence) bool { return x.Since.After(y.Since) })
	b.sortBenches()
}

// union returns all rows, and of two with the same key the better one.
func union[T any](all, more []T, key func(T) any, worse func(x, y T) bool) []T {
	at := make(map[any]int)
	for i, row := range all {
		at[key(row)] = i
	}
	for _, row := range more {
		if i, known := at[key(row)]; !known {
			at[key(row)] = len(all)
			all = append(all, row)
		} else if worse(all[i], row) {
			all[i] = row
		}
	}
	return all
}

// stateText returns the state of the backend, and at how many replicas it has it if not at all.
func (b *Backend) stateText() string {
	n := 0
	for _, its := range b.States {
		n += its
	}
	if len(b.States) < 2 {
		return b.State
	}
	return fmt.Sprintf("%s at %d of %d", b.State, b.States[b.State], n)
}

// showAll prints the rows of an answer, and whose they are: below a table, or next to JSON.
func showAll(command *cobra.Command, show func(io.Writer, []byte) error, asJSON bool, answer []byte) error {
	var all All[json.RawMessage]
	if err := decode(answer, &all); err != nil {
		return err
	}
	rows, err := json.Marshal(all.Rows)
	if err == nil {
		err = show(command.OutOrStdout(), rows)
	}
	to := command.OutOrStdout()
	if asJSON {
		to = command.ErrOrStderr()
	}
	showWhose(to, all.Connected, all.Replicas)
	return err
}

// showWhose prints which replicas are in a table.
func showWhose(to io.Writer, connected bool, seen []Seen) {
	if len(seen) == 0 {
		return
	}
	var names []string
	for _, s := range seen {
		name := strings.TrimSpace(s.Host + " " + s.ID[:min(8, len(s.ID))])
		switch {
		case s.Self:
			name += " (asked)"
		case !s.Included:
			name += " (no answer, last heard " + utc(s.Heard) + ")"
		}
		names = append(names, printable(name))
	}
	text := "replicas: " + strings.Join(names, ", ")
	if !connected {
		text = "not connected to other replicas: this is what one knows; " + text
	}
	fmt.Fprintln(to, text)
}
