package operators

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/status/statuspage"
)

// TestAFullDiskIsAProblemAMetricAndAnAlertUntilAllIsSaved has the storage full
// for five minutes, of which the last three are without requests.
func TestAFullDiskIsAProblemAMetricAndAnAlertUntilAllIsSaved(t *testing.T) {
	name := lbtest.Unique("full-disk")
	config := lbtest.PoolOf("a", "pool "+name+"\nclient_key alice client-key-of-alice\ncaller alice {\nrequests 1000/day\n}")
	var rec lbtest.Recording
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		run := func(d time.Duration, send bool) {
			for range d / lbtest.ScrapeInterval {
				rec.Add(t, name)
				if send {
					w.Send(w.RequestWithKey("client-key-of-alice")).WantServed(t, "a")
				}
				time.Sleep(lbtest.ScrapeInterval)
			}
		}
		wantProblems := func(causes ...string) {
			t.Helper()
			var page struct {
				Problems []struct {
					NeedsOperator         bool `json:"needs_operator"`
					Class, Cause, Meaning string
					RunbookURL            string `json:"runbook_url"`
				}
			}
			pageOf(t, name, &page)
			var got []string
			for _, p := range page.Problems {
				got = append(got, p.Cause)
				if !p.NeedsOperator || p.Class != "not_written" || !strings.HasSuffix(p.RunbookURL, "#the-disk-is-full") || !strings.HasPrefix(p.Meaning, "not saved: ") {
					t.Errorf("the page has the problem %+v", p)
				}
			}
			if strings.Join(got, ", ") != strings.Join(causes, ", ") {
				t.Errorf("the page shows that %q are not saved, want %q", got, causes)
			}
			html := httptest.NewRecorder()
			if err := new(statuspage.Handler).ServeHTTP(html, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/status", nil), nil); err != nil {
				t.Fatal(err)
			}
			if strings.Contains(html.Body.String(), "not saved: the bill") != (causes != nil) {
				t.Errorf("the page does not say what is not saved: %s", html.Body)
			}
		}
		run(5*time.Minute, true)
		wantProblems()
		for _, record := range []string{"bill", "limits"} {
			at := lbtest.SumOf(t, "record_written_timestamp_seconds", map[string]string{"pool": name, "record": record})
			if age := time.Since(time.Unix(int64(at), 0)); age > lbtest.ScrapeInterval {
				t.Errorf("%s was written %s ago", record, age)
			}
		}
		free := lbtest.FillStorage(name)
		run(2*time.Minute, true)
		wantProblems("bill", "limits")
		run(3*time.Minute, false)
		wantProblems("bill", "limits")
		free()
		run(6*time.Minute, false)
		wantProblems()
	})
	rec.WantAlerts(t, "warning", lbtest.Firing{At: 5 * time.Minute}, lbtest.Firing{At: 8 * time.Minute, Alerts: []string{"OpenAILBNotSaved"}},
		lbtest.Firing{At: 16*time.Minute - lbtest.ScrapeInterval})
}
