package replicas

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// reload gives the replica this configuration of a pool, as a reload does: the
// new link opens before the old one closes.
func (r *testReplica) reload(pool, digest string) {
	before := r.link
	r.link = r.NewLink()
	r.link.Configured(pool, digest)
	r.link.Open(r.pool)
	before.Close()
}

// seen says what the ith replica shows of the configurations of all replicas.
func (w *world) seen(i int) string {
	seen := make([]string, len(w.replicas))
	for _, p := range w.replicas[i].peers.list(time.Now()) {
		text := "-"
		for _, c := range p.Configs {
			if text = c.Pool + " " + c.Digest[:1]; c.DiffersSince != nil {
				text += fmt.Sprint(" for ", time.Since(*c.DiffersSince).Round(5*time.Second))
			}
		}
		seen[slices.IndexFunc(w.replicas, func(r *testReplica) bool { return r.peers.self.ID == p.ID })] = text
	}
	return strings.Join(seen, ", ")
}

// differing returns the metric for the pool, as all replicas of this process
// have it together.
func differing(t *testing.T, pool string) (n float64) {
	t.Helper()
	metrics := make(chan prometheus.Metric, 100)
	gauges{}.Collect(metrics)
	close(metrics)
	n = -1
	for m := range metrics {
		var value dto.Metric
		if err := m.Write(&value); err != nil {
			t.Fatal(err)
		}
		if m.Desc() == differingDesc && value.Label[0].GetValue() == pool {
			n = value.Gauge.GetValue()
		}
	}
	return n
}

func TestReplicasKnowSinceWhenAnotherConfigurationDiffers(t *testing.T) {
	const old, changed, newest = "aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc"
	share(t, 3, func(w *world) {
		wants := func(i int, want string) {
			t.Helper()
			if got := w.seen(i); got != want {
				t.Errorf("replica %d shows %q, want %q", i, got, want)
			}
		}
		for _, r := range w.replicas {
			r.reload("llm", old)
		}
		time.Sleep(3 * time.Second)
		wants(0, "llm a, llm a, llm a")
		if n := differing(t, "llm"); n != 0 {
			t.Errorf("%v replicas differ, want 0", n)
		}

		w.replicas[1].reload("llm", changed)
		synctest.Wait()
		time.Sleep(10 * time.Second)
		wants(0, "llm a, llm b for 10s, llm a")
		wants(1, "llm a for 10s, llm b, llm a for 10s")
		if n := differing(t, "llm"); n != 4 {
			t.Errorf("at the three replicas, %v differ in all, want 4", n)
		}

		w.replicas[1].reload("llm", newest) // it still differs
		time.Sleep(10 * time.Second)
		wants(0, "llm a, llm c for 20s, llm a")

		w.replicas[0].reload("llm", newest)
		time.Sleep(10 * time.Second)
		wants(0, "llm c, llm c, llm a for 10s")
		wants(2, "llm c for 10s, llm c for 30s, llm a")

		w.replicas[2].reload("llm", newest)
		time.Sleep(3 * time.Second)
		wants(0, "llm c, llm c, llm c")
		wants(2, "llm c, llm c, llm c")

		w.replicas[2].reload("another", old)
		time.Sleep(3 * time.Second)
		wants(0, "llm c, llm c, -")
		wants(2, "-, -, another a")

		w.replicas[1].reload("llm", changed)
		w.replicas[1].stop()
		time.Sleep(lifetime + time.Second)
		wants(0, "llm c, , -")
		if n := differing(t, "llm"); n != 0 {
			t.Errorf("%v replicas differ, want 0 when the one that did has ended", n)
		}
	})
}

func TestAReplicaOfAnOlderVersionHasNoOtherConfiguration(t *testing.T) {
	share(t, 1, func(w *world) {
		w.replicas[0].reload("llm", "aaaaaaaaaaaa")
		older := message{Version: version, Kind: alive, From: digest("older"), Sent: time.Now().UnixMicro(), Host: "h", Since: time.Now().UnixMilli()}
		if strings.Contains(string(older.text()), "configs") {
			t.Errorf("%s is not of an older version", older.text())
		}
		record := state.Record{Group: replicaGroup, Key: older.From, Mode: state.Replace, TTL: lifetime, Message: older.text()}
		if err := w.hub.Store().Put(w.Context(), []state.Record{record}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Second)
		if peers := w.replicas[0].peers.list(time.Now()); len(peers) != 2 || len(peers[0].Configs)+len(peers[1].Configs) != 1 {
			t.Errorf("it shows %+v", peers)
		}
	})
}

func TestAMessageHasRoomForTheConfigurationsOfManyPools(t *testing.T) {
	r := New(nil, nil)
	r.peers.self.Host = strings.Repeat("h", maxHost)
	if strange := strings.Repeat("\x01", maxHost); !isPlain(r.peers.self.Host) || isPlain(strange) {
		t.Errorf("a message has no room for %q, or has room for %q", r.peers.self.Host, strange)
	}
	r.peers.self.Since = time.Now()
	var links []*Link
	for i := range 2 * maxConfigs {
		l := r.NewLink()
		l.Configured(fmt.Sprint("pool ", i%(maxConfigs+10)), fmt.Sprintf("%012x", i))
		l.ShareUse(fmt.Sprint("pool ", i), limiter.NewLimiters(nil))
		links = append(links, l)
	}
	r.peers.configure(links)
	text := r.alive(time.Now()).Message
	m, err := parse(text)
	if err != nil || len(m.Configs) != maxConfigs || len(m.Writers) != maxConfigs || m.Configs[poolKey("pool 0")] != fmt.Sprintf("%012x", maxConfigs+10) {
		t.Errorf("%v: %d bytes with %d configurations: %s", err, len(text), len(m.Configs), text)
	}
}
