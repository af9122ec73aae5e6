package silence

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// image is a prompt that takes more than one write.
var image = `{"model":"gpt-4o","messages":[{"content":"` + strings.Repeat("x", 3<<20) + `"}]}`

// overBothVersions runs a test with backends of HTTP/1.1 and of HTTP/2.
func overBothVersions(t *testing.T, test func(*testing.T, *lbtest.World)) {
	for _, version := range []string{"1.1", "h2c"} {
		t.Run(version, func(t *testing.T) {
			lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first\ntransport http {\nversions "+version+"\n}"), test)
		})
	}
}

func TestAnUploadIsNoWait(t *testing.T) {
	overBothVersions(t, func(t *testing.T, w *lbtest.World) {
		warm(w)
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			for range 10 {
				time.Sleep(300 * time.Millisecond)
				io.CopyN(io.Discard, r.Body, int64(len(image)/10))
			}
			if _, err := io.Copy(io.Discard, r.Body); err != nil {
				t.Error(err)
			}
			lbtest.Says(200, `{}`)(rw, r)
		})
		wantAll(t, askTogether(w, 3, image, "X-Early", "a")(), "a", 3*time.Second, 5*time.Second)
		w.WantCalls(map[string]int{"a": 3})
		wantNoneInFlight(t)
	})
}

func TestAnUploadThatGoesOnAfterAPauseIsNoWait(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
		warm(w)
		w.Backends["a"].Replies(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(2200 * time.Millisecond)
			for range 10 {
				io.CopyN(io.Discard, r.Body, int64(len(image)/10))
				time.Sleep(100 * time.Millisecond)
			}
			if _, err := io.Copy(io.Discard, r.Body); err != nil {
				t.Error(err)
			}
			lbtest.Says(200, `{}`)(rw, r)
		})
		wantAll(t, askTogether(w, 3, image, "X-Early", "a")(), "a", 3*time.Second, 5*time.Second)
		w.WantCalls(map[string]int{"a": 3})
		wantNoneInFlight(t)
	})
}

func TestAnUploadThatStallsIsAWait(t *testing.T) {
	overBothVersions(t, func(t *testing.T, w *lbtest.World) {
		warm(w, image)
		w.Backends["a"].Replies(func(http.ResponseWriter, *http.Request) { // the server does not see that the request is cancelled
			time.Sleep(time.Minute)
			lbtest.Abort()
		})
		// by HTTP/2, an upload goes on for a moment when those with which it
		// shares a window are cancelled, and then waits anew
		wantAll(t, askTogether(w, 3, image, "X-Early", "a")(), "b", 2*time.Second+threshold, 5500*time.Millisecond)
		w.WantCalls(map[string]int{"a": 3, "b": 3})
		wantNoneInFlight(t)
		time.Sleep(time.Minute)
	})
}

func TestARequestWaitsOnceItsUploadIsOver(t *testing.T) {
	overBothVersions(t, func(t *testing.T, w *lbtest.World) {
		warm(w, image)
		w.Backends["a"].Replies(lbtest.Hangs)
		wantAll(t, askTogether(w, 3, image)(), "b", threshold, soon)
		w.Backends["a"].Recovers()
		time.Sleep(time.Second)
		wantAll(t, askTogether(w, 1, image)(), "a", 0, 0)
		wantAll(t, askTogether(w, 3, chat)(), "a", 0, 0)
		wantNoneInFlight(t)
	})
}

func TestARefusedUploadEndsASilence(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
		warm(w)
		w.Backends["a"].Replies(lbtest.Hangs)
		wantAll(t, askTogether(w, 3, chat)(), "b", threshold, soon)
		w.Backends["a"].Replies(lbtest.Says(500, `{}`))
		time.Sleep(time.Second)
		wantAll(t, askTogether(w, 1, image, "X-Early", "a")(), "b", 0, 0)
		if n := len(w.Logged("backend answers again")); n != 1 {
			t.Errorf("%d lines say that a answers again", n)
		}
		wantNoneInFlight(t)
	})
}
