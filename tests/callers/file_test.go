package callers

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestLimitsOfAFileChangeWithoutAReload changes the file as an editor does, and
// then breaks it.
func TestLimitsOfAFileChangeWithoutAReload(t *testing.T) {
	file, name := filepath.Join(t.TempDir(), "limits"), lbtest.Unique("file")
	lbtest.WriteFile(t, file, "caller alice {\n\trequests 2/hour\n}\n")
	config := lbtest.PoolOf("a b", "pool "+name+`
		client_key alice client-key-of-alice
		client_key bob client-key-of-bob
		caller alice {
			requests 1/hour
			max_requests 5
			backends a
		}
		callers_file `+file)
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		ask := func(caller string, status int) lbtest.Reply {
			t.Helper()
			reply := w.Send(w.RequestWithKey("client-key-of-" + caller))
			reply.WantStatus(t, status)
			return reply
		}
		change := func(text string) {
			t.Helper()
			lbtest.WriteFile(t, file, text)
			for range 4 {
				w.Send(w.RequestWithKey("client-key-of-bob"))
				time.Sleep(time.Second)
			}
		}
		wantStale := func(want float64) {
			t.Helper()
			if got := lbtest.SumOf(t, "secret_stale", map[string]string{"pool": name, "secret": "limits of callers"}); got != want {
				t.Errorf("the metric is %v, want %v", got, want)
			}
		}
		for range 2 {
			ask("alice", 200).WantServed(t, "a") // only where the Caddyfile says
		}
		ask("alice", 429)
		change("caller alice {\n\trequests 4/hour\n}\n")
		for range 2 { // what was used stays
			ask("alice", 200).WantServed(t, "a")
		}
		ask("alice", 429)
		for text, want := range map[string]string{
			"caller alice {\n\trequests 9/hour\n\trequest 9/day\n}\n":   "limits:3",
			"caller alice {\n\trequests 9/hour\n\tmodels gpt-5.5\n}\n":  "models, backends and service_tiers belong in the Caddyfile",
			"caller alice {\n\trequests 9/hour\n":                       "expected as many { as }",
			"caller alice {\n\ttier nowhere\n}\n":                       "tier 'nowhere' is not declared",
			"tier alice {\n\trequests 9/hour\n}\n":                      "limits:1",
			"alice sk-of-another-file\n":                                "limits:1",
			"caller alice {\n\trequests 9/hour\n}\ncaller alice deny\n": "caller 'alice' is given twice",
			"\n": "expected at least one caller",
		} {
			before := len(w.Logged("could not reload secret"))
			change(text)
			ask("alice", 429)
			wantStale(1)
			logged := w.Logged("could not reload secret")
			if strings.Contains(fmt.Sprint(logged), "sk-of-another-file") {
				t.Errorf("the log shows what is in a file that has no limits: %v", logged)
			}
			if len(logged) == 0 || len(logged) == before && before == 0 {
				t.Errorf("%q: the log says nothing", text)
			} else if last := logged[len(logged)-1].ContextMap()["error"].(string); len(logged) > before && !strings.Contains(last, want) {
				t.Errorf("%q: the log has %q, want %q", text, last, want)
			}
			change("caller alice {\n\trequests 4/hour\n}\n")
			wantStale(0)
		}
		change("caller bob {\n\trequests 1/day\n}\n") // its line is gone, so that of the Caddyfile holds
		ask("alice", 429)
		ask("bob", 429)
		change("caller * deny\n")
		ask("alice", 429)
		ask("bob", 403)
	})
}

func TestAFileOfLimitsThatIsNotValidIsRefusedAtLoad(t *testing.T) {
	file := filepath.Join(t.TempDir(), "limits")
	config := ":0\nopenai_lb {\nbackend http://a\nclient_key alice client-key-of-alice\ncallers_file " + file + "\n}"
	for text, want := range map[string]string{
		"caller alice {\n\trequests 9/week\n}\n": "limits:2",
		"caller alice {\n\trequests 9/day\n}\n":  "",
	} {
		lbtest.WriteFile(t, file, text)
		if err := lbtest.ValidateCaddyfile(t, config); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	if err := lbtest.ValidateCaddyfile(t, strings.Replace(config, "limits", "missing", 1)); err == nil || !strings.Contains(err.Error(), "callers_file: open ") {
		t.Errorf("of a file that is missing, the error is %v", err)
	}
}
