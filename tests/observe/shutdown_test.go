package observe

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// listed answers with a list of models. A date of the list is a number of days from now.
func listed(compress bool) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		day := func(days int) string { return `"` + time.Now().AddDate(0, 0, days).UTC().Format(time.DateOnly) + `"` }
		text := []byte(`{"object":"list","data":[{"id":"soon","object":"model","created":1,"owned_by":"o","shutdown_date":` + day(59) +
			`},{"id":"past","shutdown_date":` + day(-1) + `},{"id":"late","shutdown_date":` + day(61) + `},{"id":"unused","shutdown_date":` + day(1) +
			`},{"id":"stays","shutdown_date":null},{"id":"older"},{"id":"odd","shutdown_date":7},{"id":"odder","shutdown_date":"soon"}]}`)
		w.Header().Set("Content-Type", "application/json")
		if compress {
			var b bytes.Buffer
			z := gzip.NewWriter(&b)
			z.Write(text)
			z.Close()
			w.Header().Set("Content-Encoding", "gzip")
			text = b.Bytes()
		}
		w.Write(text)
	}
}

// shutdowns are the lines about shutdowns since the last call.
func shutdowns(w *lbtest.World, seen *int) string {
	lines := w.Logged("model shuts down")[*seen:]
	*seen += len(lines)
	var texts []string
	for _, l := range lines {
		fields := l.ContextMap()
		texts = append(texts, fmt.Sprint(fields["pool"], " ", fields["backend"], " ", fields["deployment"], " ", fields["shutdown_date"]))
	}
	return strings.Join(texts, ", ")
}

func TestAModelInUseThatIsShutDownSoonIsReportedOnceADay(t *testing.T) {
	for _, c := range []struct {
		name, options, path string
		compress            bool
	}{
		{"models that requests named", "", "/v1/models", false},
		{"a compressed list", "", "/v1/models", true},
		{"models that the config names", "model soon\nmodel past\nmodel late\nmodel stays\nmodel older\nmodel odd\nmodel odder\n", "/openai/v1/models", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			name := lbtest.Unique("shutdown")
			// without the other backend, the balancer would list the models itself
			config := "openai_lb {\npool " + name + "\nbackend http://a {\n" + c.options + "}\nbackend http://b {\npriority 2\n}\n}"
			lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
				for _, model := range []string{"soon", "past", "late", "stays", "older", "odd", "odder"} {
					w.Post(`{"model":"`+model+`"}`).WantServed(t, "a")
				}
				w.Backends["a"].Replies(listed(c.compress))
				list := func() {
					t.Helper()
					r := w.Request(http.MethodGet, c.path, nil)
					r.Header.Set("Accept-Encoding", "gzip")
					if reply := w.Send(r); reply.Status != 200 || len(reply.Body) < 50 {
						t.Fatalf("got %d %q", reply.Status, reply.Body)
					}
				}
				seen := 0
				date := func(days int) string { return time.Now().AddDate(0, 0, days).UTC().Format(time.DateOnly) }
				list()
				want := fmt.Sprintf("%s a soon %s, %s a past %s", name, date(59), name, date(-1))
				if got := shutdowns(w, &seen); got != want {
					t.Errorf("got %q, want %q", got, want)
				}
				list()
				if got := shutdowns(w, &seen); got != "" {
					t.Errorf("the same day: got %q", got)
				}
				until := func(deployment string) float64 {
					return lbtest.SumOf(t, "model_shutdown_timestamp_seconds", map[string]string{"pool": name, "backend": "a", "deployment": deployment})
				}
				for deployment, days := range map[string]int{"soon": 59, "past": -1, "late": 61} {
					if at := time.Now().UTC().AddDate(0, 0, days).Truncate(24 * time.Hour); until(deployment) != float64(at.Unix()) {
						t.Errorf("%s is shut down at %v, want %v", deployment, until(deployment), at)
					}
				}
				for _, deployment := range []string{"unused", "stays", "odd"} {
					if got := until(deployment); got != 0 {
						t.Errorf("%s is shut down at %v", deployment, got)
					}
				}
				time.Sleep(25 * time.Hour)
				list()
				if got := shutdowns(w, &seen); !strings.Contains(got, " soon ") || strings.Contains(got, " unused ") {
					t.Errorf("the next day: got %q", got)
				}
				w.Backends["a"].Replies(lbtest.Says(200, `{"id":"soon","object":"model","shutdown_date":null}`))
				w.Send(w.Request(http.MethodGet, "/v1/models/soon", nil))
				if got := until("soon"); got != 0 {
					t.Errorf("a date that was taken back stays: %v", got)
				}
			})
		})
	}
}

// TestOnlyAListOfModelsIsRead has replies that are none, or whose names are those of Azure's catalog and not of deployments.
func TestOnlyAListOfModelsIsRead(t *testing.T) {
	const dated = `{"data":[{"id":"m","shutdown_date":"2000-01-02"}]}`
	lbtest.InBubble(t, "openai_lb {\nbackend http://a\nbackend http://b/openai {\npriority 2\n}\n}", func(t *testing.T, w *lbtest.World) {
		w.Backends["a"].Replies(lbtest.Says(200, dated))
		w.Post(`{"model":"m"}`)
		w.Send(w.Request(http.MethodGet, "/v1/files", nil))
		for _, body := range []string{`{`, `[]`, `{"data":{}}`, strings.Repeat(" ", 5<<20) + dated} {
			w.Backends["a"].Replies(lbtest.Says(200, body))
			w.Send(w.Request(http.MethodGet, "/v1/models", nil))
		}
		if n := len(w.Logged("model shuts down")); n != 0 {
			t.Errorf("there are %d lines", n)
		}
	})
}
