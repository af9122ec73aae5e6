package redis

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// A file of one name may hold other keys: at another team's replicas, or while
// it changes.
func TestReplicasWithOtherKeysInAFileShareNoCooldown(t *testing.T) {
	var throttled atomic.Value
	throttled.Store("Bearer old")
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		if r.Header.Get("Authorization") == throttled.Load() {
			w.Header().Set("Retry-After", "60")
			w.WriteHeader(http.StatusTooManyRequests)
		}
		io.WriteString(w, `{}`)
	}))
	t.Cleanup(backend.Close)
	file := filepath.Join(t.TempDir(), "key")
	options := startServer(t).option() + fmt.Sprintf("backend %s/v1 {\nname a\nmodel m\napi_key {file.%s}\n}\nbackend %s/v1 {\nname spare\npriority 2\n}\n", backend.URL, file, backend.URL)
	cooldowns := func(r *replica) int { return len(r.logged("cooldown started", "a")) }

	lbtest.WriteFile(t, file, "old")
	first := startReplica(t, options)
	inTouch(t, []*replica{first})
	first.post("m")
	lbtest.WaitFor(t, func() bool { return cooldowns(first) == 1 })
	lbtest.WriteFile(t, file, "new")
	second := startReplica(t, options)
	inTouch(t, []*replica{first, second}) // it has read what there is
	if n := cooldowns(second); n != 0 {
		t.Errorf("with the new key, a got %d cooldowns of the old one", n)
	}
	lbtest.WaitFor(t, func() bool {
		first.post("m")
		return len(first.logged("api_key changed", "a")) == 1
	})
	throttled.Store("Bearer new")
	second.post("m")
	lbtest.WaitFor(t, func() bool { return cooldowns(first) == 2 && cooldowns(second) == 1 })
}
