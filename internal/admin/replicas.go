package admin

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/cli"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// With the option state, an operator asks one replica, and sees the sum of all.
// That replica asks the others, and adds what they answer to its own rows.

// All is the answer of a route with `?replica=`: the sum of rows over all
// replicas, or the rows of one.
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
	// Self reports whether it is the one that answers, and Included whether its
	// rows are in the sum.
	Self     bool `json:"self"`
	Included bool `json:"included"`
}

// Name returns the replica's name for operators.
func (s Seen) Name() string {
	return cli.Printable(strings.TrimSpace(s.Host + " " + s.ID[:min(8, len(s.ID))]))
}

// AskedID returns the id of the replica that answers. It is empty without the
// option state.
func (a All[T]) AskedID() string { return AskedOf(a.Replicas) }

// AskedOf returns the id of the replica that answers, of those that were seen.
func AskedOf(replicas []Seen) string {
	for _, s := range replicas {
		if s.Self {
			return s.ID
		}
	}
	return ""
}

// EveryReplica is the `?replica=` of all.
const EveryReplica = "*"

// Answerer answers a question of another replica with rows, as JSON. rest is
// the question without its first word, and shared says which pools the replicas
// share.
type Answerer func(ctx context.Context, rest string, shared seam.SharedPools) (rows any, err error)

var answerers = make(map[string]Answerer)

// Answer registers who answers the questions that begin with a word. It is
// called by init functions.
func Answer(word string, by Answerer) {
	if answerers[word] != nil {
		panic("two features answer the question " + word)
	}
	answerers[word] = by
}

// AnswerQuestion answers another replica, about the pools that it shares.
// Anyone who can write to the engine may ask.
func AnswerQuestion(ctx context.Context, question string, shared seam.SharedPools) []byte {
	word, rest, more := strings.Cut(question, " ")
	by := answerers[word]
	if by == nil || more && rest == "" {
		return nil
	}
	rows, err := by(ctx, rest, shared)
	text, failed := json.Marshal(rows)
	if err != nil || failed != nil {
		return nil
	}
	return text
}

// Any client of the store can make up answers. So these limit the bytes of an
// answer, of one of its rows, and of all answers to a question, and the rows of
// an answer and of the sum. An answer that is cut off counts as missing.
const (
	MaxAnswer, MaxRow, MaxAnswers = 16 << 20, 256 << 10, 512 << 20
	MaxRows, MaxSum               = 25_000, 100_000
)

// Read is the part of the answers that was read.
type Read struct {
	Connected bool
	Replicas  []Seen
	// Self reports whether this replica is among those that were asked for, as
	// it is without an engine of state, and sharing how many others have a
	// pool.
	Self    bool
	sharing map[string]int
}

// Times returns how many replicas have a pool.
func (r Read) Times(pool string) int {
	n := r.sharing[pool]
	if r.Self {
		n++
	}
	return max(1, n)
}

// AskAll asks the replicas with this name, and calls take for each row of their
// answers. Without the option state, there are none.
func AskAll[T any](ctx context.Context, name, question string, patience time.Duration, longest int,
	take func(a seam.PeerAnswer, row T) (pool string, full bool)) (r Read, err error) {
	asking, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	answers, err := seam.AskReplicas(asking, question,
		func(all []seam.PeerAnswer) ([]seam.PeerAnswer, error) { return chosen(all, name) })
	if err != nil {
		return r, err
	}
	r = ReadAnswers(ctx, answers, longest, take)
	if name != EveryReplica && !slices.ContainsFunc(r.Replicas, func(s Seen) bool { return s.Included }) {
		return r, Refuse(http.StatusBadGateway, "replica '%s' has not answered, see `caddy openai-lb replicas`", name)
	}
	return r, nil
}

// ReadAnswers calls take for each row of the answers, of at most longest bytes.
// take returns the row's pool, or an empty one if it ignores the row, and
// whether the sum is full.
func ReadAnswers[T any](ctx context.Context, answers []seam.PeerAnswer, longest int,
	take func(a seam.PeerAnswer, row T) (pool string, full bool)) Read {
	r := Read{Connected: true, Replicas: make([]Seen, len(answers)), Self: len(answers) == 0,
		sharing: make(map[string]int)}
	budget := int64(MaxAnswers)
	for i, a := range answers {
		in := make(map[string]bool)
		ok := a.Packed != nil && ctx.Err() == nil
		if ok {
			text := &io.LimitedReader{R: a.Text(), N: min(MaxAnswer, budget)}
			before := text.N
			ok = ReadRows(text, MaxRows, longest, func(row T) bool {
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
		r.Replicas[i] = Seen{a.ID, a.Host, a.Heard, a.Self, a.Self || ok}
		r.Connected, r.Self = r.Connected && a.Whole, r.Self || a.Self
	}
	return r
}

// ReadRows reads a list one by one. It returns false if it is no list, or has
// more rows, or longer ones, than are read.
func ReadRows[T any](from io.Reader, most, longest int, each func(row T) bool) bool {
	d := json.NewDecoder(from)
	start, err := d.Token()
	if start == nil && err == nil {
		return true // null is an empty list
	}
	for n := 0; err == nil && start == json.Delim('[') && d.More(); n++ {
		var text json.RawMessage
		var row T
		if err = d.Decode(&text); err != nil || n == most || len(text) > longest ||
			json.Unmarshal(text, &row) != nil || !each(row) {
			return false
		}
	}
	end, _ := d.Token()
	return end == json.Delim(']')
}

// chosen returns the answers of the replicas with this name: a host, or the
// beginning of an id. Several engines may have one.
func chosen(answers []seam.PeerAnswer, name string) (matching []seam.PeerAnswer, err error) {
	var names []string
	for _, a := range answers {
		names = append(names, cli.Printable(a.Host)+" "+a.ID)
	}
	engines := make(map[int]bool)
	for _, a := range answers {
		if name != EveryReplica && (a.Host != name || name == "") && (len(name) < 4 || !strings.HasPrefix(a.ID, name)) {
			continue
		}
		if engines[a.Engine] && name != EveryReplica {
			return nil, Refuse(http.StatusBadRequest, "several replicas are called '%s': use the id of one: %s",
				name, Listed(names))
		}
		engines[a.Engine] = true
		matching = append(matching, a)
	}
	if len(matching) == 0 && name != EveryReplica {
		return nil, Refuse(http.StatusNotFound, "no replica is called '%s': there are %s", name, Listed(names))
	}
	return matching, nil
}
