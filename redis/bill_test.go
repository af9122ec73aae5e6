package redis

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/certmagic"

	"github.com/openai-lb/caddy-openai-lb/internal/ledger"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

var bill = flag.Duration("bill", 0, "how long TestAKillTakesTenSecondsOfTheBillAtMost lasts; 0: it is skipped")

const (
	billReplicas = 3
	billCallers  = 40
	// killEvery is the usual time between two kills.
	killEvery = 6 * time.Second
	// unsaved is how much of a process that is killed may be missing: what changed since it last saved, and requests in
	// flight then. A second is for a machine that is busy.
	unsaved = pools.SaveInterval + longestReply + time.Second
	// longestReply is how long a backend takes at most.
	longestReply = 500 * time.Millisecond
)

// billRun is some processes that share a storage, with callers.
type billRun struct {
	*testing.T
	storage, options string
	replicas         [billReplicas]atomic.Pointer[replica]
	stop             chan struct{}

	mu sync.Mutex
	// reported are the tokens that backends have reported, in the order of time, and kills when a replica was killed.
	reported []use
	kills    []use
}

// TestAKillTakesTenSecondsOfTheBillAtMost has 40 callers call three processes that share a storage. Every six seconds, one
// is killed or restarted. In the end the ledger has no token more than backends have reported, and lacks only those that
// they reported to a process in its last seconds.
//
//	go test -run OfTheBill -bill 10m -timeout 20m -v .
func TestAKillTakesTenSecondsOfTheBillAtMost(t *testing.T) {
	if *bill == 0 {
		t.Skip("it takes minutes: go test -run OfTheBill -bill 10m -timeout 20m -v .")
	}
	b := &billRun{T: t, storage: t.TempDir(), stop: make(chan struct{})}
	var options strings.Builder
	for _, name := range []string{"one", "two"} {
		backend := httptest.NewServer(http.HandlerFunc(b.serve))
		t.Cleanup(backend.Close)
		fmt.Fprintf(&options, "backend %s/v1 {\nname %s\napi_key of-the-backend-%[2]s\n}\n", backend.URL, name)
	}
	for i := range billCallers {
		fmt.Fprintf(&options, "client_key c%02d 0123456789abcdef%02[1]d\n", i)
	}
	b.options = "handle {\nopenai_lb {\npool main\n" + options.String() + "caller * {\ntokens 100G/day\n}\n}\n}"
	for i := range b.replicas {
		b.start(i)
	}
	var clients sync.WaitGroup
	for i := range billCallers {
		clients.Go(func() { b.call(i) })
	}
	kills, restarts := b.end(time.Now().Add(*bill))
	close(b.stop)
	clients.Wait()
	for i := range b.replicas {
		b.leave(i)
	}
	b.check(kills, restarts)
}

func (b *billRun) start(i int) {
	b.replicas[i].Store(startCaddyWith(b, b.storage, b.options, "go_goroutines"))
}

// leave ends a replica, as a service manager does.
func (b *billRun) leave(i int) {
	r := b.replicas[i].Load()
	r.stdin.Close()
	r.process.Wait()
}

// end kills replicas, and restarts some, until a time.
func (b *billRun) end(until time.Time) (kills, restarts int) {
	for {
		time.Sleep(time.Duration((0.5 + rand.Float64()) * float64(killEvery)))
		if time.Now().After(until) {
			return kills, restarts
		}
		i := rand.IntN(billReplicas)
		if rand.IntN(10) == 0 {
			restarts++
			b.leave(i)
		} else {
			kills++
			r := b.replicas[i].Load()
			b.mu.Lock()
			r.process.Process.Kill()
			b.kills = append(b.kills, use{at: time.Now(), replica: strconv.Itoa(i)})
			b.mu.Unlock()
			r.process.Wait()
		}
		b.start(i)
	}
}

// call sends requests of a caller until the run stops.
func (b *billRun) call(caller int) {
	client := &http.Client{Timeout: 30 * time.Second}
	defer client.CloseIdleConnections()
	for {
		select {
		case <-b.stop:
			return
		case <-time.After(time.Duration(rand.ExpFloat64() * float64(200*time.Millisecond))):
		}
		at := rand.IntN(billReplicas)
		body := fmt.Sprintf(`{"model":"model-%d","stream":%t,"user":"%d","messages":[{"role":"user","content":"Hello"}]}`, rand.IntN(4), rand.IntN(2) == 0, at)
		r, err := http.NewRequest(http.MethodPost, b.replicas[at].Load().address+"/v1/chat/completions", strings.NewReader(body))
		if err != nil {
			b.Error(err)
			return
		}
		r.Header.Set("Authorization", fmt.Sprintf("Bearer 0123456789abcdef%02d", caller))
		r.Header.Set("Content-Type", "application/json")
		if res, err := client.Do(r); err == nil {
			io.Copy(io.Discard, res.Body)
			res.Body.Close()
		}
	}
}

// serve is a backend, which sometimes fails. It counts the tokens that it reports.
func (b *billRun) serve(w http.ResponseWriter, r *http.Request) {
	var request struct {
		User   string
		Stream bool
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
	input, output := 1+rand.IntN(2000), 1+rand.IntN(500)
	b.mu.Lock()
	b.reported = append(b.reported, use{time.Now(), input + output, request.User})
	b.mu.Unlock()
	usage := fmt.Sprintf(`"usage":{"prompt_tokens":%d,"completion_tokens":%d}`, input, output)
	if request.Stream {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\ndata: {\"choices\":[],%s}\n\ndata: [DONE]\n\n", usage)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"id":"chatcmpl-1","choices":[],%s}`, usage)
}

// check compares the ledger with what was reported.
func (b *billRun) check(kills, restarts int) {
	pages, err := ledger.Read(b.Context(), &certmagic.FileStorage{Path: b.storage}, func(ledger.Where) bool { return true })
	if err != nil {
		b.Fatal(err)
	}
	var sum ledger.Use
	for _, e := range ledger.Entries(pages) {
		sum.Add(e.Use)
	}
	reported, mayLack := int64(0), int64(0)
	for _, u := range b.reported {
		reported += int64(u.tokens)
		if slices.ContainsFunc(b.kills, func(k use) bool {
			return k.replica == u.replica && !u.at.Before(k.at.Add(-unsaved)) && u.at.Before(k.at.Add(longestReply))
		}) {
			mayLack += int64(u.tokens)
		}
	}
	has := sum.Input + sum.Output
	b.Logf("%d kills, %d restarts, %d pages, %d requests: %d tokens reported, %d (%.2f%%) not in the ledger, of %d (%.2f%%) that may be missing",
		kills, restarts, len(pages), len(b.reported), reported, reported-has, 100*float64(reported-has)/float64(reported), mayLack, 100*float64(mayLack)/float64(reported))
	if has > reported || has < reported-mayLack {
		b.Errorf("the ledger has %d tokens of %d", has, reported)
	}
	if sum.EstimatedInput+sum.EstimatedOutput > 0 {
		b.Errorf("%d tokens are estimated", sum.EstimatedInput+sum.EstimatedOutput)
	}
}
