package openailb_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/websocket"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// BenchmarkOverhead compares openai_lb with a plain reverse_proxy, in one run
// and for the same backend.
func BenchmarkOverhead(b *testing.B) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"id":"chatcmpl-1","object":"chat.completion","choices":[]}`)
	}))
	defer server.Close()
	sites := []struct{ name, directive string }{
		{"reverse_proxy", "reverse_proxy " + server.URL},
		{"openai_lb", "openai_lb {\nbackend " + server.URL + "\n}"},
		{"openai_lb, two accounts", "openai_lb {\nbackend " + server.URL + "\nbackend " + server.URL + " {\naccount two\n}\n}"},
		{"openai_lb, model replaced", "openai_lb {\nbackend " + server.URL + " {\nmodel gpt-4o its-own-name\n}\n}"},
	}
	var directives []string
	for _, site := range sites {
		directives = append(directives, site.directive)
	}
	addresses := startSites(b, directives...)
	for _, size := range []int{100, 100 << 10} {
		body := promptOf(size, false)
		for i, site := range sites {
			b.Run(fmt.Sprintf("%d B prompt/%s", size, site.name), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					res, err := http.Post(addresses[i]+"/v1/chat/completions", "application/json", strings.NewReader(body))
					if err != nil {
						b.Fatal(err)
					}
					io.Copy(io.Discard, res.Body)
					res.Body.Close()
					if res.StatusCode != 200 {
						b.Fatal(res.Status)
					}
				}
			})
		}
	}
}

// BenchmarkRefusal compares a request that a limit of its caller refuses with a
// fixed answer of Caddy's.
func BenchmarkRefusal(b *testing.B) {
	const key = "sk-alice-0123456789"
	names := []string{"respond", "openai_lb"}
	addresses := startSites(b, "respond {} 429", "openai_lb {\nbackend http://127.0.0.1:1\nclient_key alice "+key+"\ncaller alice {\ntokens 1/minute\ntokens 1k/day\n}\n}")
	body := promptOf(1800, false)
	for i, address := range addresses {
		b.Run(names[i], func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				r, _ := http.NewRequest(http.MethodPost, address+"/v1/chat/completions", strings.NewReader(body))
				r.Header.Set("Authorization", "Bearer "+key)
				res, err := http.DefaultClient.Do(r)
				if err != nil {
					b.Fatal(err)
				}
				io.Copy(io.Discard, res.Body)
				res.Body.Close()
				if res.StatusCode != http.StatusTooManyRequests {
					b.Fatal(res.Status)
				}
			}
		})
	}
}

// BenchmarkStream compares when the client has the first content of a stream,
// and how long each event takes that follows. The backend sends one only after
// the client has got the one before: each is flushed on its own. A model that
// thinks for 10 ms before its first word is a very quick one.
func BenchmarkStream(b *testing.B) {
	const events = 100
	var thinks time.Duration
	got := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, lbtest.StreamPreamble)
		w.(http.Flusher).Flush()
		time.Sleep(thinks)
		for range events {
			io.WriteString(w, lbtest.StreamContent)
			w.(http.Flusher).Flush()
			select {
			case <-got:
			case <-r.Context().Done():
				return
			}
		}
		io.WriteString(w, lbtest.StreamEnd)
	}))
	defer server.Close()
	addresses := startSites(b, "reverse_proxy "+server.URL, "openai_lb {\nbackend "+server.URL+"\n}")
	for _, c := range []struct {
		prompt int
		thinks time.Duration
	}{{100, 0}, {100 << 10, 0}, {100, 10 * time.Millisecond}, {100 << 10, 10 * time.Millisecond}} {
		b.Run(fmt.Sprintf("%d B prompt/%s", c.prompt, c.thinks), func(b *testing.B) {
			prompt := promptOf(c.prompt, true)
			thinks = c.thinks
			var first, following [2][]time.Duration
			for b.Loop() {
				for i, address := range addresses {
					start := time.Now()
					stream := openAt(b, address, prompt)
					stream.Next(b, len(lbtest.StreamPreamble+lbtest.StreamContent))
					begun := time.Now()
					for range events - 1 {
						got <- struct{}{}
						stream.Next(b, len(lbtest.StreamContent))
					}
					ended := time.Now()
					got <- struct{}{}
					io.Copy(io.Discard, stream.Response.Body)
					stream.Response.Body.Close()
					first[i] = append(first[i], begun.Sub(start))
					following[i] = append(following[i], ended.Sub(begun)/(events-1))
				}
			}
			report(b, "µs-to-first-content", time.Microsecond, first)
			report(b, "µs-per-event", time.Microsecond, following)
		})
	}
}

// BenchmarkBurst compares how long a stream takes of which all events are there
// at once.
func BenchmarkBurst(b *testing.B) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, strings.Repeat(lbtest.StreamContent, 150)+lbtest.StreamEnd)
	}))
	defer server.Close()
	addresses := startSites(b, "reverse_proxy "+server.URL, "openai_lb {\nbackend "+server.URL+"\n}")
	prompt := promptOf(1800, true)
	var took [2][]time.Duration
	for b.Loop() {
		for i, address := range addresses {
			start := time.Now()
			stream := openAt(b, address, prompt)
			io.Copy(io.Discard, stream.Response.Body)
			stream.Response.Body.Close()
			took[i] = append(took[i], time.Since(start))
		}
	}
	report(b, "µs-per-stream", time.Microsecond, took)
}

// BenchmarkLeave compares how long after a client left in the middle of a
// stream the backend feels it.
func BenchmarkLeave(b *testing.B) {
	felt := make(chan time.Time)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, lbtest.StreamContent)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		felt <- time.Now()
	}))
	defer server.Close()
	addresses := startSites(b, "reverse_proxy "+server.URL, "openai_lb {\nbackend "+server.URL+"\n}")
	var until [2][]time.Duration
	for b.Loop() {
		for i, address := range addresses {
			stream := openAt(b, address, promptOf(100, true))
			stream.Next(b, len(lbtest.StreamContent))
			left := time.Now()
			stream.Response.Body.Close()
			until[i] = append(until[i], (<-felt).Sub(left))
		}
	}
	report(b, "ms-until-felt", time.Millisecond, until)
}

// BenchmarkResponse compares a response over a WebSocket with a plain
// reverse_proxy.
func BenchmarkResponse(b *testing.B) {
	server := httptest.NewServer(websocket.Handler(func(socket *websocket.Conn) {
		var asked []byte
		for id := 0; websocket.Message.Receive(socket, &asked) == nil; id++ {
			for _, event := range []string{"created", "completed"} {
				fmt.Fprintf(socket, `{"type":"response.%s","response":{"id":"resp_%d","model":"gpt-4o","output":[],"usage":{"input_tokens":5,"output_tokens":7}}}`, event, id)
			}
		}
	}))
	defer server.Close()
	names := []string{"reverse_proxy", "openai_lb"}
	addresses := startSites(b, "reverse_proxy "+server.URL, "openai_lb {\nbackend "+server.URL+"\n}")
	for i, name := range names {
		b.Run(name, func(b *testing.B) {
			socket, err := websocket.Dial(strings.Replace(addresses[i], "http", "ws", 1)+"/v1/responses", "", addresses[i])
			if err != nil {
				b.Fatal(err)
			}
			defer socket.Close()
			b.ReportAllocs()
			for b.Loop() {
				io.WriteString(socket, `{"type":"response.create","model":"gpt-4o","input":"hi"}`)
				for event := []byte{}; !strings.Contains(string(event), "completed"); {
					if err := websocket.Message.Receive(socket, &event); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}

// startSites starts Caddy with a site for each directive.
func startSites(b *testing.B, directives ...string) (addresses []string) {
	b.Helper()
	caddyfile := "{\nadmin off\ndefault_bind 127.0.0.1\nlog {\noutput discard\n}\n}\n"
	for _, directive := range directives {
		address := fmt.Sprintf("http://127.0.0.1:%d", lbtest.FreePort(b))
		caddyfile += address + " {\n" + directive + "\n}\n"
		addresses = append(addresses, address)
	}
	lbtest.Run(b, caddyfile)
	return addresses
}

// promptOf is a request with a prompt of a size.
func promptOf(size int, stream bool) string {
	return fmt.Sprintf(`{"messages":[{"role":"user","content":"%s"}],"stream":%t,"model":"gpt-4o"}`, strings.Repeat("x", size), stream)
}

// openAt asks a site for a stream.
func openAt(b *testing.B, address, body string) lbtest.Stream {
	b.Helper()
	res, err := http.Post(address+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		b.Fatal(err)
	}
	if res.StatusCode != 200 {
		b.Fatal(res.Status)
	}
	return lbtest.Stream{Response: res}
}

// report reports the medians of what a plain reverse_proxy and openai_lb took,
// and the ratio of the two.
func report(b *testing.B, what string, unit time.Duration, took [2][]time.Duration) {
	var medians [2]float64
	for i, name := range []string{"plain", "lb"} {
		slices.Sort(took[i])
		medians[i] = float64(took[i][len(took[i])/2]) / float64(unit)
		b.ReportMetric(medians[i], name+"-"+what)
	}
	b.ReportMetric(medians[1]/medians[0], "ratio-"+what)
	b.ReportMetric(0, "ns/op") // of both, and of what is between
}
