package observe

import (
	"fmt"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestAPoolHasItsNameInMetricsHoweverManyCameBeforeIt has more pools than are
// named at a time, one after another.
func TestAPoolHasItsNameInMetricsHoweverManyCameBeforeIt(t *testing.T) {
	for i := range 1001 {
		if err := lbtest.ValidateCaddyfile(t, fmt.Sprintf("http://:8080 {\nopenai_lb {\npool before_%d\nbackend http://127.0.0.1:1\n}\n}\n", i)); err != nil {
			t.Fatal(err)
		}
	}
	pool := lbtest.Unique("after_many")
	lbtest.InBubble(t, "openai_lb {\npool "+pool+"\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
		w.Post(`{"model":"m"}`).WantServed(t, "a")
		lbtest.WantSums(t, pool, "requests_total 1", "attempts_total 1", "backend_info 1")
	})
}

// TestTheCountsOfAPoolEndWithIt has a pool be removed by a reload, while
// another one stays, and come back.
func TestTheCountsOfAPoolEndWithIt(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	_, serverB := lbtest.Listen(t, "b")
	port, goes, stays := lbtest.FreePort(t), lbtest.Unique("goes"), lbtest.Unique("stays")
	backend := map[string]string{goes: serverA.URL + " {\nname a\n}", stays: serverB.URL + " {\nname b\n}"}
	config := func(version string, pools ...string) string {
		text := fmt.Sprintf("{\nadmin off\n}\nhttp://127.0.0.1:%d {\nbind 127.0.0.1\nheader X-Config %s\n", port, version)
		for _, pool := range pools {
			text += fmt.Sprintf("handle_path /%s/* {\nopenai_lb {\npool %[1]s\nbackend %s\n}\n}\n", pool, backend[pool])
		}
		return text + "}\n"
	}
	url := func(pool string) string { return fmt.Sprintf("http://127.0.0.1:%d/%s/v1/chat/completions", port, pool) }
	ask := func(version, pool string) {
		lbtest.Post(lbtest.ClientOf(t, version, url(stays)), url(pool), `{"model":"m"}`).WantStatus(t, 200)
	}
	lbtest.Run(t, config("1", goes, stays))
	ask("1", stays)
	ask("1", goes)
	a.Replies(lbtest.Throttled("60"))
	lbtest.Post(lbtest.NewClient(t), url(goes), `{"model":"m"}`)
	lbtest.WantSums(t, goes, "cooldowns_total 1")
	before := lbtest.SumOf(t, "requests_total", map[string]string{"pool": stays})
	lbtest.Reload(t, config("2", stays))
	lbtest.ClientOf(t, "2", url(stays))
	lbtest.WaitFor(t, func() bool { // until the config before has ended
		return lbtest.SumOf(t, "attempts_per_request", map[string]string{"pool": goes}) == 0
	})
	for _, family := range lbtest.Scrape(t) {
		for _, metric := range family.GetMetric() {
			if lbtest.HasLabels(metric, map[string]string{"pool": goes}) {
				t.Errorf("%s still has the pool: %s", family.GetName(), metric)
			}
		}
	}
	if after := lbtest.SumOf(t, "requests_total", map[string]string{"pool": stays}); after < before {
		t.Errorf("the pool that stays has %v requests, before it had %v", after, before)
	}
	a.Replies(nil)
	lbtest.Reload(t, config("3", goes, stays))
	ask("3", goes)
	lbtest.WantSums(t, goes, "requests_total 1", "attempts_total 1", "cooldown_seconds_total 0")
}
