package main

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"time"
)

// callersSetup is what a contender is told of callers.
type callersSetup struct {
	Callers []caller
	// Each caller has so many requests or tokens a minute. 0: no limit.
	RequestsPerMinute, TokensPerMinute int
	CallerTiers                        bool
	Redis                              string // its address; empty: none
	// replica tells processes of one contender apart.
	replica string
}

// call is a request of a caller.
type call struct {
	arrival
	caller, replica int
	// by is the deployment that served it, with so many tokens.
	by     string
	tokens int
}

// callersRun is a row of a scenario that runs.
type callersRun struct {
	callersRow
	replicas []*running
	redis    *process
	calls    []call
}

// runCallers runs one scenario after the other.
func (b *bench) runCallers() error {
	for _, s := range callersScenarios {
		if !b.only.MatchString("callers: " + s.name) {
			continue
		}
		if err := b.callersOf(s); err != nil {
			b.problem("callers: %s: %s", s.name, err)
		}
	}
	return nil
}

// callersOf runs a scenario, with all of its rows at the same time.
func (b *bench) callersOf(s callersScenario) error {
	one := *b // with a contender for each row
	one.contenders = nil
	var all []*callersRun
	for _, row := range s.rows {
		if n := slices.IndexFunc(b.contenders, func(c contender) bool { return c.name == row.contender }); n >= 0 {
			one.contenders, all = append(one.contenders, b.contenders[n]), append(all, &callersRun{callersRow: row})
		}
	}
	if len(all) == 0 {
		return nil
	}
	if s.replicas > 0 {
		var err error
		if one.tools, err = b.tools.withRedis(); err != nil {
			return err
		}
	}
	sims, err := one.startSimulators(s.simulated, 1)
	defer sims.stop()
	if err != nil {
		return err
	}
	defer func() {
		for _, r := range all {
			r.stop()
		}
	}()
	for n, r := range all {
		if err := r.start(one.tools, n, one.contenders[n], s, sims.upstreams[n]); err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
	}

	short := cmp.Or(b.worthRound, s.round).Seconds() / s.round.Seconds()
	scaled := func(d time.Duration) time.Duration { return time.Duration(short * float64(d)) }
	for _, r := range all {
		for n := range r.replicas {
			if err := r.warmUp(s, n); err != nil {
				return err
			}
		}
	}
	if s.begins > 0 && short == 1 {
		time.Sleep(time.Until(time.Now().Add(time.Minute).Truncate(time.Minute)))
		for _, r := range all {
			r.send(http.DefaultClient, s, new(call))
		}
		time.Sleep(time.Until(time.Now().Truncate(time.Minute).Add(s.begins)))
	}

	var phases []span
	end := time.Duration(0)
	for range s.phases {
		from := end + scaled(s.lead)
		end = from + scaled(s.round)*time.Duration(b.worthRounds)
		phases = append(phases, span{from, end})
	}
	plan := s.plan(phases, end, scaled(s.lead))
	begun, idle := time.Now(), idleTime()
	var running sync.WaitGroup
	for _, r := range all {
		r.calls = slices.Clone(plan)
		running.Go(func() { r.play(s, begun) })
		if s.redisDown > 0 {
			down := time.AfterFunc(time.Until(begun.Add(phases[s.redisDown-1].to)), r.redis.stop)
			defer down.Stop()
		}
	}
	running.Wait()
	idle = (idleTime() - idle) / time.Since(begun).Seconds()
	t := &table{Title: "Callers: " + s.name, Columns: s.columns}
	t.About = fmt.Sprintf("%s Measured: %d × %s; the processors were idle for %.0f %% of the time.", s.about, b.worthRounds, scaled(s.round), 100*idle)
	for _, r := range all {
		t.add(r.name, s.values(r.calls, phases)...)
	}
	b.report.print(t)
	return nil
}

// plan lists the requests of all callers, as independent clients send them, in the order of their times.
func (s callersScenario) plan(phases []span, end, lead time.Duration) (all []call) {
	for _, l := range s.load {
		random := rand.New(rand.NewPCG(1, uint64(l.caller)))
		for at := phases[l.phase].from - lead; ; {
			if at += time.Duration(random.ExpFloat64() / l.rate * float64(time.Second)); at >= end {
				break
			}
			all = append(all, call{arrival: arrival{at: at}, caller: l.caller, replica: random.IntN(max(1, s.replicas))})
		}
	}
	slices.SortFunc(all, func(a, b call) int { return cmp.Compare(a.at, b.at) })
	return all
}

// start starts the replicas of a row, and their Redis.
func (r *callersRun) start(t tools, row int, c contender, s callersScenario, backends []upstream) error {
	set := setup{Backends: backends, Cooldown: s.simulated.cooldown, Longest: int(window.Seconds()), HeaderTimeout: 30, callersSetup: r.callersSetup}
	if s.replicas > 0 {
		port := itoa(freePort())
		set.Redis = "127.0.0.1:" + port
		var err error
		if r.redis, err = start("redis", t.dir, nil, "redis-server", "--bind", "127.0.0.1", "--port", port, "--save", "", "--appendonly", "no"); err != nil {
			return err
		}
		if err := r.redis.listening(set.Redis); err != nil {
			return err
		}
	}
	for n := range max(1, s.replicas) {
		set.replica = fmt.Sprintf("-%d-%d", row, n)
		replica, err := c.run(t, set)
		if err != nil {
			return err
		}
		r.replicas = append(r.replicas, replica)
	}
	return nil
}

func (r *callersRun) stop() {
	stopAll(r.replicas)
	if r.redis != nil {
		r.redis.stop()
	}
}

// warmUp has a replica serve a request of the last caller.
func (r *callersRun) warmUp(s callersScenario, replica int) error {
	c := call{replica: replica, caller: len(s.callers) - 1}
	var reply []byte
	for range warmUp {
		if reply = r.send(http.DefaultClient, s, &c); c.came == served {
			return nil
		}
	}
	return fmt.Errorf("%s does not serve a request within %s: %.300s", r.name, c.took, reply)
}

// play sends the calls, and fills in what became of them.
func (r *callersRun) play(s callersScenario, begun time.Time) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1000, DisableCompression: true}}
	defer client.CloseIdleConnections()
	var all sync.WaitGroup
	for n := range r.calls {
		time.Sleep(time.Until(begun.Add(r.calls[n].at)))
		all.Go(func() { r.send(client, s, &r.calls[n]) })
	}
	all.Wait()
}

var totalTokens = regexp.MustCompile(`"total_tokens": ?(\d+)`)

// send sends a call, fills in what became of it, and returns the reply.
func (r *callersRun) send(client *http.Client, s callersScenario, c *call) []byte {
	sent := time.Now()
	came, header, reply := send(client, r.replicas[c.replica], "Bearer "+s.callers[c.caller].Key, s.body, patience)
	c.came, c.took = came, time.Since(sent)
	if came != served {
		return reply
	}
	c.by = cmp.Or(header.Get("X-Simulator"), header.Get("Llm_provider-X-Simulator"))
	if found := totalTokens.FindSubmatch(reply); found != nil {
		c.tokens, _ = strconv.Atoi(string(found[1]))
	}
	return reply
}

// withRedis are tools of which Caddy also has the engine for Redis.
func (t tools) withRedis() (tools, error) {
	if _, err := exec.LookPath("redis-server"); err != nil {
		return t, err
	}
	t.caddy = filepath.Join(t.dir, "bin", "caddy-redis")
	command := exec.Command("go", "build", "-o", t.caddy, "./cmd/caddy")
	command.Dir = "../redis"
	if out, err := command.CombinedOutput(); err != nil {
		return t, fmt.Errorf("go build: %w\n%s", err, out)
	}
	return t, nil
}
