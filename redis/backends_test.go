package redis

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// account has many backends, each with a model of its own that it may throttle,
// and a spare one that has every model and never throttles.
type account struct {
	*httptest.Server

	mu        sync.Mutex
	throttles map[string]bool
	// refused are those requests that a backend refused.
	refused map[string][]refusal
	served  int
}

// refusal is when a backend refused a request, and of whom, if replicas say so.
type refusal struct {
	at time.Time
	by string
}

func newAccount(t testing.TB) *account {
	a := &account{throttles: make(map[string]bool), refused: make(map[string][]refusal)}
	a.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		name := strings.Split(r.URL.Path, "/")[1]
		w.Header().Set("Content-Type", "application/json")
		a.mu.Lock()
		throttled := a.throttles[name]
		if throttled {
			a.refused[name] = append(a.refused[name], refusal{time.Now(), r.Header.Get("X-Replica")})
		} else {
			a.served++
		}
		a.mu.Unlock()
		if throttled {
			w.Header().Set("Retry-After", "10")
			w.WriteHeader(http.StatusTooManyRequests)
			io.WriteString(w, `{"error":{"code":"429","message":"Rate limit reached"}}`)
			return
		}
		io.WriteString(w, `{"id":"chatcmpl-1"}`)
	}))
	t.Cleanup(a.Close)
	return a
}

// backends are the options for n backends and the spare one. more are options
// of each.
func (a *account) backends(n int, more ...string) string {
	var options strings.Builder
	for i := range n {
		fmt.Fprintf(&options, "backend %s/r%d/v1 {\nname r%d\nmodel r%d\napi_key s3cret-of-the-backend\n%s\n}\n", a.URL, i, i, i, strings.Join(more, "\n"))
	}
	fmt.Fprintf(&options, "backend %s/spare/v1 {\nname spare\npriority 2\napi_key s3cret-of-the-backend\n}\n", a.URL)
	return options.String()
}

func (a *account) throttle(name string, throttles bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.throttles[name] = throttles
}

// refusals are those of a backend.
func (a *account) refusals(name string) []refusal {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.refused[name])
}

func (s *server) option() string {
	return fmt.Sprintf("state redis {\naddress %s\n}\n", s.address)
}
