package replicas

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/state"
)

var someTime = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func TestACooldownArrivesAsItWas(t *testing.T) {
	b := pool.Cooldown{
		Reason: pool.Reason{Class: "throttled", Status: 429, Hint: "retry-after-ms", Cause: "RateLimit_1.0"}, ID: 1<<64 - 1, Model: "gpt-4o {}\"\n",
		Since: someTime, Until: someTime.Add(10 * time.Second), Throttle: true, Guess: 9 * time.Second, Cost: 12345,
	}
	m := message{Version: version, Kind: coolingDown, From: digest("r"), Sent: 1, Backend: digest("a"), Cooldown: cooldownOf(b, someTime.Add(3*time.Second))}
	got, err := parse(m.text())
	if err != nil || !reflect.DeepEqual(got, m) {
		t.Fatalf("got %+v, %v, want %+v", got, err, m)
	}
	heard, left := got.Cooldown.pool(someTime.Add(3 * time.Second))
	if heard != b || left != 7*time.Second {
		t.Errorf("got %+v, %v, want %+v", heard, left, b)
	}
}

func TestWhatNoReplicaWritesIsRefused(t *testing.T) {
	me, backend := digest("r"), digest("a")
	const whole = `{"v":1,"kind":"cooldown","from":"ME","sent":1,"backend":"BACKEND","cooldown":{"id":"f","class":"throttled","length":10,"left":10}}`
	complete := strings.NewReplacer("ME", me, "BACKEND", backend)
	if _, err := parse([]byte(complete.Replace(whole))); err != nil {
		t.Fatal(err)
	}
	for _, change := range [][2]string{
		{`"v":1`, `"v":2`}, {`"kind":"cooldown"`, `"kind":"ban"`}, {`"kind":"cooldown"`, `"kind":"tier_costs","shares":[{"backend":"x"}]`}, {`"kind":"cooldown"`, `"kind":"tier_costs","shares":[{"backend":"BACKEND","model":"` + strings.Repeat("m", 300) + `"}]`}, {"ME", "me"}, {"BACKEND", "https://a"}, {`"sent":1`, `"sent":-1`}, {`"sent":1`, `"sent":9223372036854775807`},
		{`"sent":1`, `"sent":1,"at":-1`}, {`"sent":1`, `"sent":1,"at":9223372036854775807`}, {`"kind":"cooldown"`, `"kind":"alive","since":9223372036854775807`},
		{`"id":"f"`, `"id":"g"`}, {"throttled", "made_up"}, {"throttled", "credential"}, {`"length":10`, `"length":9`}, {`"left":10`, `"left":-1`},
		{`"length":10,"left":10`, `"length":86400001,"left":86400001`}, {`"class"`, `"status":600,"class"`}, {`"class"`, `"cost":-1,"class"`}, {`"class"`, `"guess":-1,"class"`}, {`"class"`, `"guess":86400001,"class"`},
		{`"class"`, `"hint":"made up","class"`}, {`"class"`, `"cause":"two words","class"`}, {`"class"`, `"whole":true,"model":"m","class"`}, {`"class"`, `"whole":true,"operation":"/responses","class"`},
		{`"class"`, `"throttle":true,"operation":"/responses","class"`}, {`"class"`, `"operation":"two words","class"`}, {`"class"`, `"operation":"/` + strings.Repeat("o", 64) + `","class"`}, {`"class"`, `"model":"` + strings.Repeat("m", 300) + `","class"`},
		{whole, ""}, {whole, "null"}, {whole, `{"v":1}`}, {whole, whole[:50]}, {whole, whole + " x"}, {`{"id":"f","class":"throttled","length":10,"left":10}`, "null"},
		{`"kind":"cooldown"`, `"kind":"drain"`}, {`"kind":"cooldown"`, `"kind":"drain","member":"x"`},
		{`"kind":"cooldown"`, `"kind":"drain","member":"BACKEND","by":"a\u0007"`}, {`"kind":"cooldown"`, `"kind":"drain","member":"BACKEND","reason":"` + strings.Repeat("r", 257) + `"`}, {`"kind":"cooldown"`, `"kind":"alive","since":-1`},
		{`"kind":"cooldown"`, `"kind":"alive","configs":{"pool":"0123456789ab"}`}, {`"kind":"cooldown"`, `"kind":"alive","configs":{"0123456789ab":"x"}`}, {`"kind":"cooldown"`, `"kind":"alive","writers":[""]`},
		{`"kind":"cooldown"`, `"kind":"alive","host":"` + strings.Repeat("h", 300) + `"`}, {whole, whole + strings.Repeat(" ", state.MaxMessage)},
	} {
		text := complete.Replace(strings.Replace(whole, change[0], change[1], 1))
		if m, err := parse([]byte(text)); err == nil {
			t.Errorf("%s is taken for %+v", text, m)
		}
	}
}

func TestTheDelayOfACooldownIsExact(t *testing.T) {
	share(t, 2, func(w *world) {
		sum := func() float64 {
			var m dto.Metric
			if err := cooldownDelay.Write(&m); err != nil {
				t.Fatal(err)
			}
			return m.GetHistogram().GetSampleSum()
		}
		before := sum()
		const delay = 1400 * time.Microsecond
		w.hub.Delay(delay, 0)
		time.Sleep(time.Second + 900*time.Microsecond)
		w.at(0, "a").CoolDown(throttle(time.Minute), time.Now())
		time.Sleep(delay)
		synctest.Wait()
		if got := time.Duration(math.Round((sum() - before) * 1e9)); got != delay {
			t.Errorf("the delay is %v, want %v", got, delay)
		}
	})
}

func TestARecordOfAnotherVersionIsNotOverwritten(t *testing.T) {
	share(t, 1, func(w *world) {
		told := make(map[kind]int)
		go w.hub.Store().Listen(w.Context(), func() {}, func(text []byte) {
			m, _ := parse(text)
			told[m.Kind]++
		})
		synctest.Wait()
		backend := digest("https://a key")
		if err := w.hub.Store().Put(w.Context(), []state.Record{
			{Group: backend, Key: "throttle m", Mode: state.Extend, Version: "1", TTL: time.Hour, Message: []byte(`{"v":2}`)},
			{Group: drainGroup, Key: backend + digest("a"), Mode: state.Replace, Message: []byte(`{"v":2}`)},
		}); err != nil {
			t.Fatal(err)
		}
		w.at(0, "a").CoolDown(throttle(time.Minute), time.Now())
		w.at(0, "a").Drain(pool.Order{})
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if told[coolingDown] != 1 || told[drained] != 1 {
			t.Errorf("told %v, want one of each", told)
		}
	})
}

// During an upgrade, replicas of two versions may share a store for hours.
func TestAnotherVersionIsReportedOnce(t *testing.T) {
	share(t, 1, func(w *world) {
		records := []state.Record{
			{Group: digest("https://a key"), Key: "throttle m", Mode: state.Extend, Version: "1", TTL: time.Hour, Message: []byte(`{"v":2}`)},
			{Group: digest("https://b key"), Key: "throttle m", Mode: state.Extend, Version: "1", TTL: time.Hour, Message: []byte(`{"v":2}`)},
			{Group: drainGroup, Key: "d", Mode: state.Replace, Message: []byte(`{"v":3,"from":["a","list"]}`)},
			{Group: drainGroup, Key: "no version", Mode: state.Replace, Message: []byte(`{"kind":"drain"}`)},
			{Group: drainGroup, Key: "no message", Mode: state.Replace, Message: []byte(`v2`)},
		}
		for range 3 {
			if err := w.hub.Store().Put(w.Context(), records); err != nil {
				t.Fatal(err)
			}
			time.Sleep(5 * time.Second)
		}
		var got []any
		for _, entry := range w.replicas[0].logs.FilterMessage("ignoring replicas that use another format").All() {
			got = append(got, entry.Level.String(), entry.ContextMap()["other_format"], entry.ContextMap()["own_format"])
		}
		if want := []any{"warn", int64(2), int64(version), "warn", int64(3), int64(version)}; !reflect.DeepEqual(got, want) {
			t.Errorf("logged %v, want %v", got, want)
		}
	})
}

// Anyone who can write to the store can make up versions.
func TestTheReportedVersionsAreBounded(t *testing.T) {
	share(t, 1, func(w *world) {
		for v := range 200 {
			if err := w.hub.Store().Put(w.Context(), []state.Record{{Group: drainGroup, Key: "d", Mode: state.Replace, Message: fmt.Appendf(nil, `{"v":%d}`, v+2)}}); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		if n := w.replicas[0].logs.FilterMessage("ignoring replicas that use another format").Len(); n != maxFormats {
			t.Errorf("logged %d lines, want %d", n, maxFormats)
		}
	})
}

func FuzzParse(f *testing.F) {
	b := pool.Cooldown{ID: 7, Model: "m", Reason: pool.Reason{Class: "throttled"}, Since: someTime, Until: someTime.Add(time.Minute)}
	for _, m := range []message{
		{Version: version, Kind: coolingDown, From: digest("r"), Backend: digest("https://a key"), Cooldown: cooldownOf(b, someTime)},
		{Version: version, Kind: disproved, From: digest("r"), Backend: digest("https://a key"), Cooldown: cooldownOf(b, someTime)},
		{Version: version, Kind: drained, From: digest("r"), Backend: digest("https://a key"), Member: digest("a"), By: "alice", Reason: "why"},
		{Version: version, Kind: alive, From: digest("r"), Host: "h", Since: 1},
	} {
		f.Add(m.text())
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		m, err := parse(text)
		if err != nil {
			return
		}
		again, err := parse(m.text())
		if err != nil || !reflect.DeepEqual(again, m) {
			t.Fatalf("%+v becomes %+v, %v", m, again, err)
		}
		r := New(nil, nil)
		a := pool.NewMember("a", new(pool.Health))
		l := r.NewLink()
		l.Name(a, "https://a key")
		p := pool.New([]*pool.Member{a}, l)
		defer p.Close()
		l.Open(p)
		r.hear(m, someTime, someTime)
		if _, err := json.Marshal(r.peers.list(someTime)); err != nil {
			t.Fatal(err)
		}
		for _, s := range p.Snapshot(someTime) {
			for _, b := range s.Cooldowns {
				if !b.Until.After(someTime) || b.Until.Sub(b.Since) > maxLength || !shareable(b) {
					t.Fatalf("%s starts the cooldown %+v", text, b)
				}
			}
		}
	})
}

// lateStore answers after some time, as to a replica that is suspended before
// it reads the answer.
type lateStore struct {
	state.Store
	by atomic.Int64
}

func (s *lateStore) Load(ctx context.Context, groups []string) ([]state.Kept, time.Time, error) {
	kept, now, err := s.Store.Load(ctx, groups)
	time.Sleep(time.Duration(s.by.Load()))
	return kept, now, err
}

func TestAReplicaThatWasSuspendedExtendsNoCooldown(t *testing.T) {
	share(t, 2, func(w *world) {
		suspended := w.replicas[1]
		for name, wait := range map[string]time.Duration{"a": 5 * time.Second, "b": 20 * time.Second} {
			w.hub.Suspend(suspended.store, true)
			w.at(0, name).CoolDown(throttle(wait), time.Now())
			time.Sleep(6 * time.Second)
			w.hub.Suspend(suspended.store, false)
			for range 4 {
				time.Sleep(time.Second)
				w.wantCooldown(name, max(0, wait-7*time.Second))
				wait -= time.Second
			}
		}
	})
}

func TestAnAnswerThatIsReadLateStartsNoCooldown(t *testing.T) {
	share(t, 1, func(w *world) {
		late := &lateStore{Store: w.hub.Store()}
		r := w.startWith(late)
		time.Sleep(time.Second)
		w.hub.LoseMessages(true)
		late.by.Store(int64(6 * time.Second))
		w.at(0, "a").CoolDown(throttle(5*time.Second), time.Now())
		for range 100 {
			time.Sleep(100 * time.Millisecond)
			if over := w.replicas[0].cooldownLeft("a") == 0; over && r.cooldownLeft("a") > 0 {
				t.Fatalf("after its end, the cooldown of a lasts for %v", r.cooldownLeft("a"))
			}
		}
	})
}

// TestARecordThatWasKeptLateIsNotBelievedForLonger has records like those of a
// store that was suspended.
func TestARecordThatWasKeptLateIsNotBelievedForLonger(t *testing.T) {
	share(t, 1, func(w *world) {
		r := w.replicas[0]
		for name, c := range map[string]struct{ ago, want time.Duration }{"a": {15 * time.Second, 0}, "b": {8 * time.Second, 3500 * time.Millisecond}} {
			b := pool.Cooldown{ID: 7, Model: "m", Reason: pool.Reason{Class: "throttled"}, Throttle: true, Since: time.Now(), Until: time.Now().Add(10 * time.Second)}
			m := message{Version: version, Kind: coolingDown, From: digest("r"), At: r.clock.at(time.Now().Add(-c.ago)), Backend: digest("https://" + name + " key"), Cooldown: cooldownOf(b, time.Now())}
			w.hub.LoseMessages(true)
			if err := w.hub.Store().Put(w.Context(), []state.Record{{Group: m.Backend, Key: m.Cooldown.key(), Version: m.Cooldown.ID, TTL: 10 * time.Second, Message: m.text()}}); err != nil {
				t.Fatal(err)
			}
			for range 20 {
				time.Sleep(100 * time.Millisecond)
				if left := r.cooldownLeft(name); left > c.want {
					t.Fatalf("the cooldown of %s lasts for %v, want %v at most", name, left, c.want)
				}
			}
		}
	})
}

func TestNoValueOfAnotherReplicaIsWithoutBounds(t *testing.T) {
	share(t, 1, func(w *world) {
		for _, since := range []int64{math.MaxInt64, maxTime, 1 << 50} {
			m := message{Version: version, Kind: alive, From: digest("r"), Since: since}
			if err := w.hub.Store().Put(w.Context(), []state.Record{{Group: replicaGroup, Key: m.From, Mode: state.Replace, TTL: time.Minute, Message: m.text()}}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(3 * time.Second)
			if _, err := json.Marshal(Module{}.Statuses()); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestOtherReplicasKnowThatABackendNamedNoTime so that no request waits there
// for the end of such a cooldown.
func TestOtherReplicasKnowThatABackendNamedNoTime(t *testing.T) {
	now := time.Now()
	c := pool.Cooldown{Throttle: true, Since: now, Until: now.Add(time.Second), AsksAtOnce: true}
	if heard, _ := cooldownOf(c, now).pool(now); !heard.AsksAtOnce {
		t.Error("it is lost")
	}
}
