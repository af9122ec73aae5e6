package main

import (
	"cmp"
	"fmt"
	"math"
	"net/http"
	"os"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"
)

var worthColumns = []column{
	{Name: "served", Unit: "%", Digits: 1, Ratio: true, Better: "higher"},
	{Name: "not served", Unit: "%", Digits: 1, Better: "lower"},
	{Name: "of these: 429", Unit: "%", Digits: 1},
	{Name: "other errors", Unit: "%", Digits: 1},
	{Name: "gave up", Unit: "%", Digits: 1},
	{Name: "early calls", Better: "lower"},
	{Name: "calls for each served", Digits: 2, Better: "lower"},
	{Name: "paid capacity used", Unit: "%", Better: "higher"},
	{Name: "added p50", Unit: "ms", Digits: 1, Better: "lower"},
	{Name: "added p99", Unit: "ms", Digits: 1, Better: "lower"},
}

var silenceColumns = []column{
	{Name: "2 s or more", Unit: "%", Digits: 1, Better: "lower"},
	{Name: "p99 of all", Unit: "s", Digits: 1, Better: "lower"},
	{Name: "longest", Unit: "s", Digits: 1, Better: "lower"},
}

var refusalColumns = []column{{Name: "refusals for each 1,000 admitted", Digits: 1, Better: "lower"}}

// runWorth runs one scenario after the other.
func (b *bench) runWorth() error {
	for _, s := range worthScenarios {
		if !b.only.MatchString("worth: " + s.name) {
			continue
		}
		if err := b.worth(s); err != nil {
			b.problem("worth: %s: %s", s.name, err)
		}
	}
	return nil
}

// worth sends all contenders the same requests, at the same times and in one
// go. A round is a part of it.
func (b *bench) worth(s worthScenario) error {
	if s.poisson {
		defer func(before []contender) { b.contenders = before }(b.contenders)
		b.contenders = slices.Concat(b.contenders, b.waiting)
	}
	round := cmp.Or(b.worthRound, s.round, 20*time.Second)
	part := float64(round) / float64(cmp.Or(s.round, round)) // in a short run, all of it is shorter
	patience := cmp.Or(time.Duration(part*float64(s.patience)), patience)
	sims, err := b.startSimulators(s, part)
	defer sims.stop()
	if err != nil {
		return err
	}
	timeout := cmp.Or(s.timeout, 30)
	if s.ownTimeouts {
		timeout = 0
	}
	all := b.runAll(b.contenders, func(n int) setup {
		return setup{Backends: sims.upstreams[n], Cooldown: s.cooldown,
			Longest: cmp.Or(s.longest, int(window.Seconds())), HeaderTimeout: timeout}
	})
	defer func() { stopAll(all) }()
	body := chatRequest(worthPrompt, s.stream)
	all = slices.DeleteFunc(all, func(r *running) bool {
		answered := 0
		for range warmUp {
			if ask(http.DefaultClient, r, body, patience) == served {
				answered++
			}
		}
		if answered > 0 && (answered == warmUp || s.silence > 0) {
			return false
		}
		b.problem("%s does not serve the requests of %q, and is left out", r.name, s.name)
		r.stop()
		return true
	})
	number := make([]int, len(all)) // of each one's simulators
	for n, r := range all {
		number[n] = slices.IndexFunc(b.contenders, func(c contender) bool { return c.name == r.name })
		if err := sims.reset(number[n]); err != nil {
			return err
		}
	}

	rounds, lead := b.worthRounds, s.lead()
	if s.poisson {
		rounds = 1
	}
	if s.slow > 0 {
		rounds++ // who is hit by a silence is a matter of luck
	}
	if b.worthRound > 0 {
		lead = min(lead, b.worthRound)
	}
	// The load goes on until all that is measured is over: who makes clients
	// wait must not get the quota of a time in which nobody else asks for it.
	measured := lead + round*time.Duration(rounds)
	plan := arrivals(s.rate, max(1, s.burst), measured+patience)
	if s.poisson {
		plan = poisson(s.rate, measured, patience)
	}
	schedules := make([][]arrival, len(all))
	counted := make([][]status, len(all)) // at the beginning, and at the end of each round
	var running, pending sync.WaitGroup
	enough := make(chan struct{})
	begun := time.Now()
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
	count := func() {
		for n := range all {
			now, err := sims.status(number[n], s.deployments)
			failure = cmp.Or(failure, err)
			counted[n] = append(counted[n], now)
		}
	}
	time.Sleep(time.Until(begun.Add(lead)))
	count()
	idle := idleTime()
	for i := range rounds {
		from := begun.Add(lead + time.Duration(i)*round)
		s.stop(sims, from, part)
		time.Sleep(time.Until(from.Add(round)))
		count()
	}
	idle = (idleTime() - idle) / (measured - lead).Seconds()
	pending.Wait()
	close(enough)
	running.Wait()
	if failure != nil {
		return failure
	}

	t := &table{Title: "Worth: " + s.name, Base: plain, Columns: worthColumns}
	t.About = fmt.Sprintf("%s Measured: %d × %s; the processors were idle for %.0f %% of the time.",
		s.about, rounds, round, 100*idle)
	if s.slow > 0 {
		t.Columns = slices.Concat(worthColumns, silenceColumns)
	}
	if s.window > 0 {
		t.Columns = slices.Concat(t.Columns, refusalColumns)
	}
	could := s.ideal(plan)
	for n, r := range all {
		for i := range rounds {
			from := lead + time.Duration(i)*round
			t.add(r.name, s.values(schedules[n], could, from, from+round, counted[n][i:i+2])...)
		}
	}
	b.report.print(t)
	return nil
}

// stop stops the first deployment for a while, if that is due in a round.
func (s worthScenario) stop(sims *simulators, from time.Time, part float64) {
	if s.stoppedTo == 0 {
		return
	}
	time.Sleep(time.Until(from.Add(time.Duration(part * float64(s.stoppedFrom)))))
	sims.processes[0].signal(syscall.SIGSTOP)
	time.Sleep(time.Until(from.Add(time.Duration(part * float64(s.stoppedTo)))))
	sims.processes[0].signal(syscall.SIGCONT)
}

// values makes the values of a round's row, from what was counted before and
// after it. The capacity counts from the beginning of the load: who has left
// some of it unused has more of it later.
func (s worthScenario) values(schedule []arrival, could []bool, from, to time.Duration, counted []status) []float64 {
	var came [4]float64
	var offered, possible, waited float64
	var took, all []time.Duration
	for n, a := range schedule {
		if could[n] && a.at < to {
			possible++
		}
		if a.at < from || a.at >= to {
			continue
		}
		offered++
		came[a.came]++
		if a.came == served {
			took = append(took, a.took-cmp.Or(s.latency, latency))
		}
		if a.took >= s.slow {
			waited++
		}
		all = append(all, a.took)
	}
	slices.Sort(took)
	slices.Sort(all)
	used := math.NaN()
	if possible > 0 {
		used = 100 * counted[1].admittedPaid / possible
	}
	calls := counted[1].requests - counted[0].requests
	values := []float64{
		100 * came[served] / offered, 100 - 100*came[served]/offered,
		100 * came[refused] / offered, 100 * came[failed] / offered, 100 * came[timedOut] / offered,
		counted[1].early - counted[0].early, calls / came[served], used, percentile(took, .5) / 1e6,
		percentile(took, .99) / 1e6,
	}
	if s.slow > 0 {
		values = append(values, 100*waited/offered, percentile(all, .99)/1e9, percentile(all, 1)/1e9)
	}
	if s.window > 0 {
		admitted := counted[1].admittedPaid - counted[0].admittedPaid
		values = append(values, 1000*(calls-admitted)/admitted)
	}
	return values
}

// idleTime is for how many seconds the processors had nothing to do, on
// average, since the machine started.
func idleTime() float64 {
	var up, idle float64
	text, _ := os.ReadFile("/proc/uptime")
	_, _ = fmt.Sscan(string(text), &up, &idle)
	return idle / float64(runtime.NumCPU())
}
