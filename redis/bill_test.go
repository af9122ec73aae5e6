package redis

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/certmagic"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/ledger"
)

var bill = flag.Duration("bill", 0, "how long TestTheBillIsWhatBackendsHaveReported lasts; 0: it is skipped")

// home is that of the user, where Go keeps modules. Tests have another one.
var home = os.Getenv("HOME")

const (
	billReplicas = 3
	billTeams    = 40
	billBackends = 9
	// killEvery is the usual time between two kills.
	killEvery = 6 * time.Second
	// longestReply is how long a backend takes at most: a month is to be in ten
	// minutes.
	longestReply = 10 * time.Millisecond
)

// billRun is some processes that share a storage and a Redis, and their
// callers.
type billRun struct {
	*testing.T
	binary, folder string
	replicas       [billReplicas]atomic.Pointer[billReplica]
	down           [billReplicas]atomic.Bool
	stop           chan struct{}
	since          time.Time

	mu sync.Mutex
	// reported is what backends have reported, by row, and received what
	// clients have got.
	reported map[ledger.Key]ledger.Use
	received ledger.Use
	// abandoned are requests whose replica was gone before their backend had an
	// answer.
	abandoned, broken int
}

type billReplica struct {
	address string
	process *exec.Cmd
}

// TestTheBillIsWhatBackendsHaveReported has 40 teams in three tiers call three
// replicas with nine backends. A replica is killed a hundred times in ten
// minutes, Redis twice, and halfway all replicas are replaced, one after the
// other. In the end, the command usage has less than 0.1 % of the tokens less
// than backends have reported, and nowhere more. Most of what is missing was on
// its way through a replica at a kill, so it is more on a machine that is busy.
//
//	go test -run TheBillIsWhatBackendsHaveReported -bill 10m -timeout 20m -v .
func TestTheBillIsWhatBackendsHaveReported(t *testing.T) {
	if *bill == 0 {
		t.Skip("it takes minutes: go test -run TheBillIsWhatBackendsHaveReported -bill 10m -timeout 20m -v .")
	}
	b := &billRun{T: t, folder: t.TempDir(), since: time.Now().UTC(), stop: make(chan struct{}), reported: make(map[ledger.Key]ledger.Use)}
	b.binary = filepath.Join(b.folder, "caddy")
	build := exec.Command("go", "build", "-o", b.binary, "./cmd/caddy")
	build.Env = append(os.Environ(), "HOME="+home)
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	store := startServer(t, "--appendonly", "yes")
	b.configure(store)
	for i := range b.replicas {
		b.start(i)
		t.Cleanup(func() { b.replicas[i].Load().process.Process.Kill() })
	}
	var clients sync.WaitGroup
	for i := range billTeams {
		clients.Go(func() { b.call(i) })
	}
	kills, begin := 0, time.Now()
	todo := []struct {
		at float64
		do func()
	}{{1. / 4, func() { b.killRedis(store) }}, {1. / 2, b.upgrade}, {3. / 4, func() { b.killRedis(store) }}, {1, nil}}
	for wanted := int(*bill / killEvery); ; {
		pause := max(time.Until(begin.Add(time.Duration((float64(kills)+0.9*rand.Float64())*float64(killEvery)))), 0)
		if kills == wanted {
			pause = time.Until(begin.Add(*bill))
		}
		time.Sleep(pause)
		if float64(time.Since(begin)) >= todo[0].at*float64(*bill) {
			if todo[0].do == nil {
				break
			}
			todo[0].do()
			todo = todo[1:]
		} else if kills < wanted {
			kills++
			i := rand.IntN(billReplicas)
			b.end(i, syscall.SIGKILL)
			b.start(i)
		}
	}
	close(b.stop)
	clients.Wait()
	for i := range b.replicas {
		b.end(i, syscall.SIGTERM)
	}
	b.Logf("%d kills of replicas, 2 of Redis and an upgrade in %s", kills, time.Since(begin).Round(time.Second))
	b.check()
}

// configure writes the configuration of all replicas.
func (b *billRun) configure(store *server) {
	var options, keys strings.Builder
	for i := range billBackends {
		name := fmt.Sprintf("backend-%d", i+1)
		backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { b.serve(w, r, name) }))
		b.Cleanup(backend.Close)
		fmt.Fprintf(&options, "backend %s/v1 {\nname %s\napi_key of-the-%[2]s\npriority %d\n}\n", backend.URL, name, 1+i/3)
	}
	tiers := []string{"interactive", "normal", "leftover"}
	for i := range billTeams {
		fmt.Fprintf(&keys, "team-%02d 0123456789abcdef%02[1]d tier=%s\n", i, tiers[i%len(tiers)])
	}
	lbtest.WriteFile(b, filepath.Join(b.folder, "client-keys"), keys.String())
	lbtest.WriteFile(b, filepath.Join(b.folder, "Caddyfile"), fmt.Sprintf(`{
	admin off
	grace_period 10s
	default_bind 127.0.0.1
	storage file_system %s/storage
}
http://:{$PORT:8080} {
	openai_lb {
		pool llm
		ready_path /readyz
		client_keys_file %[1]s/client-keys
		tier interactive {
			reserve 50%%
			tokens 1G/minute
		}
		tier normal default {
			reserve 30%%
			tokens 100G/month then leftover
		}
		tier leftover {
			reserve 20%%
		}
		%s%s
	}
}`, b.folder, options.String(), store.option()))
}

// start starts a replica, and waits until it is ready.
func (b *billRun) start(i int) {
	r := &billReplica{address: fmt.Sprintf("http://127.0.0.1:%d", lbtest.FreePort(b))}
	r.process = exec.Command(b.binary, "run", "--config", filepath.Join(b.folder, "Caddyfile"))
	r.process.Env = append(os.Environ(), "PORT="+r.address[strings.LastIndexByte(r.address, ':')+1:], "HOME="+b.folder, "XDG_DATA_HOME="+b.folder, "XDG_CONFIG_HOME="+b.folder)
	logs, err := os.OpenFile(filepath.Join(b.folder, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		b.Fatal(err)
	}
	r.process.Stderr = logs
	if err := r.process.Start(); err != nil {
		b.Fatal(err)
	}
	logs.Close()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if res, err := http.Get(r.address + "/readyz"); err == nil {
			res.Body.Close()
			break
		}
		if time.Now().After(deadline) {
			b.Fatal("a replica does not start")
		}
	}
	b.replicas[i].Store(r)
	b.down[i].Store(false)
}

// end ends a replica. A load balancer would know when one is stopped, and learn
// when it is killed.
func (b *billRun) end(i int, signal syscall.Signal) {
	if signal == syscall.SIGTERM {
		b.down[i].Store(true)
	}
	r := b.replicas[i].Load()
	if err := r.process.Process.Signal(signal); err != nil {
		b.Error(err)
	}
	b.down[i].Store(true)
	r.process.Wait()
}

// upgrade replaces all replicas by those of another program.
func (b *billRun) upgrade() {
	text, err := os.ReadFile(b.binary)
	if err == nil {
		b.binary += ".new"
		err = os.WriteFile(b.binary, text, 0o700)
	}
	if err != nil {
		b.Fatal(err)
	}
	for i := range b.replicas {
		b.end(i, syscall.SIGTERM)
		b.start(i)
	}
}

func (b *billRun) killRedis(store *server) {
	store.kill()
	time.Sleep(3 * time.Second)
	store.start()
}

// call sends requests of a team until the run stops.
func (b *billRun) call(team int) {
	client := &http.Client{Timeout: 30 * time.Second}
	defer client.CloseIdleConnections()
	for {
		select {
		case <-b.stop:
			return
		case <-time.After(time.Duration(rand.ExpFloat64() * float64(200*time.Millisecond))):
		}
		i := rand.IntN(billReplicas)
		if b.down[i].Load() {
			i = (i + 1) % billReplicas
		}
		body := fmt.Sprintf(`{"model":"model-%d","stream":%t,"stream_options":{"include_usage":true},"user":"team-%02d","messages":[{"role":"user","content":"Hello"}]}`, rand.IntN(4), rand.IntN(2) == 0, team)
		r, err := http.NewRequest(http.MethodPost, b.replicas[i].Load().address+"/v1/chat/completions", strings.NewReader(body))
		if err != nil {
			b.Error(err)
			return
		}
		r.Header.Set("Authorization", fmt.Sprintf("Bearer 0123456789abcdef%02d", team))
		r.Header.Set("Content-Type", "application/json")
		b.receive(client.Do(r))
	}
}

// receive adds up what a client gets.
func (b *billRun) receive(res *http.Response, err error) {
	var text []byte
	if err == nil {
		text, err = io.ReadAll(res.Body)
		res.Body.Close()
	}
	_, usage, _ := strings.Cut(string(text), `"usage":`)
	var got struct {
		Prompt int64 `json:"prompt_tokens"`
		Output int64 `json:"completion_tokens"`
	}
	decodeErr := json.NewDecoder(strings.NewReader(usage)).Decode(&got)
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case err != nil:
		b.broken++
	case res.StatusCode == http.StatusOK && decodeErr != nil:
		b.Errorf("a reply is %s (%v)", text, decodeErr)
	case res.StatusCode == http.StatusOK:
		b.received.Add(ledger.Use{Requests: 1, Input: got.Prompt, Output: got.Output})
	}
}

// serve is a backend, which sometimes fails. It counts the tokens that it
// reports to a replica that is there.
func (b *billRun) serve(w http.ResponseWriter, r *http.Request, name string) {
	var request struct {
		User, Model string
		Stream      bool
	}
	if err := json.NewDecoder(r.Body).Decode(&request); err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	time.Sleep(rand.N(longestReply))
	if rand.IntN(50) == 0 {
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	u := ledger.Use{Requests: 1, Input: 1 + rand.Int64N(2000), Output: 1 + rand.Int64N(500)}
	k := ledger.Key{Caller: request.User, Model: request.Model, Backend: name, ServiceTier: "default"}
	b.mu.Lock()
	if r.Context().Err() != nil {
		b.abandoned++
		b.mu.Unlock()
		return
	}
	sum := b.reported[k]
	sum.Add(u)
	b.reported[k] = sum
	b.mu.Unlock()
	usage := fmt.Sprintf(`"usage":{"prompt_tokens":%d,"completion_tokens":%d}`, u.Input, u.Output)
	if request.Stream {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\ndata: {\"choices\":[],%s}\n\ndata: [DONE]\n\n", usage)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"id":"chatcmpl-1","choices":[],%s}`, usage)
}

// billMonth is how the command takes a month.
const billMonth = "2006-01"

// bill returns the rows of a month.
func (b *billRun) bill(month time.Time) (rows []ledger.Row) {
	text, err := exec.Command(b.binary, "openai-lb", "usage", "--config", filepath.Join(b.folder, "Caddyfile"), "--month", month.Format(billMonth),
		"--by", "caller,model,backend,service_tier", "--json").Output()
	if err != nil {
		b.Fatalf("%v: %s", err, text)
	}
	if err := json.Unmarshal(text, &rows); err != nil {
		b.Fatal(err)
	}
	return rows
}

// check compares the bill with what was reported.
func (b *billRun) check() {
	rows := b.bill(b.since)
	if now := time.Now().UTC(); now.Format(billMonth) != b.since.Format(billMonth) { // a run is shorter than a month
		rows = append(rows, b.bill(now)...)
	}
	var billed, reported ledger.Use
	for _, row := range rows {
		billed.Add(row.Use)
		if of := b.reported[row.Key]; row.Requests > of.Requests || row.Input > of.Input || row.Output > of.Output {
			b.Errorf("%+v is more than was reported: %+v", row, of)
		}
	}
	for _, u := range b.reported {
		reported.Add(u)
	}
	tokens := func(u ledger.Use) int64 { return u.Input + u.Output }
	percent := func(n int64) float64 { return 100 * float64(n) / float64(tokens(reported)) }
	missing := tokens(reported) - tokens(billed)
	b.Logf("%d rows, %d requests, %d tokens reported: %d (%.4f%%) are not in the bill, %d (%.4f%%) did not reach their client",
		len(rows), reported.Requests, tokens(reported), missing, percent(missing), tokens(reported)-tokens(b.received), percent(tokens(reported)-tokens(b.received)))
	b.Logf("%d requests were abandoned before their backend had an answer, %d connections of clients broke or were refused", b.abandoned, b.broken)
	if percent(missing) >= 0.1 || billed.EstimatedInput+billed.EstimatedOutput > 0 {
		b.Errorf("the bill has %+v, reported were %+v", billed, reported)
	}
	logs, err := os.ReadFile(filepath.Join(b.folder, "log"))
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(logs)) {
		if strings.Contains(line, "panic") || strings.Contains(line, "ledger") {
			b.Errorf("a replica wrote: %s", line)
		}
	}
	if left, err := filepath.Glob(filepath.Join(b.folder, "storage", "openai_lb", "journal", "*")); err != nil || len(left) > 0 {
		b.Errorf("there still are the journals %v (%v)", left, err)
	}
}

func TestAKilledProcessLeavesItsBillToTheNext(t *testing.T) {
	backend := httptest.NewServer(lbtest.Says(200, `{"id":"x","choices":[],"usage":{"prompt_tokens":70,"completion_tokens":50}}`))
	t.Cleanup(backend.Close)
	storage, options := t.TempDir(), "handle {\nopenai_lb {\npool main\nbackend "+backend.URL+"/v1\n}\n}"
	bill := func() (requests int64) {
		pages, err := ledger.Read(t.Context(), &certmagic.FileStorage{Path: storage}, func(ledger.Where) bool { return true })
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range ledger.Entries(pages) {
			requests += e.Requests
		}
		return requests
	}
	for i := range int64(3) {
		r := startCaddyWith(t, storage, options, "go_goroutines")
		lbtest.WaitFor(t, func() bool { return bill() == 20*i })
		for range 20 {
			r.post("gpt-5.5")
		}
		lbtest.WaitFor(t, func() bool {
			journals, _ := filepath.Glob(filepath.Join(storage, "openai_lb", "journal", "*"))
			return len(journals) == 1 && strings.Contains(read(t, journals[0]), `"requests":20,`)
		})
		r.process.Process.Kill()
		r.process.Wait()
	}
}
