package regions

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/state"
)

// server is the store of one region.
type server struct {
	state.Store
	name    string
	puts    *line[state.Record]
	keeps   *line[state.Entry]
	probing sync.WaitGroup

	mu sync.Mutex
	// lost is why the server did not answer last, and deaf why it cannot be
	// listened to. They are nil if it did, and can be.
	lost, deaf error
	// trip is how long it takes to answer, on average. It is 0 until it has.
	trip time.Duration
	// probed reports whether a server that is lost is asked just now.
	probed bool
}

func newServer(s state.Store, name string) *server {
	srv := &server{Store: s, name: name}
	srv.puts = newLine(func(ctx context.Context, records []state.Record, waited time.Duration) ([]int, error) {
		if records = shortened(records, waited); len(records) == 0 {
			return nil, nil
		}
		return nil, s.Put(ctx, records)
	})
	srv.keeps = newLine(func(ctx context.Context, entries []state.Entry, _ time.Duration) ([]int, error) {
		return s.Keep(ctx, entries)
	})
	return srv
}

// shortened returns the records with what is left of their times to live,
// without those of which the time has passed.
func shortened(records []state.Record, by time.Duration) (left []state.Record) {
	for _, r := range records {
		if r.TTL > 0 {
			if r.TTL -= by; r.TTL <= 0 {
				continue
			}
		}
		left = append(left, r)
	}
	return left
}

// load is Load. It records whether the server answers, and how long that takes.
func (s *server) load(ctx context.Context, groups []string) (l loaded, isBack bool) {
	ctx, cancel := context.WithTimeout(ctx, reach)
	defer cancel()
	began := time.Now()
	l.kept, l.shown, l.err = s.Load(ctx, groups)
	l.trip = time.Since(began)
	s.mu.Lock()
	defer s.mu.Unlock()
	isBack = s.lost != nil && l.err == nil
	s.lost = l.err
	if l.err == nil {
		s.trip += (l.trip - s.trip) / 4
		if s.trip == 0 {
			s.trip = l.trip
		}
	}
	return l, isBack
}

// probe asks a server that is lost, unless that is being done, and calls back
// if it answers again.
func (s *server) probe(groups []string, back func()) {
	s.mu.Lock()
	again := s.probed
	s.probed = true
	s.mu.Unlock()
	if again {
		return
	}
	s.probing.Go(func() {
		_, isBack := s.load(context.Background(), groups)
		s.mu.Lock()
		s.probed = false
		s.mu.Unlock()
		if isBack {
			back()
		}
	})
}

// listens records whether the server can be listened to.
func (s *server) listens(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deaf = err
}

// isLost reports whether the server did not answer last.
func isLost(s *server) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lost != nil
}

// hears reports whether the server can be listened to, or it is not known yet.
func hears(s *server) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.deaf == nil
}

func (s *server) distance() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.trip
}

// missing says why the server cannot be reached, or returns nil.
func (s *server) missing() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := cmp.Or(s.lost, s.deaf); err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	return nil
}

// Close implements state.Store.
func (s *server) Close() error {
	s.puts.close()
	s.keeps.close()
	s.probing.Wait()
	return s.Store.Close()
}

// Missing implements state.SpreadStore.
func (s *store) Missing() error {
	var all []error
	for _, server := range s.servers {
		all = append(all, server.missing())
	}
	return errors.Join(all...)
}

// Near implements state.SpreadStore.
func (s *store) Near() string { return s.inReach()[0].name }

// inReach returns the servers that answer, the nearest first, or all if none
// does.
func (s *store) inReach() (servers []*server) {
	servers = slices.DeleteFunc(slices.Clone(s.servers), isLost)
	if len(servers) == 0 {
		servers = slices.Clone(s.servers)
	}
	slices.SortStableFunc(servers, func(a, b *server) int { return cmp.Compare(a.distance(), b.distance()) })
	return servers
}
