package silence

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// count asks how many tokens a prompt has, which takes next to no time.
func count(w *lbtest.World) lbtest.Reply {
	return w.Send(w.Request(http.MethodPost, "/v1/messages/count_tokens", strings.NewReader(chat)))
}

// countsAtOnce is a backend that counts tokens at once, and leaves all else to
// another one.
func countsAtOnce(others http.HandlerFunc) http.HandlerFunc {
	return func(rw http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/count_tokens") {
			lbtest.Says(200, `{"input_tokens":9}`)(rw, r)
			return
		}
		others(rw, r)
	}
}

func TestWhatIsUsualForOneOperationIsNotTooLongForAnother(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
		for _, b := range w.Backends {
			b.Replies(countsAtOnce(sleeps))
		}
		for range 30 {
			count(w).WantServed(t, "a")
		}
		wantAll(t, askTogether(w, 3, chat, "X-Wait", "10s")(), "a", 10*time.Second, 10*time.Second)
		if silent := w.Logged("backend silent"); len(silent) != 0 {
			t.Errorf("logged %v", silent)
		}
	})
}

func TestABackendIsSilentForOneOperationWhileItAnswersAnother(t *testing.T) {
	lbtest.InBubble(t, lbtest.PoolOf("a b", "lb_policy first"), func(t *testing.T, w *lbtest.World) {
		warm(w)
		w.Backends["a"].Replies(countsAtOnce(lbtest.Hangs))
		replies := askTogether(w, 3, chat)
		for range 10 {
			time.Sleep(100 * time.Millisecond)
			count(w).WantServed(t, "a")
		}
		wantAll(t, replies(), "b", threshold, soon)
		count(w).WantServed(t, "a")
		wantAll(t, askTogether(w, 1, chat)(), "b", 0, 0)
		lines := w.Logged("backend silent")
		if len(lines) != 1 || lines[0].ContextMap()["operation"] != "/chat/completions" {
			t.Errorf("logged %v, want one silence and its operation", lines)
		}
	})
}
