package openailb

import (
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// checkReadyPath says what is wrong with ready_path, if anything is.
func checkReadyPath(path string) error {
	if !strings.HasPrefix(path, "/") || strings.ContainsAny(path, "?#*{}") {
		return fmt.Errorf("ready_path '%s': expected one whole path that begins with /, like /readyz", path)
	}
	return nil
}

// asksReady reports whether the request asks whether there is a backend to use.
func (h *Handler) asksReady(r *http.Request) bool {
	return h.ReadyPath != "" && r.URL.Path == h.ReadyPath &&
		(r.Method == http.MethodGet || r.Method == http.MethodHead)
}

var notReady = apiError{http.StatusServiceUnavailable,
	"No backend can be used: they are not reached, refuse their keys, or have no budget left.",
	"server_error", "no_backend_usable"}

// answerReady says whether there is a backend to use, and if not, when the
// first one may be. It calls none.
func (h *Handler) answerReady(r *http.Request) *http.Response {
	usable, wait := h.pool.usable(time.Now())
	var res *http.Response
	if usable {
		res = jsonResponse(r, http.StatusOK, map[string]string{"status": "ready"})
	} else {
		res = notReady.response(r)
		if wait > 0 {
			res.Header.Set("Retry-After", strconv.Itoa(int(math.Ceil(wait.Seconds()))))
		}
	}
	res.Header.Set("Cache-Control", "no-store")
	return res
}

// usable reports whether any member may be used, whatever the model. If none
// may, wait is until the first may again, or 0 if nobody knows.
func (p *pool) usable(now time.Time) (usable bool, wait time.Duration) {
	for _, m := range p.members {
		if m.usable(now) {
			return true, 0
		}
		// one that health checks found ill does not say when it is well
		if back := m.health.whole.returns(now).Sub(now); back > 0 && (wait == 0 || back < wait) {
			wait = back
		}
	}
	return false, wait
}

// usable reports whether the member is not benched as a whole. A model that is
// throttled, or fails, says nothing of the others.
func (m *member) usable(now time.Time) bool {
	promise, _ := m.health.whole.promise.state(now)
	suspicion, _ := m.health.whole.suspicion.state(now)
	return promise != benched && suspicion != benched && m.upstream.Healthy()
}
