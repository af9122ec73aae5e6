package regions

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/state"
)

// store is the store of all regions.
type store struct {
	// servers are in the order of the configuration.
	servers []*server
	heard   heard

	mu sync.Mutex
	// ready is that of Listen.
	ready func()
}

const (
	// reach is how long a server has for the answer to Load. One that takes
	// longer is lost, and is not waited for any more until it answers again.
	reach = 700 * time.Millisecond
	// retry is how long it takes until a server is listened to again.
	retry = 400 * time.Millisecond
	// leastWay and onTheWay bound how long a record may take to all servers, so
	// that it is not taken for one that a server has lost.
	leastWay, onTheWay = 20 * time.Millisecond, 200 * time.Millisecond
)

func newStore(servers []*server) *store { return &store{servers: servers, ready: func() {}} }

// Put implements state.Store. It returns when one server has kept the records,
// or none has.
func (s *store) Put(ctx context.Context, records []state.Record) error {
	done := make(chan result, len(s.servers))
	for _, server := range s.servers {
		server.puts.add(records, done)
	}
	var err error
	for range s.servers {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case r := <-done:
			if r.err == nil || errors.Is(r.err, state.ErrFull) {
				return r.err
			}
			err = cmp.Or(err, r.err)
		}
	}
	return err
}

// Keep implements state.Store. An entry is kept if one server keeps it: the
// others get it when it is looked up there.
func (s *store) Keep(ctx context.Context, entries []state.Entry) (failed []int, err error) {
	done := make(chan result, len(s.servers))
	for _, server := range s.servers {
		server.keeps.add(entries, done)
	}
	failed = all(entries)
	for range s.servers {
		select {
		case <-ctx.Done():
			return failed, ctx.Err()
		case r := <-done:
			failed = slices.DeleteFunc(failed, func(i int) bool { return !slices.Contains(r.failed, i) })
			if len(failed) == 0 {
				return nil, nil
			}
			err = cmp.Or(err, r.err)
		}
	}
	return failed, err
}

// Claim implements state.Store. It asks the first server of the configuration
// that can be reached, which is the same one everywhere unless a link is cut.
func (s *store) Claim(ctx context.Context, claims []state.Claim) (won []bool, err error) {
	for _, server := range s.servers {
		if !isLost(server) {
			return server.Claim(ctx, claims)
		}
	}
	return s.servers[0].Claim(ctx, claims)
}

// Find implements state.Store. It asks the nearest server, and then all others
// for what that does not have. What they have is kept by the nearest one from
// then on.
func (s *store) Find(ctx context.Context, keys []string) ([]state.Entry, error) {
	servers := s.inReach()
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(patience)
	}
	found := make([]state.Entry, len(keys))
	for i, key := range keys {
		found[i].Key = key
	}
	nearby, cancel := context.WithDeadline(ctx, time.Now().Add(time.Until(deadline)/3))
	near, nearErr := servers[0].Find(nearby, keys)
	cancel()
	missing := take(found, near)
	if len(missing) == 0 {
		return found, nil
	}
	type answer struct {
		entries []state.Entry
		err     error
	}
	answers := make(chan answer, len(servers))
	for _, far := range servers[1:] {
		go func() {
			entries, err := far.Find(ctx, missing)
			answers <- answer{entries, err}
		}()
	}
	answered, err := len(servers), nearErr
	for range servers[1:] {
		a := <-answers
		take(found, a.entries)
		if a.err != nil {
			answered--
			err = cmp.Or(err, a.err)
		}
	}
	if nearErr != nil {
		answered--
	}
	if answered == 0 {
		return nil, err
	}
	s.keepNear(servers[0], found, missing)
	incomplete := answered < len(s.servers)
	if incomplete && slices.ContainsFunc(found, isMissing) {
		return found, state.ErrIncomplete
	}
	return found, nil
}

func isMissing(e state.Entry) bool { return len(e.Value) == 0 }

// take adds entries to those that were found, of which each has its key. It
// returns the keys that are still missing.
func take(found, entries []state.Entry) (missing []string) {
	for i := range found {
		if isMissing(found[i]) {
			if at := slices.IndexFunc(entries,
				func(e state.Entry) bool { return e.Key == found[i].Key && !isMissing(e) }); at >= 0 {
				found[i] = entries[at]
			}
		}
		if isMissing(found[i]) {
			missing = append(missing, found[i].Key)
		}
	}
	return missing
}

// keepNear makes the nearest server keep what it did not have.
func (s *store) keepNear(near *server, found []state.Entry, lacked []string) {
	entries := slices.DeleteFunc(slices.Clone(found),
		func(e state.Entry) bool { return isMissing(e) || !slices.Contains(lacked, e.Key) })
	if len(entries) > 0 {
		near.keeps.add(entries, make(chan result, 1))
	}
}

// Listen implements state.Store. It begins when each server has begun or
// failed, and returns when no server can be listened to.
func (s *store) Listen(ctx context.Context, ready func(), hear func(message []byte)) error {
	s.mu.Lock()
	s.ready = ready
	s.mu.Unlock()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var hearing sync.Mutex
	var listening, beginning sync.WaitGroup
	beginning.Add(len(s.servers))
	listening.Go(func() {
		if beginning.Wait(); ctx.Err() == nil {
			ready()
		}
	})
	for i, server := range s.servers {
		server.listens(nil)
		begun := sync.OnceFunc(beginning.Done)
		listening.Go(func() {
			defer begun()
			for again := false; ctx.Err() == nil; again = true {
				err := server.Listen(ctx, func() {
					if server.listens(nil); again {
						ready()
					}
					begun()
				}, func(message []byte) {
					hearing.Lock()
					defer hearing.Unlock()
					if s.heard.isNew(message, i, time.Now()) {
						hear(message)
					}
				})
				begun()
				if server.listens(err); !slices.ContainsFunc(s.servers, hears) {
					cancel(err)
				}
				select {
				case <-ctx.Done():
				case <-time.After(retry):
				}
			}
		})
	}
	listening.Wait()
	return context.Cause(ctx)
}

// isBack makes replicas load everything, because a server is back that may have
// what they have missed.
func (s *store) isBack() {
	s.mu.Lock()
	ready := s.ready
	s.mu.Unlock()
	ready()
}

// Close implements state.Store.
func (s *store) Close() error {
	var errs []error
	for _, server := range s.servers {
		errs = append(errs, server.Close())
	}
	return errors.Join(errs...)
}

// loaded is the result of loading from a server.
type loaded struct {
	kept  []state.Kept
	shown time.Time
	trip  time.Duration
	err   error
}

// Load implements state.Store. The clock is that of the nearest server.
func (s *store) Load(ctx context.Context, groups []string) (kept []state.Kept, now time.Time, err error) {
	servers, began := s.inReach(), time.Now()
	for _, server := range s.servers {
		if !slices.Contains(servers, server) {
			server.probe(groups, s.isBack)
		}
	}
	lists, near, err := s.loadFrom(ctx, servers, groups)
	if err != nil {
		return nil, now, err
	}
	if lacking := lacking(lists); len(lacking) > 0 && time.Since(began) < reach/2 {
		// maybe it was on its way
		select {
		case <-ctx.Done():
		case <-time.After(min(max(leastWay, 2*time.Since(began)), onTheWay)):
		}
		for i, again := range s.loadAgain(ctx, servers, lacking) {
			lists[i] = append(slices.DeleteFunc(lists[i],
				func(k state.Kept) bool { return slices.Contains(lacking, k.Group) }), again...)
		}
	}
	// who asks takes the time to be that of the middle of the call
	return merged(lists), near.shown.Add(time.Since(began)/2 - near.trip/2), nil
}

// loadFrom returns the records of each server that answers, the nearest first,
// and what the nearest of them has loaded.
func (s *store) loadFrom(ctx context.Context, servers []*server,
	groups []string) (lists [][]state.Kept, near loaded, err error) {
	answers, back := make([]loaded, len(servers)), make([]bool, len(servers))
	var loading sync.WaitGroup
	for i, server := range servers {
		loading.Go(func() { answers[i], back[i] = server.load(ctx, groups) })
	}
	loading.Wait()
	if slices.Contains(back, true) {
		s.isBack()
	}
	for _, l := range slices.Backward(answers) {
		if l.err != nil {
			err = l.err
			continue
		}
		lists, near = append(lists, l.kept), l
	}
	slices.Reverse(lists)
	if len(lists) > 0 {
		err = nil
	}
	return lists, near, err
}

// loadAgain returns the records of some groups, of each server that answered
// before. If one of them does not answer now, it returns nil.
func (s *store) loadAgain(ctx context.Context, servers []*server, groups []string) [][]state.Kept {
	servers = slices.DeleteFunc(slices.Clone(servers), isLost)
	lists, _, err := s.loadFrom(ctx, servers, groups)
	if err != nil || len(lists) != len(servers) {
		return nil
	}
	return lists
}

type recordKey struct{ group, key string }

// versions returns the versions of the records that have some. Others are
// replaced again and again, so that it does not matter where they are.
func versions(kept []state.Kept) map[recordKey]string {
	all := make(map[recordKey]string)
	for _, k := range kept {
		if k.Version != "" {
			all[recordKey{k.Group, k.Key}] = k.Version
		}
	}
	return all
}

// lacking returns the groups of which servers have different records, apart
// from those without a version.
func lacking(lists [][]state.Kept) (groups []string) {
	names := make(map[recordKey]bool)
	for _, k := range merged(lists) {
		key := recordKey{k.Group, k.Key}
		if (k.Partial || names[key]) && k.Version != "" && !slices.Contains(groups, k.Group) {
			groups = append(groups, k.Group)
		}
		names[key] = true
	}
	return groups
}

// merged returns the records of all lists. Equal ones are returned once, and
// those that are not everywhere are Partial.
func merged(lists [][]state.Kept) (kept []state.Kept) {
	all := make([]map[recordKey]string, len(lists))
	for i, list := range lists {
		all[i] = versions(list)
	}
	at := make(map[recordKey][]int)
	for _, list := range lists {
		for _, k := range list {
			key := recordKey{k.Group, k.Key}
			k.Partial = slices.ContainsFunc(all, func(m map[recordKey]string) bool { return m[key] != k.Version })
			if i := slices.IndexFunc(at[key],
				func(i int) bool { return bytes.Equal(kept[i].Message, k.Message) }); i >= 0 {
				same := &kept[at[key][i]]
				if same.TTL != 0 && (k.TTL == 0 || k.TTL > same.TTL) {
					same.TTL = k.TTL
				}
				same.Partial = same.Partial || k.Partial
				continue
			}
			at[key] = append(at[key], len(kept))
			kept = append(kept, k)
		}
	}
	return kept
}
