package statuspage

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/metrics" // the directive metrics
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/modules/replicas"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
	"github.com/openai-lb/caddy-openai-lb/state/statetest"
)

// usePool puts a pool into use until the test ends.
func usePool(t *testing.T, name string, members ...string) map[string]*pool.Member {
	t.Helper()
	byName := make(map[string]*pool.Member)
	var all []*pool.Member
	for i, member := range members {
		m := pool.NewMember(member, new(pool.Health))
		m.Priority = i + 1
		byName[member], all = m, append(all, m)
	}
	e := &pools.Entry{Name: name, Pool: pool.New(all, status.Recorder(name))}
	pools.Default.Add(e)
	t.Cleanup(func() {
		pools.Default.Remove(e)
		e.Pool.Close()
	})
	return byName
}

func newHandler(t *testing.T, watchers int) (h *Handler, unload func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	return &Handler{MaxWatchers: watchers, unloaded: ctx.Done()}, cancel
}

func throttle(model string, wait time.Duration) pool.Refusal {
	return pool.Refusal{Reason: pool.Reason{Class: "throttled", Status: 429}, Throttle: true, Model: model, Wait: wait}
}

func ask(t *testing.T, h *Handler, method, target string) (*httptest.ResponseRecorder, error) {
	t.Helper()
	w := httptest.NewRecorder()
	err := h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, target, nil), nil)
	return w, err
}

func TestThePageShowsEveryBackendAndEscapesEverything(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		const evil = `<script>alert("x")</script>`
		members := usePool(t, evil, evil+"1", "b", "c", "d")
		members[evil+"1"].CoolDown(throttle(evil+strings.Repeat("long", 50), 90*time.Second), time.Now())
		members["b"].CoolDown(pool.Refusal{Reason: pool.Reason{Class: "not_permitted", Status: 403, Cause: "missing_role"}, Whole: true, Wait: time.Minute}, time.Now())
		members["c"].Drain(pool.Order{By: "alice", Reason: evil, Time: time.Now()})
		h, _ := newHandler(t, 1)
		got, err := ask(t, h, http.MethodGet, "/status")
		if err != nil {
			t.Fatal(err)
		}
		page := got.Body.String()
		for _, want := range []string{
			"&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;1", "Cooling down", "throttled (429), ", "…</span>", "until 00:01:30 UTC",
			"not permitted</a> (403): missing role</span>", "Drained", "drained by alice at 1 Jan 00:00:00: &lt;script&gt;", "Available", "1 of 4 backends available, 2 cooling down, 1 drained.", "does not permit what its key is used for</a> <small>not permitted (403): missing role",
			`href="https://github.com/openai-lb/caddy-openai-lb/blob/main/docs/troubleshooting.md#502-upstream_credentials_rejected"`, "caddy-openai-lb (devel), Caddy ",
			"Priority 4", `aria-label="Requests per second: 0 now, at most 0 in the last five minutes"`, "no traffic", "as of",
		} {
			if !strings.Contains(page, want) {
				t.Errorf("the page has no %s", want)
			}
		}
		if strings.Contains(page, "alert(\"") || strings.Count(page, "<script") != 1 {
			t.Errorf("something is not escaped:\n%s", page)
		}
		if t.Failed() {
			t.Log(page)
		}
	})
}

func TestThePageIsSelfContained(t *testing.T) {
	h, _ := newHandler(t, 1)
	got, err := ask(t, h, http.MethodGet, "/status")
	if err != nil {
		t.Fatal(err)
	}
	page, policy := got.Body.String(), got.Header().Get("Content-Security-Policy")
	for tag, directive := range map[string]string{"style": "style-src", "script": "script-src"} {
		inline := regexp.MustCompile(`(?s)<` + tag + `>(.*)</` + tag + `>`).FindStringSubmatch(page)
		if inline == nil || !strings.Contains(policy, directive+" '"+digest(inline[1])+"';") {
			t.Errorf("%s of the page is not what %s allows", tag, policy)
		}
	}
	if !strings.HasPrefix(policy, "default-src 'none'; ") || strings.Contains(policy, "unsafe") {
		t.Errorf("the policy is %s", policy)
	}
	for _, reference := range regexp.MustCompile(`(?:src|href|url)\s*[=(]\s*["']?[^"')]*`).FindAllString(page, -1) {
		if !regexp.MustCompile(`^href="(data:|\?(json|callers)?$|#pool-\d+$)`).MatchString(reference) && !strings.HasPrefix(reference, `href="`+status.Troubleshooting+"#") {
			t.Errorf("the page refers to %s", reference)
		}
	}
	if inline := regexp.MustCompile(`<[^>]* (?:style|on[a-z]+)=`).FindString(page); inline != "" {
		t.Errorf("the policy forbids %s", inline)
	}
	for name, want := range map[string]string{
		"Cache-Control": "no-store", "Content-Type": "text/html; charset=utf-8", "X-Content-Type-Options": "nosniff",
		"Content-Length": fmt.Sprint(len(page)), "Referrer-Policy": "no-referrer",
	} {
		if got.Header().Get(name) != want {
			t.Errorf("%s is %q, want %q", name, got.Header().Get(name), want)
		}
	}
}

func TestThePageIsReadOnly(t *testing.T) {
	h, _ := newHandler(t, 1)
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodOptions} {
		got, err := ask(t, h, method, "/status?events")
		var refused caddyhttp.HandlerError
		if !errors.As(err, &refused) || refused.StatusCode != http.StatusMethodNotAllowed || got.Header().Get("Allow") != "GET, HEAD" {
			t.Errorf("%s: got %v, %v", method, err, got.Header())
		}
	}
	for target, contentType := range map[string]string{"/status": "text/html; charset=utf-8", "/status?events": "text/event-stream"} {
		got, err := ask(t, h, http.MethodHead, target)
		if err != nil || got.Body.Len() > 0 || got.Header().Get("Content-Type") != contentType || got.Header().Get("Cache-Control") != "no-store" {
			t.Errorf("HEAD %s: got %v, %v, %q", target, err, got.Header(), got.Body)
		}
	}
}

func TestThePageShowsWhoShares(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		usePool(t, "p", "a")
		hub := statetest.NewHub()
		for range 3 {
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() {
				replicas.New(hub.Store(), zap.NewNop()).Run(ctx)
				close(done)
			}()
			t.Cleanup(func() { cancel(); <-done })
		}
		h, _ := newHandler(t, 1)
		shows := func(want string) {
			t.Helper()
			got, err := ask(t, h, http.MethodGet, "/status")
			if err != nil || !strings.Contains(got.Body.String(), want) {
				t.Errorf("got %v and no %s in\n%s", err, want, got.Body)
			}
		}
		time.Sleep(5 * time.Second)
		shows("3 replicas share what they know, this one included.")
		shows("since 1 Jan 00:00:00")
		w := watch(t, h)
		w.heard(t)
		time.Sleep(9500 * time.Millisecond)
		if kinds, _ := w.heard(t); len(kinds) > 0 {
			t.Errorf("while nothing happens but heartbeats, a watcher heard %q", kinds)
		}
		w.leave()
		<-w.over
		hub.Fail(errors.New("down"))
		time.Sleep(5 * time.Second)
		shows("Out of touch: this one goes on by itself.")
		shows("last heard 00:00:1")
	})
}

// watcher is a browser that watches the page.
type watcher struct {
	header http.Header
	over   chan error
	leave  context.CancelFunc

	mu     sync.Mutex
	events []string
}

func (w *watcher) Header() http.Header { return w.header }
func (w *watcher) WriteHeader(int)     {}
func (w *watcher) Flush()              {}

func (w *watcher) Write(event []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, string(event))
	return len(event), nil
}

// heard returns the kinds of the events since the last time.
func (w *watcher) heard(t *testing.T) (kinds []string, last string) {
	t.Helper()
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.events {
		parts := regexp.MustCompile(`^id: \d+\nevent: (\w+)\ndata: (.*)\n\n$`).FindStringSubmatch(e)
		if parts == nil {
			t.Fatalf("not an event: %q", e)
		}
		kinds = append(kinds, parts[1])
		last = parts[2]
	}
	w.events = nil
	return kinds, last
}

func watch(t *testing.T, h *Handler) *watcher {
	t.Helper()
	ctx, leave := context.WithCancel(t.Context())
	w := &watcher{header: make(http.Header), over: make(chan error, 1), leave: leave}
	go func() {
		w.over <- h.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/status?events", nil), nil)
	}()
	return w
}

func TestAWatcherHearsOfChangesUntilItLeaves(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		a := usePool(t, "p", "a")["a"]
		h, _ := newHandler(t, 1)
		w := watch(t, h)
		wants := func(what string, want ...string) (last string) {
			t.Helper()
			got, last := w.heard(t)
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("%s: heard %q, want %q", what, got, want)
			}
			return last
		}
		wants("at first", "state")
		time.Sleep(9500 * time.Millisecond)
		wants("while nothing happens")
		time.Sleep(time.Second)
		wants("after ten seconds of that", "beat")
		a.CoolDown(throttle("gpt-4o", 5*time.Second), time.Now())
		time.Sleep(time.Second)
		if last := wants("the cooldown of a has started", "change"); !strings.Contains(last, `data-state=\"cooling_down\"`) || strings.Contains(last, "Not served") {
			t.Errorf("heard not only of a: %s", last)
		}
		time.Sleep(3 * time.Second)
		wants("the countdown is the page's own")
		time.Sleep(2 * time.Second)
		wants("a is back", "change")
		w.leave()
		if err := <-w.over; err != nil {
			t.Error(err)
		}
	})
}

func TestWatchersAreBoundedAndEndWithTheConfig(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		h, unload := newHandler(t, 2)
		first, second := watch(t, h), watch(t, h)
		synctest.Wait()
		third := watch(t, h)
		var refused caddyhttp.HandlerError
		if err := <-third.over; !errors.As(err, &refused) || refused.StatusCode != http.StatusServiceUnavailable || third.header.Get("Retry-After") != "10" {
			t.Errorf("one too many got %v, %v", err, third.header)
		}
		first.leave()
		<-first.over
		fourth := watch(t, h)
		if kinds, _ := fourth.heard(t); fmt.Sprint(kinds) != "[state]" {
			t.Errorf("after one has left, another heard %q", kinds)
		}
		unload()
		for _, w := range []*watcher{second, fourth} {
			if err := <-w.over; err != nil {
				t.Error(err)
			}
		}
		if n := h.watchers.Load(); n != 0 {
			t.Errorf("%d watchers are left", n)
		}
	})
}

func TestOptionsOfTheStatusPage(t *testing.T) {
	for config, want := range map[string]string{
		"openai_lb_status":                                "",
		"openai_lb_status {\nmax_watchers 3\n}":           "",
		"openai_lb_status {\nmax_watchers 0\n}":           "max_watchers '0' is not a whole number of 1 or more",
		"openai_lb_status /status":                        "unexpected argument '/status'",
		"openai_lb_status {\nmax_watchers 3\nwatchers\n}": "watchers",
	} {
		err := new(Handler).UnmarshalCaddyfile(caddyfile.NewTestDispenser(config))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", config, err, want)
		}
	}
}

// early and late stand where openai_lb does, before reverse_proxy. Variables
// are initialized before the package's init registers openai_lb_status, and the
// test's own init comes after it.
var _ = registerBeforeReverseProxy("early")

func init() { registerBeforeReverseProxy("late") }

// registerBeforeReverseProxy registers a directive that answers with its name.
func registerBeforeReverseProxy(name string) bool {
	httpcaddyfile.RegisterHandlerDirective(name, func(httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		return &caddyhttp.StaticResponse{Body: name}, nil
	})
	httpcaddyfile.RegisterDirectiveOrder(name, httpcaddyfile.Before, "reverse_proxy")
	return true
}

func TestTheStatusPageStandsBeforeABalancerWhicheverWasRegisteredFirst(t *testing.T) {
	adapter := caddyfile.Adapter{ServerType: httpcaddyfile.ServerType{}}
	config, _, err := adapter.Adapt([]byte(":80 {\n\treverse_proxy 127.0.0.1:1\n\tmetrics /metrics\n\tearly\n\tlate\n\trespond /health ok\n\topenai_lb_status /status\n}"), nil)
	if err != nil {
		t.Fatal(err)
	}
	at := -1
	for _, next := range []string{`"body":"ok"`, `"openai_lb_status"`, `"metrics"`, `"early"`, `"late"`, `"reverse_proxy"`} {
		before := at
		if at = strings.Index(string(config), next); at < before {
			t.Errorf("%s stands too early in %s", next, config)
		}
	}
}

func TestNumbersHaveThreeDigits(t *testing.T) {
	for n, want := range map[float64]string{
		0: "0", 0.04: "0.04", 0.2: "0.2", 3: "3", 3.14159: "3.1", 27.68: "27.7", 99.96: "100", 985: "985", 999.9: "1000",
		1400: "1.4 k", 22_700: "22.7 k", 812_345: "812 k", 61_220_118: "61.2 M", 5e9: "5 G",
	} {
		if got := short(n); got != want {
			t.Errorf("%v is %q, want %q", n, got, want)
		}
	}
}
