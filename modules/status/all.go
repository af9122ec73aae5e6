package status

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/admin"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// The first words of the questions that replicas ask each other. These
// questions have no further words.
const (
	backendsQuestion = "backends"
	callersQuestion  = "callers"
)

// Any client of the store can make up answers. admin.AskAll limits the number
// of rows, and these constants limit the content of a row.
const (
	// maxWord is the maximum length of a name in a row, and maxReasons the
	// maximum number of reasons for refusals.
	maxWord, maxReasons = 256, 16
	// maxLimits is the maximum number of limits of a caller.
	maxLimits = 1024
	// maxCooldowns is the maximum number of cooldowns and silences of a
	// backend.
	maxCooldowns = 4096
)

// askPatience is how long other replicas have for an answer.
const askPatience = time.Second

func init() {
	admin.Answer(backendsQuestion, answers(Backends))
	admin.Answer(callersQuestion, answers(callersIn))
}

// answers returns an admin.Answerer that returns the rows of shared pools.
func answers[T any](rows func(now time.Time, inPool func(string) bool) []T) admin.Answerer {
	return func(_ context.Context, rest string, shared seam.SharedPools) (any, error) {
		if rest != "" {
			return nil, errors.New("expected nothing after the first word")
		}
		return rows(time.Now(), func(pool string) bool { return slices.Contains(shared.Pools, pool) }), nil
	}
}

// callersIn returns the callers of the pools for which inPool returns true.
func callersIn(now time.Time, inPool func(string) bool) []Caller {
	all := []Caller{} // in JSON, none is an empty list
	for _, entry := range pools.Default.Entries() {
		if inPool(entry.Name) {
			all = append(all, Callers(now, entry.Name)...)
		}
	}
	return all
}

// named is the name of a row: its pool, and its backend or caller.
type named struct{ pool, name string }

// sum is a sum of rows by their names.
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
		if len(s.rows) >= admin.MaxSum {
			return false
		}
		s.at[name] = len(s.rows)
		s.rows = append(s.rows, row)
	}
	return true
}

// areWords reports whether no name is too long.
func areWords(names ...string) bool {
	return !slices.ContainsFunc(names, func(name string) bool { return len(name) > maxWord })
}

// allBackends returns the backends of these pools as seen by all replicas, or
// by one.
func allBackends(ctx context.Context, replica string, inPool func(string) bool) (a admin.All[Backend], err error) {
	others := newBackends()
	r, err := admin.AskAll(ctx, replica, backendsQuestion, askPatience, admin.MaxRow, others.take(inPool))
	if err != nil {
		return a, err
	}
	var local []Backend
	if r.Self {
		local = Backends(time.Now(), inPool)
	}
	return admin.All[Backend]{Connected: r.Connected, Replicas: r.Replicas, Rows: others.with(local, r)}, nil
}

// backendSum is a sum of backends.
type backendSum struct{ sum[Backend] }

func newBackends() *backendSum {
	return &backendSum{
		sum[Backend]{name: func(b *Backend) named { return named{b.Pool, b.Name} }, plus: (*Backend).add},
	}
}

// take returns a function that adds a backend from another replica's answer, if
// it is in these pools.
func (s *backendSum) take(inPool func(string) bool) func(a seam.PeerAnswer, b Backend) (pool string, full bool) {
	return func(a seam.PeerAnswer, b Backend) (pool string, full bool) {
		if !inPool(b.Pool) || !slices.Contains(a.Pools, b.Pool) || !b.isSound() {
			return "", false
		}
		b.seenBy(a.ID)
		return b.Pool, !s.add(b)
	}
}

// with returns the sum of these backends and of this replica's own.
func (s *backendSum) with(local []Backend, r admin.Read) []Backend {
	all := newBackends()
	for _, b := range local {
		b.seenBy(admin.AskedOf(r.Replicas))
		all.add(b)
	}
	all.add(s.rows...)
	for i := range all.rows {
		all.rows[i].MaxRequests *= int64(r.Times(all.rows[i].Pool))
	}
	return all.rows
}

// seenBy records the replica that sees the backend in its state. Without the
// option state, the replica's id is empty.
func (b *Backend) seenBy(id string) {
	b.States, b.DrainedAt = map[string]int{b.State: 1}, map[string]bool{id: b.Drain != nil}
}

// states are the states of a backend in order. If replicas differ, the first
// counts.
var states = []string{Drained, CoolingDown, Silent, Slow, Probing, Available}

// add adds the state of the backend at another replica.
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
	*c = Counts{c.Requests + o.Requests, c.Attempts + o.Attempts, c.Throttles + o.Throttles, c.Failures + o.Failures,
		c.Failovers + o.Failovers, c.Tokens + o.Tokens}
	b.Drain = cmp.Or(b.Drain, other.Drain)
	if b.LastError == nil || other.LastError != nil && other.LastError.Time.After(b.LastError.Time) {
		b.LastError = other.LastError
	}
	key := func(x Cooldown) any {
		return [...]string{x.Scope, x.Model, x.Deployment, x.ServiceTier, x.Operation, x.Class}
	}
	earlier := func(x, y Cooldown) bool { return x.Until.Before(y.Until) }
	b.Cooldowns, b.Due = union(b.Cooldowns, other.Cooldowns, key, earlier), union(b.Due, other.Due, key, earlier)
	b.Silences = union(b.Silences, other.Silences, func(x Silence) any { return [...]string{x.Model, x.Deployment} },
		func(x, y Silence) bool { return x.Since.After(y.Since) })
	b.Untried = union(b.Untried, other.Untried, func(x Untried) any { return [...]string{x.Model, x.Deployment} },
		func(x, y Untried) bool { return x.Since.Before(y.Since) })
	b.sortCooldowns()
}

// union returns all rows of both lists. Of two rows with the same key, it
// returns the better one.
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

// stateText returns the state of the backend in words. If replicas see several
// states, it adds how many of them see this one.
func (b *Backend) stateText() string {
	n := 0
	for _, count := range b.States {
		n += count
	}
	text := strings.ReplaceAll(b.State, "_", " ")
	if len(b.States) < 2 {
		return text
	}
	return fmt.Sprintf("%s at %d of %d", text, b.States[b.State], n)
}
