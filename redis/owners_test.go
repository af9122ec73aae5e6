package redis

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/simulator"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// accounts are three simulators in a process, each with what it stores itself.
type accounts struct{ *replica }

var accountNames = []string{"a", "b", "c"}

// startAccounts has each account that throttles refuse every third request.
func startAccounts(t testing.TB, throttle ...string) accounts {
	t.Helper()
	var directives strings.Builder
	for _, name := range accountNames {
		fault := ""
		for _, throttles := range throttle {
			if throttles == name {
				fault = "fault status:429:1 3"
			}
		}
		fmt.Fprintf(&directives, "handle_path /%s/* {\nopenai_simulator {\nname %s\napi_key s3cret-of-%s\noutput_tokens 5\n%s\n}\n}\n", name, name, name, fault)
	}
	return accounts{startCaddy(t, directives.String(), "go_goroutines")}
}

// options are those of a pool with the accounts, and with callers.
func (a accounts) options() string {
	var options strings.Builder
	for _, name := range accountNames {
		fmt.Fprintf(&options, "backend %s/%s/v1 {\nname %s\napi_key s3cret-of-%s\n}\n", a.address, name, name, name)
	}
	for _, name := range []string{"alice", "bob"} {
		fmt.Fprintf(&options, "client_key %s client-key-of-%s\n", name, name)
	}
	return options.String()
}

// calls counts the requests that the accounts have had, and those of them that
// named what the account does not have.
func (a accounts) calls() (all, vain int) {
	a.t.Helper()
	for _, name := range accountNames {
		res, err := a.client.Get(a.address + "/" + name + "/_simulator/status")
		if err != nil {
			a.t.Fatal(err)
		}
		var s simulator.Status
		err = json.NewDecoder(res.Body).Decode(&s)
		res.Body.Close()
		if err != nil {
			a.t.Fatal(err)
		}
		all += int(s.Requests)
		for _, r := range s.Last {
			if r.Status == 400 || r.Status == 404 {
				vain++
			}
		}
	}
	return all, vain
}

// call sends a request as a caller.
func (r *replica) call(caller, method, path, body string) (status int, text string, header http.Header) {
	req, err := http.NewRequest(method, r.address+path, strings.NewReader(body))
	if err != nil {
		r.t.Error(err)
		return 0, "", nil
	}
	req.Header.Set("Authorization", "Bearer client-key-of-"+caller)
	req.Header.Set("Content-Type", "application/json")
	res, err := r.client.Do(req)
	if err != nil {
		r.t.Error(err)
		return 0, "", nil
	}
	defer res.Body.Close()
	read, err := io.ReadAll(res.Body)
	if err != nil {
		r.t.Error(err)
	}
	return res.StatusCode, string(read), res.Header
}

var responseID = regexp.MustCompile(`"id":\s*"(resp_[^"]+)"`)

// respond has some account make a response, and returns its id.
func (r *replica) respond(caller, previous string) string {
	r.t.Helper()
	body := `{"model":"gpt-4o","input":"hi"}`
	if previous != "" {
		body = fmt.Sprintf(`{"model":"gpt-4o","input":"hi","previous_response_id":%q}`, previous)
	}
	status, text, _ := r.call(caller, "POST", "/v1/responses", body)
	id := responseID.FindStringSubmatch(text)
	if status != 200 || id == nil {
		r.t.Fatalf("no response: %d %s", status, text)
	}
	return id[1]
}

const (
	found   = `caddy_openai_lb_state_lookups_total{outcome="found"}`
	unknown = `caddy_openai_lb_state_lookups_total{outcome="unknown"}`
	late    = `caddy_openai_lb_state_lookups_total{outcome="late"}`
	skipped = `caddy_openai_lb_state_lookups_total{outcome="skipped"}`
	sent    = "caddy_openai_lb_state_owners_sent_total"
)

// sum adds up a metric of the replicas.
func sum(replicas []*replica, name string) (n float64) {
	for _, r := range replicas {
		n += max(0, r.metric(name))
	}
	return n
}

// conversation asks ten times, each time at any replica, and reads the last
// response. It comes back when a 429 says so, as clients do. turn is called
// before each request.
func conversation(t *testing.T, caller string, replicas []*replica, turn func()) (refused int) {
	id := ""
	for i := 0; i <= 10; {
		method, path, body := "POST", "/v1/responses", fmt.Sprintf(`{"model":"gpt-4o","input":"hi","stream":%v`, i%2 == 1)
		switch {
		case i == 10:
			method, path, body = "GET", "/v1/responses/"+id, ""
		case i > 0:
			body += fmt.Sprintf(`,"previous_response_id":%q}`, id)
		default:
			body += "}"
		}
		turn()
		status, text, header := replicas[rand.IntN(len(replicas))].call(caller, method, path, body)
		made := responseID.FindStringSubmatch(text)
		switch {
		case status == 200 && made != nil:
			id = made[1]
			i++
		case status == 429:
			refused++
			seconds, err := strconv.Atoi(header.Get("Retry-After"))
			if err != nil {
				t.Errorf("Retry-After is %q", header.Get("Retry-After"))
			}
			time.Sleep(time.Duration(seconds) * time.Second)
		default:
			t.Errorf("request %d of a conversation: %d %s", i, status, text)
			return refused
		}
	}
	return refused
}

// converse has conversations go on at the same time.
func converse(t *testing.T, n int, replicas []*replica, turn func()) (refused int) {
	var all sync.WaitGroup
	var count atomic.Int64
	for i := range n {
		all.Go(func() { count.Add(int64(conversation(t, []string{"alice", "bob"}[i%2], replicas, turn))) })
	}
	all.Wait()
	return int(count.Load())
}

func TestAConversationGoesOnAtAnyReplica(t *testing.T) {
	const conversations = 6
	s := startServer(t)
	for _, tt := range []struct{ name, option string }{{"with Redis", s.option()}, {"without", ""}} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.option == "" && !*measure {
				t.Skip("it prints figures to compare with: go test -run TestAConversationGoesOnAtAnyReplica -measure -v")
			}
			a := startAccounts(t, "a", "b")
			t.Setenv(patientVariable, "yes")
			replicas := startReplicas(t, 3, a.options()+tt.option)
			if tt.option != "" {
				inTouch(t, replicas)
			}
			refused := converse(t, conversations, replicas, func() {})
			all, vain := a.calls()
			t.Logf("%d requests reached the accounts, %d in vain; clients got %d times 429; lookups: %v found, %v unknown, of %.1f ms; ids: %v",
				all, vain, refused, sum(replicas, found), sum(replicas, unknown), 1000*sum(replicas, "caddy_openai_lb_state_lookup_duration_seconds_sum")/
					sum(replicas, "caddy_openai_lb_state_lookup_duration_seconds_count"), sum(replicas, sent))
			if tt.option == "" {
				return
			}
			if sum(replicas, found) < 2*conversations {
				t.Error("replicas did not look up what others learned")
			}
			// what is learned may arrive after the next request, if a machine
			// is busy
			if vain > conversations*10/4 {
				t.Errorf("%d requests reached an account in vain", vain)
			}
		})
	}
}

func TestAConversationGoesOnWhateverBecomesOfRedis(t *testing.T) {
	s := startServer(t)
	a := startAccounts(t, "a", "b")
	t.Setenv(patientVariable, "yes")
	replicas := startReplicas(t, 3, a.options()+s.option())
	inTouch(t, replicas)
	var turns atomic.Int64
	converse(t, 3, replicas, func() {
		switch turns.Add(1) {
		case 8:
			s.do("flushall")
		case 16:
			s.signal(syscall.SIGSTOP)
		case 24:
			s.signal(syscall.SIGCONT)
		case 28:
			s.kill()
		}
	})
}

func TestAnothersIDIsNotFoundAtAnyReplica(t *testing.T) {
	s := startServer(t)
	a := startAccounts(t)
	t.Setenv(patientVariable, "yes")
	replicas := startReplicas(t, 3, a.options()+s.option())
	inTouch(t, replicas)
	id := replicas[0].respond("alice", "")
	lbtest.WaitFor(t, func() bool { return replicas[0].metric(sent) > 0 })
	before, _ := a.calls()
	for _, r := range replicas {
		for _, c := range []struct{ method, path, body string }{
			{"GET", "/v1/responses/" + id, ""},
			{"DELETE", "/v1/responses/" + id, ""},
			{"POST", "/v1/responses", fmt.Sprintf(`{"model":"gpt-4o","input":"hi","previous_response_id":%q}`, id)},
		} {
			if status, text, _ := r.call("bob", c.method, c.path, c.body); status != 404 || !strings.Contains(text, "not") {
				t.Errorf("%s %s: %d %s", c.method, c.path, status, text)
			}
		}
	}
	if after, _ := a.calls(); after != before {
		t.Errorf("%d requests for another's id reached an account", after-before)
	}
	if n := sum(replicas, found); n != 2 {
		t.Errorf("replicas looked it up %v times, want once each that did not know it", n)
	}
	for _, r := range replicas {
		if status, text, _ := r.call("alice", "GET", "/v1/responses/"+id, ""); status != 200 {
			t.Errorf("alice got %d %s", status, text)
		}
	}
	for _, key := range s.do("keys", "*").([]any) {
		text := fmt.Sprint(key)
		if s.do("type", key) == "string" {
			text += fmt.Sprint(s.do("get", key))
		}
		for _, secret := range []string{id, "alice", "s3cret", "key-of", a.address} {
			if strings.Contains(text, secret) {
				t.Errorf("Redis knows %s: %q", secret, text)
			}
		}
	}
}

func TestAStoppedRedisIsAskedOnceAndThenTheAccountsAre(t *testing.T) {
	s := startServer(t)
	a := startAccounts(t)
	replicas := startReplicas(t, 2, a.options()+s.option())
	inTouch(t, replicas)
	ids := []string{replicas[0].respond("alice", ""), replicas[0].respond("alice", ""), replicas[0].respond("alice", "")}
	lbtest.WaitFor(t, func() bool { return replicas[0].metric(sent) > 0 })
	s.signal(syscall.SIGSTOP)
	defer s.signal(syscall.SIGCONT)
	for _, id := range ids {
		began := time.Now()
		if status, text, _ := replicas[1].call("alice", "GET", "/v1/responses/"+id, ""); status != 200 {
			t.Errorf("client got %d %s", status, text)
		}
		t.Logf("the request took %v", time.Since(began))
	}
	if l, s := replicas[1].metric(late), replicas[1].metric(skipped); l != 1 || s != 2 {
		t.Errorf("%v lookups were late and %v skipped, want 1 and 2", l, s)
	}
}

func TestOnlyRequestsWithUnknownIDsAskRedis(t *testing.T) {
	s := startServer(t)
	a := startAccounts(t)
	t.Setenv(patientVariable, "yes")
	replicas := startReplicas(t, 2, a.options()+s.option())
	inTouch(t, replicas)
	id := replicas[0].respond("alice", "")
	lbtest.WaitFor(t, func() bool { return replicas[0].metric(sent) > 0 })
	for range 5 {
		replicas[0].respond("alice", id)
		replicas[1].respond("bob", "")
		replicas[1].call("bob", "POST", "/v1/chat/completions", `{"model":"gpt-4o","messages":[{"role":"user","content":"`+id+`"}]}`)
	}
	if n := sum(replicas, found) + sum(replicas, unknown); n != 0 {
		t.Errorf("replicas asked %v times", n)
	}
	for range 5 {
		replicas[1].respond("alice", id)
	}
	if n := sum(replicas, found); n != 1 {
		t.Errorf("replicas asked %v times, want once", n)
	}
}

func TestALookupEndsInTime(t *testing.T) {
	for name, begin := range map[string]func(*server, *proxy){
		"stopped": func(s *server, _ *proxy) { s.signal(syscall.SIGSTOP) },
		"delayed": func(_ *server, p *proxy) { p.mode.Store(delays) },
		"dropped": func(_ *server, p *proxy) { p.mode.Store(drops) },
		"cut":     func(_ *server, p *proxy) { p.mode.Store(cuts) },
		"babbles": func(_ *server, p *proxy) { p.mode.Store(babbles) },
		"killed":  func(s *server, _ *proxy) { s.kill() },
	} {
		t.Run(name, func(t *testing.T) {
			s := startServer(t)
			p := newProxy(t, s.address)
			st := open(t, &Engine{Address: []string{p.Addr().String()}})
			if _, err := st.Find(t.Context(), []string{"k"}); err != nil {
				t.Fatal(err)
			}
			begin(s, p)
			for range 3 {
				began := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
				_, err := st.Find(ctx, []string{"k"})
				cancel()
				if took := time.Since(began); err == nil || took > ioTimeout {
					t.Errorf("it took %v: %v", took, err)
				}
			}
		})
	}
}

// TestHowMuchAnIDTakes prints how much memory Redis needs for an id, and how
// many bytes go to it.
func TestHowMuchAnIDTakes(t *testing.T) {
	if !*measure {
		t.Skip("it prints figures: go test -run TestHowMuchAnIDTakes -measure -v")
	}
	for _, size := range []int{8, 16} {
		s := startServer(t)
		st := open(t, s.engine())
		numbers := func(section, name string) (n int) {
			_, value, _ := strings.Cut(fmt.Sprint(s.do("info", section)), name+":")
			fmt.Sscan(value, &n)
			return n
		}
		const ids, batch = 1_000_000, 128
		memory, received, began := numbers("memory", "used_memory"), numbers("stats", "total_net_input_bytes"), time.Now()
		for i := 0; i < ids; i += batch {
			var entries []state.Entry
			for j := range batch {
				entries = append(entries, state.Entry{Key: fmt.Sprintf("%022d", i+j), Value: bytes.Repeat([]byte{200}, size), Firm: size > 8, TTL: 720 * time.Hour})
			}
			if _, err := st.Keep(t.Context(), entries); err != nil {
				t.Fatal(err)
			}
		}
		took := time.Since(began) / ids
		_, stats, _ := strings.Cut(fmt.Sprint(s.do("info", "commandstats")), "cmdstat_eval:")
		stats, _, _ = strings.Cut(stats, "\r")
		t.Logf("of an id with %d bytes, Redis keeps %d bytes and gets %d; it took %v each, and Redis: %s", size,
			(numbers("memory", "used_memory")-memory)/ids, (numbers("stats", "total_net_input_bytes")-received)/ids, took, stats)
	}
}
