package waiting

import (
	"context"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// bob may use b alone, and alice both. The queue of b has the order of all of
// them.
func TestCallersOfDifferentBackendsGoByTier(t *testing.T) {
	inBubbleWith(t, "wait 5s\nbackend http://a\nbackend http://b\nclient_key alice "+aliceKey+"\nclient_key bob "+bobKey+
		"\ncaller alice {\ntier first\n}\ncaller bob {\ntier second\nbackends b\n}\ntier first\ntier second", func(t *testing.T, w *world) {
		throttles := func(d time.Duration) http.HandlerFunc {
			return lbtest.Status(429, "Retry-After-Ms", strconv.FormatInt(d.Milliseconds(), 10))
		}
		serves := lbtest.Says(200, `{}`, "X-Ratelimit-Limit-Requests", "60", "X-Ratelimit-Remaining-Requests", "60", "X-Ratelimit-Reset-Requests", "10")
		w.AllReply(serves)
		for range 20 {
			w.Send(w.request(-1, aliceKey))
		}
		w.Backends["a"].Replies(throttles(time.Minute))
		w.Backends["b"].Replies(throttles(time.Second))
		w.Backends["b"].Forget()
		w.wantServed(t, bobKey, bobKey, aliceKey, bobKey, aliceKey)
		w.Backends["b"].Replies(serves)
		w.wg.Wait()
		got := w.numbers("b")
		if sent := got[len(got)-5:]; !slices.Equal(sent, []int{2, 4, 0, 1, 3}) {
			t.Errorf("they went in the order %v, want 2, 4, 0, 1, 3", sent)
		}
	})
}

func TestAStreamAndALargeBodyWaitAsAWhole(t *testing.T) {
	inBubble(t, "wait 2s", func(t *testing.T, w *world) {
		w.knows(t, "", 10)
		w.coolDown(t, "a", time.Second)
		body := `{"model":"gpt-4o","stream":true,"messages":[{"role":"user","content":"` + strings.Repeat("x", 1<<20) + `"}]}`
		w.Backends["a"].Replies(lbtest.Streams("data: {\"choices\":[{\"delta\":{\"content\":\"hello\"}}]}\n\n", "data: [DONE]\n\n"))
		begin := time.Now()
		got := w.Post(body)
		if took := time.Since(begin); got.Status != 200 || !strings.Contains(got.Body, "hello") || took < 990*time.Millisecond || took > 1100*time.Millisecond {
			t.Errorf("got %d after %s: %s", got.Status, took, got.Body)
		}
		calls := w.Backends["a"].Received()
		if last := calls[len(calls)-1]; last.BodyBytes != int64(len(body)) {
			t.Errorf("a got %d bytes, want %d", last.BodyBytes, len(body))
		}
		w.wg.Wait()
	})
}

func TestTheBodiesOfRequestsThatLeaveGiveTheirMemoryBack(t *testing.T) {
	inBubble(t, "wait 2s", func(t *testing.T, w *world) {
		w.knows(t, "", 1000)
		w.throttle("a", 1500*time.Millisecond)
		body := `{"model":"gpt-4o","messages":[{"role":"user","content":"` + strings.Repeat("x", 30<<20) + `"}]}`
		send := func(ctx context.Context) int {
			return w.Send(w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(body)).WithContext(ctx)).Status
		}
		ctx, leave := context.WithCancel(t.Context())
		for range 8 {
			w.wg.Go(func() { send(ctx) })
		}
		time.Sleep(100 * time.Millisecond)
		if got := send(t.Context()); got != 429 {
			t.Errorf("a ninth body of 30 MiB got %d", got)
		}
		leave()
		time.Sleep(100 * time.Millisecond)
		if got := send(t.Context()); got != 200 {
			t.Errorf("a body of 30 MiB got %d when the others had left", got)
		}
		w.wg.Wait()
	})
}

// TestNoRequestWaitsWhileABackendOnlyHasNoRoom has b not throttle, but serve
// its maximum of requests.
func TestNoRequestWaitsWhileABackendOnlyHasNoRoom(t *testing.T) {
	inBubbleWith(t, "backend http://a\nbackend http://b {\nmax_requests 1\n}\nwait 2s", func(t *testing.T, w *world) {
		w.Backends["b"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(100 * time.Millisecond)
			lbtest.Says(200, `{"id":"chatcmpl-1"}`)(rw, r)
		})
		w.throttle("a", 1500*time.Millisecond)
		w.ask(0, "", func(got lbtest.Reply, _ time.Duration) { got.WantStatus(t, http.StatusOK) })
		time.Sleep(time.Millisecond)
		w.ask(1, "", func(got lbtest.Reply, took time.Duration) {
			if got.Status != http.StatusTooManyRequests || took > 10*time.Millisecond {
				t.Errorf("got %d after %s, want a 429 at once", got.Status, took)
			}
		})
		w.wg.Wait()
	})
}
