package callers

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// Each config has its own pool. In metrics, only 1,000 pools have their own
// label, and other tests need some, also with -count=10.
var seeds = flag.Uint64("seeds", 5, "how many random configs TestARetryAtTheTimeThatA429NamesIsNotRefusedAgain tries")

// random makes random callers, and backends that answer at random.
type random struct {
	*rand.Rand
	// tokens are those that the last reply has used, and calls is how many
	// there were.
	tokens, calls int
	// failed is when a backend failed last. Until its cooldown is over, a retry
	// may be served before its time.
	failed time.Time
}

func (c *random) pick(choices ...string) string { return choices[c.IntN(len(choices))] }

// config has two callers with limits and tiers, and one or two backends.
func (c *random) config() string {
	var config strings.Builder
	for _, caller := range []string{"alice", "bob"} {
		config.WriteString("caller " + caller + " {\ntier of-" + caller + "\n")
		for _, unit := range []string{"second", "minute", "hour", "day"} {
			config.WriteString(c.pick("", "", "requests "+c.pick("1", "2", "5", "11", "13", "60")+"/"+unit+"\n"))
			config.WriteString(c.pick("", "", "tokens "+c.pick("7", "100", "1k", "5k", "20k")+"/"+unit+"\n"))
		}
		config.WriteString("}\n")
	}
	config.WriteString("tier of-alice {\nreserve " + c.pick("20%", "40%", "99%") + "\n}\ntier of-bob\nbackend http://a\n")
	return config.String() + c.pick("", "backend http://b\n", "backend http://b {\npriority 2\n}\n")
}

// reply answers after a while.
func (c *random) reply(rw http.ResponseWriter, r *http.Request) {
	c.calls++
	var limits []string
	if c.IntN(2) == 0 {
		limits = append(limits, "Azure-Openai-Deployment-Utilization", strconv.Itoa(c.IntN(140))+"%")
	}
	for _, kind := range []string{"Tokens", "Requests"} {
		if c.IntN(3) == 0 {
			limits = append(limits, "X-Ratelimit-Limit-"+kind, "100", "X-Ratelimit-Remaining-"+kind, strconv.Itoa(c.IntN(101)),
				"X-Ratelimit-Reset-"+kind, c.pick("1s", "300ms", "17", "1m0s", "0"))
		}
	}
	time.Sleep(time.Duration(c.IntN(4)) * 333 * time.Millisecond)
	switch c.pick("served", "served", "served", "refused", "failed", "throttled") {
	case "served":
		prompt, output := c.IntN(300), c.IntN(900)
		c.tokens = prompt + output
		lbtest.Says(200, `{"id":"chatcmpl-1","choices":[],"usage":`+usage(prompt, output)+`}`, limits...)(rw, r)
	case "refused":
		lbtest.Status(400, limits...)(rw, r)
	case "failed":
		c.failed = time.Now()
		lbtest.Status(500, limits...)(rw, r)
	case "throttled":
		lbtest.Status(429, append(limits, "Retry-After-Ms", c.pick("20", "500", "1500", "5000"))...)(rw, r)
	}
}

// TestARetryAtTheTimeThatA429NamesIsNotRefusedAgain sends one request at a
// time. If it gets a 429, no backend gets it before the time that the 429
// names, and at that time, the same limits do not refuse it. Each caller is
// charged with what the backends have counted.
func TestARetryAtTheTimeThatA429NamesIsNotRefusedAgain(t *testing.T) {
	const early = 5 * time.Millisecond // what is used of a backend is known by the millisecond
	for seed := range *seeds {
		c := &random{Rand: rand.New(rand.NewPCG(seed, 37))}
		config := c.config()
		inBubbleWith(t, config, func(t *testing.T, w *world) {
			w.AllReply(c.reply)
			send := func(name, body string) (reply lbtest.Reply, called bool) {
				calls, before := c.calls, w.of(name).Today
				c.tokens = 0
				reply = w.post(map[string]string{"alice": aliceKey, "bob": bobKey}[name], "/v1/chat/completions", body)
				if s := w.of(name); s.Today != before+int64(c.tokens) || s.Reserved != 0 || s.InFlight != 0 {
					t.Errorf("%s is charged with %d tokens of %d (%d reserved, %d in flight)", name, s.Today-before, c.tokens, s.Reserved, s.InFlight)
				}
				return reply, c.calls > calls
			}
			for range 30 {
				name, body := c.pick("alice", "bob"), fmt.Sprintf(`{"model":%q,"max_tokens":2000,"messages":[%q]}`, c.pick("m1", "m2"), strings.Repeat("x", c.IntN(500)))
				reply, _ := send(name, body)
				ms, _ := strconv.Atoi(reply.Header.Get("Retry-After-Ms"))
				wait := time.Duration(ms) * time.Millisecond
				if reply.Status == 429 && wait > 0 && wait < 59*time.Second {
					if wait > time.Second+early && time.Since(c.failed) > 15*time.Second {
						time.Sleep(wait - early)
						wait = early
						if again, called := send(name, body); called || again.Status != 429 {
							t.Errorf("%s gets %d before the time of %s", name, again.Status, reply.Body)
						}
					}
					time.Sleep(wait)
					ofCaller := func(r lbtest.Reply) bool { return strings.Contains(r.Body, "Rate limit reached") }
					if again, called := send(name, body); !called && ofCaller(again) == ofCaller(reply) {
						t.Errorf("%s gets %s at the time of %s", name, again.Body, reply.Body)
					}
				}
				time.Sleep(time.Duration(c.IntN(4)) * time.Duration(c.IntN(20_000)) * time.Millisecond / 3)
			}
		})
		if t.Failed() {
			t.Fatalf("seed %d, with\n%s", seed, config)
		}
	}
}
