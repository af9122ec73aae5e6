package regions

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
	"github.com/openai-lb/caddy-openai-lb/modules/replicas"
	"github.com/openai-lb/caddy-openai-lb/state"
	"github.com/openai-lb/caddy-openai-lb/state/statetest"
)

func TestTheServersOfAllRegionsAreAStore(t *testing.T) {
	hubs := []*statetest.Hub{statetest.NewHub(), statetest.NewHub()}
	statetest.Conform(t, func(t *testing.T) state.Store {
		var servers []*server
		for i, hub := range hubs {
			hub.Flush()
			servers = append(servers, newServer(hub.Store(), fmt.Sprint("hub ", i+1)))
		}
		return settled{newStore(servers)}
	})
}

// settled is a store that has told all servers by the time it returns.
type settled struct{ *store }

func (s settled) Put(ctx context.Context, records []state.Record) error {
	err := s.store.Put(ctx, records)
	for _, server := range s.servers {
		server.puts.running.Wait()
	}
	return err
}

func (s settled) Keep(ctx context.Context, entries []state.Entry) (failed []int, err error) {
	failed, err = s.store.Keep(ctx, entries)
	for _, server := range s.servers {
		server.keeps.running.Wait()
	}
	return failed, err
}

// away is a server that is so far away from a replica. Nothing reaches it while
// the link is cut.
type away struct {
	state.Store
	distance time.Duration
	cut      *atomic.Bool
	// heard ends Listen when the link is cut.
	finds *atomic.Int64
}

var errCut = errors.New("the link is cut")

// pass takes as long as the way to the server and back.
func (a away) pass(ctx context.Context) error {
	if a.cut.Load() && a.distance > 0 {
		<-ctx.Done()
		return ctx.Err()
	}
	if a.distance == 0 {
		return ctx.Err()
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(a.distance):
		return nil
	}
}

func (a away) Put(ctx context.Context, records []state.Record) error {
	if err := a.pass(ctx); err != nil {
		return err
	}
	return a.Store.Put(ctx, records)
}

func (a away) Load(ctx context.Context, groups []string) ([]state.Kept, time.Time, error) {
	if err := a.pass(ctx); err != nil {
		return nil, time.Time{}, err
	}
	return a.Store.Load(ctx, groups)
}

func (a away) Claim(ctx context.Context, claims []state.Claim) ([]bool, error) {
	if err := a.pass(ctx); err != nil {
		return nil, err
	}
	return a.Store.Claim(ctx, claims)
}

func (a away) Keep(ctx context.Context, entries []state.Entry) ([]int, error) {
	if err := a.pass(ctx); err != nil {
		return all(entries), err
	}
	return a.Store.Keep(ctx, entries)
}

func (a away) Find(ctx context.Context, keys []string) ([]state.Entry, error) {
	a.finds.Add(1)
	if err := a.pass(ctx); err != nil {
		return nil, err
	}
	return a.Store.Find(ctx, keys)
}

func (a away) Listen(ctx context.Context, ready func(), hear func([]byte)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		for ctx.Err() == nil && (!a.cut.Load() || a.distance <= 0) {
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
		cancel()
	}()
	if a.cut.Load() && a.distance > 0 {
		return errCut
	}
	return a.Store.Listen(ctx, ready, func(message []byte) {
		if text := string(message); !a.cut.Load() || a.distance == 0 {
			time.AfterFunc(a.distance/2, func() { hear([]byte(text)) })
		}
	})
}

// world is two regions with a server and two replicas each, in virtual time.
type world struct {
	*testing.T
	hubs     [2]*statetest.Hub
	cut      atomic.Bool
	finds    atomic.Int64 // in the far region
	replicas []*replica
}

type replica struct {
	*replicas.Replica
	link   *replicas.Link
	member *pool.Member
	pool   *pool.Pool
	region int
	stop   func()
}

// share runs a test with replicas of which the first two are in one region, and
// the others in another one, 80 ms away.
func share(t *testing.T, test func(w *world)) {
	t.Helper()
	bubble.Test(t, func(t *testing.T) {
		w := &world{T: t, hubs: [2]*statetest.Hub{statetest.NewHub(), statetest.NewHub()}}
		for i := range 4 {
			w.start(i / 2)
		}
		time.Sleep(3 * time.Second)
		test(w)
	})
}

// start adds a replica to a region.
func (w *world) start(region int) *replica {
	var servers []*server
	for i, hub := range w.hubs {
		distance := 80 * time.Millisecond
		if i == region {
			distance = 0
		}
		finds := &w.finds
		if i == region {
			finds = new(atomic.Int64)
		}
		servers = append(servers, newServer(away{hub.Store(), distance, &w.cut, finds}, fmt.Sprint("hub ", i+1)))
	}
	r := &replica{Replica: replicas.New(newStore(servers), zap.NewNop()), member: pool.NewMember("a", new(pool.Health)), region: region}
	r.member.Models = []string{"m"}
	r.link = r.NewLink()
	r.link.Name(r.member, "https://a key")
	r.pool = pool.New([]*pool.Member{r.member}, r.link)
	r.link.Open(r.pool)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		r.Run(ctx)
		close(done)
	}()
	stopped := false
	r.stop = func() {
		if !stopped {
			stopped = true
			cancel()
			<-done
			_ = r.Destruct()
			r.pool.Close()
		}
	}
	w.Cleanup(r.stop)
	w.replicas = append(w.replicas, r)
	return r
}

// cooldownLeft returns how long the longest cooldown still lasts.
func (r *replica) cooldownLeft() (left time.Duration) {
	for _, s := range r.pool.Snapshot(time.Now()) {
		for _, b := range s.Cooldowns {
			left = max(left, time.Until(b.Until))
		}
	}
	return left
}

func (r *replica) throttle(wait time.Duration) {
	r.member.CoolDown(pool.Refusal{Reason: pool.Reason{Class: string(verdict.Throttled), Status: 429, Hint: "retry-after"}, Throttle: true, Model: "m", Wait: wait}, time.Now())
}

func (r *replica) owners() ownership.Others { return r.link.Owners("a pool", []string{"a", "b"}) }

func (r *replica) find(id string) (account string, unsure bool) {
	found, err := r.owners().Lookup(alice, []ownership.Key{ownership.KeyOf(id)})
	if err != nil {
		return err.Error(), false
	}
	return found[0].Account, found[0].Unsure
}

func (r *replica) made(id string) {
	r.owners().Send(ownership.KeyOf(id), ownership.Owner{Account: "a", Caller: alice}, time.Hour)
}

var alice = ownership.CallerNamed("alice")

func TestWhatHappensInOneRegionIsKnownInAll(t *testing.T) {
	share(t, func(w *world) {
		w.replicas[0].throttle(30 * time.Second)
		time.Sleep(200 * time.Millisecond)
		for i, r := range w.replicas {
			if left := r.cooldownLeft(); left < 29*time.Second {
				t.Errorf("replica %d knows a cooldown of %v", i, left)
			}
		}
		w.replicas[3].member.Drain(pool.Order{By: "alice"})
		time.Sleep(200 * time.Millisecond)
		for i, r := range w.replicas {
			if !r.member.Drained() {
				t.Errorf("replica %d has not heard of a drain", i)
			}
		}
		for i, s := range seam.Statuses() {
			if !s.InTouch || len(s.Peers) != 4 {
				t.Errorf("replica %d is in touch: %v, with %d", i, s.InTouch, len(s.Peers))
			}
		}
	})
}

// TestAnIDIsFoundInTheOtherRegion by one question there, and then in the own
// one.
func TestAnIDIsFoundInTheOtherRegion(t *testing.T) {
	share(t, func(w *world) {
		time.Sleep(10 * time.Second)
		w.cut.Store(true)
		time.Sleep(5 * time.Second)
		w.replicas[0].made("resp_1")
		synctest.Wait()
		if account, unsure := w.replicas[2].find("resp_1"); account != "" || !unsure {
			t.Errorf("while the link is cut, the account is %q, and unsure: %v", account, unsure)
		}
		w.cut.Store(false)
		time.Sleep(5 * time.Second)
		before := w.finds.Load()
		for range 2 {
			if account, _ := w.replicas[2].find("resp_1"); account != "a" {
				t.Errorf("the account is %q, want a", account)
			}
			synctest.Wait()
		}
		if account, unsure := w.replicas[2].find("resp_none"); account != "" || unsure {
			t.Errorf("the account of nothing is %q, and unsure: %v", account, unsure)
		}
		if asked := w.finds.Load() - before; asked != 2 {
			t.Errorf("the far region was asked %d times, want once for each id", asked)
		}
	})
}

// TestAServerThatComesBackEmptyGetsEverythingAgain, so that the region that had
// it can be lost then.
func TestAServerThatComesBackEmptyGetsEverythingAgain(t *testing.T) {
	for name, lose := range map[string]func(w *world){
		"while it was reached": func(w *world) { w.hubs[1].Flush() },
		"while it was not": func(w *world) {
			w.hubs[1].Fail(errors.New("down"))
			time.Sleep(time.Minute)
			w.hubs[1].Flush()
			w.hubs[1].Fail(nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			share(t, func(w *world) {
				w.replicas[0].throttle(time.Hour)
				w.replicas[1].member.Drain(pool.Order{By: "alice"})
				time.Sleep(5 * time.Second)
				lose(w)
				time.Sleep(10 * time.Second)
				w.hubs[0].Fail(errors.New("down"))
				time.Sleep(5 * time.Second)
				for _, r := range w.replicas[:4] {
					r.stop()
				}
				late := w.start(1)
				time.Sleep(5 * time.Second)
				if late.cooldownLeft() < 50*time.Minute || !late.member.Drained() {
					t.Errorf("a replica that starts knows a cooldown of %v, and is drained: %v", late.cooldownLeft(), late.member.Drained())
				}
			})
		})
	}
}

// TestARegionGoesOnWithoutTheOther and both agree when the link is back.
func TestARegionGoesOnWithoutTheOther(t *testing.T) {
	share(t, func(w *world) {
		w.cut.Store(true)
		time.Sleep(5 * time.Second)
		for i, s := range seam.Statuses() {
			if s.InTouch {
				t.Errorf("replica %d is in touch with all", i)
			}
		}
		w.replicas[0].throttle(10 * time.Minute)
		w.replicas[2].member.Drain(pool.Order{})
		time.Sleep(20 * time.Millisecond)
		if w.replicas[1].cooldownLeft() == 0 || w.replicas[2].cooldownLeft() != 0 || !w.replicas[3].member.Drained() || w.replicas[1].member.Drained() {
			t.Error("the replicas of a region do not know what happens in it, and only that")
		}
		time.Sleep(time.Minute)
		w.cut.Store(false)
		time.Sleep(5 * time.Second)
		for i, r := range w.replicas {
			if r.cooldownLeft() < 8*time.Minute || !r.member.Drained() {
				t.Errorf("replica %d knows a cooldown of %v, and is drained: %v", i, r.cooldownLeft(), r.member.Drained())
			}
		}
		for i, s := range seam.Statuses() {
			if !s.InTouch || len(s.Peers) != 4 {
				t.Errorf("replica %d is in touch: %v, with %d", i, s.InTouch, len(s.Peers))
			}
		}
	})
}

// TestARegionKeepsItsPartOfALimitWhileTheLinkIsCut has most of the use of a
// limit in the first region.
func TestARegionKeepsItsPartOfALimitWhileTheLinkIsCut(t *testing.T) {
	share(t, func(w *world) {
		limit, err := ratelimit.ParseLimit(ratelimit.Tokens, "1000/minute")
		if err != nil {
			t.Fatal(err)
		}
		var all []*limiter.Limiters
		for _, r := range w.replicas {
			callers := limiter.NewLimiters(nil)
			callers.Configure(time.Now(), func(string) limiter.Settings { return limiter.Settings{Limits: []ratelimit.Limit{limit}} })
			r.link.ShareUse("a pool", callers)
			all = append(all, callers)
		}
		time.Sleep(3 * time.Second)
		allowed := func(i int) int64 {
			return all[i].Get(time.Now(), "alice").Snapshot(time.Now()).Limits[0].Allowed
		}
		for i, used := range []int64{300, 500, 100, 0} {
			r, refusal := all[i].Get(time.Now(), "alice").Try(time.Now(), ratelimit.Estimate{Prompt: 1})
			if refusal != nil {
				t.Fatal(refusal)
			}
			r.Settle(time.Now(), ratelimit.Cost{Requests: 1, Prompt: used})
			time.Sleep(time.Second)
		}
		w.cut.Store(true)
		time.Sleep(5 * time.Second)
		// 900 are used, and each may use its part of 100 more, or a fourth
		for i, want := range []int64{900 + 33, 900 + 55, 900 + 25, 900 + 25} {
			if got := allowed(i); got != want {
				t.Errorf("replica %d may use %d, want %d", i, got, want)
			}
		}
		time.Sleep(2 * time.Minute)
		for i, want := range []int64{333, 555, 250, 250} {
			if got := allowed(i); got != want {
				t.Errorf("after two minutes, replica %d may use %d, want %d", i, got, want)
			}
		}
		w.cut.Store(false)
		time.Sleep(5 * time.Second)
		for i := range all {
			if got := allowed(i); got != 1000 {
				t.Errorf("when the link is back, replica %d may use %d", i, got)
			}
		}
		// without both servers, nobody knows how users are spread: each may
		// use an equal part
		for _, hub := range w.hubs {
			hub.Fail(errors.New("down"))
		}
		time.Sleep(10 * time.Second)
		for i := range all {
			if got := allowed(i); got != 250 {
				t.Errorf("without servers, replica %d may use %d", i, got)
			}
		}
		for _, hub := range w.hubs {
			hub.Fail(nil)
		}
	})
}

// TestNothingWaitsForTheFarRegion also while it does not answer.
func TestNothingWaitsForTheFarRegion(t *testing.T) {
	share(t, func(w *world) {
		for _, cut := range []bool{false, true} {
			w.cut.Store(cut)
			for round := range 20 {
				w.replicas[0].throttle(time.Duration(round+1) * time.Minute)
				time.Sleep(5 * time.Millisecond)
				if left := w.replicas[1].cooldownLeft(); left < time.Duration(round)*time.Minute {
					t.Fatalf("cut: %v, in round %d the next replica knows a cooldown of %v", cut, round, left)
				}
				time.Sleep(150 * time.Millisecond)
			}
		}
	})
}

func TestTheNearServerIsNamed(t *testing.T) {
	share(t, func(w *world) {
		near := make(map[string]int)
		for _, s := range seam.Statuses() {
			near[s.Near]++
		}
		if near["hub 1"] != 2 || near["hub 2"] != 2 {
			t.Errorf("of two replicas in each region, the near servers are %v", near)
		}
	})
}

func TestMessagesAreHeardOnce(t *testing.T) {
	var h heard
	now := time.Now()
	for i, step := range []struct {
		message string
		server  int
		after   time.Duration
		isNew   bool
	}{
		{"a", 0, 0, true}, {"a", 1, 0, false}, {"b", 1, 0, true}, {"b", 0, 0, false},
		{"a", 0, 0, true}, {"a", 1, 0, false}, // it was sent twice
		{"a", 1, remembered, false}, {"a", 1, 3 * remembered, true},
	} {
		if got := h.isNew([]byte(step.message), step.server, now.Add(step.after)); got != step.isNew {
			t.Errorf("step %d: it is new: %v", i, got)
		}
	}
	for i := range 3 * maxHeard {
		h.isNew(fmt.Append(nil, i), 0, now)
	}
	if n := len(h.recent) + len(h.earlier); n > 2*maxHeard {
		t.Errorf("%d messages are remembered", n)
	}
}

func TestTheServersThatAreMissingAreNamed(t *testing.T) {
	share(t, func(w *world) {
		w.hubs[0].Fail(errors.New("down"))
		time.Sleep(3 * time.Second)
		s := newStore(nil)
		if s.Missing() != nil {
			t.Error("something is missing of nothing")
		}
		one := newServer(w.hubs[0].Store(), "hub 1")
		_, _ = one.load(w.Context(), nil)
		if err := newStore([]*server{one}).Missing(); err == nil || !strings.Contains(err.Error(), "hub 1: down") {
			t.Errorf("missing is %v", err)
		}
	})
}
