package waiting

import (
	"net/http"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestAWaitAddsNoRetries(t *testing.T) {
	fails := lbtest.Says(500, `{"error":{"message":"x"}}`)
	unknown := lbtest.Says(404, `{"error":{"message":"The model 'gpt-4o' does not exist","type":"invalid_request_error","param":null,"code":"model_not_found"}}`)
	for name, row := range map[string]struct {
		options string
		reply   http.HandlerFunc
	}{
		"lb_retries":                {"lb_retries 1", fails},
		"lb_try_duration":           {"lb_try_duration 1s", func(w http.ResponseWriter, r *http.Request) { time.Sleep(600 * time.Millisecond); fails(w, r) }},
		"a model that nobody knows": {"", unknown},
	} {
		calls := make(map[string][2]int)
		for _, wait := range []string{"", "\nwait 5s"} {
			inBubbleWith(t, row.options+"\nbackend http://a\nbackend http://b\nbackend http://c\nbackend http://d"+wait, func(_ *testing.T, w *world) {
				w.AllReply(row.reply)
				first := w.Send(w.request(0, "")).Status
				second := w.Send(w.request(0, "")).Status
				calls[wait] = [2]int{w.TotalCalls(), 1000*first + second}
			})
		}
		if calls[""] != calls["\nwait 5s"] {
			t.Errorf("%s: the calls and statuses are %v", name, calls)
		}
	}
}

// Each of the two backends takes longer to refuse a request than it asks it to
// stay away.
func TestRetriesEndWithTheWait(t *testing.T) {
	for _, clients := range []int{1, 20} {
		inBubbleWith(t, "backend http://a\nbackend http://b\nwait 1s", func(t *testing.T, w *world) {
			w.AllReply(func(rw http.ResponseWriter, r *http.Request) {
				time.Sleep(60 * time.Millisecond)
				lbtest.Status(429, "Retry-After-Ms", "50")(rw, r)
			})
			for i := range clients {
				w.ask(i, "", func(got lbtest.Reply, took time.Duration) {
					if got.Status != http.StatusTooManyRequests || took > 1300*time.Millisecond {
						t.Errorf("request %d got %d after %s", i, got.Status, took)
					}
				})
			}
			w.wg.Wait()
			t.Logf("%d clients: %d calls", clients, w.TotalCalls())
			if calls := w.TotalCalls(); calls > 40+5*clients { // each backend gets one each 50 ms, the first ones, and some that come back
				t.Errorf("%d clients made %d calls", clients, calls)
			}
		})
	}
}
