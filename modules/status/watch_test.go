package status

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// watchedPool is a pool with two backends of the models gpt and mini, whose
// problems are logged.
type watchedPool struct {
	*testing.T
	name  string
	a, b  *pool.Member
	logs  *observer.ObservedLogs
	start time.Time
}

func watchPool(t *testing.T) *watchedPool {
	t.Helper()
	p := &watchedPool{T: t, name: fmt.Sprint(t.Name(), time.Now()), a: pool.NewMember("a", new(pool.Health)), b: pool.NewMember("b", new(pool.Health)), start: time.Now()}
	for _, m := range []*pool.Member{p.a, p.b} {
		m.Names, m.Models = map[string]string{"gpt": "gpt", "mini": "mini"}, []string{"gpt", "mini"}
	}
	entry := &pools.Entry{Name: p.name, Pool: pool.New([]*pool.Member{p.a, p.b}, Recorder(p.name))}
	pools.Default.Add(entry)
	core, logs := observer.New(zap.DebugLevel)
	p.logs = logs
	watch.use(p.name, zap.New(core))
	t.Cleanup(func() {
		watch.leave(p.name)
		pools.Default.Remove(entry)
		entry.Pool.Close()
	})
	return p
}

// wantLog checks the lines since the last call.
func (p *watchedPool) wantLog(want ...string) {
	p.Helper()
	synctest.Wait()
	var got []string
	for _, line := range p.logs.TakeAll() {
		fields := line.ContextMap()
		text := fmt.Sprint(line.Level, " ", line.Message, ": ", fields["models"])
		if fields["pool"] != p.name {
			p.Errorf("the line %q is about the pool %s", text, fields["pool"])
		}
		if line.Level == zap.ErrorLevel && fields["next"] == nil {
			p.Errorf("the line %q does not say what to do", text)
		}
		if seconds, ok := fields["seconds"]; ok {
			text += fmt.Sprint(" for ", seconds)
		}
		got = append(got, text)
	}
	if !slices.Equal(got, want) {
		p.Errorf("the log has %q, want %q", got, want)
	}
}

func (p *watchedPool) fail(m *pool.Member, model string, wait time.Duration) {
	m.CoolDown(pool.Refusal{Reason: pool.Reason{Class: "failed"}, Model: model, Wait: wait}, time.Now())
}

func TestThatNoBackendIsAvailableIsLoggedOnceAndSoIsItsEnd(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		p := watchPool(t)
		for range 6 * 5 { // five minutes, with a pause after each cooldown
			for _, m := range []*pool.Member{p.a, p.b} {
				p.fail(m, "gpt", 9*time.Second)
			}
			time.Sleep(10 * time.Second)
		}
		p.wantLog("error no backend is available: gpt")
		for _, m := range []*pool.Member{p.a, p.b} {
			p.fail(m, "mini", time.Minute)
		}
		time.Sleep(time.Minute)
		p.wantLog("error no backend is available: mini", "info a backend is available again: gpt for 290")
		time.Sleep(time.Minute)
		p.wantLog("info a backend is available again: mini for 50")
		time.Sleep(time.Hour)
		p.wantLog()
	})
}

func TestACooldownOfSomeSecondsIsNotLoggedAsAnOutage(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		p := watchPool(t)
		for range 20 {
			p.fail(p.a, "gpt", 10*time.Second)
			p.fail(p.b, "gpt", 10*time.Second)
			time.Sleep(5 * time.Minute)
		}
		p.a.CoolDown(pool.Refusal{Reason: pool.Reason{Class: "throttled"}, Throttle: true, Model: "gpt", Wait: time.Hour}, time.Now())
		p.b.CoolDown(pool.Refusal{Reason: pool.Reason{Class: "throttled"}, Throttle: true, Model: "gpt", Wait: time.Hour}, time.Now())
		time.Sleep(30 * time.Minute) // a full quota needs nobody
		p.wantLog()
	})
}

func TestThatRequestsWaitIsLoggedOnceAndSoIsItsEnd(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		p := watchPool(t)
		first := []metrics.FirstByte{metrics.Of(p.name).FirstBytes.Begin(time.Now(), 0), metrics.Of(p.name).FirstBytes.Begin(time.Now(), 0)}
		time.Sleep(10 * time.Minute)
		p.wantLog("error requests wait and get no byte: <nil>")
		for i := range first {
			first[i].End()
		}
		time.Sleep(time.Minute)
		if logs := p.logs.All(); len(logs) != 1 || logs[0].Message != "requests no longer wait" {
			t.Errorf("the log has %v", logs)
		}
		if got := Episodes(p.name, 10); len(got) != 1 || got[0].Class != NoFirstByte || got[0].Backend != "" || !got[0].Over(time.Now()) {
			t.Errorf("the recent list has %+v", got)
		}
	})
}

// TestEachProblemThatNeedsAPersonIsLoggedAsAnError has the lines that others
// write. Lines about backends have the level of the table: see package observe.
func TestEachProblemThatNeedsAPersonIsLoggedAsAnError(t *testing.T) {
	elsewhere := map[verdict.Class]string{
		verdict.NotWritten:   "pools.Saver, and the journal of package ledger",
		verdict.StaleSecret:  "keys.Reloader",
		verdict.ReloadFailed: "Caddy",
	}
	for _, r := range verdict.PoolRemedies {
		if watched := r.Over != ""; r.NeedsOperator && watched != (elsewhere[r.Class] == "") {
			t.Errorf("who logs %s?", r.Class)
		}
		if r.Log == "" {
			t.Errorf("%s has no line in the log", r.Class)
		}
	}
}

func TestARemovedPoolIsNotWatched(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		w := new(watched)
		w.use("stays", zap.NewNop())
		w.use("removed", zap.NewNop())
		w.use("stays", zap.NewNop()) // a reload
		w.leave("stays")
		w.leave("removed")
		if len(w.pools) != 1 || w.pools["stays"].users != 1 {
			t.Errorf("got %+v", w.pools)
		}
		if w.leave("stays"); len(w.pools) > 0 || w.timer.Stop() {
			t.Errorf("after the last one got %+v, or the timer is still set", w.pools)
		}
	})
}
