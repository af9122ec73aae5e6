package redis

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/state"
	"github.com/openai-lb/caddy-openai-lb/state/statetest"
)

func caddyContext(t testing.TB) caddy.Context {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	t.Cleanup(cancel)
	return ctx
}

func TestEveryServerIsAStore(t *testing.T) {
	for _, path := range programs(t) {
		t.Run(filepath.Base(path), func(t *testing.T) {
			s := startProgram(t, path)
			conforms(t, s.engine(), s)
		})
	}
}

// conforms tests the stores of an engine, whose servers hold nothing else.
func conforms(t *testing.T, e *Engine, servers ...*server) {
	t.Helper()
	statetest.Conform(t, func(t *testing.T) state.Store {
		for _, s := range servers {
			s.do("flushall")
		}
		return open(t, e)
	})
}

func TestAClusterIsAStore(t *testing.T) {
	nodes := startCluster(t)
	conforms(t, &Engine{Address: []string{nodes[0].address, nodes[1].address}, Cluster: true}, nodes...)
}

// So are Redis Enterprise and Azure Managed Redis by default.
func TestAClusterBehindOneAddressIsAStore(t *testing.T) {
	s := startNode(t)
	s.do("cluster", "addslotsrange", 0, 16383)
	lbtest.WaitFor(t, s.clusterIsUp)
	conforms(t, s.engine(), s)
	s.do("config", "resetstat")
	st := open(t, s.engine())
	for range 5 {
		wantUsable(t, st, "g", "h")
	}
	if refused := fmt.Sprint(s.do("info", "errorstats")); !strings.Contains(refused, "errorstat_CROSSSLOT:count=1") {
		t.Errorf("it goes on to load groups that are apart: %s", refused)
	}
}

func TestAMasterThatSentinelsTellIsAStore(t *testing.T) {
	master := startServer(t)
	sentinel := startSentinel(t, master)
	conforms(t, &Engine{Address: []string{sentinel.address}, Sentinel: "mymaster"}, master)
}

func TestConnectionsAreEncryptedAndTheServerIsKnown(t *testing.T) {
	cert, key := certificate(t)
	s := startServer(t)
	port := s.args[3]
	s.kill()
	// one that has TLS complains of the files
	if said, _ := exec.Command(s.name, "--port", "0", "--tls-port", port, "--tls-cert-file", "none", "--tls-key-file", "none").CombinedOutput(); strings.Contains(string(said), "Failed finding TLS support") {
		t.Skipf("not tested: %s was built without TLS", s.name)
	}
	s.args = append(s.args, "--port", "0", "--tls-port", port, "--tls-cert-file", cert, "--tls-key-file", key, "--tls-auth-clients", "no")
	s.start()
	e := s.engine()
	e.TLS, e.ServerName = true, "redis.test"
	wantUsable(t, open(t, e))
	e.ServerName = ""
	if _, _, err := open(t, e).Load(t.Context(), []string{"g"}); err == nil || !strings.Contains(err.Error(), "x509") {
		t.Errorf("a server that proves to be another: %v", err)
	}
	e.TLS = false
	if _, _, err := open(t, e).Load(t.Context(), []string{"g"}); err == nil {
		t.Error("a server that wants TLS is used without")
	}
}

func wantUsable(t testing.TB, s state.Store, groups ...string) {
	t.Helper()
	if _, _, err := s.Load(t.Context(), append(groups, "g")); err != nil {
		t.Error(err)
	}
}

func TestNothingOutlivesItsUse(t *testing.T) {
	s := startServer(t)
	st := open(t, s.engine())
	for i := range 500 {
		record := state.Record{Group: "g", Key: fmt.Sprint(i), Mode: state.Extend, Version: "1", TTL: 200 * time.Millisecond, Message: []byte("m")}
		if err := st.Put(t.Context(), []state.Record{record}); err != nil {
			t.Fatal(err)
		}
		if _, err := st.Claim(t.Context(), []state.Claim{{Name: fmt.Sprint(i), TTL: 200 * time.Millisecond}}); err != nil {
			t.Fatal(err)
		}
	}
	deadline := time.Now().Add(2 * time.Minute)
	for s.do("dbsize") != int64(0) {
		if time.Now().After(deadline) {
			t.Fatalf("the server still holds %v", s.do("keys", "*"))
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func TestAnEntryIsFoundUntilAnotherCanTakeItsPlace(t *testing.T) {
	st := open(t, startServer(t).engine())
	for i := range 50 {
		key := fmt.Sprint(i)
		keep := func(e state.Entry) {
			e.Key = key
			if _, err := st.Keep(t.Context(), []state.Entry{e}); err != nil {
				t.Fatal(err)
			}
		}
		find := func() state.Entry {
			found, err := st.Find(t.Context(), []string{key})
			if err != nil {
				t.Fatal(err)
			}
			return found[0]
		}
		keep(state.Entry{Value: []byte("1"), Firm: true, TTL: 3 * time.Millisecond})
		for len(find().Value) > 0 {
		}
		keep(state.Entry{Value: []byte("2"), TTL: time.Hour})
		if e := find(); string(e.Value) != "2" {
			t.Fatalf("an entry that was not found any more became %+v", e)
		}
	}
}

func TestConnectionsAreFewAndOpenInAdvance(t *testing.T) {
	s := startServer(t)
	st := open(t, s.engine())
	if n := s.connected(); n != 0 {
		t.Errorf("%d connections before the first use", n)
	}
	var users sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(users.Wait)
	t.Cleanup(cancel)
	ready := make(chan struct{})
	users.Go(func() { st.Listen(ctx, func() { close(ready) }, func([]byte) {}) })
	<-ready
	wantUsable(t, st)
	lbtest.WaitFor(t, func() bool { return s.connected() >= 3 }) // one listens
	for range 30 {
		users.Go(func() {
			for ctx.Err() == nil {
				st.Find(ctx, []string{"k"})
				st.Keep(ctx, []state.Entry{{Key: "k", Value: []byte("1"), TTL: time.Minute}})
				st.Load(ctx, []string{"g"})
			}
		})
	}
	for range 20 {
		time.Sleep(10 * time.Millisecond)
		if n := s.connected(); n > 5 {
			t.Fatalf("there are %d connections, want 5 at most", n)
		}
	}
}

func TestPrefixesAndDatabasesKeepBalancersApart(t *testing.T) {
	s := startServer(t)
	engines := make([]*Engine, 3)
	for i := range engines {
		engines[i] = s.engine()
	}
	engines[1].KeyPrefix, engines[2].DB = "other:", 1
	heard := make(chan string, 10)
	for i, e := range engines {
		st, ready := open(t, e), make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			st.Listen(ctx, func() { close(ready) }, func(message []byte) { heard <- fmt.Sprintf("%d %s", i, message) })
		}()
		t.Cleanup(func() {
			cancel()
			<-done
		})
		<-ready
	}
	for n := range 2 * len(engines) { // who hears of others has more to hear the second time
		i, group := n%len(engines), fmt.Sprint(n/len(engines))
		st := open(t, engines[i])
		if kept, _, err := st.Load(t.Context(), []string{group}); err != nil || len(kept) != 0 {
			t.Errorf("balancer %d got %v, %v of another", i, kept, err)
		}
		record := state.Record{Group: group, Key: "k", Mode: state.Extend, Version: "1", TTL: time.Minute, Message: []byte("m")}
		if err := st.Put(t.Context(), []state.Record{record}); err != nil {
			t.Fatal(err)
		}
		if got, want := <-heard, fmt.Sprint(i, " m"); got != want {
			t.Errorf("heard %q, want %q", got, want)
		}
	}
}
