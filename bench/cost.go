package main

import (
	"fmt"
	"math"
	"net"
	"slices"
	"time"
)

// direct stands for the backends with nothing in front of them.
const direct = "direct"

// costScenario is a kind of request; what is measured is what it costs to let
// it through, in front of three equal backends.
type costScenario struct {
	name   string
	prompt int // characters
	events int // of a stream; 0: a whole reply of 1 KB
	tls    bool
	// renames says that openai_lb has another name for the model, which it has
	// to find and to replace. The others send what they get.
	renames bool
}

var costScenarios = []costScenario{
	{name: "chat, prompt of 0.3 KB", prompt: 300},
	{name: "chat, prompt of 2 KB", prompt: 2_000},
	{name: "chat, prompt of 8 KB", prompt: 8_000},
	{name: "chat, prompt of 200 KB", prompt: 200_000, renames: true},
	{name: "stream of 50 events", prompt: 2_000, events: 50},
	{name: "stream of 200 events", prompt: 2_000, events: 200},
	{name: "chat over TLS, prompt of 2 KB", prompt: 2_000, tls: true},
}

const clients = 32

const cpuColumn = "CPU a request"

var costColumns = []column{
	{Name: cpuColumn, Unit: "µs", Ratio: true, Better: "lower"},
	{Name: "requests a second", Ratio: true, Better: "higher"},
	{Name: "added p50", Unit: "µs", Ratio: true, Better: "lower"},
	{Name: "added p99", Unit: "µs", Ratio: true, Better: "lower"},
	{Name: "memory", Unit: "MB", Ratio: true, Better: "lower"},
}

// runCost measures all cost scenarios, and then idle streams.
func (b *bench) runCost() error {
	backends, err := startBackends(b.tools, 1, 1, 1)
	if err != nil {
		return err
	}
	defer backends.stop()
	setupOf := func(int) setup {
		return setup{Backends: backends.upstreams, Cooldown: 10, Longest: 10, HeaderTimeout: 600}
	}
	all := b.runAll(b.contenders, setupOf)
	defer func() { stopAll(all) }()
	for _, s := range costScenarios {
		if !b.only.MatchString("cost: " + s.name) {
			continue
		}
		if err := b.cost(s, backends, all); err != nil {
			b.problem("cost: %s: %s", s.name, err)
		}
	}
	stopAll(all)
	all = nil
	if b.only.MatchString("cost: idle streams") {
		return b.idleStreams(backends, setupOf(0))
	}
	return nil
}

func (b *bench) cost(s costScenario, backends *told, all []*running) error {
	does := behaviour{Reply: replyChat}
	about := "A reply has 1 KB."
	if s.renames {
		about += " `" + ours + "` also replaces the name of the model in each prompt."
	}
	if s.events > 0 {
		does, about = behaviour{Reply: replyStream, Events: s.events}, "Each event is sent by itself."
	}
	if err := backends.behave(does); err != nil {
		return err
	}
	t := &table{
		Title: "Cost: " + s.name, Base: plain, Columns: costColumns,
		About: fmt.Sprintf("%s %d clients, each with its next request when the last one is answered; the latency is that of one client, less that of a backend asked directly, which is what `direct` has.",
			about, clients),
	}
	load := closedLoop{tls: s.tls, body: chatRequest(s.prompt, s.events > 0), clients: clients}
	for round := range b.rounds {
		for _, r := range rotated(all, round) {
			if (s.tls && !r.hasTLS) || (s.events > 0 && !r.streams) {
				continue
			}
			load := load.of(r)
			renames := s.renames && r.name == ours
			switch {
			case s.tls:
				load.address = r.setup.TLSAddress
			case renames:
				load.address = r.setup.RenamingAddress
			}
			if round == 0 {
				load.run(b.slice) // connections, caches, compilers
				if seen, err := backends.observed(); err != nil {
					return err
				} else if renames != (seen.Model == renamedModel) {
					b.problem("%s sends the model %q", r.name, seen.Model)
				}
			}
			micros, requests, result := b.measure(r, load)
			one := load
			one.clients = 1
			latency := one.run(b.slice / 3)
			alone := closedLoop{address: backends.upstreams[0].Address, body: load.body, clients: 1}.run(b.slice / 6)
			t.add(direct, math.NaN(), math.NaN(), percentile(alone.took, .5)/1e3, percentile(alone.took, .99)/1e3)
			t.add(r.name, micros, float64(requests)/result.elapsed.Seconds(),
				(percentile(latency.took, .5)-percentile(alone.took, .5))/1e3,
				(percentile(latency.took, .99)-percentile(alone.took, .99))/1e3, r.resident()/1e6)
		}
	}
	b.report.print(t)
	return nil
}

// measure loads a contender for a slice of time, and returns what a request
// cost.
func (b *bench) measure(r *running, load closedLoop) (micros float64, requests int, result loopResult) {
	cpu := r.cpu()
	result = load.run(b.slice)
	cpu = r.cpu() - cpu
	requests = len(result.took)
	if result.failed > 0 {
		b.problem("%s: %d of %d requests failed: %s", r.name, result.failed, requests+result.failed, result.failure)
	}
	return float64(cpu.Microseconds()) / float64(requests), requests, result
}

// rotated lets another contender be the first in each round.
func rotated[T any](all []T, round int) []T {
	n := round % max(1, len(all))
	return slices.Concat(all[n:], all[:n])
}

// idleStreams measures what streams cost of which nothing comes. Each
// contender is started for this alone.
func (b *bench) idleStreams(backends *told, s setup) error {
	t := &table{
		Title: "Cost: idle streams", Base: plain,
		About: "Streams that have sent one event and wait, with prompts of 2 KB. Resident: all of its memory beside what it had before, after a collection.",
	}
	for _, n := range b.streams {
		t.Columns = append(t.Columns,
			column{Name: fmt.Sprintf("resident, each of %d", n), Unit: "KB", Digits: 1, Ratio: true, Better: "lower"})
	}
	for round := range min(2, b.rounds) { // each takes long, and they differ little
		for _, c := range rotated(b.contenders, round) {
			if !c.streams {
				continue
			}
			r, err := c.run(b.tools, s)
			if err != nil {
				b.problem("%s", err)
				continue
			}
			values, err := b.openStreams(r, backends)
			r.stop()
			if err != nil {
				b.problem("%s: idle streams: %s", c.name, err)
			}
			t.add(c.name, values...)
		}
	}
	b.report.print(t)
	return nil
}

// openStreams opens more and more streams, and returns what each costs.
func (b *bench) openStreams(r *running, backends *told) (values []float64, err error) {
	load := closedLoop{body: chatRequest(2_000, true), clients: clients}.of(r)
	if err := backends.behave(behaviour{Reply: replyStream, Events: 1}); err != nil {
		return nil, err
	}
	load.run(b.slice) // what it needs anyway
	if err := backends.behave(behaviour{Reply: replyIdle, Hold: 5 * time.Minute}); err != nil {
		return nil, err
	}
	resident := r.resident()
	var open []net.Conn
	defer func() {
		for _, conn := range open {
			conn.Close()
		}
	}()
	for _, n := range b.streams {
		more, err := load.idleStreams(n - len(open))
		open = append(open, more...)
		if err != nil {
			return values, fmt.Errorf("only %d of %d are open: %w", len(open), n, err)
		}
		time.Sleep(b.slice / 2)
		values = append(values, (r.resident()-resident)/1e3/float64(n))
	}
	return values, nil
}

// runFailover measures what it costs, and how long it takes, to go on to the
// next backend.
func (b *bench) runFailover() error {
	backends, err := startBackends(b.tools, 1, 2, 3)
	if err != nil {
		return err
	}
	defer backends.stop()
	var which []contender
	for _, c := range b.contenders {
		if c.failsOver {
			which = append(which, c)
		}
	}
	all := b.runAll(which, func(int) setup {
		return setup{Backends: backends.upstreams, HeaderTimeout: 600}
	})
	defer stopAll(all)
	for refusing, times := range []string{"not at all", "once", "twice"} {
		if !b.only.MatchString("failover: " + times) {
			continue
		}
		if err := b.failover(refusing, times, backends, all); err != nil {
			b.problem("failover: %s: %s", times, err)
		}
	}
	return nil
}

// refusalPause is more than the least time for which anybody is left alone
// that says to come back at once.
const refusalPause = 60 * time.Millisecond

func (b *bench) failover(refusing int, times string, backends *told, all []*running) error {
	t := &table{
		Title: "Failover: " + times, Base: bestRest,
		About: "Backends of three priorities, with prompts of 2 KB; contenders are told not to remember a failure, if they can be told. The first ones answer a 429 that is about the request alone, with a `Retry-After` of 0.",
		Columns: []column{
			{Name: "served", Unit: "%", Digits: 1, Better: "higher"},
			{Name: "calls a request", Digits: 2},
			{Name: cpuColumn, Unit: "µs", Ratio: true, Better: "lower"},
			{Name: "requests a second", Ratio: true, Better: "higher"},
		},
	}
	if refusing > 0 {
		t.About += " The time from a 429 until the next backend has the request is that of a real throttle of 10 ms, with one client that comes every 60 ms."
		t.Columns = append(t.Columns,
			column{Name: "to the next, p50", Unit: "µs", Ratio: true, Better: "lower"},
			column{Name: "to the next, p99", Unit: "µs", Ratio: true, Better: "lower"})
	}
	load := closedLoop{body: chatRequest(2_000, false), clients: clients}
	for round := range b.rounds {
		for _, r := range rotated(all, round) {
			load := load.of(r)
			time.Sleep(refusalPause) // the last refusals are forgotten
			if err := backends.behave(behaviour{Reply: replyChat, Refusing: refusing,
				Refusal: refuseLarge}); err != nil {
				return err
			}
			micros, requests, result := b.measure(r, load)
			seen, err := backends.observed()
			if err != nil {
				return err
			}
			sent := float64(requests + result.failed)
			values := []float64{
				100 * float64(requests) / sent, float64(seen.Calls) / sent,
				micros, float64(requests) / result.elapsed.Seconds(),
			}
			if refusing > 0 {
				if err := backends.behave(behaviour{
					Reply: replyChat, Refusing: refusing, Refusal: refuseThrottle,
				}); err != nil {
					return err
				}
				one := load
				one.clients, one.pause = 1, refusalPause
				one.run(b.slice)
				if seen, err = backends.observed(); err != nil {
					return err
				}
				slices.Sort(seen.Gaps)
				values = append(values, percentile(seen.Gaps, .5)/1e3, percentile(seen.Gaps, .99)/1e3)
			}
			t.add(r.name, values...)
		}
	}
	b.report.print(t)
	return nil
}
