package callers

import (
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/status/statuspage"
)

// noLimits is what the log says of such keys.
const noLimits = "client keys without a caller block have no limits: 'caller *' limits or refuses them"

// reported returns the callers in the latest report of keys without limits, and
// how many reports there are.
func (w *world) reported() (callers string, reports int) {
	entries := w.Logged(noLimits)
	for _, entry := range entries {
		var names []string
		for _, name := range entry.ContextMap()["callers"].([]any) {
			names = append(names, name.(string))
		}
		callers = strings.Join(names, " ")
	}
	return callers, len(entries)
}

// page returns the status page.
func page(t *testing.T) string {
	t.Helper()
	answer := httptest.NewRecorder()
	if err := new(statuspage.Handler).ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/status", nil), nil); err != nil {
		t.Fatal(err)
	}
	return answer.Body.String()
}

func TestKeysWithoutLimitsAreReportedIfOthersHaveSome(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	lbtest.WriteFile(t, file, "carol sk-carol-0123456789\ncarol sk-carol-9876543210\nalice sk-alice-9876543210\n")
	inBubble(t, "client_keys_file "+file+"\ncaller alice {\ntokens 1M/day\n}", func(t *testing.T, w *world) {
		w.chat(`{}`).WantServed(t, "a")
		if got, n := w.reported(); got != "bob carol" || n != 1 {
			t.Errorf("the log names %q in %d lines, want bob and carol in one", got, n)
		}
		if !strings.Contains(page(t), "Client keys without limits, because their callers have no block: bob, carol.") {
			t.Error("the page does not show bob and carol")
		}
		lbtest.WriteFile(t, file, "<b>dave</b> sk-dave-0123456789\n")
		time.Sleep(2 * time.Second)
		w.chat(`{}`).WantServed(t, "a")
		if got, n := w.reported(); got != "<b>dave</b> bob" || n != 2 {
			t.Errorf("after a reload, the log names %q in %d lines, want dave and bob in a second one", got, n)
		}
		if got := page(t); !strings.Contains(got, "no block: &lt;b&gt;dave&lt;/b&gt;, bob.") {
			t.Error("after a reload, the page does not show dave and bob")
		}
		lbtest.WriteFile(t, file, "alice sk-alice-9876543210\n")
		time.Sleep(2 * time.Second)
		w.chat(`{}`).WantServed(t, "a")
		if got, n := w.reported(); got != "bob" || n != 3 {
			t.Errorf("after a second reload, the log names %q in %d lines, want bob in a third one", got, n)
		}
	})
}

func TestKeysAreNotReportedIfAllHaveLimitsOrNoneHas(t *testing.T) {
	for _, options := range []string{"", "caller alice {\nmax_requests 5\n}\ncaller bob {\nmax_requests 5\n}", "caller * {\nmax_requests 5\n}", "caller alice {\nmax_requests 5\n}\ncaller * deny"} {
		inBubble(t, options, func(t *testing.T, w *world) {
			w.chat(`{}`)
			if got, n := w.reported(); n != 0 {
				t.Errorf("%s: the log names %q", options, got)
			}
			if strings.Contains(page(t), "Client keys without limits") {
				t.Errorf("%s: the page shows keys", options)
			}
		})
	}
}

func TestCallersWithoutABlockAreRefusedByDeny(t *testing.T) {
	inBubble(t, "caller alice {\ntokens 1M/day\n}\ncaller * deny", func(t *testing.T, w *world) {
		w.chat(`{}`).WantServed(t, "a")
		w.Backends["a"].Forget()
		for _, path := range []string{"/v1/chat/completions", "/v1/files", "/v1/unknown"} {
			w.post(bobKey, path, `{}`).WantError(t, http.StatusForbidden, "permission_denied")
		}
		r := w.Request(http.MethodGet, "/v1/models", nil)
		r.Header.Set("Api-Key", bobKey)
		w.Send(r).WantError(t, http.StatusForbidden, "permission_denied")
		w.post("sk-nobody-0123456789", "/v1/files", `{}`).WantError(t, http.StatusUnauthorized, "invalid_api_key")
		if got := len(w.Backends["a"].Received()); got != 0 {
			t.Errorf("the backend got %d requests", got)
		}
		lbtest.WantSums(t, w.Handler.Pool, "requests_total caller=bob class=unauthenticated code=403 4", "caller_limited_total 0")
	})
}
