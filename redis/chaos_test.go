package redis

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

var chaos = flag.Duration("chaos", 0, "how long TestLimitsHoldInChaos lasts; 0: it is skipped")

const (
	chaosReplicas = 3
	perDay        = 100_000_000
)

// chaosTiers are the tiers, and the limit by the minute of each of their
// callers.
var chaosTiers = []struct {
	name      string
	perMinute int
}{{"gold", 30_000}, {"silver", 20_000}, {"bronze", 12_000}}

// chaosModel is a model of which callers may use half of their limit. All but
// modest ones ask for it in every second request.
const chaosModel = "gpt-4o-mini"

// chaosCaller is a client. A modest one never asks for more than its share of
// the limit, which is the limit divided by the number of replicas, whatever its
// requests cost in the end. The others ask for twice the limit.
type chaosCaller struct {
	name, key, tier string
	limit           int
	modest          bool
	// declares reports whether its requests say how long their output may be.
	declares bool

	mu sync.Mutex
	// used are the tokens that backends reported, and asked those that it has
	// declared, by the time of the request. mini are those of used that were of
	// chaosModel.
	used, asked, mini []use
	// results are how many requests ended with a status. 0: the connection
	// broke.
	results map[int]int
	// wrong are refusals of a modest caller.
	wrong []string
}

type use struct {
	at     time.Time
	tokens int
	// replica is the one that sent the request.
	replica string
}

// most returns how much was used in any window of so long, and when that ended.
func most(all []use, window time.Duration) (most int, end time.Time) {
	slices.SortFunc(all, func(a, b use) int { return a.at.Compare(b.at) })
	first, sum := 0, 0
	for _, u := range all {
		for sum += u.tokens; u.at.Sub(all[first].at) >= window; first++ {
			sum -= all[first].tokens
		}
		if sum > most {
			most, end = sum, u.at
		}
	}
	return most, end
}

// seconds returns which replica sent how many tokens in each second of the two
// minutes before the end.
func seconds(all []use, end time.Time) string {
	var text strings.Builder
	sums := make(map[string]int)
	for i, u := range all {
		if u.at.Before(end.Add(-2*time.Minute)) || u.at.After(end) {
			continue
		}
		sums[u.replica] += u.tokens
		if i+1 == len(all) || all[i+1].at.Unix() != u.at.Unix() {
			fmt.Fprintf(&text, "%s %v\n", u.at.Format(time.TimeOnly), sums)
			clear(sums)
		}
	}
	return text.String()
}

// chaosRun is some callers that call replicas while things fail.
type chaosRun struct {
	*testing.T
	callers  []*chaosCaller
	byName   map[string]*chaosCaller
	replicas [chaosReplicas]atomic.Pointer[replica]
	// storages are the folders of the replicas, which outlive their processes.
	storages [chaosReplicas]string
	options  string
	stop     chan struct{}
}

// start starts a replica, for the first time or again.
func (c *chaosRun) start(i int) {
	c.Helper()
	c.replicas[i].Store(startCaddyWith(c, c.storages[i], "handle {\nopenai_lb {\n"+c.options+"\n}\n}", "caddy_openai_lb_state_queue_length"))
}

// restart ends a replica in order, and starts it again.
func (c *chaosRun) restart(i int) {
	c.Helper()
	r := c.replicas[i].Load()
	r.stdin.Close()
	r.process.Wait()
	c.start(i)
}

// TestLimitsHoldInChaos has 40 callers of three tiers call three replicas, in
// processes of their own, while Redis is stopped, loses its data and restarts,
// a replica is killed, and all restart while Redis is gone: one of these every
// twelve seconds. As backends report it, no caller uses more than 110 % of a
// limit in any 60 s, of all models or of one, whether it declares its outputs
// or not, and none that stays within its share is refused. In the end all
// replicas have the same use by day, also after a rolling restart.
//
//	go test -run LimitsHoldInChaos -chaos 10m -timeout 20m -v .
func TestLimitsHoldInChaos(t *testing.T) {
	if *chaos == 0 {
		t.Skip("it takes minutes: go test -run LimitsHoldInChaos -chaos 10m -timeout 20m -v .")
	}
	c := &chaosRun{T: t, byName: make(map[string]*chaosCaller), stop: make(chan struct{})}
	backend := httptest.NewServer(http.HandlerFunc(c.serve))
	t.Cleanup(backend.Close)
	store := startServer(t)
	var options strings.Builder
	fmt.Fprintf(&options, "backend %s/v1 {\nname one\napi_key of-the-backend\n}\nbackend %[1]s/v1 {\nname two\napi_key of-the-other\n}\n%s", backend.URL, store.option())
	for _, tier := range chaosTiers {
		fmt.Fprintf(&options, "tier %s\n", tier.name)
	}
	for i := range 40 {
		tier := chaosTiers[i%len(chaosTiers)]
		caller := &chaosCaller{name: fmt.Sprintf("c%02d", i), key: fmt.Sprintf("0123456789abcdef%02d", i), tier: tier.name,
			limit: tier.perMinute, modest: i%4 == 0, declares: i%8 < 4, results: make(map[int]int)}
		c.callers, c.byName[caller.name] = append(c.callers, caller), caller
		fmt.Fprintf(&options, "client_key %s %s\ncaller %[1]s {\ntokens %[3]d/minute\ntokens %[4]d/day\ntokens %[6]d/minute %[7]s\ntier %[5]s\n}\n", caller.name, caller.key, tier.perMinute, perDay, tier.name, tier.perMinute/2, chaosModel)
	}
	c.options = options.String()
	for i := range c.replicas {
		c.storages[i] = t.TempDir()
		c.start(i)
	}
	time.Sleep(3 * time.Second) // they know each other
	var clients sync.WaitGroup
	for _, caller := range c.callers {
		clients.Go(func() { c.call(caller) })
	}
	c.breakThings(store, time.Now().Add(*chaos))
	close(c.stop)
	clients.Wait()
	c.check()
	time.Sleep(6 * time.Second)
	before := c.today("at the end")
	for i := range c.replicas {
		c.restart(i)
		time.Sleep(2 * time.Second)
	}
	time.Sleep(4 * time.Second)
	if after := c.today("after a rolling restart"); !maps.Equal(before, after) {
		t.Errorf("after a rolling restart, the use by day is %v, before it was %v", after, before)
	}
}

// note logs what happens, and when.
func (c *chaosRun) note(what string) { c.Log(time.Now().Format(time.TimeOnly), what) }

// breakThings does so until the end, less the time of one cycle's part in which
// all recovers.
func (c *chaosRun) breakThings(store *server, end time.Time) {
	const pause = 12 * time.Second
	for n := 0; time.Until(end) > 2*pause; n++ {
		time.Sleep(pause)
		switch n % 5 {
		case 0:
			c.note("Redis hangs for 5 s")
			store.signal(syscall.SIGSTOP)
			time.Sleep(5 * time.Second)
			store.signal(syscall.SIGCONT)
		case 1:
			c.note("Redis loses its data")
			store.do("flushall")
		case 2:
			c.note("a replica is killed")
			i := n / 5 % chaosReplicas
			r := c.replicas[i].Load()
			r.process.Process.Kill()
			r.process.Wait()
			time.Sleep(2 * time.Second)
			c.start(i)
		case 3:
			c.note("all replicas restart, one after the other, without Redis")
			store.kill()
			for i := range c.replicas {
				c.restart(i)
				time.Sleep(time.Second)
			}
			store.start()
		default:
			c.note("Redis restarts without its data")
			store.kill()
			time.Sleep(3 * time.Second)
			store.start()
		}
	}
	time.Sleep(time.Until(end))
}

// call sends requests until the run stops: three at a time, or one if the
// caller is modest.
func (c *chaosRun) call(caller *chaosCaller) {
	client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 10}}
	defer client.CloseIdleConnections()
	workers, demand := 3, 4*caller.limit // what requests declare is about twice what they cost
	if caller.modest {
		workers, demand = 1, caller.limit/chaosReplicas
	}
	var all sync.WaitGroup
	for range workers {
		all.Go(func() {
			for {
				words, output := 20+rand.IntN(300), 1+rand.IntN(500)
				cost := words*2 + output // a word has at most two tokens
				pause := time.Duration(rand.ExpFloat64() * float64(time.Minute) * float64(cost) / float64(demand) * float64(workers))
				select {
				case <-c.stop:
					return
				case <-time.After(pause):
				}
				if !caller.modest || caller.mayAsk(cost, demand) {
					c.send(client, caller, words, output)
				}
			}
		})
	}
	all.Wait()
}

// mayAsk reports whether a modest caller may ask for so much now, and remembers
// that.
func (c *chaosCaller) mayAsk(cost, share int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	sum := cost
	for _, u := range slices.Backward(c.asked) {
		if now.Sub(u.at) > 70*time.Second {
			break
		}
		sum += u.tokens
	}
	if sum > share {
		return false
	}
	c.asked = append(c.asked, use{at: now, tokens: cost})
	return true
}

func (c *chaosRun) send(client *http.Client, caller *chaosCaller, words, output int) {
	request := map[string]any{
		"model": "gpt-4o", "user": caller.name, "stream": rand.IntN(2) == 0,
		"messages": []map[string]string{{"role": "user", "content": strings.Repeat("word ", words)}},
	}
	if caller.declares {
		request["max_tokens"] = output
	}
	if !caller.modest && rand.IntN(2) == 0 {
		request["model"] = chaosModel
	}
	body, err := json.Marshal(request)
	if err != nil {
		c.Error(err)
		return
	}
	status, text := 0, ""
	r := c.post(caller, body, rand.IntN(chaosReplicas))
	r.Header.Set("X-Output", strconv.Itoa(output))
	if res, err := client.Do(r); err == nil {
		reply, _ := io.ReadAll(res.Body)
		res.Body.Close()
		status, text = res.StatusCode, string(reply)
	}
	caller.mu.Lock()
	defer caller.mu.Unlock()
	caller.results[status]++
	if status > 299 && (caller.modest || status != http.StatusTooManyRequests) {
		caller.wrong = append(caller.wrong, fmt.Sprint(time.Now().Format(time.TimeOnly), " ", status, " ", text))
	}
}

func (c *chaosRun) post(caller *chaosCaller, body []byte, at int) *http.Request {
	r, err := http.NewRequest(http.MethodPost, c.replicas[at].Load().address+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		c.Error(err)
	}
	r.Header.Set("Authorization", "Bearer "+caller.key)
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("X-Replica", strconv.Itoa(at))
	return r
}

// serve is a backend. It reports a random usage, and counts that when the
// request comes.
func (c *chaosRun) serve(w http.ResponseWriter, r *http.Request) {
	var request struct {
		User     string
		Model    string
		Stream   bool
		Messages []struct{ Content string }
	}
	if err := json.NewDecoder(r.Body).Decode(&request); err != nil || len(request.Messages) == 0 {
		w.WriteHeader(http.StatusBadRequest) // as today asks for
		return
	}
	prompt := len(request.Messages[0].Content) / 5 * (80 + rand.IntN(60)) / 100
	longest, _ := strconv.Atoi(r.Header.Get("X-Output"))
	output := 1 + rand.IntN(longest)
	caller := c.byName[request.User]
	caller.mu.Lock()
	used := use{time.Now(), prompt + output, r.Header.Get("X-Replica")}
	caller.used = append(caller.used, used)
	if request.Model == chaosModel {
		caller.mini = append(caller.mini, used)
	}
	caller.mu.Unlock()
	usage := fmt.Sprintf(`{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}`, prompt, output, prompt+output)
	if !request.Stream {
		time.Sleep(time.Duration(20+rand.IntN(500)) * time.Millisecond)
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"id":"chatcmpl-1","choices":[{"message":{"role":"assistant","content":"%s"}}],"usage":%s}`, strings.Repeat("word ", output), usage)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	for range 10 {
		fmt.Fprintf(w, "data: {\"choices\":[{\"delta\":{\"content\":\"%s\"}}]}\n\n", strings.Repeat("word ", output/10))
		http.NewResponseController(w).Flush()
		time.Sleep(time.Duration(rand.IntN(200)) * time.Millisecond)
	}
	fmt.Fprintf(w, "data: {\"choices\":[],\"usage\":%s}\n\ndata: [DONE]\n\n", usage)
}

// check checks what the backends have reported, and the refusals.
func (c *chaosRun) check() {
	for _, tier := range chaosTiers {
		results, highest, ofModel, average := make(map[int]int), 0.0, 0.0, 0.0
		busy := 0
		for _, caller := range c.callers {
			if caller.tier != tier.name {
				continue
			}
			caller.mu.Lock()
			peak, end := most(caller.used, time.Minute)
			ratio := float64(peak) / float64(caller.limit)
			highest = max(highest, ratio)
			if ratio > 1.1 {
				c.Errorf("%s used %.0f %% of its limit in the 60 s before %s:\n%s", caller.name, 100*ratio, end.Format(time.TimeOnly), seconds(caller.used, end))
			}
			mini, end := most(caller.mini, time.Minute)
			ratio = float64(mini) / float64(caller.limit/2)
			if ofModel = max(ofModel, ratio); ratio > 1.1 {
				c.Errorf("%s used %.0f %% of its limit of a model in the 60 s before %s:\n%s", caller.name, 100*ratio, end.Format(time.TimeOnly), seconds(caller.mini, end))
			}
			if !caller.modest {
				sum := 0
				for _, u := range caller.used {
					sum += u.tokens
				}
				average += float64(sum) / chaos.Minutes() / float64(caller.limit)
				busy++
			}
			for status, n := range caller.results {
				results[status] += n
			}
			if len(caller.wrong) > 0 {
				c.Errorf("%s had %d wrong answers, such as %s", caller.name, len(caller.wrong), caller.wrong[0])
			}
			caller.mu.Unlock()
		}
		c.Logf("%s: at most %.1f %% of a limit in 60 s, and %.1f %% of that of a model, on average %.1f %% where twice as much was asked for; answers: %v",
			tier.name, 100*highest, 100*ofModel, 100*average/float64(max(1, busy)), results)
	}
}

// today returns the use by day of all callers, which has to be the same at all
// replicas. It is known at a replica that has seen a request of the caller,
// here a wrong one.
func (c *chaosRun) today(when string) map[string]int {
	client := &http.Client{Timeout: 30 * time.Second}
	defer client.CloseIdleConnections()
	all := make([]map[string]int, chaosReplicas)
	for i := range all {
		all[i] = make(map[string]int)
		for _, caller := range c.callers {
			res, err := client.Do(c.post(caller, []byte(`{"model":"gpt-4o","messages":[]}`), i))
			if err != nil {
				c.Error(err)
				continue
			}
			res.Body.Close()
		}
		for _, caller := range c.callers {
			name := fmt.Sprintf(`caller="%s",kind="tokens",`, caller.name)
			all[i][caller.name] = int(perDay*c.replicas[i].Load().metricLike("caller_limit_used_ratio", name, `window="day"`) + .5)
		}
	}
	for i := range all {
		if !maps.Equal(all[0], all[i]) {
			c.Errorf("%s, the use by day is %v at one replica, and %v at another", when, all[0], all[i])
		}
	}
	reported, known := 0, 0
	for _, caller := range c.callers {
		caller.mu.Lock()
		for _, u := range caller.used {
			reported += u.tokens
		}
		caller.mu.Unlock()
		known += all[0][caller.name]
	}
	c.Logf("%s, replicas know of %d tokens of this day, of %d that the backends have reported (%.2f %%)", when, known, reported, 100*float64(known)/float64(reported))
	return all[0]
}
