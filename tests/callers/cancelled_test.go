package callers

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/simulator"
)

// simulate has a backend answer as a simulator does, and returns what that has
// counted.
func (w *world) simulate(t *testing.T, backend string) (status func() simulator.Status) {
	t.Helper()
	sim := &simulator.Handler{FirstTokenLatency: caddy.Duration(500 * time.Millisecond), TokenLatency: caddy.Duration(20 * time.Millisecond)}
	if err := sim.Provision(lbtest.Context(t)); err != nil {
		t.Fatal(err)
	}
	serve := func(rw http.ResponseWriter, r *http.Request) {
		sim.ServeHTTP(rw, caddyhttp.PrepareRequest(r, caddy.NewReplacer(), rw, nil), nil)
	}
	w.Serve(backend+":80", http.HandlerFunc(serve))
	w.Serve(backend+"-status:80", http.HandlerFunc(serve))
	client := &http.Client{Transport: &http.Transport{DialContext: w.Dial, DisableKeepAlives: true}}
	return func() (s simulator.Status) {
		res := lbtest.Do(t, client, lbtest.NewRequest(t, http.MethodGet, "http://"+backend+"-status/_simulator/status", nil))
		if err := json.NewDecoder(res.Body).Decode(&s); err != nil {
			t.Fatal(err)
		}
		return s
	}
}

// TestTenThousandStreamsCancelledAtRandomLeaveNothingReserved has streams of
// two callers. Those of bob are cancelled at any time, before the reply, during
// it or after it. Those of alice are read until their end mark, and half of
// them are cancelled then.
func TestTenThousandStreamsCancelledAtRandomLeaveNothingReserved(t *testing.T) {
	streams, atATime := 10_000, 200
	if testing.Short() || lbtest.Race {
		streams = 1000
	}
	inBubbleWith(t, "backend http://a {\nmodel x\n}\nbackend http://b {\nmodel y\n}\ncaller * {\ntokens 1G/minute\n}", func(t *testing.T, w *world) {
		statusOfA, statusOfB := w.simulate(t, "a"), w.simulate(t, "b")
		var wg sync.WaitGroup
		places := make(chan struct{}, atATime)
		random := rand.New(rand.NewPCG(1, 2))
		for i := range streams {
			places <- struct{}{}
			output, wait, leaves := 1+random.IntN(20), time.Duration(random.IntN(1200))*time.Millisecond, random.IntN(2) == 0
			wg.Go(func() {
				defer func() { <-places }()
				if i%2 == 0 {
					w.stream(t, bobKey, "y", output, wait, true)
				} else {
					w.stream(t, aliceKey, "x", output, time.Hour, leaves)
				}
			})
		}
		wg.Wait()
		synctest.Wait()
		a, b := statusOfA(), statusOfB()
		alice, bob := w.of("alice"), w.of("bob")
		if alice.Reserved != 0 || bob.Reserved != 0 || alice.InFlight != 0 || bob.InFlight != 0 {
			t.Errorf("still reserved: %d of alice (%d in flight), %d of bob (%d)", alice.Reserved, alice.InFlight, bob.Reserved, bob.InFlight)
		}
		if want := a.Tokens.Input + a.Tokens.Output; alice.Today != want || want == 0 {
			t.Errorf("alice was charged with %d tokens, and the simulator counted %d", alice.Today, want)
		}
		if b.Cancelled < int64(streams)/8 || b.Cancelled == b.Admitted {
			t.Errorf("%d of %d streams were cancelled", b.Cancelled, b.Admitted)
		}
		if bob.Today < b.Tokens.Output/2 {
			t.Errorf("bob was charged with %d tokens, and the simulator counted %d and %d", bob.Today, b.Tokens.Input, b.Tokens.Output)
		}
	})
}

// stream asks for a stream, and reads it until its end mark or until the time
// is over.
func (w *world) stream(t *testing.T, key, model string, output int, until time.Duration, leaves bool) {
	ctx, leave := context.WithTimeout(t.Context(), until)
	defer leave()
	body := fmt.Sprintf(`{"model":%q,"stream":true,"max_tokens":%d,"messages":[{"role":"user","content":"Say hello to the world."}]}`, model, output)
	r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(body)).WithContext(ctx)
	r.Header.Set("Authorization", "Bearer "+key)
	res, err := w.Client.Do(r)
	if err != nil {
		return
	}
	defer res.Body.Close()
	for lines := bufio.NewScanner(res.Body); lines.Scan(); {
		if leaves && lines.Text() == "data: [DONE]" {
			return
		}
	}
}
