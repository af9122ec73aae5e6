package affinity

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// manyCallers is a pool of three accounts, of which b has half of the weight.
func manyCallers(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "client_key caller%d client-key-of-caller-%d\n", i, i)
	}
	return "openai_lb {\n" + b.String() + "backend http://a\nbackend http://b {\nweight 2\n}\nbackend http://c\n}"
}

// TestACallersObjectsAreMadeInOneAccount whatever they are, and whether the
// caller has a name.
func TestACallersObjectsAreMadeInOneAccount(t *testing.T) {
	for name, key := range map[string]string{"a caller": alice, "callers without names": ""} {
		config := threeAccounts
		if key == "" {
			config = "openai_lb {\nbackend http://a\nbackend http://b\nbackend http://c\n}"
		}
		for _, first := range []string{"/v1/files", "/v1/conversations", "/v1/responses", "/v1/threads"} {
			inBubble(t, config, func(t *testing.T, w *world) {
				home := ""
				for i := range 10 {
					for _, path := range []string{first, "/v1/files", "/v1/vector_stores", "/v1/conversations", "/v1/responses", "/v1/threads", "/v1/assistants", "/v1/containers",
						"/v1/uploads", "/openai/files?api-version=1"} {
						reply := w.call(key, "POST", path, `{"model":"gpt-4o"}`)
						if home == "" {
							home = reply.Backend
						}
						if reply.Status != 200 || reply.Backend != home {
							t.Fatalf("%s begin with %s at %s; in round %d, %s is made at %s (%d)", name, first, home, i, path, reply.Backend, reply.Status)
						}
					}
				}
			})
		}
	}
}

// TestWeightsApplyToCallers and not to their objects.
func TestWeightsApplyToCallers(t *testing.T) {
	const callers = 200
	inBubble(t, manyCallers(callers), func(t *testing.T, w *world) {
		homes := make(map[string]int)
		for i := range callers {
			homes[w.call(fmt.Sprintf("client-key-of-caller-%d", i), "POST", "/v1/files", "{}").Backend]++
		}
		if b := homes["b"]; b < callers*4/10 || b > callers*6/10 || homes["a"] < callers/6 || homes["c"] < callers/6 {
			t.Errorf("callers have their homes at %v", homes)
		}
	})
}

// TestResponsesOfACallerWithoutObjectsGoAnywhere so that one caller has the
// capacity of all accounts.
func TestResponsesOfACallerWithoutObjectsGoAnywhere(t *testing.T) {
	for _, body := range []string{`{"model":"m"}`, `{"model":"m","store":false}`} {
		inBubble(t, threeAccounts, func(t *testing.T, w *world) {
			if strings.Contains(body, "store") {
				w.call(alice, "POST", "/v1/files", "{}")
			}
			homes := make(map[string]bool)
			for range 60 {
				homes[w.call(alice, "POST", "/v1/responses", body).Backend] = true
			}
			if len(homes) != 3 {
				t.Errorf("%s: they went to %v", body, homes)
			}
		})
	}
}

// TestTheHomeIsTheSameAtEachReplica although these never talk.
func TestTheHomeIsTheSameAtEachReplica(t *testing.T) {
	homes := make([]string, 2)
	for replica := range homes {
		inBubble(t, manyCallers(20), func(t *testing.T, w *world) {
			for i := range 20 {
				homes[replica] += w.call(fmt.Sprintf("client-key-of-caller-%d", i), "POST", "/v1/files", "{}").Backend
			}
		})
	}
	if homes[0] != homes[1] {
		t.Errorf("one replica has %s, the other one %s", homes[0], homes[1])
	}
}

// TestACallerMovesWhenItsHomeIsOutOfUse and stays where it moved.
func TestACallerMovesWhenItsHomeIsOutOfUse(t *testing.T) {
	for name, c := range map[string]struct {
		breaks func(*lbtest.Backend)
		status int // of the first request then. 0: it is made elsewhere
		moves  bool
	}{
		"it throttles for some seconds": {func(b *lbtest.Backend) { b.Replies(lbtest.Throttled("20")) }, 429, false},
		"it throttles for an hour":      {func(b *lbtest.Backend) { b.Replies(lbtest.Throttled("3600")) }, 0, true},
		"its key is refused":            {func(b *lbtest.Backend) { b.Replies(lbtest.Status(401)) }, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, threeAccounts, func(t *testing.T, w *world) {
				upload := func() reply { return w.call(alice, "POST", "/v1/files", "{}") }
				home := upload().Backend
				c.breaks(w.Backends[home])
				for i := range 3 {
					got := upload()
					if got.Status != c.status && (c.status != 0 || got.Status != 200 || got.Backend == home) {
						t.Errorf("request %d: got %d %s from %s", i, got.Status, got.Body, got.Backend)
					}
					if c.status == 429 && !strings.Contains(got.Body, "The account that stores the caller's objects is rate limited") {
						t.Errorf("got %s", got.Body)
					}
				}
				w.Backends[home].Recovers()
				time.Sleep(2 * time.Hour)
				if got := upload(); got.Status != 200 || (got.Backend != home) != c.moves {
					t.Errorf("when it is back, %d from %s, and home was %s", got.Status, got.Backend, home)
				}
			})
		})
	}
}

// TestNewObjectsDoNotGoToADrainedHome but to another account, and all to the
// same.
func TestNewObjectsDoNotGoToADrainedHome(t *testing.T) {
	homes := make(map[string]bool)
	for _, drained := range []string{"a", "b", "c"} {
		config := strings.Replace(threeAccounts, "backend http://"+drained, "backend http://"+drained+" {\nweight 0\n}", 1)
		inBubble(t, config, func(t *testing.T, w *world) {
			home := w.call(alice, "POST", "/v1/files", "{}").Backend
			for range 5 {
				w.call(alice, "POST", "/v1/vector_stores", "{}").WantServed(t, home)
			}
			if home == drained {
				t.Errorf("%s is drained", home)
			}
			homes[home] = true
		})
	}
	if len(homes) != 2 { // two configs have the first one in the caller's order
		t.Errorf("the homes are %v", homes)
	}
}
