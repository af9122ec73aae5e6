package redis

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// site is a site with two pools that share by a server.
func site(s *server, port int, options string) string {
	block := fmt.Sprintf("openai_lb {\nbackend http://127.0.0.1:1 {\nmodel m\n}\n%s\n%s}\n", s.option(), options)
	return fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\n}\nhttp://127.0.0.1:%d {\nhandle /a/* {\n%s}\nhandle {\n%s}\n}", port, block, block)
}

// connections are those of clients other than this one, by their ids.
func (s *server) connections() map[string]bool {
	ids := make(map[string]bool)
	for _, line := range strings.Split(fmt.Sprint(s.do("client", "list", "type", "pubsub")), "\n") {
		var id string
		if _, err := fmt.Sscanf(line, "id=%s", &id); err == nil {
			ids[id] = true
		}
	}
	return ids
}

func TestHandlersShareOneConnectionThroughReloads(t *testing.T) {
	s := startServer(t)
	port := lbtest.FreePort(t)
	goroutines := runtime.NumGoroutine()
	lbtest.Run(t, site(s, port, ""))
	lbtest.WaitFor(t, func() bool { return len(s.connections()) == 1 && inTouchHere() })
	first := s.connections()
	for i := range 3 {
		lbtest.Reload(t, site(s, port, fmt.Sprintf("lb_retries %d\n", i+1)))
		if now := s.connections(); fmt.Sprint(now) != fmt.Sprint(first) {
			t.Errorf("after a reload the connections are %v, before %v", now, first)
		}
	}
	if n := len(seam.Statuses()); n != 1 {
		t.Errorf("%d replicas run, want 1", n)
	}
	other := startServer(t)
	lbtest.Reload(t, site(other, port, ""))
	lbtest.WaitFor(t, func() bool { return len(other.connections()) == 1 && len(s.connections()) == 0 })
	lbtest.Reload(t, "{\nadmin off\n}\n")
	lbtest.WaitFor(t, func() bool { return len(other.connections()) == 0 && runtime.NumGoroutine() <= goroutines+5 })
	if n := len(seam.Statuses()); n != 0 {
		t.Errorf("%d replicas run after the last handler is gone", n)
	}
}

func inTouchHere() bool {
	statuses := seam.Statuses()
	return len(statuses) == 1 && statuses[0].InTouch && len(statuses[0].Peers) == 1
}

func TestWhoOnlyValidatesAConfigConnectsToNobody(t *testing.T) {
	s := startServer(t)
	config, err := lbtest.Adapt(site(s, lbtest.FreePort(t), ""))
	if err != nil {
		t.Fatal(err)
	}
	before := fmt.Sprint(s.do("info", "stats"))
	if err := lbtest.Validate(t, config); err != nil {
		t.Fatal(err)
	}
	if got, want := received(fmt.Sprint(s.do("info", "stats"))), received(before)+1; got != want {
		t.Errorf("the server has had %d connections, want %d", got, want)
	}
}

// received is how many connections the server has had.
func received(stats string) (n int) {
	for _, line := range strings.Split(stats, "\n") {
		fmt.Sscanf(line, "total_connections_received:%d", &n)
	}
	return n
}

func TestTheAdminAPITellsWhoShares(t *testing.T) {
	s := startServer(t)
	admin := fmt.Sprintf("127.0.0.1:%d", lbtest.FreePort(t))
	lbtest.Run(t, strings.Replace(site(s, lbtest.FreePort(t), ""), "admin off", "admin "+admin, 1))
	lbtest.WaitFor(t, inTouchHere)
	var got []seam.EngineStatus
	if err := json.Unmarshal([]byte(lbtest.Get(http.DefaultClient, "http://"+admin+"/openai_lb/replicas").Body), &got); err != nil {
		t.Fatal(err)
	}
	host, _ := os.Hostname()
	if len(got) != 1 || !got[0].InTouch || len(got[0].Peers) != 1 || got[0].Peers[0].Host != host {
		t.Errorf("got %+v, want one replica at %s", got, host)
	}
}
