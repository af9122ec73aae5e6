package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// callersScenario is what several callers ask of a set of simulated deployments. Each row of its table has such a
// set, and all rows have the same requests at the same times.
type callersScenario struct {
	name, about string
	simulated   worthScenario // the deployments, and their latency
	rows        []callersRow
	callers     []caller // of which the last one has a request before the others
	load        []callerLoad
	body        string
	replicas    int // of each row, which share a Redis; 0: one without Redis
	// A phase has a lead, and then as many rounds as the command says, which are measured.
	lead, round time.Duration
	phases      int
	// begins is when the load begins in a minute of the clock, at the start of which the first caller has one
	// request. 0: at once.
	begins time.Duration
	// redisDown is the phase with which Redis goes down. 0: none.
	redisDown int
	columns   []column
	// values makes the values of a row from the calls, in the order of their times, and where each phase is measured.
	values func(calls []call, phases []span) []float64
}

// callersRow is a contender with some settings.
type callersRow struct {
	name, contender string
	callersSetup
}

// caller has a key.
type caller struct{ Name, Key, Tier string }

// callerLoad is what a caller sends: so many requests a second, from a phase on.
type callerLoad struct {
	caller int
	rate   float64
	phase  int
}

// span is a part of a run.
type span struct{ from, to time.Duration }

func (s span) seconds() float64 { return (s.to - s.from).Seconds() }

var callersScenarios = []callersScenario{hog(), tiersOnPTU(1000, 2, 1200, 200), tiersOnPTU(50, .5, 136, 16), fourReplicas()}

// named returns callers with these names.
func named(names ...string) (all []caller) {
	for _, name := range names {
		all = append(all, caller{Name: name, Key: "sk-key-of-caller-" + name})
	}
	return all
}

// limited are a contender with these settings, and without any.
func limited(contender, without string, callers []caller, limits callersSetup) []callersRow {
	limits.Callers = callers
	return []callersRow{{contender, contender, limits}, {contender + ", " + without, contender, callersSetup{Callers: untiered(callers)}}}
}

func untiered(callers []caller) []caller {
	callers = slices.Clone(callers)
	for i := range callers {
		callers[i].Tier = ""
	}
	return callers
}

func hog() callersScenario {
	const others, rate, hogRate, limit = 39, .2, 24., 36
	names := []string{"hog"}
	load := []callerLoad{{rate: hogRate}}
	for n := range others {
		names, load = append(names, fmt.Sprint("team", n)), append(load, callerLoad{caller: n + 1, rate: rate})
	}
	callers, limits := named(names...), callersSetup{RequestsPerMinute: limit}
	return callersScenario{
		name: "one caller hogs",
		about: fmt.Sprintf("Three quotas of 40 requests in 10 s, 39 callers with %g requests a second together, and one that sends %g. With limits, each caller has %d requests a minute.",
			others*rate, hogRate, limit),
		simulated: worthScenario{deployments: three(payg(40)), cooldown: 10},
		rows:      slices.Concat(limited(ours, "no limits", callers, limits), limited("litellm", "no limits", callers, limits)),
		callers:   callers, load: load, body: chatRequest(worthPrompt, false),
		lead: patience, round: time.Minute, phases: 1,
		columns: []column{
			{Name: "others served", Unit: "%", Digits: 1, Better: "higher"},
			{Name: "the worst-off of them", Unit: "%", Digits: 1, Better: "higher"},
			{Name: "p50 of others", Unit: "ms", Digits: 1, Better: "lower"},
			{Name: "p99 of others", Unit: "ms", Digits: 1, Better: "lower"},
			{Name: "the hog's, served a minute"},
		},
		values: func(calls []call, phases []span) []float64 {
			sent, got := make([]float64, others+1), make([]float64, others+1)
			var took []time.Duration
			for _, c := range measured(calls, phases[0]) {
				sent[c.caller]++
				if c.came == served {
					got[c.caller]++
					if c.caller > 0 {
						took = append(took, c.took)
					}
				}
			}
			slices.Sort(took)
			worst, all, of := 100., 0., 0.
			for n := 1; n <= others; n++ {
				all, of = all+got[n], of+sent[n]
				if sent[n] > 0 {
					worst = min(worst, 100*got[n]/sent[n])
				}
			}
			return []float64{100 * all / of, worst, percentile(took, .5) / 1e6, percentile(took, .99) / 1e6, got[0] / phases[0].seconds() * 60}
		},
	}
}

// tiersOnPTU has requests with so many tokens of prompt and of output.
func tiersOnPTU(units int, bucket float64, prompt, output int) callersScenario {
	weight := float64(prompt + 4*output)
	drain := float64(units) * perUnit / 60 // a second
	callers := named("web", "jobs")
	callers[0].Tier, callers[1].Tier = "interactive", "batch"
	rows := limited(ours, "no tiers", callers, callersSetup{CallerTiers: true})
	rows = append(rows, callersRow{"litellm, no tiers", "litellm", callersSetup{Callers: untiered(callers)}})
	return callersScenario{
		name: fmt.Sprintf("tiers on %d PTU and %g s", units, bucket),
		about: fmt.Sprintf("A provisioned deployment that serves %.1f requests a second, with pay-as-you-go behind it. Batch asks for twice that, first alone, and then next to interactive, which asks for half of it. "+
			"LiteLLM's priorities need a licence, so it has none here.", drain/weight),
		simulated: worthScenario{
			deployments: []deployment{
				{options: fmt.Sprintf("ptu %d\nbucket_seconds %g", units, bucket), priority: 1},
				behind,
			},
			cooldown: 1, latency: 300 * time.Millisecond, output: output,
		},
		rows: rows, callers: callers,
		load: []callerLoad{{caller: 1, rate: 2 * drain / weight}, {caller: 0, rate: drain / weight / 2, phase: 1}},
		body: limitedTo(output, chatRequest(4*prompt, false)),
		lead: window, round: 40 * time.Second, phases: 2,
		columns: []column{
			{Name: "interactive on the PTU", Unit: "%", Digits: 1, Better: "higher"},
			{Name: "interactive served", Unit: "%", Digits: 1, Better: "higher"},
			{Name: "batch served", Unit: "%", Digits: 1, Better: "higher"},
			{Name: "the PTU used", Unit: "%", Digits: 1, Better: "higher"},
			{Name: "batch alone: the PTU used", Unit: "%", Digits: 1, Better: "higher"},
		},
		values: func(calls []call, phases []span) []float64 {
			var sent, got, onPTU [2]float64
			for _, c := range measured(calls, phases[1]) {
				sent[c.caller]++
				if c.came == served {
					got[c.caller]++
				}
				if c.by == ptu {
					onPTU[c.caller]++
				}
			}
			alone := 0.
			for _, c := range measured(calls, phases[0]) {
				if c.by == ptu {
					alone++
				}
			}
			used := func(requests float64, in span) float64 { return 100 * requests * weight / (drain * in.seconds()) }
			return []float64{
				100 * onPTU[0] / sent[0], 100 * got[0] / sent[0], 100 * got[1] / sent[1],
				used(onPTU[0]+onPTU[1], phases[1]), used(alone, phases[0]),
			}
		},
	}
}

// ptu is the name of the first simulator.
const ptu = "s0"

// limitedTo changes max_tokens of a body.
func limitedTo(tokens int, body string) string {
	return strings.Replace(body, fmt.Sprintf(`"max_tokens":%d`, maxTokens), fmt.Sprintf(`"max_tokens":%d`, tokens), 1)
}

func fourReplicas() callersScenario {
	// limit is in tokens a minute, of which a request has prompt and output. Clients declare twice that output.
	const limit, prompt, output = 48_000, 100, 60
	const rate = 3. * limit / 60 / (prompt + output)
	const idle = 20 * time.Second // in which this load uses a limit up
	callers, limits := named("team", "another"), callersSetup{TokensPerMinute: limit}
	body := strings.Replace(limitedTo(2*output, chatRequest(4*prompt, true)), `"stream":`, `"stream_options":{"include_usage":true},"stream":`, 1)
	return callersScenario{
		name: "limits over four replicas",
		about: fmt.Sprintf("One caller with %d tokens a minute at four replicas that share a Redis, and three times as many requests: %g a second, of %d tokens, which are streams of 5 s. "+
			"The load begins at the 40th second of a minute of the clock, 40 s after one request: the worst moment for a window that begins with a request, and for one that slides over two minutes of the clock. "+
			"A request's tokens count when it is sent. The first 80 s are “from idle”; what follows the first 20 s is measured with Redis, and what follows 20 s without it.",
			limit, rate, prompt+output),
		simulated: worthScenario{
			deployments: []deployment{{options: "token_latency 80ms", priority: 1}}, latency: 200 * time.Millisecond, output: output,
		},
		rows:     []callersRow{limited(ours, "", callers, limits)[0], limited("litellm", "", callers, limits)[0]},
		callers:  callers,
		load:     []callerLoad{{rate: rate}},
		body:     body,
		replicas: 4, lead: idle, round: time.Minute, phases: 2, begins: 40 * time.Second, redisDown: 1,
		columns: []column{
			{Name: "from idle: most in 60 s", Unit: "%", Digits: 1, Better: "lower"},
			{Name: "most in 60 s", Unit: "%", Digits: 1, Better: "lower"},
			{Name: "used", Unit: "%", Digits: 1, Better: "higher"},
			{Name: "longest pause", Unit: "s", Digits: 1, Better: "lower"},
			{Name: "Redis down: most in 60 s", Unit: "%", Digits: 1},
			{Name: "Redis down: used", Unit: "%", Digits: 1},
		},
		values: func(calls []call, phases []span) []float64 {
			whole := func(s span) float64 {
				tokens := 0
				for _, c := range measured(calls, s) {
					tokens += c.tokens
				}
				return 100 * float64(tokens) / limit / s.seconds() * 60
			}
			most := func(s span) float64 {
				all, highest, tokens, first := measured(calls, s), 0, 0, 0
				for _, c := range all {
					for c.at-all[first].at >= time.Minute {
						tokens -= all[first].tokens
						first++
					}
					tokens += c.tokens
					highest = max(highest, tokens)
				}
				return 100 * float64(highest) / limit
			}
			up, down := phases[0], phases[1]
			last, pause := up.from, time.Duration(0)
			for _, c := range append(slices.Clone(measured(calls, up)), call{arrival: arrival{at: up.to}, tokens: 1}) {
				if c.tokens > 0 {
					pause, last = max(pause, c.at-last), c.at
				}
			}
			return []float64{
				most(span{0, idle + time.Minute}), most(up), whole(up), pause.Seconds(), most(span{up.to - time.Minute, down.to}), whole(down),
			}
		},
	}
}

// measured are the calls of a part of a run.
func measured(calls []call, s span) []call {
	at := func(c call, at time.Duration) int { return cmp.Compare(c.at, at) }
	from, _ := slices.BinarySearchFunc(calls, s.from, at)
	to, _ := slices.BinarySearchFunc(calls, s.to, at)
	return calls[from:to]
}
