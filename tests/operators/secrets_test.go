package operators

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/status/statuspage"
)

// TestASecretThatCannotBeReloadedIsAMetricAndAProblemUntilItIs sends no
// request: to look at the metrics or the page is enough to have the files read.
func TestASecretThatCannotBeReloadedIsAMetricAndAProblemUntilItIs(t *testing.T) {
	folder, name := t.TempDir(), lbtest.Unique("secrets")
	callers, key := filepath.Join(folder, "callers"), filepath.Join(folder, "key")
	lbtest.WriteFile(t, callers, "alice client-key-of-alice\nbob client-key-of-bob\n")
	lbtest.WriteFile(t, key, "key-of-a")
	config := "openai_lb {\npool " + name + "\nbackend http://a {\nname a\napi_key {file." + key + "}\n}\nclient_keys_file " + callers + "\n}"
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		wantStale := func(stale ...string) {
			t.Helper()
			var page struct {
				Problems []struct {
					NeedsOperator bool `json:"needs_operator"`
					Class, Cause  string
					Since         time.Time
					RunbookURL    string `json:"runbook_url"`
				}
			}
			pageOf(t, name, &page)
			var shown []string
			for _, p := range page.Problems {
				shown = append(shown, p.Cause)
				if !p.NeedsOperator || p.Class != "stale_secret" || p.Since.IsZero() || !strings.HasSuffix(p.RunbookURL, "#a-new-key-is-not-accepted") {
					t.Errorf("the page has the problem %+v", p)
				}
			}
			if strings.Join(shown, ", ") != strings.Join(stale, ", ") {
				t.Errorf("the page shows %q, want %q", shown, stale)
			}
			metrics, html := lbtest.Scrape(t), httptest.NewRecorder()
			if err := new(statuspage.Handler).ServeHTTP(html, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/status", nil), nil); err != nil {
				t.Fatal(err)
			}
			for _, secret := range []string{"client keys", "api_key of backend a"} {
				want := 0.0
				if strings.Contains(strings.Join(stale, ", "), secret) {
					want = 1
				}
				if got := metrics.Sum("secret_stale", map[string]string{"pool": name, "secret": secret}); got != want {
					t.Errorf("the metric of %s is %v, want %v", secret, got, want)
				}
				if strings.Contains(html.Body.String(), "could not reload: "+secret) != (want == 1) {
					t.Errorf("the page does not say what is true of %s: %s", secret, html.Body)
				}
			}
		}
		wantStale()
		lbtest.WriteFile(t, callers, "alice client-key-of-alice\ncarol\n")
		time.Sleep(time.Second)
		wantStale("client keys")
		w.Send(w.RequestWithKey("client-key-of-alice")).WantServed(t, "a")
		w.Send(w.RequestWithKey("client-key-of-bob")).WantError(t, 401, "invalid_api_key")
		if err := os.Remove(key); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		wantStale("client keys", "api_key of backend a")
		w.Send(w.RequestWithKey("client-key-of-alice")).WantServed(t, "a")
		lbtest.WriteFile(t, callers, "carol client-key-of-carol\n")
		time.Sleep(time.Second)
		wantStale("api_key of backend a")
		lbtest.WriteFile(t, key, "key-of-a")
		time.Sleep(time.Second)
		wantStale()
	})
}
