package redis

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

const (
	flexChat    = `{"model":"m","service_tier":"flex"}`
	defaultChat = `{"model":"m"}`
)

// deployment refuses a service tier, by default flex, with these headers of its
// 429, and serves all other requests.
type deployment struct {
	url     string
	refuses string
	// refusal has the headers of a 429, in pairs.
	refusal      atomic.Pointer[[]string]
	mu           sync.Mutex
	flex, served int
}

func newDeployment(t *testing.T, refusal ...string) *deployment {
	d := &deployment{refuses: "flex"}
	d.refusal.Store(&refusal)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		flex := strings.Contains(string(body), `"service_tier":"`+d.refuses+`"`)
		d.mu.Lock()
		if flex {
			d.flex++
		} else {
			d.served++
		}
		d.mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Backend", "deployment")
		if flex {
			headers := *d.refusal.Load()
			for i := 0; i < len(headers); i += 2 {
				w.Header().Set(headers[i], headers[i+1])
			}
			w.WriteHeader(http.StatusTooManyRequests)
		}
		io.WriteString(w, `{"id":"chatcmpl-1","choices":[]}`)
	}))
	t.Cleanup(server.Close)
	d.url = server.URL
	return d
}

// calls returns how many requests it refused and served since the last time.
func (d *deployment) calls() (flex, served int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	flex, served, d.flex, d.served = d.flex, d.served, 0, 0
	return flex, served
}

func (d *deployment) wantCalls(t *testing.T, what string, flex, served int) {
	t.Helper()
	if gotFlex, gotServed := d.calls(); gotFlex != flex || gotServed != served {
		t.Errorf("%s: the deployment refused %d and served %d requests, want %d and %d", what, gotFlex, gotServed, flex, served)
	}
}

// chat sends a chat, and returns the status.
func (r *replica) chat(body string) int {
	return lbtest.Post(r.client, r.address+"/v1/chat/completions", body).Status
}

func wantCooldowns(t *testing.T, replicas []*replica, backend string, times int) {
	t.Helper()
	for _, r := range replicas {
		lbtest.WaitFor(t, func() bool { return len(r.logged("cooldown started", backend)) == times })
	}
}

func TestARefusedServiceTierAloneCoolsDownAtAllReplicas(t *testing.T) {
	for _, tier := range []string{"flex", "ultrafast", "warp"} {
		t.Run(tier, func(t *testing.T) {
			d := newDeployment(t, "Retry-After", "60")
			d.refuses = tier
			replicas := startReplicas(t, 3, "backend "+d.url+" {\nname a\nmodel m\napi_key s3cret-of-the-backend\n}\n"+startServer(t).option())
			inTouch(t, replicas)
			chat := strings.Replace(flexChat, "flex", tier, 1)
			if status := replicas[0].chat(chat); status != http.StatusTooManyRequests {
				t.Errorf("%s got %d", tier, status)
			}
			wantCooldowns(t, replicas, "a", 1)
			d.wantCalls(t, "the first one", 1, 0)
			for _, r := range replicas {
				if refused, other := r.chat(chat), r.chat(defaultChat); refused != http.StatusTooManyRequests || other != http.StatusOK {
					t.Errorf("%s got %d, and default %d", tier, refused, other)
				}
			}
			d.wantCalls(t, "during the cooldown", 0, 3)
		})
	}
}

func TestASharedLimitThatFlexMeetsCoolsAllTiersDownAtAllReplicas(t *testing.T) {
	d := newDeployment(t, "X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "60s")
	replicas := startReplicas(t, 3, "backend "+d.url+" {\nname a\nmodel m\napi_key s3cret-of-the-backend\n}\n"+startServer(t).option())
	inTouch(t, replicas)
	replicas[0].chat(flexChat)
	wantCooldowns(t, replicas, "a", 1)
	d.calls()
	for _, r := range replicas {
		if status := r.chat(defaultChat); status != http.StatusTooManyRequests {
			t.Errorf("default got %d while no tokens are left", status)
		}
	}
	d.wantCalls(t, "while no tokens are left", 0, 0)
}

func TestBackendsOfOtherServiceTiersShareNoCooldownAtReplicas(t *testing.T) {
	d := newDeployment(t, "Retry-After", "60")
	backends := "backend " + d.url + " {\nname flex\nmodel m\napi_key s3cret-of-the-backend\nservice_tier flex\n}\n" +
		"backend " + d.url + " {\nname standard\nmodel m\npriority 2\napi_key s3cret-of-the-backend\nservice_tier default\n}\n"
	replicas := startReplicas(t, 3, backends+startServer(t).option())
	inTouch(t, replicas)
	replicas[0].chat(defaultChat)
	wantCooldowns(t, replicas, "flex", 1)
	d.wantCalls(t, "the first request", 1, 1)
	for _, r := range replicas {
		if status := r.chat(defaultChat); status != http.StatusOK {
			t.Errorf("got %d", status)
		}
		if cooldowns := r.logged("cooldown started", "standard"); len(cooldowns) > 0 {
			t.Errorf("standard got the cooldowns %v, too", cooldowns)
		}
	}
	d.wantCalls(t, "during the cooldown of flex", 0, 3)
}

func TestABackendWithoutTheServiceTierHasNoCooldownAtAnyReplica(t *testing.T) {
	lacks := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("Content-Type", "application/json")
		if strings.Contains(string(body), `"service_tier":"flex"`) {
			w.WriteHeader(http.StatusBadRequest)
			io.WriteString(w, `{"error":{"message":"not here","type":"invalid_request_error","param":"service_tier","code":"invalid_value"}}`)
			return
		}
		io.WriteString(w, `{"id":"chatcmpl-1","choices":[]}`)
	}))
	t.Cleanup(lacks.Close)
	replicas := startReplicas(t, 3, "backend "+lacks.URL+" {\nname a\nmodel m\n}\nbackend "+lacks.URL+"/v2 {\nname b\nmodel m\npriority 2\nservice_tier default\n}\n"+startServer(t).option())
	inTouch(t, replicas)
	for _, r := range replicas {
		if flex, other := r.chat(flexChat), r.chat(defaultChat); flex != http.StatusOK || other != http.StatusOK {
			t.Errorf("flex got %d, and default %d", flex, other)
		}
	}
	for _, r := range replicas {
		if cooldowns := r.logged("cooldown started", ""); len(cooldowns) > 0 {
			t.Errorf("got the cooldowns %v", cooldowns)
		}
	}
}
