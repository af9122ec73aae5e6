package affinity

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	_ "github.com/openai-lb/caddy-openai-lb/simulator"
)

// sessions are conversations in which each turn has all that was said before.
type sessions struct {
	client *http.Client
	url    string

	mu       sync.Mutex
	requests map[string]int // by backend
	cached   int            // requests whose prompt began in the cache
	tokens   [2]int64       // input, and of these cached
}

// talk has sessions of ten turns, which take turns. Eight ask at a time.
func (s *sessions) talk(t *testing.T, count int) {
	s.requests = make(map[string]int)
	for turn := range 10 {
		next := make(chan int)
		var workers sync.WaitGroup
		for range 8 {
			workers.Go(func() {
				for session := range next {
					s.ask(t, session, turn)
				}
			})
		}
		for session := range count {
			next <- session
		}
		close(next)
		workers.Wait()
	}
}

func (s *sessions) ask(t *testing.T, session, turn int) {
	messages := fmt.Sprintf(`{"role":"system","content":"Be brief."},{"role":"user","content":"%s"}`, strings.Repeat(fmt.Sprintf("session %4d ", session), 320))
	for i := range turn {
		messages += fmt.Sprintf(`,{"role":"assistant","content":"reply %d"},{"role":"user","content":"%s"}`, i, strings.Repeat(fmt.Sprint("and ", i), 10))
	}
	reply := lbtest.Post(s.client, s.url, `{"model":"gpt-4o","messages":[`+messages+`]}`)
	var body struct {
		Usage struct {
			PromptTokens int64 `json:"prompt_tokens"`
			Details      struct {
				CachedTokens int64 `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	if err := json.Unmarshal([]byte(reply.Body), &body); reply.Err != nil || reply.Status != 200 || err != nil {
		t.Errorf("client got %d %s (%v)", reply.Status, reply.Body, reply.Err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests[reply.Header.Get("X-Simulator")]++
	s.tokens[0] += body.Usage.PromptTokens
	s.tokens[1] += body.Usage.Details.CachedTokens
	if body.Usage.Details.CachedTokens > 0 {
		s.cached++
	}
}

func (s *sessions) hitRate() float64 {
	total := 0
	for _, n := range s.requests {
		total += n
	}
	return float64(s.cached) / float64(total)
}

// TestSessionsComeBackToTheirPromptCache has 300 sessions at three backends of
// which each remembers the latest 256 prompts.
func TestSessionsComeBackToTheirPromptCache(t *testing.T) {
	count, prefixes := 300, 256
	if lbtest.Race {
		count, prefixes = 60, 51
	}
	config := "{\nadmin off\ndefault_bind 127.0.0.1\n}\n"
	site := func(directive string) (url string) {
		port := lbtest.FreePort(t)
		config += fmt.Sprintf("http://:%d {\n%s\n}\n", port, directive)
		return fmt.Sprintf("http://127.0.0.1:%d", port)
	}
	balancer := func(options string) (url string) {
		backends := ""
		for _, name := range []string{"a", "b", "c"} {
			backends += fmt.Sprintf("backend %s {\nname %s\n}\n", site("openai_simulator {\nname "+name+"\nprompt_cache "+strconv.Itoa(prefixes)+"\noutput_tokens 1\n}"), name)
		}
		return site("openai_lb {\n"+backends+options+"\n}") + "/v1/chat/completions"
	}
	usual := &sessions{client: lbtest.NewClient(t), url: balancer("affinity {\nprompt_cache off\n}")}
	kept := &sessions{client: lbtest.NewClient(t), url: balancer("")}
	lbtest.Run(t, config)
	for _, s := range []*sessions{usual, kept} {
		s.talk(t, count)
		t.Logf("hit rate %.3f, cached tokens %.3f, requests %v", s.hitRate(), float64(s.tokens[1])/float64(s.tokens[0]), s.requests)
	}
	if got := usual.hitRate(); got > 0.5 {
		t.Errorf("the usual choice has a hit rate of %.2f: the test shows nothing", got)
	}
	if got := kept.hitRate(); got < 0.85 {
		t.Errorf("the hit rate is %.2f, want 0.85", got)
	}
	for name, n := range kept.requests {
		if share := float64(n) / float64(count*10/3); share > 1.3 {
			t.Errorf("%s has %.2f times its share", name, share)
		}
	}
}

// TestSeveralAccountsHaveEachSessionInOneOfThem unless an option says
// otherwise: each account has a cache of its own.
func TestSeveralAccountsHaveEachSessionInOneOfThem(t *testing.T) {
	const one, several = "backend http://a {\naccount one\n}\nbackend http://b {\naccount one\n}\n", "backend http://a\nbackend http://b\n"
	for _, c := range []struct {
		name, options string
		keeps         bool
	}{
		{"several accounts", several, true},
		{"one account", one, false},
		{"one account, asked for", one + "affinity {\nprompt_cache\n}\n", true},
		{"turned off", several + "affinity {\nprompt_cache off\n}\n", false},
		{"another option of affinity", several + "client_key alice client-key-of-alice\naffinity {\ncallers strict\n}\n", true},
		{"a policy of the operator's", several + "lb_policy round_robin\n", false},
		{"a policy, and asked for", several + "lb_policy round_robin\naffinity {\nprompt_cache\n}\n", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\n"+c.options+"}", func(t *testing.T, w *lbtest.World) {
				for range 40 {
					r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(prompted))
					r.Header.Set("Authorization", "Bearer client-key-of-alice")
					w.Send(r).WantServed(t, "a", "b")
				}
				if a, b := len(w.Backends["a"].Received()), len(w.Backends["b"].Received()); (a == 0 || b == 0) != c.keeps {
					t.Errorf("a session had %d requests at one account and %d at the other", a, b)
				}
			})
		})
	}
}

const prompted = `{"model":"gpt-4o","prompt_cache_key":"one"}`

func TestSessionsThatACooldownMovedComeBackWhenTheBetterPriorityDoes(t *testing.T) {
	const config = `openai_lb {
		backend http://a
		backend http://b
		backend http://c {
			priority 2
		}
		backend http://d {
			priority 2
		}
		affinity {
			prompt_cache
		}
	}`
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		servedBy := func() map[string]string {
			by := make(map[string]string)
			for i := range 30 {
				key := fmt.Sprint("session ", i)
				reply := w.Post(fmt.Sprintf(`{"model":"gpt-4o","prompt_cache_key":%q}`, key))
				reply.WantServed(t, "a", "b", "c", "d")
				by[key] = reply.Backend
			}
			return by
		}
		same := func(want map[string]string, differ ...string) {
			t.Helper()
			moved := 0
			for key, backend := range servedBy() {
				if backend == want[key] {
					continue
				}
				if moved++; len(differ) == 0 || want[key] != differ[0] || backend == differ[0] {
					t.Errorf("%s is at %s, and was at %s", key, backend, want[key])
				}
			}
			if (moved > 0) != (len(differ) > 0) {
				t.Errorf("%d sessions moved", moved)
			}
		}
		home := servedBy()
		same(home)
		// one of the tier is out: only its sessions move, and stay there
		w.Backends["a"].Replies(lbtest.Status(500))
		same(home, "a")
		w.Backends["a"].Recovers()
		moved := servedBy()
		time.Sleep(time.Minute)
		same(moved)
		time.Sleep(11 * time.Minute)
		same(home) // they were idle
		// a throttle drives them away only for a while: the weights apply again
		w.Backends["a"].Replies(lbtest.Throttled("20"))
		same(home, "a")
		w.Backends["a"].Recovers()
		time.Sleep(time.Minute)
		servedBy()
		servedBy()
		same(home)
		// the whole tier is out, and comes back
		w.Backends["a"].Replies(lbtest.Throttled("20"))
		w.Backends["b"].Replies(lbtest.Throttled("20"))
		elsewhere := servedBy()
		for key, backend := range elsewhere {
			if backend != "c" && backend != "d" {
				t.Errorf("%s is at %s", key, backend)
			}
		}
		same(elsewhere)
		w.Backends["a"].Recovers()
		w.Backends["b"].Recovers()
		time.Sleep(25 * time.Second)
		same(home)
	})
}

func TestAHotSessionPutsNoBackendOverItsBound(t *testing.T) {
	const requests = 60
	var all sync.WaitGroup
	all.Add(requests)
	backends := make(map[string]*lbtest.Backend)
	config := ""
	for _, name := range []string{"a", "b", "c"} {
		b, server := lbtest.Listen(t, name)
		b.Replies(func(w http.ResponseWriter, _ *http.Request) {
			all.Done() // nobody answers before all are in flight
			all.Wait()
		})
		config += "backend " + server.URL + " {\nname " + name + "\n}\n"
		backends[name] = b
	}
	address := lbtest.ServeAt(t, "openai_lb {\n"+config+"affinity {\nprompt_cache X-Session\n}\n}")
	client := lbtest.NewClient(t)
	var clients sync.WaitGroup
	for range requests {
		clients.Go(func() {
			if reply := lbtest.Ask(client, "http://"+address+"/v1/chat/completions", "X-Session", "hot"); reply.Status != 200 {
				t.Errorf("client got %d (%v)", reply.Status, reply.Err)
			}
		})
	}
	clients.Wait()
	bound := int(math.Ceil(1.25*requests/3)) + 1
	for name, b := range backends {
		if n := len(b.Received()); n > bound {
			t.Errorf("%s got %d of %d requests in flight, over its bound of %d", name, n, requests, bound)
		}
	}
}

func TestWhichRequestsHaveAKey(t *testing.T) {
	const config = "openai_lb {\nbackend http://a\nbackend http://b\nbackend http://c\nlb_policy first\naffinity {\nprompt_cache session-id X-Session\n}\n}"
	long := strings.Repeat("lorem ", 1000)
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		w.Shows = map[string]string{"X-Affinity": "{http.openai_lb.affinity}"}
		for name, c := range map[string]struct {
			path, body string
			headers    []string
			keyed      bool
		}{
			"a header":                {"/v1/chat/completions", `{"n":%d}`, []string{"Session-Id", "session %d"}, true},
			"the second header":       {"/v1/chat/completions", `{"n":%d}`, []string{"X-Session", "session %d"}, true},
			"an empty header":         {"/v1/chat/completions", `{"n":%d}`, []string{"X-Session", ""}, false},
			"another header":          {"/v1/chat/completions", `{"n":%d}`, []string{"X-Other", "session %d"}, false},
			"a prompt_cache_key":      {"/openai/v1/responses", `{"prompt_cache_key":"%d"}`, nil, true},
			"a conversation":          {"/v1/responses", `{"conversation":"conv_%d"}`, nil, true},
			"a long prompt":           {"/openai/deployments/gpt-4o/chat/completions", `{"messages":[{"role":"user","content":"%d ` + long + `"}]}`, nil, true},
			"another model":           {"/v1/chat/completions", `{"model":"m%d","messages":[{"role":"user","content":"` + long + `"}]}`, nil, true},
			"Anthropic's":             {"/v1/messages", `{"system":[{"text":"%d"}],"messages":[{"role":"user","content":"` + long + `"}]}`, nil, true},
			"a short prompt":          {"/v1/chat/completions", `{"messages":[{"role":"user","content":"%d"}]}`, nil, false},
			"a response that goes on": {"/v1/responses", `{"previous_response_id":"resp_%d","input":"` + long + `"}`, nil, false},
			"an embedding":            {"/v1/embeddings", `{"input":"%d ` + long + `"}`, []string{"X-Session", "session %d"}, false},
			"a file":                  {"/v1/files", `{"prompt_cache_key":"%d"}`, []string{"X-Session", "session %d"}, false},
		} {
			backends := make(map[string]bool)
			for i := range 20 {
				served := ""
				for range 2 {
					body := c.body
					if strings.Contains(body, "%d") {
						body = fmt.Sprintf(body, i)
					}
					r := w.Request(http.MethodPost, c.path, strings.NewReader(body))
					for n := 0; n+1 < len(c.headers); n += 2 {
						r.Header.Set(c.headers[n], strings.ReplaceAll(c.headers[n+1], "%d", fmt.Sprint(i)))
					}
					reply := w.Send(r)
					reply.WantServed(t, "a", "b", "c")
					if served != "" && reply.Backend != served {
						t.Errorf("%s: session %d went to %s, then to %s", name, i, served, reply.Backend)
					}
					served = reply.Backend
					if got := reply.Header.Get("X-Affinity"); c.keyed != (got == "cache") || !c.keyed && got != "none" && got != "learned" && got != "home" {
						t.Errorf("%s: affinity is %q", name, got)
					}
				}
				backends[served] = true
			}
			// without a key, the policy has the choice
			if want := map[bool]int{true: 3, false: 1}[c.keyed]; len(backends) != want {
				t.Errorf("%s: went to %v", name, backends)
			}
		}
	})
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\nbackend http://b\nlb_policy first\n}", func(t *testing.T, w *lbtest.World) {
		for i := range 20 {
			w.Post(fmt.Sprintf(`{"prompt_cache_key":"%d"}`, i)).WantServed(t, "a")
		}
	})
}

func TestMovedSessionsSurviveAReloadAndAreCounted(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	b, serverB := lbtest.Listen(t, "b")
	port, metrics := lbtest.FreePort(t), lbtest.FreePort(t)
	pool := lbtest.Unique("moves")
	config := func(n int) string {
		return fmt.Sprintf("{\nadmin off\nmetrics\n}\nhttp://127.0.0.1:%d {\nbind 127.0.0.1\nheader X-Config %d\nmetrics /metrics\n}\nhttp://127.0.0.1:%d {\nbind 127.0.0.1\nheader X-Config %d\nopenai_lb {\npool %s\nbackend %s {\nname a\n}\nbackend %s {\nname b\n}\naffinity {\nprompt_cache\n}\n}\n}",
			metrics, n, port, n, pool, serverA.URL, serverB.URL)
	}
	lbtest.Run(t, config(1))
	url := fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", port)
	home := lbtest.Post(lbtest.NewClient(t), url, prompted).Backend
	names := map[string]*lbtest.Backend{"a": a, "b": b}
	names[home].Replies(lbtest.Status(500))
	moved := lbtest.Post(lbtest.NewClient(t), url, prompted).Backend
	names[home].Recovers()
	if moved == home || moved == "" {
		t.Fatalf("the session is at %q, and was at %q", moved, home)
	}
	lbtest.Reload(t, config(2))
	client := lbtest.ClientOf(t, "2", url)
	for range 3 {
		lbtest.Post(client, url, prompted).WantServed(t, moved)
	}
	text := lbtest.Get(lbtest.ClientOf(t, "2", fmt.Sprintf("http://127.0.0.1:%d/metrics", metrics)), fmt.Sprintf("http://127.0.0.1:%d/metrics", metrics)).Body
	for _, want := range []string{
		`caddy_openai_lb_affinity_total{kind="cache",pool="` + pool + `",result="hit"} 4`,
		`caddy_openai_lb_affinity_total{kind="cache",pool="` + pool + `",result="move"} 1`,
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("the metrics have no %s", want)
		}
	}
}
