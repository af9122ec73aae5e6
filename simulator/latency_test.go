package simulator

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

const ms = caddy.Duration(time.Millisecond)

// timedWriter remembers when each event was written.
type timedWriter struct {
	*httptest.ResponseRecorder
	begin  time.Time
	header time.Duration
	writes []time.Duration
	broken bool // by the client, from now on
}

func (w *timedWriter) Write(p []byte) (int, error) {
	if w.broken {
		return 0, errors.New("broken pipe")
	}
	w.writes = append(w.writes, time.Since(w.begin))
	return w.ResponseRecorder.Write(p)
}

func (w *timedWriter) WriteHeader(status int) {
	w.header = time.Since(w.begin)
	w.ResponseRecorder.WriteHeader(status)
}

func (w *timedWriter) Unwrap() http.ResponseWriter { return w.ResponseRecorder }

// run answers one request whose client leaves after patience, if that is set,
// and says whether the reply was aborted.
func run(h *Handler, path, body, fault string, patience time.Duration) (w *timedWriter, aborted bool) {
	ctx := context.Background()
	if patience > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, patience)
		defer cancel()
	}
	w = &timedWriter{ResponseRecorder: httptest.NewRecorder(), begin: time.Now()}
	r := httptest.NewRequest("POST", path, strings.NewReader(body)).WithContext(ctx)
	r.Header.Set("X-Simulator-Fault", fault)
	defer func() {
		if reason := recover(); reason != nil {
			if reason != http.ErrAbortHandler {
				panic(reason)
			}
			aborted = true
		}
	}()
	serve(h, w, r)
	return w, false
}

func inMilliseconds(durations []time.Duration) []int64 {
	var all []int64
	for _, d := range durations {
		all = append(all, d.Milliseconds())
	}
	return all
}

func TestAWholeReplyTakesTheTimeOfAllItsTokens(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		h := provision(t, &Handler{FirstTokenLatency: 300 * ms, TokenLatency: 20 * ms, OutputTokens: 10})
		for body, want := range map[string]time.Duration{
			`{}`:               500 * time.Millisecond,
			`{"max_tokens":4}`: 380 * time.Millisecond,
		} {
			if w, _ := run(h, chatPath, body, "", 0); w.header != want {
				t.Errorf("%s: took %s, want %s", body, w.header, want)
			}
		}
	})
}

func TestAStreamComesTokenByToken(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		h := provision(t, &Handler{FirstTokenLatency: 300 * ms, TokenLatency: 20 * ms, OutputTokens: 3})
		// Chat's headers come with its first token: filter, role, token, token,
		// token, stop, done.
		w, _ := run(h, chatPath, streamBody, "", 0)
		if got := inMilliseconds(w.writes); w.header != 300*time.Millisecond || !slices.Equal(got, []int64{300, 300, 300, 320, 340, 340, 340}) {
			t.Errorf("headers after %s, events after %v", w.header, got)
		}
		// The Responses API says at once that it is at work.
		w, _ = run(h, "/v1/responses", responsesBody, "", 0)
		if got := inMilliseconds(w.writes); w.header != 0 || !slices.Equal(got, []int64{0, 0, 300, 300, 300, 320, 340, 340, 340, 340, 340}) {
			t.Errorf("headers after %s, events after %v", w.header, got)
		}
	})
}

func TestAThrottleTakesNoTime(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		h := provision(t, &Handler{FirstTokenLatency: 300 * ms, TokensPerMinute: 1})
		if w, _ := run(h, chatPath, chatBody, "", 0); w.Code != 429 || w.header != 0 {
			t.Errorf("got %d after %s", w.Code, w.header)
		}
	})
}

func TestAClientThatLeavesStopsTheGeneration(t *testing.T) {
	for name, tc := range map[string]struct {
		path, body string
		patience   time.Duration
		wantTokens int64
	}{
		"before the first token":           {chatPath, streamBody, 299 * time.Millisecond, 0},
		"in a stream":                      {chatPath, streamBody, 350 * time.Millisecond, 3},
		"in a response":                    {"/v1/responses", responsesBody, 350 * time.Millisecond, 3},
		"in a response, before any token":  {"/v1/responses", responsesBody, 100 * time.Millisecond, 0},
		"while a whole reply is generated": {chatPath, chatBody, 350 * time.Millisecond, 2},
		"before a whole reply is begun":    {chatPath, chatBody, 100 * time.Millisecond, 0},
	} {
		t.Run(name, func(t *testing.T) {
			bubble.Test(t, func(t *testing.T) {
				// One unit, with a bucket in which a second of work is nothing.
				h := provision(t, &Handler{
					PTU: 1, BucketSeconds: 1e6, OutputTokens: 1000,
					FirstTokenLatency: 300 * ms, TokenLatency: 20 * ms,
				})
				begin := time.Now()
				if _, aborted := run(h, tc.path, tc.body, "", tc.patience); !aborted {
					t.Error("the reply was not aborted")
				}
				if took := time.Since(begin); took != tc.patience {
					t.Errorf("it went on for %s, want %s", took, tc.patience)
				}
				s := h.state.snapshot(time.Now())
				if s.Cancelled != 1 || !s.Last[0].Cancelled || s.InFlight != 0 || s.Tokens.Output != tc.wantTokens {
					t.Errorf("got %+v, want %d tokens", s, tc.wantTokens)
				}
				// 3 tokens of prompt and 4 for each one generated, less what
				// was worked off.
				if most := 100 * float64(3+4*tc.wantTokens) / h.rules.Capacity; s.Utilization > most {
					t.Errorf("got utilization %v, want %v at most", s.Utilization, most)
				}
			})
		})
	}
}

func TestAWriteThatFailsIsAClientThatLeft(t *testing.T) {
	h := provision(t, &Handler{})
	w := &timedWriter{ResponseRecorder: httptest.NewRecorder(), broken: true}
	func() {
		defer func() { _ = recover() }()
		serve(h, w, httptest.NewRequest("POST", chatPath, strings.NewReader(streamBody)))
	}()
	if s := h.state.snapshot(time.Now()); s.Cancelled != 1 || s.InFlight != 0 || s.Tokens.Output != 0 {
		t.Errorf("got %+v", s)
	}
}

func TestABodyThatBreaksOffIsAClientThatLeft(t *testing.T) {
	h := provision(t, &Handler{})
	func() {
		defer func() { _ = recover() }()
		serve(h, httptest.NewRecorder(), httptest.NewRequest("POST", chatPath, brokenBody{}))
	}()
	if s := h.state.snapshot(time.Now()); s.Cancelled != 1 || s.InFlight != 0 || s.Last[0].Status != 0 {
		t.Errorf("got %+v", s)
	}
}

type brokenBody struct{}

func (brokenBody) Read([]byte) (int, error) { return 0, errors.New("unexpected EOF") }

func TestABodyOverTheServersLimitIs413(t *testing.T) {
	h := provision(t, &Handler{})
	w := httptest.NewRecorder()
	r := httptest.NewRequest("POST", chatPath, strings.NewReader(chatBody))
	r.Body = http.MaxBytesReader(w, r.Body, 10)
	serve(h, w, r)
	if w.Code != 413 {
		t.Errorf("got %d %s", w.Code, w.Body)
	}
}

func TestAHangEndsWithItsClient(t *testing.T) {
	for fault, wantEvents := range map[string]int{"hang_before_headers": 0, "hang_after:0": 0, "hang_after:3": 3} {
		t.Run(fault, func(t *testing.T) {
			bubble.Test(t, func(t *testing.T) {
				h := provision(t, &Handler{AllowFaultHeader: true})
				begin := time.Now()
				w, aborted := run(h, chatPath, streamBody, fault, time.Hour)
				if !aborted || time.Since(begin) != time.Hour {
					t.Errorf("aborted %t after %s", aborted, time.Since(begin))
				}
				if len(w.writes) != wantEvents {
					t.Errorf("got %d events, want %d", len(w.writes), wantEvents)
				}
				if s := h.state.snapshot(time.Now()); s.Cancelled != 1 || s.Faults != 1 {
					t.Errorf("got %+v", s)
				}
			})
		})
	}
}

func TestAHangEndsWithItsConfig(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ctx, unload := caddy.NewContext(caddy.Context{Context: context.Background()})
		h := &Handler{AllowFaultHeader: true}
		if err := h.Provision(ctx); err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(time.Minute, unload)
		begin := time.Now()
		_, aborted := run(h, chatPath, chatBody, "hang_before_headers", 0)
		if !aborted || time.Since(begin) != time.Minute {
			t.Errorf("aborted %t after %s", aborted, time.Since(begin))
		}
		if s := h.state.snapshot(time.Now()); s.Cancelled != 0 {
			t.Error("it counts as left by its client")
		}
	})
}

func TestARequestInFlightOutlivesAReset(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		h := provision(t, &Handler{FirstTokenLatency: 100 * ms})
		time.AfterFunc(50*time.Millisecond, func() {
			h.state.reset()
			if got := h.state.snapshot(time.Now()).InFlight; got != 1 {
				t.Errorf("got %d in flight, want 1", got)
			}
		})
		run(h, chatPath, chatBody, "", 0)
		if got := h.state.snapshot(time.Now()).InFlight; got != 0 {
			t.Errorf("got %d in flight, want 0", got)
		}
	})
}

func BenchmarkChat(b *testing.B) {
	h := provision(b, &Handler{})
	for name, body := range map[string]string{"whole": chatBody, "stream": streamBody} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				serve(h, httptest.NewRecorder(), httptest.NewRequest("POST", chatPath, strings.NewReader(body)))
			}
		})
	}
}
