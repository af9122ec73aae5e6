package redis

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// page is what tests read of the status page as JSON.
type page struct {
	SumsOver []struct{ Self, Included bool } `json:"sums_over"`
	Pools    []struct {
		Served   int64
		Backends []struct {
			Name     string
			Requests int64
			States   map[string]int
		}
		Callers []struct {
			Name     string
			LastHour struct{ Refused map[string]uint64 } `json:"last_hour"`
		}
	}
}

// page returns the status page.
func (r *replica) page() (p page) {
	r.t.Helper()
	got := lbtest.Get(r.client, r.address+"/status?json&callers")
	if err := json.Unmarshal([]byte(got.Body), &p); err != nil || len(p.Pools) != 1 {
		r.t.Fatalf("got %v from the page: %s", err, got.Body)
	}
	return p
}

// refused returns how many requests of a caller were refused in the last hour,
// as its page says.
func (p page) refused(caller string) (n uint64) {
	for _, c := range p.Pools[0].Callers {
		for _, more := range c.LastHour.Refused {
			if c.Name == caller {
				n += more
			}
		}
	}
	return n
}

// TestThePageOfEachReplicaShowsAll of the requests, backends and refusals of
// all replicas, and no refusal is lost while they are replaced one by one.
func TestThePageOfEachReplicaShowsAll(t *testing.T) {
	s := startServer(t)
	file := filepath.Join(t.TempDir(), "keys")
	lbtest.WriteFile(t, file, "team "+teamKey+"\nother "+otherKey+"\n")
	site := "handle /status {\nopenai_lb_status\n}\nhandle {\nopenai_lb {\n" + newAccount(t).backends(1) +
		"client_keys_file " + file + "\ncaller team {\nrequests 4/day\n}\ncaller *\n" + s.option() + "\n}\n}"
	start := func() *replica { return startCaddy(t, site, "caddy_openai_lb_state_queue_length") }
	all := []*replica{start(), start(), start()}
	inTouch(t, all)
	for i, r := range all {
		for range i + 1 {
			r.ask(otherKey, "r0")
		}
	}
	for range 4 {
		if got := all[0].ask(teamKey, "r0"); got != 200 {
			t.Fatalf("got %d", got)
		}
	}
	for _, r := range all[:2] {
		lbtest.WaitFor(t, func() bool { return r.ask(teamKey, "r0") == 429 })
	}
	var want uint64
	for i, r := range all {
		var p page
		lbtest.WaitFor(t, func() bool { p = r.page(); return p.Pools[0].Served >= 10 })
		b := p.Pools[0].Backends[0]
		if b.Requests != p.Pools[0].Served || fmt.Sprint(b.States) != "map[available:3]" || len(p.SumsOver) != 3 {
			t.Errorf("the page of replica %d shows %+v", i, p)
		}
		if want = p.refused("team"); want < 2 {
			t.Errorf("the page of replica %d shows %d refused requests", i, want)
		}
		got := lbtest.Get(r.client, r.address+"/status").Body
		if !strings.Contains(got, "Sums over 3 replicas: ") || strings.Count(got, `<span class="self">this one</span>`) != 1 {
			t.Errorf("the page of replica %d does not mark it: %s", i, got)
		}
	}
	for i := range all { // a rolling restart, after which no replica knows the callers
		all[i].stdin.Close()
		all[i].process.Wait()
		all[i] = start()
		inTouch(t, all)
		for j, r := range all {
			deadline := time.Now().Add(20 * time.Second)
			got := r.page().refused("team")
			for got != want && time.Now().Before(deadline) { // it asks again every two seconds
				time.Sleep(100 * time.Millisecond)
				got = r.page().refused("team")
			}
			if got != want {
				t.Errorf("after replica %d was replaced, %d requests are refused at replica %d, want %d", i, got, j, want)
			}
		}
	}
	all[2].wantCommand("callers --json", fmt.Sprintf(`"refused":{"requests/day":%d}`, want))
}
