package health

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
)

// noneLeft are the headers of a 429 or a 200 that say that a limit is used up.
var noneLeft = []string{"Retry-After", "20", "X-Ratelimit-Limit-Tokens", "1000", "X-Ratelimit-Remaining-Tokens", "0", "X-Ratelimit-Reset-Tokens", "20s"}

// chatOf is a chat that asks for a service tier.
func chatOf(tier string) string {
	return `{"model":"gpt-4o","messages":[],"service_tier":"` + tier + `"}`
}

// refuses has a backend treat the requests for some service tiers in another
// way, and serve all others.
func refuses(refusal http.HandlerFunc, tiers ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		for _, tier := range tiers {
			if strings.Contains(string(body), `"service_tier":"`+tier+`"`) {
				refusal(w, r)
				return
			}
		}
		lbtest.Says(200, `{"id":"chatcmpl-1","choices":[]}`)(w, r)
	}
}

func TestARefusedServiceTierWithItsOwnLimitsCoolsDownNoOther(t *testing.T) {
	for name, refusal := range map[string]http.HandlerFunc{
		"a throttle without a time":    lbtest.Status(429),
		"a throttle with a time":       lbtest.Throttled("20"),
		"a limit that is used up":      lbtest.Status(429, noneLeft...),
		"no capacity":                  lbtest.Status(503),
		"a gateway's timeout":          lbtest.Status(504),
		"a model that lacks this tier": lbtest.Says(404, `{"error":{"message":"The model does not exist","type":"invalid_request_error","param":null,"code":"model_not_found"}}`),
	} {
		for _, tier := range []string{"ultrafast", "warp"} {
			t.Run(name+" of "+tier, func(t *testing.T) {
				lbtest.InBubble(t, flexPool, func(t *testing.T, w *lbtest.World) {
					w.AllReply(refuses(refusal, tier))
					for range 12 {
						if got := w.Post(chatOf(tier)); got.Status == 200 {
							t.Errorf("%s got %d", tier, got.Status)
						}
						for _, other := range []string{"default", "fast", "priority", "flex"} {
							w.Post(chatOf(other)).WantServed(t, "a")
						}
						w.Post(defaultChat).WantServed(t, "a")
						time.Sleep(time.Second)
					}
				})
			})
		}
	}
}

func TestAServiceTierCoolsDownAsLongAsItWasTold(t *testing.T) {
	for _, tier := range []string{"ultrafast", "warp"} {
		lbtest.InBubble(t, flexPool, func(t *testing.T, w *lbtest.World) {
			w.AllReply(refuses(lbtest.Throttled("20"), tier))
			w.Post(chatOf(tier)).WantStatus(t, 429)
			time.Sleep(time.Second)
			if got := w.Post(chatOf(tier)); got.Status != 429 || got.Header.Get("Retry-After") != "19" {
				t.Errorf("%s got %d with Retry-After %s, want 429 with 19", tier, got.Status, got.Header.Get("Retry-After"))
			}
			w.WantCalls(map[string]int{"a": 1, "b": 1})
			time.Sleep(19 * time.Second)
			w.AllReply(refuses(nil))
			w.Post(chatOf(tier)).WantServed(t, "a")
		})
	}
}

// TestNoMadeUpServiceTierEscapesFromACooldown sends requests with one name of a
// service tier after another, while both backends throttle.
func TestNoMadeUpServiceTierEscapesFromACooldown(t *testing.T) {
	lbtest.InBubble(t, flexPool, func(t *testing.T, w *lbtest.World) {
		w.AllReply(lbtest.Throttled("20"))
		w.Post(defaultChat).WantStatus(t, 429)
		for _, tier := range []string{"warp", "turbo", "scale", "Default", "", "fast", "priority", "flex"} {
			w.Post(chatOf(tier)).WantStatus(t, 429)
		}
		w.WantCalls(map[string]int{"a": 1, "b": 1})
	})
	lbtest.InBubble(t, flexPool, func(t *testing.T, w *lbtest.World) {
		w.AllReply(refuses(lbtest.Throttled("20"), "warp", "turbo"))
		w.Post(chatOf("warp")).WantStatus(t, 429)
		w.Post(chatOf("turbo")).WantStatus(t, 429)
		w.WantCalls(map[string]int{"a": 1, "b": 1})
	})
}

func TestUltrafastMeetsNoCooldownOfOtherServiceTiers(t *testing.T) {
	lbtest.InBubble(t, flexPool, func(t *testing.T, w *lbtest.World) {
		w.AllReply(refuses(lbtest.Throttled("20"), "default"))
		w.Post(chatOf("default")).WantStatus(t, 429)
		w.Post(chatOf("ultrafast")).WantServed(t, "a")
		w.Post(chatOf("default")).WantStatus(t, 429) // the other tier has not ended this cooldown
		w.WantCalls(map[string]int{"a": 2, "b": 1})
	})
}

// TestABodyThatMayNameTwoServiceTiersCoolsNeitherDown has servers take either
// of two.
func TestABodyThatMayNameTwoServiceTiersCoolsNeitherDown(t *testing.T) {
	for _, body := range []string{
		`{"model":"gpt-4o","service_tier":"ultrafast","service_tier":"default"}`,
		`{"model":"gpt-4o","service_tier":"default","service_tier":"ultrafast"}`,
		`{"model":"gpt-4o","service_tier":"default","Service_Tier":"ultrafast"}`,
	} {
		lbtest.InBubble(t, flexPool, func(t *testing.T, w *lbtest.World) {
			w.Backends["a"].Replies(lbtest.Throttled("20"))
			w.Post(body).WantServed(t, "b")
			w.Backends["a"].Recovers()
			w.Post(defaultChat).WantServed(t, "a")
			w.Post(chatOf("ultrafast")).WantServed(t, "a")
		})
	}
}

func TestTheLimitsOfUltrafastAreNotThoseOfItsModel(t *testing.T) {
	name := lbtest.Unique("ultrafast-limits")
	lbtest.InBubble(t, "openai_lb {\npool "+name+"\nbackend http://a {\nname a\n}\nbackend http://b {\nname b\nweight 1\n}\n}", func(t *testing.T, w *lbtest.World) {
		w.AllReply(lbtest.Says(200, `{"id":"chatcmpl-1","choices":[]}`, "X-Ratelimit-Limit-Tokens", "100000", "X-Ratelimit-Remaining-Tokens", "99999"))
		for range 20 {
			w.Post(defaultChat).WantStatus(t, 200)
		}
		w.Backends["a"].Replies(lbtest.Says(200, `{"id":"chatcmpl-1","choices":[]}`, noneLeft...))
		for tier := range 20 {
			w.Post(chatOf([]string{"ultrafast", "warp"}[tier%2])).WantStatus(t, 200)
		}
		before := len(w.Backends["a"].Received())
		for range 40 {
			w.Post(`{"model":"gpt-4o","messages":[],"service_tier":"ultrafast"}`)
		}
		if len(w.Backends["a"].Received()) == before {
			t.Error("ultrafast is steered away by what is left of a limit that is not its own")
		}
		w.Backends["a"].Recovers()
		before = len(w.Backends["a"].Received())
		for range 40 {
			w.Post(defaultChat).WantStatus(t, 200)
		}
		if len(w.Backends["a"].Received()) == before {
			t.Error("the model is passed over because ultrafast has nothing left")
		}
		lbtest.WantSums(t, name, "ratelimit_remaining backend=a type=tokens 99999")
	})
}

func TestABackendOfUltrafastSharesNoCooldownWithItsDeployment(t *testing.T) {
	const config = "openai_lb {\nbackend http://a {\nname ultrafast\nservice_tier ultrafast\n}\nbackend http://a {\nname standard\npriority 2\nservice_tier default\n}\n}"
	lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
		states := func(want string) {
			t.Helper()
			var got []string
			for _, b := range status.Backends(time.Now(), func(string) bool { return true }) {
				got = append(got, b.Name+" "+b.State)
			}
			if s := strings.Join(got, ", "); s != want {
				t.Errorf("the states are %s, want %s", s, want)
			}
		}
		w.Backends["a"].Replies(refuses(lbtest.Throttled("20"), "ultrafast"))
		for range 10 {
			w.Post(defaultChat).WantServed(t, "a")
		}
		w.WantCalls(map[string]int{"a": 11})
		states("ultrafast cooling_down, standard available")

		time.Sleep(20 * time.Second)
		w.Backends["a"].Replies(refuses(nil))
		w.Post(defaultChat).WantServed(t, "a")
		w.Backends["a"].Replies(refuses(lbtest.Throttled("20"), "ultrafast", "default"))
		w.Post(defaultChat).WantStatus(t, 429)
		w.Backends["a"].Replies(refuses(nil))
		time.Sleep(20 * time.Second)
		w.Post(defaultChat).WantServed(t, "a")
	})
}

func TestTheCooldownOfAServiceTierNamesIt(t *testing.T) {
	for tier, named := range map[string]string{"ultrafast": "ultrafast", "warp": "other", "flex": "flex", "fast": "", "priority": ""} {
		lbtest.InBubble(t, flexPool, func(t *testing.T, w *lbtest.World) {
			w.Backends["a"].Replies(lbtest.Throttled("20"))
			w.Post(chatOf(tier)).WantServed(t, "b")
			for _, b := range status.Backends(time.Now(), func(string) bool { return true }) {
				if b.Name == "a" && (len(b.Cooldowns) != 1 || b.Cooldowns[0].ServiceTier != named || (b.State == status.Available) != (named != "")) {
					t.Errorf("%s: a is %s, with the cooldowns %+v", tier, b.State, b.Cooldowns)
				}
			}
			cooldowns := w.Logged("cooldown started")
			if len(cooldowns) != 1 || named != "" && cooldowns[0].ContextMap()["service_tier"] != named {
				t.Errorf("%s: logged %v", tier, cooldowns)
			}
		})
	}
}
