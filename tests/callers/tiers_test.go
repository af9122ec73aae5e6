package callers

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// inTiers runs a test with a file of these keys, which it may write.
func inTiers(t *testing.T, keys, options string, test func(t *testing.T, w *world, write func(keys string))) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "keys")
	write := func(keys string) {
		lbtest.WriteFile(t, file, strings.NewReplacer("alice ", "alice "+aliceKey+" ", "bob ", "bob "+bobKey+" ").Replace(keys)+"\n")
	}
	write(keys)
	config := "openai_lb {\npool " + lbtest.Unique("tiers") + "\nclient_keys_file " + file + "\n" + options + "\n}"
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		time.Sleep(time.Until(time.Now().Truncate(time.Hour).Add(time.Hour))) // windows begin here
		test(t, &world{w}, func(keys string) {
			write(keys)
			time.Sleep(time.Second) // until the file is looked at
		})
	})
}

// served is how many of ten requests of a caller are served.
func (w *world) served(key string) (n int) {
	for range 10 {
		if w.post(key, "/v1/chat/completions", `{"model":"gpt-4o"}`).Status == 200 {
			n++
		}
	}
	return n
}

func (w *world) wantServedOfTen(t *testing.T, key string, want int) {
	t.Helper()
	if got := w.served(key); got != want {
		t.Errorf("%s: %d requests of ten were served, want %d", key, got, want)
	}
}

const goldAndBronze = `
	backend http://ptu {
		name ptu
	}
	backend http://east {
		name east
		priority 2
	}
	tier gold {
		requests 5/hour
	}
	tier bronze {
		requests 3/minute
		backends east
		max_requests 9
		models gpt-4o
		service_tiers default
	}
`

func TestEachCallerOfATierGetsWhatTheTierGets(t *testing.T) {
	inTiers(t, "alice tier=bronze\nbob tier=bronze expires=2099-01-01", goldAndBronze, func(t *testing.T, w *world, _ func(string)) {
		w.wantServedOfTen(t, aliceKey, 3)
		w.wantServedOfTen(t, bobKey, 3) // each is counted separately
		w.WantCalls(map[string]int{"ptu": 0, "east": 6})
		time.Sleep(63 * time.Second)
		w.post(aliceKey, "/v1/chat/completions", `{"model":"gpt-5"}`).WantError(t, 404, "model_not_found")
		w.post(aliceKey, "/v1/chat/completions", `{"model":"gpt-4o","service_tier":"flex"}`).WantError(t, 400, "invalid_value")
		if s := w.of("alice"); s.Tier != "bronze" || s.MaxRequests != 9 || len(s.Limits) != 1 || s.Limits[0].Limit.String() != "3/minute" {
			t.Errorf("alice is in %q with %v and %d at a time", s.Tier, s.Limits, s.MaxRequests)
		}
	})
}

func TestALineOfACallersOwnBlockReplacesThatOfItsTier(t *testing.T) {
	own := "caller alice {\nrequests 7/minute\nbackends ptu\n}\n"
	for name, options := range map[string]string{"own block": own, "block of all others": strings.Replace(own, "alice", "*", 1)} {
		t.Run(name, func(t *testing.T) {
			inTiers(t, "alice tier=bronze", options+strings.Replace(goldAndBronze, "requests 3/minute", "requests 3/minute\nrequests 8/hour", 1), func(t *testing.T, w *world, _ func(string)) {
				w.post(aliceKey, "/v1/chat/completions", `{"model":"gpt-5"}`).WantError(t, 404, "model_not_found")
				w.wantServedOfTen(t, aliceKey, 7)
				w.WantCalls(map[string]int{"ptu": 7, "east": 0})
				time.Sleep(63 * time.Second)
				w.wantServedOfTen(t, aliceKey, 1) // the limit of the tier by the hour is another line
			})
		})
	}
}

func TestTheTierOfACallerIsThatOfItsBlockThenOfItsKeyThenTheDefault(t *testing.T) {
	tiers := strings.NewReplacer("tier gold", "tier gold default").Replace(goldAndBronze)
	for _, c := range []struct{ name, keys, options, want string }{
		{"its block", "alice tier=gold", tiers + "caller alice {\ntier bronze\n}\n", "bronze"},
		{"its key", "alice tier=bronze", tiers + "caller alice {\nmax_requests 9\n}\n", "bronze"},
		{"its key, before the block of all others", "alice tier=bronze", tiers + "caller * {\ntier gold\n}\n", "bronze"},
		{"the block of all others", "alice ", tiers + "caller * {\ntier bronze\n}\n", "bronze"},
		{"another line of its own", "alice tier=bronze\nalice\tclient-key-of-alices-other-program", tiers, "bronze"},
		{"the default", "alice ", tiers, "gold"},
		{"the default of a block without a tier", "alice ", tiers + "caller alice {\nmax_requests 9\n}\n", "gold"},
		{"the last without a default", "alice ", goldAndBronze, "bronze"},
	} {
		t.Run(c.name, func(t *testing.T) {
			inTiers(t, c.keys, c.options, func(t *testing.T, w *world, _ func(string)) {
				backend := map[string]string{"gold": "ptu", "bronze": "east"}[c.want]
				w.chat(`{"model":"gpt-4o"}`).WantServed(t, backend)
				if got := w.of("alice").Tier; got != c.want {
					t.Errorf("alice is in %q, want %q", got, c.want)
				}
			})
		})
	}
}

func TestACallerMovesToAnotherTierWithoutAReloadAndKeepsWhatItUsed(t *testing.T) {
	tiers := strings.NewReplacer("requests 5/hour", "requests 9/hour", "requests 3/minute", "requests 3/hour").Replace(goldAndBronze)
	inTiers(t, "alice tier=bronze\nbob tier=gold", tiers, func(t *testing.T, w *world, write func(string)) {
		w.wantServedOfTen(t, aliceKey, 3)
		write("alice tier=gold\nbob tier=gold")
		w.wantServedOfTen(t, aliceKey, 6)
		w.WantCalls(map[string]int{"ptu": 6, "east": 3})
		write("alice tier=bronze\nbob tier=gold")
		w.wantServedOfTen(t, aliceKey, 0)
		write("alice tier=silver\nbob tier=gold") // no such tier: the line counts as not there
		w.chat(`{"model":"gpt-4o"}`).WantError(t, 401, "invalid_api_key")
		write("alice \nbob tier=gold")
		w.wantServedOfTen(t, aliceKey, 0) // the last tier
		write("alice tier=gold\nbob tier=gold")
		time.Sleep(63 * time.Minute)
		w.wantServedOfTen(t, aliceKey, 9)
		w.wantServedOfTen(t, bobKey, 9)
	})
}

func TestATierCanAddCallersWithoutAReload(t *testing.T) {
	inTiers(t, "alice tier=gold", goldAndBronze, func(t *testing.T, w *world, write func(string)) {
		w.chat(`{"model":"gpt-4o"}`).WantServed(t, "ptu")
		write("alice tier=gold\nbob tier=bronze")
		w.wantServedOfTen(t, bobKey, 3)
		w.WantCalls(map[string]int{"east": 3})
		w.wantServedOfTen(t, aliceKey, 4)
	})
}

func TestTheModelsOfATierAreThoseThatTheCallersOwnBackendsHave(t *testing.T) {
	inTiers(t, "alice tier=gold\nbob tier=gold", threeBackends+"tier gold {\nmodels gpt-4o gpt-5\n}\ncaller alice {\nbackends ptu-*\n}\n", func(t *testing.T, w *world, _ func(string)) {
		if got := w.ask(aliceKey, "/v1/models").Body; !strings.Contains(got, "gpt-4o") || strings.Contains(got, "gpt-5") || strings.Contains(got, "o3") {
			t.Errorf("the list of models is %s, want gpt-4o", got)
		}
		for _, model := range []string{"gpt-5", "o3"} {
			got := w.post(aliceKey, "/v1/chat/completions", `{"model":"`+model+`"}`)
			if got.WantError(t, 404, "model_not_found"); !strings.Contains(got.Body, "Available models: gpt-4o.") {
				t.Errorf("got %s", got.Body)
			}
		}
		w.post(bobKey, "/v1/chat/completions", `{"model":"gpt-5"}`).WantServed(t, "east")
	})
}

// TestWhatIsWarnedOfTiers are options without an effect, and callers without
// limits.
func TestWhatIsWarnedOfTiers(t *testing.T) {
	tiers := goldAndBronze + "tier spare\ntier free default\ncaller alice {\n}\n"
	inTiers(t, "alice tier=gold\nbob tier=free\ncarol client-key-of-carol-0123 tier=gold", strings.Replace(tiers, "requests 3/minute", "requests 3/minute then gold", 1), func(t *testing.T, w *world, _ func(string)) {
		for message, want := range map[string]int{
			"tier 'spare' has no caller, so it has no effect":                                                         1,
			"tier 'bronze' has no caller, so it has no effect":                                                        1,
			"tier 'gold' has no caller, so it has no effect":                                                          0,
			"tier 'free' has no caller, so it has no effect":                                                          0,
			"caller 'alice' has no options, so nothing limits it":                                                     0,
			"tier 'bronze': '3/minute then gold' changes no tier, because 'gold' is not less important than 'bronze'": 1,
			"client keys without a caller block have no limits: 'caller *' limits or refuses them":                    1,
		} {
			if got := len(w.Logged(message)); got != want {
				t.Errorf("%q was logged %d times, want %d", message, got, want)
			}
		}
		if got := w.Logged("client keys without a caller block have no limits: 'caller *' limits or refuses them"); len(got) == 1 {
			if names := got[0].ContextMap()["callers"]; len(names.([]any)) != 1 {
				t.Errorf("%v have no limits, want bob", names)
			}
		}
	})
}
