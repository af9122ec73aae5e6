// Package tiers tests that tiers get their shares of backends, and all that is
// idle.
package tiers

import (
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestMain(m *testing.M) { lbtest.Main(m) }

// keys are the client keys of the callers. plain has no block and no tier.
var keys = map[string]string{"plain": "sk-plain-0123456789", "web": "sk-web-0123456789ab", "batch": "sk-batch-0123456789", "nightly": "sk-nightly-01234567"}

// callers are the options of the callers and their tiers.
const callers = `
	client_key plain sk-plain-0123456789
	client_key web sk-web-0123456789ab
	client_key batch sk-batch-0123456789
	client_key nightly sk-nightly-01234567
	caller web {
		tier interactive
	}
	caller batch {
		tier batch
	}
	caller nightly {
		tier nightly
	}
	tier interactive {
		reserve 20%
	}
	tier batch
	tier nightly
`

// twoBackends are a PTU and a pay-as-you-go deployment behind it.
const twoBackends = `
	backend http://ptu {
		model gpt-4o
		model gpt-4o-mini
	}
	backend http://payg {
		model gpt-4o
		model gpt-4o-mini
		priority 2
	}
`

// inBubble runs a test in a balancer with the callers and these options.
func inBubble(t *testing.T, options string, test func(*testing.T, *world)) {
	t.Helper()
	lbtest.InBubble(t, "openai_lb {\npool "+lbtest.Unique("tiers")+"\n"+callers+options+"\n}", func(t *testing.T, w *lbtest.World) { test(t, &world{w}) })
}

type world struct{ *lbtest.World }

const chat = `{"model":"gpt-4o","messages":[]}`

// post sends a request of a caller.
func (w *world) post(caller, path, body string) lbtest.Reply {
	r := w.Request(http.MethodPost, path, strings.NewReader(body))
	r.Header.Set("Authorization", "Bearer "+keys[caller])
	return w.Send(r)
}

// wantAt checks which backend serves a chat of the caller.
func (w *world) wantAt(t *testing.T, caller, backend string) {
	t.Helper()
	got := w.post(caller, "/v1/chat/completions", chat)
	if at := got.Header.Get("X-Backend"); got.Status != http.StatusOK || at != backend {
		t.Errorf("%s: got %d by %q, want %s", caller, got.Status, at, backend)
	}
}

// used has the backend serve with this utilization.
func (w *world) used(backend, percent string) {
	w.Backends[backend].Replies(lbtest.Says(200, `{"id":"chatcmpl-1","choices":[]}`, "Azure-OpenAI-Deployment-Utilization", percent, "X-Backend", backend))
}

// wantPassedOver checks for how many requests of a tier the backend was passed
// over.
func (w *world) wantPassedOver(t *testing.T, backend, tier string, want float64) {
	t.Helper()
	labels := map[string]string{"pool": w.Handler.Pool, "backend": backend, "tier": tier}
	if got := lbtest.Scrape(t).Sum("tier_passed_over_total", labels); got != want {
		t.Errorf("%s was passed over for %v requests of %s, want %v", backend, got, tier, want)
	}
}
