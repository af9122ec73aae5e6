package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/openai-lb/caddy-openai-lb/internal/cli"
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

// name returns the replica's name for operators.
func (s Seen) name() string {
	return cli.Printable(strings.TrimSpace(s.Host + " " + s.ID[:min(8, len(s.ID))]))
}

// askedID returns the id of the replica that answers. It is empty without the option state.
func (a All[T]) askedID() string { return askedOf(a.Replicas) }

func askedOf(replicas []Seen) string {
	for _, s := range replicas {
		if s.Self {
			return s.ID
		}
	}
	return ""
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

// askPatience is how long the other replicas have for an answer.
const askPatience = time.Second

// Any client of the store can make up answers. So these limit the bytes of an answer, of one of its rows, and of all answers to a
// question, and the rows of an answer and of the sum. An answer that is cut off counts as missing.
const (
	maxAnswer, maxRow, maxAnswers = 16 << 20, 256 << 10, 512 << 20
	maxRows, maxSum               = 25_000, 100_000
	// maxWord is how long a name in a row is at most, and maxReasons how many things refuse requests.
	maxWord, maxReasons = 256, 16
	// maxBenches is how many benches and silences a backend has at most.
	maxBenches = 4096
)

func init() { replicas.OnQuestion(answerQuestion) }

// answerQuestion answers another replica, about the pools that it shares. Anyone who can write to the engine may ask.
func answerQuestion(ctx context.Context, question string, pools replicas.Shared) []byte {
	has := func(pool string) bool { return slices.Contains(pools.Pools, pool) }
	word, rest, _ := strings.Cut(question, " ")
	var rows any
	var err error
	switch {
	case question == backendsQuestion:
		rows = Backends(time.Now(), has)
	case question == callersQuestion:
		rows = callersIn(time.Now(), has)
	case word == pagesQuestion:
		rows, err = listPages(ctx, rest, pools)
	case word == pageQuestion:
		rows, err = pagesWith(ctx, strings.Fields(rest), pools)
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

// read is what was read of answers.
type read struct {
	connected bool
	replicas  []Seen
	// self reports whether this replica is among those that were asked for, as it is without an engine of state, and sharing
	// how many others have a pool.
	self    bool
	sharing map[string]int
}

// times returns how many replicas have a pool.
func (r read) times(pool string) int {
	n := r.sharing[pool]
	if r.self {
		n++
	}
	return max(1, n)
}

// askAll asks the replicas with this name, and calls take for each row of their answers. Without the option state, there are none.
func askAll[T any](ctx context.Context, name, question string, patience time.Duration, longest int, take func(a replicas.Answer, row T) (pool string, full bool)) (r read, err error) {
	asking, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	answers, err := replicas.Ask(asking, question, func(all []replicas.Answer) ([]replicas.Answer, error) { return chosen(all, name) })
	if err != nil {
		return r, err
	}
	r = readAnswers(ctx, answers, longest, take)
	if name != everyReplica && !slices.ContainsFunc(r.replicas, func(s Seen) bool { return s.Included }) {
		return r, refuse(http.StatusBadGateway, "replica '%s' has not answered, see `caddy openai-lb replicas`", name)
	}
	return r, nil
}

// readAnswers calls take for each row of the answers, of at most longest bytes. take returns the row's pool, or an empty one if it
// ignores the row, and whether the sum is full.
func readAnswers[T any](ctx context.Context, answers []replicas.Answer, longest int, take func(a replicas.Answer, row T) (pool string, full bool)) read {
	r := read{connected: true, replicas: make([]Seen, len(answers)), self: len(answers) == 0, sharing: make(map[string]int)}
	budget := int64(maxAnswers)
	for i, a := range answers {
		in := make(map[string]bool)
		ok := a.Packed != nil && ctx.Err() == nil
		if ok {
			text := &io.LimitedReader{R: a.Text(), N: min(maxAnswer, budget)}
			before := text.N
			ok = readRows(text, maxRows, longest, func(row T) bool {
				pool, full := take(a, row)
				if pool != "" {
					in[pool] = true
				}
				return !full
			})
			budget -= before - text.N
		}
		for _, c := range a.Configs {
			if ok && slices.Contains(a.Pools, c.Pool) {
				in[c.Pool] = true // even without rows: it may have started after its callers' last requests
			}
		}
		for pool := range in {
			r.sharing[pool]++
		}
		r.replicas[i] = Seen{a.ID, a.Host, a.Heard, a.Self, a.Self || ok}
		r.connected, r.self = r.connected && a.Whole, r.self || a.Self
	}
	return r
}

// readRows reads a list one by one. It returns false if it is no list, or has more rows, or longer ones, than are read.
func readRows[T any](from io.Reader, most, longest int, each func(row T) bool) bool {
	d := json.NewDecoder(from)
	start, err := d.Token()
	if start == nil && err == nil {
		return true // null is an empty list
	}
	for n := 0; err == nil && start == json.Delim('[') && d.More(); n++ {
		var text json.RawMessage
		var row T
		if err = d.Decode(&text); err != nil || n == most || len(text) > longest || json.Unmarshal(text, &row) != nil || !each(row) {
			return false
		}
	}
	end, _ := d.Token()
	return end == json.Delim(']')
}

// chosen returns the answers of the replicas with this name: a host, or the beginning of an id. Several engines may have one.
func chosen(answers []replicas.Answer, name string) (its []replicas.Answer, err error) {
	var names []string
	for _, a := range answers {
		names = append(names, cli.Printable(a.Host)+" "+a.ID)
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

// named is the name of a row: that of a pool, and of a backend or a caller.
type named struct{ pool, name string }

// sum is a sum of rows, by their names.
type sum[T any] struct {
	rows []T
	at   map[named]int
	name func(*T) named
	plus func(sum, row *T)
}

// add adds rows. It returns false if there are too many.
func (s *sum[T]) add(rows ...T) bool {
	if s.at == nil {
		s.at, s.rows = make(map[named]int), []T{}
	}
	for _, row := range rows {
		name := s.name(&row)
		if i, known := s.at[name]; known {
			s.plus(&s.rows[i], &row)
			continue
		}
		if len(s.rows) >= maxSum {
			return false
		}
		s.at[name] = len(s.rows)
		s.rows = append(s.rows, row)
	}
	return true
}

// areWords reports whether names are as long as names are.
func areWords(names ...string) bool {
	return !slices.ContainsFunc(names, func(name string) bool { return len(name) > maxWord })
}

// allBackends returns the backends of these pools, of all replicas or of one.
func allBackends(ctx context.Context, replica string, inPool func(string) bool) (a All[Backend], err error) {
	others := newBackends()
	r, err := askAll(ctx, replica, backendsQuestion, askPatience, maxRow, others.take(inPool))
	if err != nil {
		return a, err
	}
	var own []Backend
	if r.self {
		own = Backends(time.Now(), inPool)
	}
	return All[Backend]{r.connected, r.replicas, others.with(own, r)}, nil
}

// backendSum is a sum of backends.
type backendSum struct{ sum[Backend] }

func newBackends() *backendSum {
	return &backendSum{sum[Backend]{name: func(b *Backend) named { return named{b.Pool, b.Name} }, plus: (*Backend).add}}
}

// take returns what adds those in these pools that another replica answers with.
func (s *backendSum) take(inPool func(string) bool) func(a replicas.Answer, b Backend) (pool string, full bool) {
	return func(a replicas.Answer, b Backend) (pool string, full bool) {
		if !inPool(b.Pool) || !slices.Contains(a.Pools, b.Pool) || !areWords(b.Name, b.State) || len(b.Benches)+len(b.Silences)+len(b.Untried) > maxBenches {
			return "", false
		}
		b.seenBy(a.ID)
		return b.Pool, !s.add(b)
	}
}

// with returns them together with those of this replica.
func (s *backendSum) with(own []Backend, r read) []Backend {
	all := newBackends()
	for _, b := range own {
		b.seenBy(askedOf(r.replicas))
		all.add(b)
	}
	all.add(s.rows...)
	for i := range all.rows {
		all.rows[i].MaxRequests *= int64(r.times(all.rows[i].Pool))
	}
	return all.rows
}

// seenBy records which replica sees the backend in its state. Without the option state, the replica has no id.
func (b *Backend) seenBy(id string) {
	b.States, b.DrainedAt = map[string]int{b.State: 1}, map[string]bool{id: b.Drain != nil}
}

// states are the states of a backend in their order.
var states = []string{Drained, Benched, Silent, Slow, Probing, Available}

// add adds what another replica says of the backend.
func (b *Backend) add(other *Backend) {
	for state, n := range other.States {
		b.States[state] += n
	}
	maps.Copy(b.DrainedAt, other.DrainedAt)
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
	b.Untried = union(b.Untried, other.Untried, func(x Untried) any { return [...]string{x.Model, x.Deployment} },
		func(x, y Untried) bool { return x.Since.Before(y.Since) })
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
		name := s.name()
		switch {
		case s.Self:
			name += " (asked)"
		case !s.Included:
			name += " (no answer, last heard " + utc(s.Heard) + ")"
		}
		names = append(names, name)
	}
	text := "replicas: " + strings.Join(names, ", ")
	if !connected {
		lacks := "not connected to other replicas: this is what one knows"
		if slices.ContainsFunc(seen, func(s Seen) bool { return s.Included && !s.Self }) {
			lacks = "not connected to all replicas: this is what some know"
		}
		text = lacks + "; " + text
	}
	fmt.Fprintln(to, text)
}
