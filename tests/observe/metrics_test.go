package observe

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/simulator"
)

// statusOf is what a simulator counted.
func statusOf(t *testing.T, address string) (status simulator.Status) {
	t.Helper()
	if err := json.Unmarshal([]byte(lbtest.Get(http.DefaultClient, "http://"+address+"/_simulator/status").Body), &status); err != nil {
		t.Fatal(err)
	}
	return status
}

// simulators are sites that simulate backends with these options, by name.
func simulators(t *testing.T, options map[string]string) (addresses map[string]string, config string) {
	t.Helper()
	addresses = make(map[string]string)
	for name, its := range options {
		addresses[name] = fmt.Sprintf("127.0.0.1:%d", lbtest.FreePort(t))
		config += fmt.Sprintf("http://%s {\nbind 127.0.0.1\nencode {\ngzip\nminimum_length 1\n}\nopenai_simulator {\nname %s\nfirst_token_latency 0\ntoken_latency 0\noutput_tokens 3\n%s\n}\n}\n",
			addresses[name], name, its)
	}
	return addresses, config
}

func TestMetricsAgreeWithWhatTheSimulatorsCounted(t *testing.T) {
	t.Run("streams are not asked for their usage", func(t *testing.T) { compareWithSimulators(t, "agrees", "") })
	t.Run("streams are asked", func(t *testing.T) {
		compareWithSimulators(t, "agrees-asked", "client_key alice client-key-of-alice\ncaller alice {\ntokens 1G/minute\n}")
	})
}

// compareWithSimulators holds the metrics of a pool with an option against what
// its backends counted.
func compareWithSimulators(t *testing.T, pool, option string) {
	pool = lbtest.Unique(pool)
	at, sites := simulators(t, map[string]string{
		"ptu":    "ptu 15\nbucket_seconds 1",
		"east":   "fault status:500 7",
		"west":   "fault reset 5",
		"closed": "api_key key-of-closed",
	})
	port := lbtest.FreePort(t)
	lbtest.Run(t, fmt.Sprintf("{\nadmin off\n}\n%shttp://127.0.0.1:%d {\nbind 127.0.0.1\nopenai_lb {\npool %s\n%s\nfail_duration 1ms\n"+
		"backend http://%s {\nname ptu\nmodel gpt-4o gpt-4o-ptu\n}\nbackend http://%s {\nname closed\nauth bearer\napi_key another-key\npriority 2\n}\n"+
		"backend http://%s {\nname east\npriority 2\n}\nbackend http://%s {\nname west\npriority 2\nmodel gpt-4o\n}\n"+
		// what a used connection loses is sent again there, and is no attempt
		// of its own
		"transport http {\nkeepalive off\n}\n}\n}\n",
		sites, port, pool, option, at["ptu"], at["closed"], at["east"], at["west"]))
	statuses := make(map[int]int)
	streams, compressed := 0.0, 0
	for i := range 150 {
		body := fmt.Sprintf(`{"model":"gpt-4o","stream":%t,"messages":[{"role":"user","content":"%s"}]}`, i%3 == 0, strings.Repeat("word ", 60))
		r := lbtest.NewRequest(t, http.MethodPost, fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", port), strings.NewReader(body))
		r.Header.Set("Authorization", "Bearer client-key-of-alice")
		res, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, res.Body) // a stream may be cut
		res.Body.Close()
		if res.Uncompressed { // net/http asks for that, and undoes it
			compressed++
		}
		if statuses[res.StatusCode]++; i%3 == 0 && res.StatusCode == 200 && option == "" {
			streams++
		}
	}
	if compressed == 0 {
		t.Error("no reply was compressed")
	}
	scraped := lbtest.Scrape(t)
	attempts, failovers, input, output := 0.0, 0.0, 0.0, 0.0
	for name := range at {
		s := statusOf(t, at[name])
		its := map[string]string{"pool": pool, "backend": name}
		ofClass := func(class string) float64 {
			return scraped.Sum("attempts_total", map[string]string{"pool": pool, "backend": name, "class": class})
		}
		if got := scraped.Sum("attempts_total", its); got != float64(s.Requests) || got == 0 {
			t.Errorf("%s got %d requests, and %v attempts were counted", name, s.Requests, got)
		}
		refused := s.Throttled.PTU + s.Throttled.Requests + s.Throttled.Tokens
		if got := ofClass("throttled"); got != float64(refused) || scraped.Sum("hints_total", its) != got {
			t.Errorf("%s refused %d, and %v throttles were counted, %v hints", name, refused, got, scraped.Sum("hints_total", its))
		}
		if got := ofClass("credential"); got != float64(s.Unauthorized) {
			t.Errorf("%s refused %d keys, and %v were counted", name, s.Unauthorized, got)
		}
		if got := ofClass("failed") + ofClass("broken_stream"); got != float64(s.Faults) {
			t.Errorf("%s had %d faults, and %v were counted", name, s.Faults, got)
		}
		if served := ofClass("served"); served != scraped.Sum("requests_total", map[string]string{"pool": pool, "backend": name, "class": "served", "code": "200"}) {
			t.Errorf("%s served %v attempts, and another number of requests", name, served)
		}
		input += float64(s.Tokens.Input)
		output += float64(s.Tokens.Output)
		attempts += scraped.Sum("attempts_total", its)
		failovers += scraped.Sum("failovers_total", its)
	}
	lbtest.WantSums(t, pool,
		"attempts_total backend=ptu deployment=gpt-4o-ptu class=throttled *", "attempts_total backend=ptu deployment=gpt-4o-ptu class=served *",
		"attempts_total backend=east deployment=other class=failed *", "attempts_total backend=closed deployment=other class=credential *",
		"attempts_total backend=west deployment=gpt-4o class=failed *", "cooldowns_total backend=ptu deployment=gpt-4o-ptu class=throttled *",
		"cooldown_seconds_total backend=ptu *", "cooldowns_total backend=closed deployment= class=credential *", "hints_total backend=ptu source=retry-after-ms *",
		"deployment_utilization_ratio backend=ptu deployment=gpt-4o-ptu *", "failovers_total backend=ptu class=throttled *",
		"time_to_first_byte_seconds backend=ptu *", "requests_total 150", "request_duration_seconds 150", "attempts_per_request 150", "requests_in_flight 0")
	if requests := scraped.Sum("requests_total", map[string]string{"pool": pool}); attempts-failovers != requests {
		t.Errorf("%v attempts without the %v of failovers should be %v requests: %v", attempts, failovers, requests, statuses)
	}
	// whole replies tell their tokens, and streams whose client does not ask do
	// not
	unknown := scraped.Sum("tokens_unknown_total", map[string]string{"pool": pool})
	if got := scraped.Sum("tokens_total", map[string]string{"pool": pool, "type": "output"}); got+3*unknown != output || unknown != streams || got == 0 {
		t.Errorf("%v tokens of answers were counted and %v streams unknown; there were %v tokens and %v streams", got, unknown, output, streams)
	}
	if got := scraped.Sum("tokens_total", map[string]string{"pool": pool, "type": "input"}); option != "" && got != input {
		t.Errorf("%v tokens of prompts were counted, and there were %v", got, input)
	}
	for code, n := range statuses {
		lbtest.WantSums(t, pool, fmt.Sprintf("requests_total code=%d %d", code, n))
	}
	t.Run("promtool", func(t *testing.T) { checkByPromtool(t, lbtest.Registry(t)) })
}

// checkByPromtool lints what a scrape of the registry brings.
func checkByPromtool(t *testing.T, registry *prometheus.Registry) {
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("promtool is not here: it is in Debian's package prometheus")
	}
	recorder := newRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(recorder, &http.Request{Header: http.Header{}})
	check := exec.Command(promtool, "check", "metrics")
	check.Stdin = &recorder.body
	if found, err := check.CombinedOutput(); err != nil || len(found) > 0 {
		t.Errorf("%v: %s", err, found)
	}
}

// recorder takes a response.
type recorder struct {
	header http.Header
	body   bytes.Buffer
}

func newRecorder() *recorder { return &recorder{header: make(http.Header)} }

func (r *recorder) Header() http.Header         { return r.header }
func (r *recorder) WriteHeader(int)             {}
func (r *recorder) Write(p []byte) (int, error) { return r.body.Write(p) }

// as is a request with a client key.
func as(w *lbtest.World, key, method, path, body string) *http.Request {
	r := w.Request(method, path, strings.NewReader(body))
	r.Header.Set("Api-Key", key)
	return r
}

func asAlice(w *lbtest.World, method, path, body string) *http.Request {
	return as(w, "client-key-of-alice", method, path, body)
}

func TestEveryAnswerHasAClass(t *testing.T) {
	pool := lbtest.Unique("classes")
	options := `
		pool ` + pool + `
		client_key alice client-key-of-alice
		ready_path /readyz
		request_buffers 1KiB
		backend http://a {
			model gpt-4o
			max_requests 1
		}
		backend http://b {
			model gpt-4o
			priority 2
			max_requests 1
		}`
	lbtest.InBubble(t, "openai_lb {"+options+"\n}", func(t *testing.T, w *lbtest.World) {
		chat := func(body string) lbtest.Reply {
			return w.Send(asAlice(w, http.MethodPost, "/v1/chat/completions", body))
		}
		for _, c := range []struct {
			name string
			ask  func() lbtest.Reply
			want string
		}{
			{"served", func() lbtest.Reply { return chat(`{"model":"gpt-4o"}`) }, "backend=a caller=alice class=served code=200"},
			{"the client's error", func() lbtest.Reply {
				w.Backends["a"].Replies(lbtest.Status(400))
				return chat(`{"model":"gpt-4o"}`)
			}, "backend=a caller=alice class=client_error code=400"},
			{"ready", func() lbtest.Reply { return w.Ready(http.MethodGet) }, "backend= caller= class=ready code=200"},
			{"no key", func() lbtest.Reply { return w.Post(`{"model":"gpt-4o"}`) }, "backend= caller= class=unauthenticated code=401"},
			{"another model", func() lbtest.Reply { return chat(`{"model":"made-up"}`) }, "backend= caller=alice class=no_such_model code=404"},
			{"the models", func() lbtest.Reply {
				return w.Send(asAlice(w, http.MethodGet, "/v1/models", ""))
			}, "backend= caller=alice class=models code=200"},
			{"no model of theirs", func() lbtest.Reply {
				return w.Send(asAlice(w, http.MethodGet, "/v1/models/made-up", ""))
			}, "backend= caller=alice class=no_such_model code=404"},
			{"a path", func() lbtest.Reply {
				return w.Send(asAlice(w, http.MethodPost, "/v1//x", "{}"))
			}, "backend= caller=alice class=invalid_request code=400"},
			{"no model in the beginning", func() lbtest.Reply {
				return chat(`{"input":"` + strings.Repeat("x", 2000) + `","model":"gpt-4o"}`)
			}, "backend= caller=alice class=invalid_request code=413"},
			{"a broken stream", func() lbtest.Reply {
				w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
					lbtest.Streams(lbtest.StreamContent)(rw, r)
					panic(http.ErrAbortHandler)
				})
				return chat(`{"model":"gpt-4o","stream":true}`)
			}, "backend=a caller=alice class=broken_stream code=200"},
			{"failed everywhere", func() lbtest.Reply {
				time.Sleep(time.Minute)
				w.Backends["a"].Replies(lbtest.Status(500))
				w.Backends["b"].Replies(lbtest.Status(502))
				return chat(`{"model":"gpt-4o"}`)
			}, "backend=b caller=alice class=failed code=502"},
			{"throttled everywhere", func() lbtest.Reply {
				time.Sleep(time.Minute)
				w.Backends["a"].Replies(lbtest.Throttled("60"))
				w.Backends["b"].Replies(lbtest.Throttled("60"))
				return chat(`{"model":"gpt-4o"}`)
			}, "backend= caller=alice class=all_throttled code=429"},
			{"nobody reached", func() lbtest.Reply {
				time.Sleep(2 * time.Minute)
				w.Stop("a")
				w.Stop("b")
				return chat(`{"model":"gpt-4o"}`)
			}, "backend= caller=alice class=unreachable code=502"},
			{"not ready", func() lbtest.Reply { return w.Ready(http.MethodGet) }, "backend= caller= class=not_ready code=503"},
		} {
			labels := map[string]string{"pool": pool}
			for _, field := range strings.Fields(c.want) {
				name, value, _ := strings.Cut(field, "=")
				labels[name] = value
			}
			before := lbtest.Scrape(t)
			reply := c.ask()
			after := lbtest.Scrape(t)
			if got, same := after.Sum("requests_total", labels), before.Sum("requests_total", labels); got != same+1 {
				t.Errorf("%s (%d %s): %s is %v, and was %v", c.name, reply.Status, reply.Body, c.want, got, same)
			}
			all := map[string]string{"pool": pool}
			if n := after.Sum("requests_total", all) - before.Sum("requests_total", all); n != 1 {
				t.Errorf("%s was counted %v times", c.name, n)
			}
		}
		lbtest.WantSums(t, pool, "requests_total class= 0", "attempts_total class= 0", "all_throttled_total 1")
	})
}

func TestAClientThatLeavesWithoutAByteIsCountedApart(t *testing.T) {
	pool := lbtest.Unique("leaves")
	lbtest.InBubble(t, "openai_lb {\npool "+pool+"\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
		ctx, leave := context.WithTimeout(t.Context(), time.Second)
		defer leave()
		w.Send(w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{}`)).WithContext(ctx))
		time.Sleep(time.Second)
		lbtest.WantSums(t, pool, "requests_total backend=a class=client_left_waiting code=499 1", "attempts_total backend=a class=client_left_waiting 1", "requests_total class=client_left 0", "cooldowns_total 0", "requests_total 1")
	})
}

func TestMadeUpNamesAddNoSeries(t *testing.T) {
	n := 10_000
	if lbtest.Race {
		n = 1200
	}
	var keys strings.Builder
	for i := range n {
		fmt.Fprintf(&keys, "caller-%d key-of-the-caller-%d\n", i, i)
	}
	file := filepath.Join(t.TempDir(), "keys")
	lbtest.WriteFile(t, file, keys.String())
	pool := lbtest.Unique("made-up")
	lbtest.InBubble(t, "openai_lb {\npool "+pool+"\nclient_keys_file "+file+"\nbackend http://a {\nmodel gpt-4o\n}\nbackend http://b\nbackend http://c {\npriority 2\n}\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["b"].Replies(lbtest.Throttled("60"))
		for i := range n {
			if i == 300 {
				w.Backends["b"].Recovers()
			}
			reply := w.Send(as(w, fmt.Sprintf("key-of-the-caller-%d", i), http.MethodPost, "/v1/chat/completions", fmt.Sprintf(`{"model":"made-up-%d"}`, i)))
			reply.WantServed(t, "b", "c")
		}
		series := 0
		families, err := lbtest.Registry(t).Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, family := range families {
			for _, metric := range family.GetMetric() {
				if lbtest.HasLabels(metric, map[string]string{"pool": pool}) {
					series++
				}
			}
		}
		if series > 1200 {
			t.Errorf("there are %d series of 1000 callers", series)
		}
		lbtest.WantSums(t, pool, fmt.Sprint("requests_total ", n), "attempts_total backend=c deployment=other 300", "attempts_total backend=b deployment=other class=throttled 300", fmt.Sprint("attempts_total backend=b deployment=other class=served ", n-300),
			"backend_available backend=b deployment=other 0", "backend_available backend=a deployment=other 0", "requests_total caller=other *")
	})
}

func TestAReloadKeepsCountersAndTwoPoolsDoNotMix(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	_, serverB := lbtest.Listen(t, "b")
	ports := []int{lbtest.FreePort(t), lbtest.FreePort(t)}
	pools := []string{lbtest.Unique("mix"), lbtest.Unique("mix")}
	config := func(comment string) string {
		text := "{\nadmin off\n}\n"
		for i, port := range ports {
			text += fmt.Sprintf("http://127.0.0.1:%d {\nbind 127.0.0.1\nheader X-Config %s\nopenai_lb {\npool %s\nbackend %s {\nname a\n}\nbackend %s {\nname b\npriority 2\n}\n}\n}\n",
				port, comment, pools[i], serverA.URL, serverB.URL)
		}
		return text
	}
	url := func(site int) string { return fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", ports[site]) }
	client := lbtest.NewClient(t)
	ask := func(site, n int) {
		for range n {
			lbtest.Post(client, url(site), `{"model":"m"}`)
		}
	}
	lbtest.Run(t, config("1"))
	ask(0, 3)
	ask(1, 5)
	lbtest.WantSums(t, pools[0], "requests_total 3", "attempts_total backend=a 3", "request_duration_seconds 3")
	lbtest.WantSums(t, pools[1], "requests_total 5", "attempts_total backend=a 5", "attempts_per_request 5")
	lbtest.Reload(t, config("2"))
	client = lbtest.ClientOf(t, "2", url(0))
	requests := lbtest.SumOf(t, "requests_total", map[string]string{"pool": pools[0]})
	if requests < 4 {
		t.Errorf("after a reload, %v requests are counted", requests)
	}
	a.Replies(lbtest.Throttled("60"))
	ask(0, 2)
	lbtest.WantSums(t, pools[0], fmt.Sprintf("requests_total %v", requests+2), "cooldowns_total backend=a 1", "attempts_total backend=b 2", "attempts_total backend=a class=throttled 1")
	lbtest.WantSums(t, pools[1], "requests_total 5", "cooldowns_total 0", "attempts_total backend=b 0")
	// the backend is one, and so is its limit
	lbtest.WantSums(t, pools[1], "backend_available backend=a deployment=other 0", "backend_available backend=b deployment=other 1")
}

func TestTheSecondsOfACooldownEndWithItsBackend(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	_, serverB := lbtest.Listen(t, "b")
	port, pool := lbtest.FreePort(t), lbtest.Unique("removed")
	config := func(version, backends string) string {
		return fmt.Sprintf("{\nadmin off\n}\nhttp://127.0.0.1:%d {\nbind 127.0.0.1\nheader X-Config %s\nopenai_lb {\npool %s\n%s\n}\n}\n", port, version, pool, backends)
	}
	b := "backend " + serverB.URL + " {\nname b\npriority 2\n}"
	url := fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", port)
	lbtest.Run(t, config("1", "backend "+serverA.URL+" {\nname a\n}\n"+b))
	a.Replies(lbtest.Throttled("60"))
	lbtest.Post(lbtest.NewClient(t), url, `{"model":"m"}`).WantServed(t, "b")
	lbtest.Reload(t, config("2", b))
	lbtest.ClientOf(t, "2", url)
	seconds := func() float64 {
		return lbtest.SumOf(t, "cooldown_seconds_total", map[string]string{"pool": pool, "backend": "a"})
	}
	var counts []float64
	lbtest.WaitFor(t, func() bool { // until the config before has ended
		counts = append(counts, seconds())
		return len(counts) > 1 && counts[len(counts)-1] == counts[len(counts)-2]
	})
	if last := counts[len(counts)-1]; last <= 0 || last >= 60 {
		t.Errorf("the cooldown counts as %v s", last)
	}
}

func TestTheFirstByteIsTimedWhenItGoesToTheClient(t *testing.T) {
	for name, reply := range map[string]http.HandlerFunc{
		"a stream": lbtest.Streams(3*time.Second, lbtest.StreamContent, time.Minute, lbtest.StreamEnd),
		"a whole one": func(w http.ResponseWriter, r *http.Request) {
			time.Sleep(3 * time.Second)
			lbtest.Says(200, "{}")(w, r)
		},
		"no inference": lbtest.Streams(3*time.Second, "a part", time.Minute, "the rest"),
	} {
		t.Run(name, func(t *testing.T) {
			pool := lbtest.Unique("first-byte-" + strings.ReplaceAll(name, " ", "-"))
			lbtest.InBubble(t, "openai_lb {\npool "+pool+"\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(reply)
				path := "/v1/chat/completions"
				if name == "no inference" {
					path = "/v1/files"
				}
				w.Send(w.Request(http.MethodPost, path, strings.NewReader(fmt.Sprintf(`{"stream":%v}`, name != "a whole one")))).WantStatus(t, 200)
				families, err := lbtest.Registry(t).Gather()
				if err != nil {
					t.Fatal(err)
				}
				for _, family := range families {
					for _, metric := range family.GetMetric() {
						if family.GetName() != "caddy_openai_lb_time_to_first_byte_seconds" || !lbtest.HasLabels(metric, map[string]string{"pool": pool}) {
							continue
						}
						if h := metric.GetHistogram(); h.GetSampleCount() != 1 || h.GetSampleSum() < 2.99 || h.GetSampleSum() > 3.01 {
							t.Errorf("the first byte came after %v s", h.GetSampleSum())
						}
						return
					}
				}
				t.Error("it was not timed")
			})
		})
	}
}

// TestABillIsByCallerModelAndBackend has a provisioned deployment under another
// name than the model, and a second backend that takes what it throttles.
func TestABillIsByCallerModelAndBackend(t *testing.T) {
	pool := lbtest.Unique("bill")
	lbtest.InBubble(t, `openai_lb {
		pool `+pool+`
		client_key alice key-of-alice-1234
		client_key bob key-of-bob-123456
		backend http://ptu {
			name ptu
			model gpt-4o gpt-4o-ptu
			model mini mini-ptu
		}
		backend http://paygo {
			name paygo
			priority 2
			weight 3
			model gpt-4o
			model mini
		}
	}`, func(t *testing.T, w *lbtest.World) {
		w.AllReply(lbtest.Says(200, `{"object":"chat.completion","usage":{"prompt_tokens":100,"completion_tokens":7}}`))
		chat := func(key, model string) lbtest.Reply {
			return w.Send(as(w, key, http.MethodPost, "/v1/chat/completions", `{"model":"`+model+`"}`))
		}
		chat("key-of-alice-1234", "gpt-4o").WantServed(t, "ptu")
		chat("key-of-bob-123456", "mini").WantServed(t, "ptu")
		w.Backends["ptu"].Replies(lbtest.Throttled("60"))
		for range 3 {
			chat("key-of-alice-1234", "gpt-4o").WantServed(t, "paygo")
		}
		chat("key-of-bob-123456", "made-up").WantError(t, http.StatusNotFound, "model_not_found")
		bob := metrics.Caller("bob") // or that of others, if another test has a thousand callers
		lbtest.WantSums(t, pool,
			"requests_total caller=alice model=gpt-4o backend=ptu class=served code=200 1", "requests_total caller=alice model=gpt-4o backend=paygo class=served 3",
			"requests_total caller="+bob+" model=mini backend=ptu class=served 1", "requests_total caller="+bob+" model=other backend= class=no_such_model code=404 1", "requests_total 6",
			"caller_tokens_total caller=alice model=gpt-4o type=input 400",
			"caller_tokens_total caller="+bob+" model=mini type=output 7", "caller_tokens_total type=output 35",
			"tokens_total backend=ptu model=gpt-4o deployment=gpt-4o-ptu type=input 100", "tokens_total backend=paygo model=gpt-4o deployment=gpt-4o type=input 300",
			"attempts_total backend=ptu deployment=gpt-4o-ptu class=throttled 1", "attempts_total backend=paygo deployment=gpt-4o class=served 3",
			"failovers_total backend=ptu class=throttled 1", "cooldowns_total backend=ptu deployment=gpt-4o-ptu class=throttled 1",
			"backend_info backend=ptu priority=1 weight=1 1", "backend_info backend=paygo priority=2 weight=3 1")
		// a name has one meaning in all metrics
		for _, family := range lbtest.Scrape(t) {
			for _, metric := range family.GetMetric() {
				for _, label := range metric.GetLabel() {
					name, value := label.GetName(), label.GetValue()
					if name == "outcome" || name == "reason" || name == "model" && strings.HasSuffix(value, "-ptu") {
						t.Errorf("%s has the label %s with the value %q", family.GetName(), name, value)
					}
				}
			}
		}
	})
}

// TestARefusedKeyIsShownUntilItIsAccepted has a key refused. Nobody can know
// from the time alone whether it is valid again.
func TestARefusedKeyIsShownUntilItIsAccepted(t *testing.T) {
	for _, c := range []struct {
		class string
		reply http.HandlerFunc
		after float64 // what is shown when the time of the cooldown has passed
	}{
		{"credential", lbtest.Status(401), 1},
		{"quota", lbtest.Says(429, `{"error":{"code":"insufficient_quota"}}`), 1},
		{"no_model", lbtest.Says(404, `{"error":{"code":"DeploymentNotFound"}}`), 1},
		{"failed", lbtest.Status(500), 1},
		{"throttled", lbtest.Throttled("60"), 0},
	} {
		t.Run(c.class, func(t *testing.T) {
			pool := lbtest.Unique("refused")
			lbtest.InBubble(t, "openai_lb {\npool "+pool+"\nlb_policy first\nbackend http://a {\nmodel gpt-4o\n}\nbackend http://b\n}", func(t *testing.T, w *lbtest.World) {
				shown := func(when string, want float64) {
					t.Helper()
					if got := lbtest.SumOf(t, "backend_unavailable", map[string]string{"pool": pool, "backend": "a", "class": c.class}); got != want {
						t.Errorf("%s, backend_unavailable is %v, want %v", when, got, want)
					}
				}
				shown("before any request", 0)
				w.Backends["a"].Replies(c.reply)
				w.Post(`{"model":"gpt-4o"}`).WantServed(t, "b")
				shown("after a refusal", 1)
				time.Sleep(time.Hour)
				shown("without a request for an hour", c.after)
				w.Post(`{"model":"gpt-4o"}`).WantServed(t, "b")
				shown("after another refusal", 1)
				w.Backends["a"].Recovers()
				time.Sleep(time.Hour)
				w.Post(`{"model":"gpt-4o"}`).WantServed(t, "a")
				shown("after a request was served", 0)
			})
		})
	}
}
