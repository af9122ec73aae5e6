package tiers

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/simulator"
)

// capacity is what a simulated deployment serves of such requests in a second.
func capacity(d simulator.Handler) float64 {
	if d.PTU > 0 {
		return float64(d.PTU) * 2500 / 60 / perRequest
	}
	return float64(d.TokensPerMinute) / 60 / (promptTokens + outputTokens)
}

// mute is the name of a deployment of which only throttles tell how full it is.
const mute = "mute"

// muted is a reply without the utilization.
type muted struct{ http.ResponseWriter }

func (m muted) WriteHeader(status int) {
	m.Header().Del("Azure-Openai-Deployment-Utilization")
	m.ResponseWriter.WriteHeader(status)
}

// pools are of three sizes, with provisioned deployments first, and with limits
// by the minute.
var pools = map[string][]simulator.Handler{
	"a PTU":                 {{PTU: 300}},
	"a PTU without headers": {{PTU: 300, Name: mute}},
	"a limit by the minute": {{TokensPerMinute: 525_000}},
	"three backends":        {{PTU: 100}, {TokensPerMinute: 175_000}, {TokensPerMinute: 175_000, Hints: "openai_dur"}},
	"nine backends": {
		{PTU: 100}, {PTU: 50}, {PTU: 50, BucketSeconds: 2}, {TokensPerMinute: 58_000}, {TokensPerMinute: 58_000}, {TokensPerMinute: 58_000},
		{TokensPerMinute: 58_000, Hints: "openai_dur"}, {TokensPerMinute: 58_000}, {TokensPerMinute: 58_000},
	},
}

// gold, silver and bronze keep 50, 30 and 20 %.
var tiersOf = []string{"gold", "silver", "bronze"}

const threeShares = "tier gold {\nreserve 50%\n}\ntier silver {\nreserve 30%\n}\ntier bronze {\nreserve 20%\n}"

// demand is what a tier asks for at a time, as a part of the capacity of the
// pool.
type demand func(at time.Duration) float64

func steady(part float64) demand { return func(time.Duration) float64 { return part } }

// late is a demand that begins after a time.
func late(part float64, after time.Duration) demand {
	return func(at time.Duration) float64 {
		if at < after {
			return 0
		}
		return part
	}
}

// steadily are the demands of the tiers.
func steadily(gold, silver, bronze float64) map[string]demand {
	return map[string]demand{"gold": steady(gold), "silver": steady(silver), "bronze": steady(bronze)}
}

// part is what became of the requests of a tier.
type part struct{ sent, served float64 }

// ask has each tier ask at random times for so long, and returns what came of
// it in each second, as parts of the capacity.
func ask(t *testing.T, backends []simulator.Handler, long time.Duration, asks map[string]demand) (seconds map[string][]part) {
	t.Helper()
	return askIn(t, threeShares, backends, long, asks)
}

// askIn is ask with these tiers. A name in asks such as gold/small is that of
// another caller of the tier.
func askIn(t *testing.T, tiers string, backends []simulator.Handler, long time.Duration, asks map[string]demand) (seconds map[string][]part) {
	t.Helper()
	config, whole := "openai_lb {\npool "+lbtest.Unique("tiers")+"\n"+tiers+"\n", 0.
	for i, d := range backends {
		whole += capacity(d)
		priority := 1
		if d.PTU == 0 && backends[0].PTU > 0 {
			priority = 2
		}
		config += fmt.Sprintf("backend http://b%d {\nname b%d\nmodel gpt-4o\npriority %d\n}\n", i, i, priority)
	}
	for name := range asks {
		tier, caller, _ := strings.Cut(name, "/")
		caller = cmp.Or(caller, tier)
		config += fmt.Sprintf("client_key %s %s\ncaller %s {\ntier %s\n}\n", caller, keyOf(caller), caller, tier)
	}
	seconds = make(map[string][]part)
	lbtest.InBubble(t, config+"}", func(t *testing.T, w *lbtest.World) {
		for i, d := range backends {
			isMute, other := d.Name == mute, windows[d.Name]
			d.Name, d.OutputTokens, d.FirstTokenLatency = fmt.Sprint("b", i), outputTokens, caddy.Duration(300*time.Millisecond)
			simulated := lbtest.Simulate(t, d)
			if other != nil {
				simulated = other()
			}
			w.Serve(d.Name+":80", http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				if isMute {
					rw = muted{rw}
				}
				simulated.ServeHTTP(rw, r)
			}))
		}
		body := `{"model":"gpt-4o","max_tokens":200,"messages":[{"role":"user","content":"` + strings.Repeat("x", 4*promptTokens) + `"}]}`
		var mu sync.Mutex
		var all sync.WaitGroup
		begin := time.Now()
		for name, asks := range asks {
			random, of := rand.New(rand.NewPCG(uint64(len(name)), 7)), make([]part, int(long.Seconds())+1)
			seconds[name] = of
			all.Go(func() {
				const most = 8 // times the capacity
				for {
					time.Sleep(time.Duration(random.ExpFloat64() / (most * whole) * float64(time.Second)))
					at := time.Since(begin)
					if at > long {
						return
					}
					if random.Float64() > asks(at)/most {
						continue
					}
					all.Go(func() {
						r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(body))
						r.Header.Set("Authorization", "Bearer "+keyOf(name))
						got := w.Send(r)
						mu.Lock()
						defer mu.Unlock()
						of[int(at.Seconds())].sent += 1 / whole
						switch got.Status {
						case http.StatusOK:
							of[int(at.Seconds())].served += 1 / whole
						case http.StatusTooManyRequests:
						default:
							t.Errorf("%s got %d: %s", name, got.Status, got.Body)
						}
					})
				}
			})
		}
		all.Wait()
	})
	return seconds
}

// between adds up the seconds from one to another, as a part of the capacity of
// that time.
func between(seconds []part, from, to int) (sum part) {
	for _, s := range seconds[from:to] {
		sum.sent += s.sent / float64(to-from)
		sum.served += s.served / float64(to-from)
	}
	return sum
}

func keyOf(name string) string { return "sk-0123456789-" + name[strings.IndexByte(name, '/')+1:] }

// wantParts checks which part of the capacity each tier gets between two
// seconds.
func wantParts(t *testing.T, got map[string][]part, from, to int, tolerance float64, want ...float64) {
	t.Helper()
	used := 0.
	for i, tier := range tiersOf {
		p := between(got[tier], from, to)
		used += p.served
		t.Logf("from %d to %d s %s gets %.3f of %.3f", from, to, tier, p.served, p.sent)
		if math.Abs(p.served-want[i]) > tolerance {
			t.Errorf("from %d to %d s %s gets %.3f of %.3f, want %.3f", from, to, tier, p.served, p.sent, want[i])
		}
	}
	if used < .96 {
		t.Errorf("from %d to %d s %.3f of the capacity is used", from, to, used)
	}
}

// forEachPool runs a test with each of the pools.
func forEachPool(t *testing.T, test func(t *testing.T, name string, backends []simulator.Handler)) {
	if lbtest.Race {
		t.Skip("it sends thousands of requests, one after the other")
	}
	for name, backends := range pools {
		t.Run(name, func(t *testing.T) { test(t, name, backends) })
	}
}

func TestInExhaustionEachTierGetsItsShare(t *testing.T) {
	forEachPool(t, func(t *testing.T, _ string, backends []simulator.Handler) {
		wantParts(t, ask(t, backends, 3*time.Minute, steadily(4./3, 4./3, 4./3)), 60, 180, .05, .5, .3, .2)
	})
}

// A tier cannot get more than its share by asking for more.
func TestInExhaustionATierThatAsksForMostGetsItsShare(t *testing.T) {
	forEachPool(t, func(t *testing.T, _ string, backends []simulator.Handler) {
		wantParts(t, ask(t, backends, 3*time.Minute, steadily(.6, .6, 2.8)), 60, 180, .05, .5, .3, .2)
	})
}

// Requests of a tier that has got its share wait, and do not keep others from
// theirs.
func TestInExhaustionEachTierGetsItsShareWhileOthersWait(t *testing.T) {
	forEachPool(t, func(t *testing.T, _ string, backends []simulator.Handler) {
		got := askIn(t, "wait 1s\n"+threeShares, backends, 3*time.Minute, steadily(2.8, .6, .6))
		wantParts(t, got, 60, 180, .05, .5, .3, .2)
	})
}

// TestWhatNoTierThatAsksKeepsIsUsed has a backend that works off within 200 ms
// what it accepts: readings say for too long that nothing is left. The last
// tier keeps nothing, or does not ask.
func TestWhatNoTierThatAsksKeepsIsUsed(t *testing.T) {
	if lbtest.Race {
		t.Skip("it sends thousands of requests, one after the other")
	}
	for _, wait := range []string{"", "wait 1s\n"} {
		for tiers, bronze := range map[string]float64{strings.Replace(threeShares, "reserve 20%", "", 1): 4. / 3, threeShares: 0} {
			got := askIn(t, wait+tiers, []simulator.Handler{{PTU: 1000, BucketSeconds: .2, Name: mute}}, 3*time.Minute, steadily(4./3, 4./3, bronze))
			wantParts(t, got, 30, 180, .05, .7, .3, 0)
		}
	}
}

func TestAtHalfDemandNobodyIsRefused(t *testing.T) {
	forEachPool(t, func(t *testing.T, _ string, backends []simulator.Handler) {
		for _, asks := range []map[string]demand{steadily(.5/3, .5/3, .5/3), steadily(.05, .05, .4), steadily(0, 0, .5)} {
			got := ask(t, backends, 2*time.Minute, asks)
			for _, tier := range tiersOf {
				if p := between(got[tier], 0, 120); p.served != p.sent {
					t.Errorf("%s gets %.4f of %.4f", tier, p.served, p.sent)
				}
			}
		}
	})
}

func TestATierThatNeedsLessThanItsShareGetsIt(t *testing.T) {
	forEachPool(t, func(t *testing.T, _ string, backends []simulator.Handler) {
		got := ask(t, backends, 4*time.Minute, steadily(.1, 1.95, 1.95))
		gold, silver, bronze := between(got["gold"], 60, 240), between(got["silver"], 60, 240), between(got["bronze"], 60, 240)
		if gold.served < .95*gold.sent || silver.served < .28 || bronze.served < .18 || gold.served+silver.served+bronze.served < .95 {
			t.Errorf("got %+v, %+v and %+v", gold, silver, bronze)
		}
	})
}

// TestATierWithinItsShareIsSeldomRefused has gold ask for less than it keeps,
// at random times, and the others for more than there is. Some of gold's
// requests come while it is above its share, because many came just before.
func TestATierWithinItsShareIsSeldomRefused(t *testing.T) {
	if lbtest.Race {
		t.Skip("it sends thousands of requests, one after the other")
	}
	for _, wait := range []string{"", "wait 1s\n"} {
		for name, backends := range pools {
			got := askIn(t, wait+threeShares, backends, 12*time.Minute, steadily(.4, 1.5, 1.5))
			used, gold := 0., between(got["gold"], 60, 720)
			for _, tier := range tiersOf {
				used += between(got[tier], 60, 720).served
			}
			refused := 1 - gold.served/gold.sent
			t.Logf("%s, %q: %.4f of gold's requests are refused, %.3f is used", name, wait, refused, used)
			if refused > .01 || used < .98 {
				t.Errorf("%s, %q: %.4f of gold's requests are refused, want .01 at most; %.3f is used, want .98", name, wait, refused, used)
			}
		}
	}
}

// TestASmallTierIsSeldomRefusedAtTheEndOfAWindow has gold ask for most of its
// tenth, while the others use the rest up as soon as a window begins.
func TestASmallTierIsSeldomRefusedAtTheEndOfAWindow(t *testing.T) {
	if lbtest.Race {
		t.Skip("it sends thousands of requests, one after the other")
	}
	tiers := "tier gold {\nreserve 10%\n}\ntier silver {\nreserve 50%\n}\ntier bronze {\nreserve 40%\n}"
	got := askIn(t, tiers, pools["a limit by the minute"], 30*time.Minute, steadily(.08, 1.5, 1.5))
	if gold := between(got["gold"], 60, 1800); gold.served < .96*gold.sent {
		t.Errorf("gold gets %.4f of %.4f", gold.served, gold.sent)
	}
}

// A tier that keeps everything leaves to the others what it does not use.
func TestWhatATierKeepsAndDoesNotUseIsUsed(t *testing.T) {
	forEachPool(t, func(t *testing.T, _ string, backends []simulator.Handler) {
		got := askIn(t, "tier gold {\nreserve 100%\n}\ntier bronze", backends, 4*time.Minute, map[string]demand{"gold": steady(.05), "bronze": steady(1.5)})
		gold, bronze := between(got["gold"], 60, 240), between(got["bronze"], 60, 240)
		if gold.served < .95*gold.sent || gold.served+bronze.served < .88 {
			t.Errorf("gold gets %.3f of %.3f, and bronze %.3f", gold.served, gold.sent, bronze.served)
		}
	})
}

// TestABurst is one of gold's, after a silence in which the others use
// everything up. A PTU is shared within seconds, and a limit by the minute as
// soon as its next window begins. When the burst is over, the others get all
// again.
func TestABurst(t *testing.T) {
	forEachPool(t, func(t *testing.T, name string, backends []simulator.Handler) {
		asks := steadily(0, 2, 2)
		asks["gold"] = func(at time.Duration) float64 {
			if at < 150*time.Second || at > 270*time.Second {
				return 0
			}
			return 4. / 3
		}
		got := ask(t, backends, 7*time.Minute, asks)
		within := 60
		if strings.HasPrefix(name, "a PTU") {
			within = 10
		}
		wantParts(t, got, 150+within, 270, .07, .5, .3, .2)
		if burst := between(got["gold"], 152, 152+within); burst.served < .4 {
			t.Errorf("in the first %d s gold gets %.3f", within, burst.served)
		}
		if silver, bronze := between(got["silver"], 270+within, 330+within), between(got["bronze"], 270+within, 330+within); silver.served+bronze.served < .95 {
			t.Errorf("after it silver gets %.3f and bronze %.3f", silver.served, bronze.served)
		}
	})
}

// TestATierThatComesLaterTakesNotEverything has two of them come while the
// first one uses everything, and looks at 20 s in which a PTU serves and the
// limits by the minute are used up.
func TestATierThatComesLaterTakesNotEverything(t *testing.T) {
	forEachPool(t, func(t *testing.T, _ string, backends []simulator.Handler) {
		if backends[0].PTU == 0 {
			t.Skip("all get something only when a window begins")
		}
		late := late(2, 100*time.Second)
		got := ask(t, backends, 3*time.Minute, map[string]demand{"gold": steady(2), "silver": late, "bronze": late})
		whole, ptus := 0., 0.
		for _, d := range backends {
			if whole += capacity(d); d.PTU > 0 {
				ptus += capacity(d)
			}
		}
		for from, part := range map[int]float64{100: .5, 155: .8} {
			for i, share := range []float64{.5, .3, .2} {
				if p := between(got[tiersOf[i]], from, from+20).served / (ptus / whole); p < part*share {
					t.Errorf("from %d to %d s %s gets %.3f of what PTUs serve, want about %.1f", from, from+20, tiersOf[i], p, share)
				}
			}
		}
	})
}

// TestTiersDoNotServeInWaves has silver and bronze come after gold had
// everything for a while. They get more than their shares at first, and that
// must not repeat when what they got then counts no more.
func TestTiersDoNotServeInWaves(t *testing.T) {
	forEachPool(t, func(t *testing.T, name string, backends []simulator.Handler) {
		if !strings.HasPrefix(name, "a PTU") {
			t.Skip("a limit by the minute is used up when a window begins")
		}
		late := late(2, 100*time.Second)
		got := ask(t, backends, 200*time.Second, map[string]demand{"gold": steady(2), "silver": late, "bronze": late})
		for from := 120; from < 200; from += 10 {
			wantParts(t, got, from, from+10, .08, .5, .3, .2)
		}
	})
}

// TestATierKeepsItsShareOfTheBackendsThatItMayUse has gold use only one of two,
// of which the other one is shared by the others.
func TestATierKeepsItsShareOfTheBackendsThatItMayUse(t *testing.T) {
	if lbtest.Race {
		t.Skip("it sends thousands of requests, one after the other")
	}
	tiers := strings.Replace(threeShares, "reserve 50%", "reserve 50%\nbackends b0", 1)
	got := askIn(t, tiers, []simulator.Handler{{PTU: 150}, {PTU: 150}}, 3*time.Minute, steadily(4./3, 4./3, 4./3))
	wantParts(t, got, 60, 180, .05, .25, .55, .2)
}

// TestTiersWithoutAShareGetWhatIsLeft has two of them, and one that needs less
// than it keeps.
func TestTiersWithoutAShareGetWhatIsLeft(t *testing.T) {
	forEachPool(t, func(t *testing.T, name string, backends []simulator.Handler) {
		got := askIn(t, "tier gold {\nreserve 60%\n}\ntier silver\ntier bronze", backends, 4*time.Minute, steadily(.4, 1, 1))
		wantParts(t, got, 60, 240, .06, .4, .3, .3)
	})
}
