package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// worthScenario is a set of simulated deployments and what clients ask of them.
// Each contender has such a set for itself, and all of them have the same
// requests at the same times.
type worthScenario struct {
	name, about string
	deployments []deployment
	rate        float64 // requests a second, as independent clients send them
	burst       int     // so many at a time; 0: one
	stream      bool
	cooldown    int // seconds; what the operator of such deployments would choose
	// timeout is how many seconds a deployment has to begin its reply; 0: 30.
	timeout int
	// silent is when the first deployment does not answer, in each round.
	silentFrom, silentTo time.Duration
	round                time.Duration // 0: 20 s
}

// deployment is one simulator.
type deployment struct {
	options  string // of openai_simulator
	priority int
	paid     float64 // requests a second that it can serve; 0: no matter how many
	bucket   float64 // seconds that a provisioned one holds
}

const (
	window      = 10 * time.Second // in which pay-as-you-go deployments count
	latency     = 20 * time.Millisecond
	patience    = 20 * time.Second // of a client
	warmUp      = 5                // requests before the others
	worthPrompt = 544              // characters, 136 tokens
	// worthTokens is what a provisioned deployment takes a request for: its
	// prompt, and the tokens it may generate, of which each weighs four.
	worthTokens = worthPrompt/4 + 4*maxTokens
)

// payg is a pay-as-you-go deployment for so many requests in 10 seconds.
func payg(requests int, options ...string) deployment {
	return deployment{
		options:  strings.Join(append(options, "requests_per_minute "+itoa(requests*6), "request_window 10s"), "\n"),
		priority: 1, paid: float64(requests) / window.Seconds(),
	}
}

// provisioned is a PTU deployment for so many requests a second.
func provisioned(requests int, bucket float64) deployment {
	return deployment{
		options:  fmt.Sprintf("ptu %d\ninput_tpm_per_ptu %d\nbucket_seconds %g", requests*60, worthTokens, bucket),
		priority: 1, paid: float64(requests), bucket: bucket,
	}
}

// three are three deployments of the same kind.
func three(d deployment) []deployment { return []deployment{d, d, d} }

// behind is a deployment of the second priority, with plenty of quota.
var behind = deployment{options: "requests_per_minute 60000", priority: 2}

var (
	uneven    = []deployment{payg(20), payg(60), payg(120)}
	unlimited = deployment{priority: 1}
)

var worthScenarios = []worthScenario{
	{name: "uneven quotas, 0.8 times what they allow", deployments: uneven, rate: 16, cooldown: 10, about: "Quotas of 20, 60 and 120 requests in 10 s."},
	{name: "uneven quotas, all that they allow", deployments: uneven, rate: 20, cooldown: 10, about: "Quotas of 20, 60 and 120 requests in 10 s."},
	{name: "uneven quotas, twice what they allow", deployments: uneven, rate: 40, cooldown: 10, about: "Quotas of 20, 60 and 120 requests in 10 s."},
	{name: "PTU with a bucket of 0.5 s", deployments: []deployment{provisioned(20, .5), behind}, rate: 40, cooldown: 1, about: "A PTU for 20 requests a second, with a pay-as-you-go deployment behind it, and 40 requests a second."},
	{name: "PTU with a bucket of 2 s", deployments: []deployment{provisioned(20, 2), behind}, rate: 40, cooldown: 1, about: "The same."},
	{name: "PTU with a bucket of 10 s", deployments: []deployment{provisioned(20, 10), behind}, rate: 40, cooldown: 1, about: "The same."},
	{name: "bursts", deployments: three(payg(50)), rate: 12, burst: 25, cooldown: 10, about: "Three quotas of 50 requests in 10 s, 12 requests a second that come 25 at a time."},
	{name: "no hint", deployments: three(payg(70, "hints azure_neg1", "error_body string_error")), rate: 40, cooldown: 10, about: "Three quotas of 70 requests in 10 s, twice as many requests, and 429s that do not say for how long. An early call is one before the quota is there again."},
	{name: "a wrong hint", deployments: three(payg(70, "hints zero", "error_body string_error")), rate: 40, cooldown: 10, about: "The same, but each 429 asks to come back at once."},
	{name: "a hint of a day", deployments: three(payg(70, "hints azure_day")), rate: 40, cooldown: 10, about: "The same, but each 429 asks to come back after a day."},
	{name: "brown-out", deployments: three(unlimited), rate: 20, cooldown: 10, timeout: 2, silentFrom: 5 * time.Second, silentTo: 10 * time.Second, round: 15 * time.Second, about: "One of three deployments without limits is silent for 5 of every 15 s. The contenders give each 2 s to answer."},
	{name: "errors as first event", deployments: three(deployment{options: "fault sse_error_first:too_many_requests:no_capacity 20", priority: 1}), rate: 20, stream: true, cooldown: 10, about: "Streams, of which each deployment begins every 20th with an error, after a status of 200."},
	{name: "all exhausted", deployments: three(payg(35)), rate: 50, cooldown: 10, about: "Three quotas of 35 requests in 10 s, and nearly five times as many requests."},
}

var worthColumns = []column{
	{Name: "served", Unit: "%", Digits: 1, Ratio: true, Better: "higher"},
	{Name: "429", Unit: "%", Digits: 1, Better: "lower"},
	{Name: "other errors", Unit: "%", Digits: 1, Better: "lower"},
	{Name: "gave up", Unit: "%", Digits: 1, Better: "lower"},
	{Name: "early calls", Better: "lower"},
	{Name: "calls a request", Digits: 2, Better: "lower"},
	{Name: "paid capacity used", Unit: "%", Better: "higher"},
	{Name: "added p50", Unit: "ms", Digits: 1, Better: "lower"},
	{Name: "added p99", Unit: "ms", Digits: 1, Better: "lower"},
}

var brownOutColumns = []column{
	{Name: "waited for the timeout", Unit: "%", Digits: 1, Better: "lower"},
	{Name: "longest", Unit: "s", Digits: 1, Better: "lower"},
}

// simulators are the processes of a scenario: the n-th one is the n-th
// deployment of every contender, so that all of them fall silent together.
type simulators struct {
	processes []*process
	upstreams [][]upstream // of each contender
}

func (b *bench) startSimulators(s worthScenario) (sims *simulators, err error) {
	sims = &simulators{upstreams: make([][]upstream, len(b.contenders))}
	port := freePort()
	for n, d := range s.deployments {
		config := "{\nadmin off\nauto_https off\nlog {\nlevel ERROR\n}\n}\n"
		for c := range b.contenders {
			host := fmt.Sprintf("127.0.%d.%d", 10+c, n+1)
			sims.upstreams[c] = append(sims.upstreams[c], newUpstream(host, port, d.priority))
			config += fmt.Sprintf("http://:%d {\nbind %s\nopenai_simulator {\nname s%d\napi_key %s\noutput_tokens %d\nfirst_token_latency %s\n%s\n}\n}\n",
				port, host, n, backendKey, maxTokens, latency, d.options)
		}
		name := fmt.Sprintf("simulator%d", n)
		dir := filepath.Join(b.tools.dir, name)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return sims, err
		}
		if err := os.WriteFile(dir+"/Caddyfile", []byte(config), 0o600); err != nil {
			return sims, err
		}
		p, err := start(name, dir, caddyEnv(setup{Dir: dir}), caddyRun(b.tools, setup{Dir: dir})...)
		if err != nil {
			return sims, err
		}
		sims.processes = append(sims.processes, p)
		if err := p.listening(sims.upstreams[0][n].Address); err != nil {
			return sims, err
		}
	}
	return sims, nil
}

func (s *simulators) stop() {
	for _, p := range s.processes {
		p.stop()
	}
}

// status is what the simulators of a contender have counted.
type status struct{ requests, early, admittedPaid float64 }

func (s *simulators) status(contender int, deployments []deployment) (sum status, err error) {
	for n, u := range s.upstreams[contender] {
		res, err := http.Get("http://" + u.Address + "/_simulator/status")
		if err != nil {
			return sum, err
		}
		var one struct{ Requests, Early, Admitted float64 }
		err = json.NewDecoder(res.Body).Decode(&one)
		res.Body.Close()
		if err != nil {
			return sum, err
		}
		sum.requests += one.Requests
		sum.early += one.Early
		if deployments[n].paid > 0 {
			sum.admittedPaid += one.Admitted
		}
	}
	return sum, nil
}

// reset forgets all that the simulators of a contender have counted.
func (s *simulators) reset(contender int) error {
	for _, u := range s.upstreams[contender] {
		res, err := http.Post("http://"+u.Address+"/_simulator/status", "", nil)
		if err != nil {
			return err
		}
		res.Body.Close()
	}
	return nil
}

// runWorth runs one scenario after the other.
func (b *bench) runWorth() error {
	for _, s := range worthScenarios {
		if !b.only.MatchString("worth: " + s.name) {
			continue
		}
		if err := b.worth(s); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return nil
}

// worth sends all contenders the same requests, at the same times and in one
// go. A round is a part of it.
func (b *bench) worth(s worthScenario) error {
	sims, err := b.startSimulators(s)
	defer sims.stop()
	if err != nil {
		return err
	}
	timeout := cmp.Or(s.timeout, 30)
	all := runAll(b.tools, b.contenders, func(n int) setup {
		return setup{Backends: sims.upstreams[n], Cooldown: s.cooldown, Window: int(window.Seconds()), HeaderTimeout: timeout}
	})
	defer func() { stopAll(all) }()
	body := chatRequest(worthPrompt, s.stream)
	all = slices.DeleteFunc(all, func(r *running) bool {
		for range warmUp {
			if ask(http.DefaultClient, r, body, patience) != served {
				b.problem("%s does not serve the requests of %q, and is left out", r.name, s.name)
				r.stop()
				return true
			}
		}
		return false
	})
	number := make([]int, len(all)) // of each one's simulators
	for n, r := range all {
		number[n] = slices.IndexFunc(b.contenders, func(c contender) bool { return c.name == r.name })
		if err := sims.reset(number[n]); err != nil {
			return err
		}
	}

	round := cmp.Or(b.worthRound, s.round, 20*time.Second)
	// The load goes on until all that is measured is over: who makes clients
	// wait must not get the quota of a time in which nobody else asks for it.
	measured := round * time.Duration(b.worthRounds)
	plan := arrivals(s.rate, max(1, s.burst), measured+patience)
	schedules := make([][]arrival, len(all))
	counted := make([][]status, len(all)) // at the end of each round
	var running, pending sync.WaitGroup
	enough := make(chan struct{})
	begun, idle := time.Now(), idleTime()
	for n, r := range all {
		schedules[n] = slices.Clone(plan)
		for _, a := range plan {
			if a.at < measured {
				pending.Add(1)
			}
		}
		running.Go(func() {
			openLoop(r, body, schedules[n], patience, enough, func(a arrival) {
				if a.at < measured {
					pending.Done()
				}
			})
		})
	}
	var failure error
	for i := range b.worthRounds {
		b.beSilent(s, sims, begun.Add(time.Duration(i)*round), round)
		time.Sleep(time.Until(begun.Add(time.Duration(i+1) * round)))
		for n := range all {
			now, err := sims.status(number[n], s.deployments)
			failure = cmp.Or(failure, err)
			counted[n] = append(counted[n], now)
		}
	}
	idle = (idleTime() - idle) / time.Since(begun).Seconds()
	pending.Wait()
	close(enough)
	running.Wait()
	if failure != nil {
		return failure
	}

	t := &table{Title: "Worth: " + s.name, Base: plain, Columns: worthColumns}
	t.About = fmt.Sprintf("%s %d rounds of %s; the processors were idle for %.0f %% of the time.", s.about, b.worthRounds, round, 100*idle)
	if s.silentTo > 0 {
		t.Columns = slices.Concat(worthColumns, brownOutColumns)
	}
	could := s.ideal(plan)
	for n, r := range all {
		for i := range b.worthRounds {
			from, to := time.Duration(i)*round, time.Duration(i+1)*round
			delta := counted[n][i]
			if i > 0 {
				before := counted[n][i-1]
				delta = status{delta.requests - before.requests, delta.early - before.early, delta.admittedPaid - before.admittedPaid}
			}
			t.add(r.name, s.values(schedules[n], could, from, to, delta, time.Duration(timeout)*time.Second)...)
		}
	}
	b.report.print(t)
	return nil
}

// beSilent stops the first deployment for a while, if that is due in a round.
func (b *bench) beSilent(s worthScenario, sims *simulators, from time.Time, round time.Duration) {
	if s.silentTo == 0 {
		return
	}
	part := float64(round) / float64(s.round) // in a short run, all of it is shorter
	time.Sleep(time.Until(from.Add(time.Duration(part * float64(s.silentFrom)))))
	sims.processes[0].signal(syscall.SIGSTOP)
	time.Sleep(time.Until(from.Add(time.Duration(part * float64(s.silentTo)))))
	sims.processes[0].signal(syscall.SIGCONT)
}

// values makes the values of a round's row.
func (s worthScenario) values(schedule []arrival, could []bool, from, to time.Duration, counted status, timeout time.Duration) []float64 {
	var came [4]float64
	var offered, possible, waited, longest float64
	var took []time.Duration
	for n, a := range schedule {
		if a.at < from || a.at >= to {
			continue
		}
		offered++
		came[a.came]++
		if could[n] {
			possible++
		}
		if a.came == served {
			took = append(took, a.took-latency)
		}
		if a.took >= timeout {
			waited++
		}
		longest = max(longest, a.took.Seconds())
	}
	slices.Sort(took)
	used := math.NaN()
	if possible > 0 {
		used = 100 * counted.admittedPaid / possible
	}
	values := []float64{
		100 * came[served] / offered, 100 * came[refused] / offered, 100 * came[failed] / offered, 100 * came[timedOut] / offered,
		counted.early, counted.requests / offered, used, percentile(took, .5) / 1e6, percentile(took, .99) / 1e6,
	}
	if s.silentTo > 0 {
		values = append(values, 100*waited/offered, longest)
	}
	return values
}

// ideal says which requests a balancer could have served that knows all, by
// what is paid for: of deployments with quotas those of all of them together,
// else the bucket of the provisioned one.
func (s worthScenario) ideal(schedule []arrival) []bool {
	could := make([]bool, len(schedule))
	var quota, rate, bucket float64
	for _, d := range s.deployments {
		if d.bucket > 0 {
			rate, bucket = d.paid, d.bucket*d.paid
		} else {
			quota += d.paid * window.Seconds()
		}
	}
	var used, level float64
	var ends, last time.Duration
	for n, a := range schedule {
		if bucket > 0 {
			level = max(0, level-rate*(a.at-last).Seconds())
			last = a.at
			if could[n] = level < bucket; could[n] {
				level++
			}
			continue
		}
		if a.at >= ends {
			ends, used = a.at+window, 0
		}
		if could[n] = used < quota; could[n] {
			used++
		}
	}
	return could
}

// idleTime is for how many seconds the processors had nothing to do, on
// average, since the machine started.
func idleTime() float64 {
	var up, idle float64
	text, _ := os.ReadFile("/proc/uptime")
	_, _ = fmt.Sscan(string(text), &up, &idle)
	return idle / float64(runtime.NumCPU())
}
