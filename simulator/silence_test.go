package simulator

import (
	"math/rand/v2"
	"net/http/httptest"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

// blackHole is silent for the last 30 s of every two minutes.
func blackHole() *Handler {
	return &Handler{
		APIKey: []string{"key"}, FirstTokenLatency: 300 * ms, TokenLatency: 100 * ms, OutputTokens: 20,
		Fault: []Fault{{Action: "silent", For: caddy.Duration(30 * time.Second), Period: caddy.Duration(2 * time.Minute)}},
	}
}

func TestASilenceHitsTheRequestsThatAreInProgress(t *testing.T) {
	const s = time.Second
	for name, c := range map[string]struct {
		at         time.Duration // the request is sent
		body       string
		wantStatus int // 0: no reply
		wantEvents int
	}{
		"before it":                        {80 * s, chatBody, 200, 1},
		"answered just before it":          {90*s - 2400*time.Millisecond, chatBody, 200, 1},
		"not answered when it begins":      {90*s - 2300*time.Millisecond, chatBody, 0, 0},
		"half of a stream before it":       {90*s - 1250*time.Millisecond, streamBody, 200, 2 + 10},
		"the headers of a stream due":      {90*s - 200*time.Millisecond, streamBody, 0, 0},
		"sent in it":                       {100 * s, chatBody, 0, 0},
		"sent just before its end":         {120*s - 1, streamBody, 0, 0},
		"after it":                         {120 * s, streamBody, 200, 2 + 20 + 2},
		"across it":                        {89 * s, chatBody, 0, 0},
		"in the next one":                  {210 * s, chatBody, 0, 0},
		"after the next one":               {240 * s, chatBody, 200, 1},
		"of another key":                   {100 * s, "", 0, 0},
		"of another key, after it":         {120 * s, "", 401, 1},
		"of a request that is not correct": {100 * s, "{", 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			bubble.Test(t, func(t *testing.T) {
				h := provision(t, blackHole())
				time.Sleep(c.at)
				begun := time.Now()
				path := "/v1/chat/completions"
				if c.body == "" {
					h.keys = map[[32]byte]struct{}{{}: {}}
				} else {
					h.keys = nil
				}
				w, aborted := run(h, path, c.body, "", time.Minute)
				status := w.Code
				if w.header == 0 && len(w.writes) == 0 && aborted {
					status = 0
				}
				if status != c.wantStatus || len(w.writes) != c.wantEvents {
					t.Errorf("got status %d and %d writes, want %d and %d", status, len(w.writes), c.wantStatus, c.wantEvents)
				}
				silenced := c.wantStatus == 0 || aborted
				if aborted != silenced || silenced && time.Since(begun) != time.Minute {
					t.Errorf("aborted %t after %s", aborted, time.Since(begun))
				}
				got := h.state.snapshot(time.Now())
				if got.InFlight != 0 || silenced && (got.Faults != 1 || got.Cancelled != 1) || !silenced && got.Faults != 0 {
					t.Errorf("counted %+v", got)
				}
			})
		})
	}
}

func TestARequestThatIsSentIntoASilenceIsNotCharged(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		h := provision(t, blackHole())
		h.keys = nil
		time.Sleep(100 * time.Second)
		run(h, "/v1/chat/completions", chatBody, "", time.Second)
		if got := h.state.snapshot(time.Now()); got.Requests != 1 || got.Admitted != 0 {
			t.Errorf("counted %+v", got)
		}
	})
}

func TestTheStatusPageAnswersDuringASilence(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		h := provision(t, blackHole())
		time.Sleep(100 * time.Second)
		w := httptest.NewRecorder()
		serve(h, w, httptest.NewRequest("GET", "/_simulator/status", nil))
		if w.Code != 200 || w.Body.Len() == 0 {
			t.Errorf("got %d %s", w.Code, w.Body)
		}
	})
}

func TestAWebSocketIsSilentToo(t *testing.T) {
	h := blackHole()
	h.APIKey = nil
	var passed atomic.Int64
	begun := time.Now()
	h.now = func() time.Time { return begun.Add(time.Duration(passed.Load())) }
	srv := listen(t, h)
	c, _ := dialRealtime(t, srv, "/v1/realtime?model=m")
	c.until(t, "session.created")
	answered := make(chan error)
	go func() {
		_, _, err := c.frame()
		answered <- err
	}()
	passed.Store(int64(100 * time.Second))
	c.say(t, `{"type":"session.update"}`)
	for status(t, srv).Faults == 0 {
		select {
		case <-answered:
			t.Fatal("it is answered")
		default:
		}
	}
	c.Close()
	if err := <-answered; err == nil {
		t.Error("it was answered")
	}
}

func TestFirstTokensCanTakeTimesOfAWideRange(t *testing.T) {
	h := provision(t, &Handler{FirstTokenLatency: 300 * ms, FirstTokenLatencyP95: 900 * ms})
	h.normal = rand.New(rand.NewPCG(1, 2)).NormFloat64
	x := &exchange{h: h}
	var all []time.Duration
	for range 10_001 {
		all = append(all, x.firstTokenLatency())
	}
	slices.Sort(all)
	for share, want := range map[float64]time.Duration{.5: 300 * time.Millisecond, .95: 900 * time.Millisecond} {
		if got := all[int(share*10_000)]; got < want*95/100 || got > want*105/100 {
			t.Errorf("%v of all take up to %s, want %s", share, got, want)
		}
	}
}

func TestTimesThatMakeNoSenseAreRefused(t *testing.T) {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	defer cancel()
	for want, h := range map[string]*Handler{
		"fault 'silent' requires for and period, with for the shorter one":                       {Fault: []Fault{{Action: "silent", For: 30, Period: 30}}},
		"fault 'silent' requires for and period, with for the shorter one, got 0s and 1m0s":      {Fault: []Fault{{Action: "silent", Period: caddy.Duration(time.Minute)}}},
		"fault 'reset' does not take for or period":                                              {Fault: []Fault{{Action: "reset", For: 1}}},
		"first_token_latency_p95 must be more than first_token_latency, got '200ms' and '300ms'": {FirstTokenLatency: 300 * ms, FirstTokenLatencyP95: 200 * ms},
	} {
		err := h.Provision(ctx)
		if err == nil {
			err = h.Validate()
		}
		if err == nil || len(err.Error()) < len(want) || err.Error()[:len(want)] != want {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}
