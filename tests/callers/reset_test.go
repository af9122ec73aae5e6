package callers

import (
	"fmt"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// reset gives alice her use back.
func (w *world) reset(t *testing.T) {
	t.Helper()
	if !lbtest.EntryOf(w.Handler.Pool).Callers.Reset("alice", pool.Order{Time: time.Now(), By: "op@host", Reason: "a wrong report"}) {
		t.Error("alice is not known")
	}
}

func TestACallerThatAWrongReportBlockedIsServedAfterAReset(t *testing.T) {
	inBubble(t, "caller alice {\ntokens 10k/month\n}", func(t *testing.T, w *world) {
		w.AllReply(used(50, 1_000_000))
		w.chat(prompt(50, "")).WantServed(t, "a")
		w.AllReply(used(50, 50))
		w.chat(prompt(50, "")).WantError(t, http.StatusTooManyRequests, "insufficient_quota")
		w.reset(t)
		w.wantUse(t, 0)
		for range 20 { // with the usual output of before, only one would be
			w.chat(prompt(50, "")).WantServed(t, "a")
		}
		synctest.Wait()
		w.wantUse(t, 2000)
		logged := w.Logged("caller reset")
		if len(logged) != 1 || logged[0].Level != zap.InfoLevel ||
			fmt.Sprint(logged[0].ContextMap()) != "map[by:op@host caller:alice pool:"+w.Handler.Pool+" reason:a wrong report]" {
			t.Errorf("logged is %v", logged)
		}
		if lbtest.EntryOf(w.Handler.Pool).Callers.Reset("carol", pool.Order{}) {
			t.Error("a caller is reset that has sent no request")
		}
	})
}
