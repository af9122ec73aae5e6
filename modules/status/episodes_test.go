package status

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/latency"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// episodesOf are those of a pool as text, with seconds since the start.
func episodesOf(name string, start time.Time) (text []string) {
	for _, e := range Episodes(name, 10) {
		text = append(text, fmt.Sprintf("%s %s %s ×%d %v-%v", e.Backend, e.Class, e.Model, e.Times, e.Since.Sub(start).Seconds(), e.Until.Sub(start).Seconds()))
	}
	return text
}

func refusal(class, model string, wait time.Duration) pool.Refusal {
	return pool.Refusal{Reason: pool.Reason{Class: class}, Throttle: class == "throttled", Model: model, Wait: wait}
}

func TestCooldownsInARowAreOneEpisode(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		start := time.Now()
		a, b := pool.NewMember("a", new(pool.Health)), pool.NewMember("b", new(pool.Health))
		p := pool.New([]*pool.Member{a, b}, Recorder(t.Name()))
		defer p.Close()
		wants := func(want ...string) {
			t.Helper()
			if got := episodesOf(t.Name(), start); !slices.Equal(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
		}
		for range 3 {
			a.CoolDown(refusal("throttled", "m", 2*time.Second), time.Now())
			time.Sleep(3 * time.Second)
		}
		wants("a throttled m ×3 0-8")
		b.CoolDown(refusal("failed", "m", 10*time.Second), time.Now())
		time.Sleep(time.Second)
		b.CoolDown(refusal("failed", "m", 10*time.Second), time.Now()) // it grows
		wants("b failed m ×1 9-20", "a throttled m ×3 0-8")
		time.Sleep(time.Second)
		b.Reset(pool.Order{})
		wants("b failed m ×1 9-11", "a throttled m ×3 0-8")
		time.Sleep(2 * time.Minute)
		a.CoolDown(refusal("throttled", "other", 2*time.Second), time.Now())
		wants("a throttled other ×1 131-133", "b failed m ×1 9-11", "a throttled m ×3 0-8")
		if got := Episodes("another pool", 10); got != nil {
			t.Errorf("another pool has %v", got)
		}
	})
}

func TestEpisodesAreBounded(t *testing.T) {
	name := fmt.Sprint(t.Name(), time.Now()) // what was recorded stays
	bubble.Test(t, func(t *testing.T) {
		a := pool.NewMember("a", new(pool.Health))
		p := pool.New([]*pool.Member{a}, Recorder(name))
		defer p.Close()
		for n := range 1000 { // a client makes up models
			a.CoolDown(refusal("no_model", fmt.Sprint(n), time.Minute), time.Now())
		}
		if got := Episodes(name, 10); len(got) != 1 || got[0].Times != 1000 {
			t.Errorf("got %v", got)
		}
		for range 200 {
			a.CoolDown(refusal("failed", "m", time.Second), time.Now())
			time.Sleep(2 * pause)
		}
		if got := len(Episodes(name, 1000)); got != maxEpisodes {
			t.Errorf("got %d episodes", got)
		}
	})
}

func TestCooldownsAreInTheOrderOfTime(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		start := time.Now()
		a, b, c := pool.NewMember("a", new(pool.Health)), pool.NewMember("b", new(pool.Health)), pool.NewMember("c", new(pool.Health))
		p := pool.New([]*pool.Member{a, b, c}, Recorder(t.Name()))
		defer p.Close()
		wants := func(want ...string) {
			t.Helper()
			var got []string
			for _, e := range Episodes(t.Name(), 10) {
				got = append(got, fmt.Sprintf("%s %v over=%v", e.Backend, e.Latest.Sub(start).Seconds(), e.Over(time.Now())))
			}
			if !slices.Equal(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
		}
		a.CoolDown(refusal("throttled", "m", time.Minute), time.Now())
		time.Sleep(time.Second)
		c.CoolDown(pool.Refusal{Reason: pool.Reason{Class: "unreachable"}, Whole: true, Unreachable: true}, time.Now())
		time.Sleep(time.Second)
		b.CoolDown(refusal("failed", "m", time.Second), time.Now())
		time.Sleep(time.Second)
		a.CoolDown(refusal("throttled", "m", time.Hour), time.Now()) // it grows
		wants("b 2 over=true", "c 1 over=false", "a 0 over=false")
		b.CoolDown(refusal("failed", "m", time.Second), time.Now())
		time.Sleep(10 * time.Minute) // c was not reached
		wants("b 3 over=true", "c 1 over=false", "a 0 over=false")
		c.Reached()
		wants("b 3 over=true", "c 1 over=true", "a 0 over=false")
	})
}

func unreachable(cause string) pool.Refusal {
	return pool.Refusal{Reason: pool.Reason{Class: "unreachable", Cause: cause}, Whole: true, Unreachable: true}
}

// TestCausesWithDifferentRemediesAreDifferentEpisodes has a backend that
// refuses connections, and loses its name while it does.
func TestCausesWithDifferentRemediesAreDifferentEpisodes(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		start := time.Now()
		a := pool.NewMember("a", new(pool.Health))
		p := pool.New([]*pool.Member{a}, Recorder(t.Name()))
		defer p.Close()
		wants := func(want ...string) {
			t.Helper()
			var got []string
			for _, e := range Episodes(t.Name(), 10) {
				got = append(got, fmt.Sprintf("%s ×%d from %v over=%v", e.Cause, e.Times, e.Since.Sub(start).Seconds(), e.Over(time.Now())))
			}
			if !slices.Equal(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
		}
		a.CoolDown(unreachable("refused"), time.Now())
		time.Sleep(10 * time.Second)
		a.CoolDown(unreachable("dns"), time.Now())
		wants("dns ×1 from 10 over=false", "refused ×1 from 0 over=true")
		time.Sleep(10 * time.Second)
		a.Reached()
		wants("dns ×1 from 10 over=true", "refused ×1 from 0 over=true")
		time.Sleep(10 * time.Second)
		a.CoolDown(unreachable("reset"), time.Now())
		a.Reached()
		time.Sleep(time.Second)
		a.CoolDown(unreachable("closed"), time.Now()) // nobody can tell these two apart
		wants("closed ×2 from 30 over=false", "dns ×1 from 10 over=true", "refused ×1 from 0 over=true")
		other := []Episode{{Backend: "a", Class: "unreachable", Cause: "refused", Since: start, Latest: start, Until: start.Add(9 * time.Second), Times: 1}}
		if got := EpisodesOf(Episodes(t.Name(), 10), []*View{{Episodes: other}}, 10); len(got) != 3 {
			t.Errorf("with another replica, the episodes are %+v", got)
		}
	})
}

// TestASilenceThatIsOverIsInTheRecentList has a backend that is silent for two
// models, and slow for one of them before that is over.
func TestASilenceThatIsOverIsInTheRecentList(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		start, a := time.Now(), pool.NewMember("a", new(pool.Health))
		r := Recorder(t.Name())
		tell := func(happening pool.Happening, model string) {
			r.Happened(pool.Event{Happening: happening, Member: a, Silence: latency.State{Use: latency.Use{Model: model, Operation: "/responses"}}})
		}
		wants := func(want ...string) {
			t.Helper()
			var got []string
			for _, e := range Episodes(t.Name(), 10) {
				text := fmt.Sprintf("%s %s %s ×%d from %v", e.Backend, e.Class, e.Model, e.Times, e.Since.Sub(start).Seconds())
				if e.Over(time.Now()) {
					text += fmt.Sprint(" to ", e.Until.Sub(start).Seconds())
				}
				got = append(got, text)
			}
			if !slices.Equal(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
		}
		tell(pool.FellSilent, "gpt")
		time.Sleep(10 * time.Minute)
		tell(pool.FellSilent, "mini")
		wants("a silent mini ×2 from 0")
		tell(pool.Answered, "mini")
		wants("a silent mini ×2 from 0")
		time.Sleep(time.Minute)
		tell(pool.BecameSlow, "gpt")
		wants("a silent mini ×2 from 0")
		time.Sleep(time.Minute)
		tell(pool.Answered, "gpt")
		time.Sleep(time.Hour)
		wants("a silent mini ×2 from 0 to 720")
		tell(pool.FellSilent, "gpt")
		time.Sleep(time.Minute)
		r.Happened(pool.Event{Happening: pool.Began, Member: a, Cooldown: pool.Cooldown{
			Reason: pool.Reason{Class: "unreachable", Cause: "refused"}, Whole: true, Unreachable: true, Since: time.Now(), Until: time.Now().Add(time.Second),
		}})
		wants("a unreachable  ×1 from 4380", "a silent gpt ×1 from 4320 to 4380", "a silent mini ×2 from 0 to 720")
	})
}

// TestASilenceThatNoRequestEndsIsOver is about a backend that got another key,
// or is gone.
func TestASilenceThatNoRequestEndsIsOver(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		p := watchPool(t)
		Recorder(p.name).Happened(pool.Event{Happening: pool.FellSilent, Member: p.a, Silence: latency.State{Use: latency.Use{Model: "gpt"}}})
		if got := Episodes(p.name, 10); len(got) != 1 || got[0].Over(time.Now()) {
			t.Errorf("the episodes are %+v", got)
		}
		time.Sleep(2 * lookInterval)
		synctest.Wait()
		if got := Episodes(p.name, 10); len(got) != 1 || !got[0].Over(time.Now()) {
			t.Errorf("the episodes are %+v", got)
		}
	})
}
