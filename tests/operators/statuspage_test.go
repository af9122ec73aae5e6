package operators

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/modules/status/statuspage"
)

func TestTheStatusPageShowsNoSecret(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	a.Replies(lbtest.Says(429, `{"error":{"message":"sk-of-a is over its limit","code":"sk-of-a"}}`, "Retry-After", "60", "X-Key", "sk-of-a"))
	address := lbtest.ServeAt(t, `openai_lb_status /status
	openai_lb {
		client_key alice sk-1234-of-alice
		backend `+server.URL+`/base {
			name a
			api_key sk-of-a
			header X-Gateway-Key sk-of-the-gateway
		}
	}`)
	client := lbtest.NewClient(t)
	lbtest.Ask(client, "http://"+address+"/v1/chat/completions?api-key=sk-1234-of-alice", "Authorization", "Bearer sk-1234-of-alice")
	for query, shown := range map[string]string{"": "throttled</a> (429), gpt-4o", "?json": `"model":"gpt-4o","deployment":"gpt-4o","class":"throttled"`} {
		page := lbtest.Get(client, "http://"+address+"/status"+query)
		if page.Status != http.StatusOK || !strings.Contains(page.Body, shown) {
			t.Fatalf("got %d %s", page.Status, page.Body)
		}
		for _, secret := range []string{"sk-1234", "sk-of-a", "sk-of-the-gateway", server.Listener.Addr().String(), "/base"} {
			if strings.Contains(page.Body, secret) {
				t.Errorf("the page%s shows %s", query, secret)
			}
		}
	}
}

// pageOf returns what the status page says of a pool, as JSON.
func pageOf(t *testing.T, name string, into any) {
	t.Helper()
	w := httptest.NewRecorder()
	if err := new(statuspage.Handler).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/status?json", nil), nil); err != nil {
		t.Fatal(err)
	}
	var page struct{ Pools []json.RawMessage }
	if err := json.Unmarshal(w.Body.Bytes(), &page); err != nil {
		t.Fatal(err)
	}
	for _, text := range page.Pools {
		var pool struct{ Pool string }
		if err := json.Unmarshal(text, &pool); err != nil {
			t.Fatal(err)
		}
		if pool.Pool == name {
			if err := json.Unmarshal(text, into); err != nil {
				t.Fatal(err)
			}
			return
		}
	}
	t.Fatalf("the page has no pool %s: %s", name, w.Body)
}

func TestThePageShowsTheLastFiveMinutes(t *testing.T) {
	name := lbtest.Unique("page")
	config := "openai_lb {\npool " + name + `
		backend http://a {
			model gpt-4o a-4o
		}
		backend http://b {
			priority 2
			model gpt-4o b-4o
		}
	}`
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		metrics.Recent.Use()
		defer metrics.Recent.Leave()
		type quantiles struct{ P50, P95 *float64 }
		type page struct {
			Served       int64 `json:"served"`
			NotServed    int64 `json:"not_served"`
			CallerErrors int64 `json:"caller_errors"`
			Classes      []struct{ Class string }
			FirstByte    quantiles `json:"time_to_first_byte_seconds"`
			Backends     []struct {
				Requests, Throttles, Failures int64
				Utilization                   map[string]float64 `json:"deployment_utilization_ratio"`
				FirstByte                     quantiles          `json:"time_to_first_byte_seconds"`
			}
		}
		after := func(delay time.Duration, reply http.HandlerFunc) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				time.Sleep(delay)
				reply(w, r)
			}
		}
		w.Backends["a"].Replies(after(time.Millisecond, lbtest.Says(200, `{}`, "Azure-Openai-Deployment-Utilization", "89.5%")))
		for range 8 {
			w.Post(`{"model":"gpt-4o"}`).WantServed(t, "a")
		}
		w.Backends["a"].Replies(lbtest.Throttled("60"))
		w.Backends["b"].Replies(after(3*time.Second, lbtest.Says(200, `{}`)))
		for range 8 {
			w.Post(`{"model":"gpt-4o"}`).WantServed(t, "b")
		}
		w.Backends["b"].Replies(lbtest.Throttled("60"))
		for range 4 {
			w.Post(`{"model":"gpt-4o"}`).WantError(t, http.StatusTooManyRequests, "rate_limit_exceeded")
		}
		w.Post(`{"model":"gpt-5"}`).WantError(t, http.StatusNotFound, "model_not_found")
		time.Sleep(metrics.SpanLength)
		var got page
		pageOf(t, name, &got)
		a, b := got.Backends[0], got.Backends[1]
		if got.Served != 16 || got.NotServed != 4 || got.CallerErrors != 1 || len(got.Classes) != 2 || got.Classes[0].Class != "all_throttled" {
			t.Errorf("got %+v", got)
		}
		if a.Requests != 8 || a.Throttles != 1 || a.Failures != 0 || b.Requests != 8 || b.Throttles != 1 || a.Utilization["a-4o"] != .895 {
			t.Errorf("got %+v", got.Backends)
		}
		if *a.FirstByte.P95 > .01 || *b.FirstByte.P50 < 2.5 || *b.FirstByte.P50 > 5 || *got.FirstByte.P50 > 2.5 || *got.FirstByte.P95 < 2.5 {
			t.Errorf("the first byte took %v %v %v", *got.FirstByte.P95, *a.FirstByte.P95, *b.FirstByte.P50)
		}
		time.Sleep(5 * time.Minute)
		var later page
		pageOf(t, name, &later)
		if later.Served+later.NotServed+later.CallerErrors > 0 || later.FirstByte.P50 != nil || later.Backends[0].Utilization == nil || len(later.Backends[0].Utilization) > 0 {
			t.Errorf("five minutes later: %+v", later)
		}
	})
}

func TestAReloadEndsAWatchAndKeepsWhatItShows(t *testing.T) {
	a, server := lbtest.Listen(t, "a")
	port := lbtest.FreePort(t)
	address := fmt.Sprintf("http://127.0.0.1:%d", port)
	config := fmt.Sprintf(`{
		admin off
		auto_https off
	}
	:%d {
		bind 127.0.0.1
		header X-Config 1
		openai_lb_status /status
		openai_lb /v1/* {
			backend %s {
				name a
			}
		}
	}`, port, server.URL)
	lbtest.Run(t, config)
	client := lbtest.NewClient(t)
	a.Replies(lbtest.Throttled("60"))
	lbtest.Ask(client, address+"/v1/chat/completions")
	watch := func() *bufio.Scanner {
		t.Helper()
		r := lbtest.NewRequest(t, http.MethodGet, address+"/status?events", http.NoBody)
		var res *http.Response
		lbtest.WaitFor(t, func() (ok bool) { // a new connection may have reached the listener of the old config, which is closing
			var err error
			res, err = client.Do(r)
			return err == nil
		})
		t.Cleanup(func() { res.Body.Close() })
		lines := bufio.NewScanner(res.Body)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			if strings.HasPrefix(lines.Text(), "data: ") {
				break
			}
		}
		if !strings.Contains(lines.Text(), `data-state=\"cooling_down\"`) {
			t.Errorf("the first event is %s, %v", lines.Text(), lines.Err())
		}
		return lines
	}
	first := watch()
	lbtest.Reload(t, strings.Replace(config, "X-Config 1", "X-Config 2", 1))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for first.Scan() { // until it ends
		}
	}()
	lbtest.Within(t, "the watch ends with its config", ended)
	watch()
}
