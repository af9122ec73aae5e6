// Package statuspage is the directive openai_lb_status: a web page that shows
// operators the backends, callers and problems of all pools.
//
// The page is for somebody who was woken at night. It says first what needs a
// person (TestProblemsAreThoseThatNeedAnOperatorFirst) and what will end by
// itself (TestThePageSaysWhoEndsAProblem). Below are charts of the last five
// minutes, the backends, the busiest callers and the replicas. The same is
// available as JSON (TestThePageIsAvailableAsJSON).
//
// The server makes all of the page, also without scripts. A small script keeps
// an open page up to date: it receives the lines that have changed since the
// last version (TestOnlyTheLinesAreSentThatDiffer). One version is made for all
// watchers, only while somebody watches, and takes a small part of the time
// (TestMakingThePageTakesNoMoreThanASmallPartOfTheTime). Nobody who reads the
// page waits for another replica (TestThePageWaitsForNoReplica).
//
// The page can change nothing (TestThePageIsReadOnly), loads nothing from other
// hosts (TestThePageIsSelfContained), and escapes every name, because clients
// and backends choose some of them
// (TestThePageShowsEveryBackendAndEscapesEverything).
package statuspage

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
)

func init() {
	caddy.RegisterModule(new(Handler))
	httpcaddyfile.RegisterHandlerDirective("openai_lb_status", parseCaddyfile)
	// Not before reverse_proxy, where openai_lb stands: which of two directives
	// at one place comes first depends on the order in which their packages are
	// initialized.
	httpcaddyfile.RegisterDirectiveOrder("openai_lb_status", httpcaddyfile.Before, "metrics")
}

// Handler answers GET with a page that shows the pools of all openai_lb
// handlers: the share of the requests of the last five minutes that were not
// served, problems and what to do about them, the state of each backend and
// model, how long a cooldown still lasts, what callers have used of their
// limits, the traffic, and recent cooldowns. With the query `?callers`, it
// shows the callers: who uses how much of which limit, and who was refused in
// the last hour, and why. All figures are sums over the replicas that share
// state. The page is read-only, and updates itself. With the query `?json` the
// answer is the same as JSON. It shows no key and no URL, but the names of
// pools, backends, models and callers: let only those reach it who may know
// them.
type Handler struct {
	// MaxWatchers is how many browsers may watch the page at a time. Others see
	// it too, but it does not update itself for them. Default: 32.
	MaxWatchers int `json:"max_watchers,omitempty"`

	watchers atomic.Int64
	unloaded <-chan struct{}
	leave    func()

	mu       sync.Mutex
	status   Status
	fragment []byte
	// pause is how long they count.
	pause time.Duration
	// others are what other replicas see, which are asked again at a time.
	// While they are asked, asking is not nil; it is closed after the answers.
	others   status.Others
	askAgain time.Time
	asking   chan struct{}
}

const defaultMaxWatchers = 32

// CaddyModule returns the Caddy module information.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.openai_lb_status",
		New: func() caddy.Module { return new(Handler) },
	}
}

// Provision sets up the handler.
func (h *Handler) Provision(ctx caddy.Context) error {
	if h.MaxWatchers < 0 {
		return fmt.Errorf("max_watchers '%d' is not a whole number of 1 or more", h.MaxWatchers)
	}
	h.MaxWatchers = cmp.Or(h.MaxWatchers, defaultMaxWatchers)
	h.unloaded = ctx.Done()
	metrics.Recent.Use()
	h.leave = sync.OnceFunc(metrics.Recent.Leave)
	return nil
}

// Cleanup ends the use of the recent counts.
func (h *Handler) Cleanup() error {
	if h.leave != nil {
		h.leave()
	}
	return nil
}

func parseCaddyfile(helper httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	h := new(Handler)
	return h, h.UnmarshalCaddyfile(helper.Dispenser)
}

// UnmarshalCaddyfile sets up the handler from Caddyfile tokens. Syntax:
//
//	openai_lb_status [<matcher>] {
//	    max_watchers <n>
//	}
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return directive.Unmarshal(d, directive.Options{"max_watchers": directive.Int(&h.MaxWatchers, 1, directive.MaxInt)})
}

// ServeHTTP implements caddyhttp.MiddlewareHandler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, _ caddyhttp.Handler) error {
	header := w.Header()
	header.Set("Cache-Control", "no-store")
	header.Set("X-Content-Type-Options", "nosniff")
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		header.Set("Allow", "GET, HEAD")
		return caddyhttp.Error(http.StatusMethodNotAllowed, fmt.Errorf("method %s is not allowed", r.Method))
	}
	if r.URL.Query().Has("events") {
		return h.stream(w, r)
	}
	now, view := time.Now(), viewOf(r)
	status, fragment, err := h.render(now, view)
	if err != nil {
		return err
	}
	var page []byte
	if r.URL.Query().Has("json") {
		header.Set("Content-Type", "application/json")
		if page, err = json.Marshal(view.of(status)); err != nil {
			return err
		}
		page = append(page, '\n')
	} else {
		header.Set("Content-Type", "text/html; charset=utf-8")
		header.Set("Content-Security-Policy", contentSecurityPolicy)
		page = assemble(fragment, view.tools(), now)
	}
	header.Set("Content-Length", strconv.Itoa(len(page)))
	header.Set("Referrer-Policy", "no-referrer")
	header.Set("Cross-Origin-Resource-Policy", "same-origin")
	if r.Method == http.MethodGet {
		_, err = w.Write(page)
	}
	return err
}

// askInterval is how often other replicas are asked, and askPerRow how much
// longer it takes for each row of their answers: that costs a fiftieth of the
// time.
const askInterval, askPerRow = 2 * time.Second, 200 * time.Microsecond

// maxAsking is how long the answers are read, and maxWait how long a page waits
// for them.
const maxAsking, maxWait = 10 * time.Second, 2 * time.Second

// pauseFactor is how many times as long as it takes to make the page it counts:
// that costs 0.5 % of one core, however many backends there are. maxPause is
// the longest time that it counts.
const pauseFactor, maxPause = 200, 5 * time.Second

// pauseAfter returns how long a page counts that took so long to make.
func pauseAfter(took time.Duration) time.Duration {
	return min(max(interval/2, pauseFactor*took), maxPause)
}

// render returns what the page shows, and as HTML the part of it that changes.
// However many watchers there are, the status is made only once in a while, and
// so is the HTML of the first page.
func (h *Handler) render(now time.Time, v view) (s Status, fragment []byte, err error) {
	h.askOthers(now)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.fragment == nil || now.Sub(h.status.Time) >= h.pause {
		began := time.Now()
		s = statusAt(now, h.others)
		if fragment, err = (view{}).render(s); err != nil {
			return s, nil, err
		}
		h.status, h.fragment, h.pause = s, fragment, pauseAfter(time.Since(began))
	}
	if v.callers {
		fragment, err = v.render(h.status)
		return h.status, fragment, err
	}
	return h.status, h.fragment, nil
}

// askOthers asks the other replicas in the background, if the last answers are
// old enough. It waits for new answers only if the last ones are so old that a
// page would show them as current.
func (h *Handler) askOthers(now time.Time) {
	h.mu.Lock()
	if h.asking == nil && !now.Before(h.askAgain) {
		asking := make(chan struct{})
		h.asking = asking
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), maxAsking)
			defer cancel()
			others := status.AskOthers(ctx)
			h.mu.Lock()
			defer h.mu.Unlock()
			h.others, h.askAgain, h.asking = others,
				time.Now().Add(askInterval+time.Duration(others.Number)*askPerRow), nil
			close(asking)
		}()
	}
	asking, isOld := h.asking, now.Sub(h.askAgain) >= askInterval
	h.mu.Unlock()
	if asking != nil && isOld {
		pools.WaitFor(asking, maxWait)
	}
}

// Interface guards
var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.CleanerUpper          = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
	_ caddyfile.Unmarshaler       = (*Handler)(nil)
)
