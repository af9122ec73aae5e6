package silence

import (
	"testing"
	"time"

	"go.uber.org/zap/zapcore"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
)

func TestOperatorsSeeASilence(t *testing.T) {
	name := lbtest.Unique("silence")
	lbtest.InBubble(t, lbtest.PoolOf("a b", "pool "+name+"\nlb_policy first"), func(t *testing.T, w *lbtest.World) {
		warm(w)
		of := func(metric, backend string) float64 {
			return lbtest.SumOf(t, metric, map[string]string{"pool": name, "backend": backend})
		}
		silences := func() []status.Silence {
			return status.Backends(time.Now(), func(pool string) bool { return pool == name })[0].Silences
		}
		if n := len(silences()); n != 0 {
			t.Errorf("%d silences before one began", n)
		}
		w.Backends["a"].Replies(lbtest.Hangs)
		began := time.Now().Add(threshold)
		wantAll(t, askTogether(w, 3, chat)(), "b", threshold, soon)
		lines := w.Logged("backend silent")
		if len(lines) != 1 || lines[0].Level != zapcore.WarnLevel || lines[0].ContextMap()["backend"] != "a" || lines[0].ContextMap()["deployment"] != "gpt-4o" {
			t.Errorf("logged %v", lines)
		}
		for metric, want := range map[string]float64{"silent": 1, "silences_total": 1, "moved_total": 3} {
			if got := of(metric, "a"); got != want {
				t.Errorf("%s is %g, want %g", metric, got, want)
			}
			if got := of(metric, "b"); got != 0 {
				t.Errorf("%s of b is %g", metric, got)
			}
		}
		if got := lbtest.SumOf(t, "attempts_total", map[string]string{"pool": name, "class": "silent"}); got != 3 {
			t.Errorf("%g attempts are silent, want 3", got)
		}
		if s := silences(); len(s) != 1 || s[0] != (status.Silence{Model: "gpt-4o", Deployment: "gpt-4o", Since: began.UTC().Truncate(time.Millisecond)}) {
			t.Errorf("silences %v, want one since %s", s, began)
		}
		w.Backends["a"].Recovers()
		time.Sleep(time.Until(began.Add(2 * time.Second)))
		wantAll(t, askTogether(w, 1, chat)(), "a", 0, 0)
		lines = w.Logged("backend answers again")
		if len(lines) != 1 || lines[0].Level != zapcore.InfoLevel || lines[0].ContextMap()["seconds"] != 2.0 {
			t.Errorf("logged %v", lines)
		}
		if got := of("silent", "a"); got != 0 || len(silences()) != 0 {
			t.Errorf("after the silence, silent is %g, and the silences are %v", got, silences())
		}
	})
}
