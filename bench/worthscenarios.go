package main

import (
	"cmp"
	"fmt"
	"strings"
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
	// poisson makes them independent of each other: some windows have more of
	// them than others. Such a scenario has one long round.
	poisson  bool
	stream   bool
	cooldown int // seconds; what the operator of such deployments would choose
	longest  int // seconds that a deployment may ask for; 0: those of a window
	// timeout is how many seconds a deployment has to begin its reply; 0: 30.
	// With ownTimeouts, each contender keeps its default instead.
	timeout     int
	ownTimeouts bool
	outage
	patience time.Duration // of a client; 0: patience
	// latency is the median of a deployment's first token, and p95 its 95th
	// percentile. 0: latency, and no spread.
	latency, p95 time.Duration
	round        time.Duration // 0: 20 s
	// window is that of the deployments' quotas. 0: window. With one, refusals
	// are counted for each 1,000 requests that the deployments admitted.
	window time.Duration
}

// outage is the failure of the first deployment in each round.
type outage struct {
	// stopped is when its process is stopped. It answers afterwards.
	stoppedFrom, stoppedTo time.Duration
	// silence is for how long it is a black hole, at the end: what waits then
	// is never answered.
	silence time.Duration
	slow    time.Duration // a reply that took so long waited for it
}

// deployment is one simulator.
type deployment struct {
	options  string // of openai_simulator
	priority int
	paid     float64 // requests a second that it can serve; 0: no matter how many
	bucket   float64 // seconds that a provisioned one holds
}

const (
	window   = 10 * time.Second // in which pay-as-you-go deployments count
	latency  = 20 * time.Millisecond
	patience = 20 * time.Second // of a client
	warmUp   = 5                // requests before the others
	// grace is how long after a 429 a call is not early, for it may have been
	// under way: more than a round trip takes while the processors are busy.
	grace       = 20 * time.Millisecond
	worthPrompt = 544 // characters, 136 tokens
	// worthTokens is the size of a request for a provisioned deployment: its
	// prompt, and the tokens it may generate, of which each weighs four.
	worthTokens = worthPrompt/4 + 4*maxTokens
	perUnit     = 2500 // tokens a minute that one PTU of a simulator serves
	// chatTokens is the size of a request for any other deployment.
	chatTokens = worthPrompt/4 + maxTokens
)

// lead is for how long the load is on before anything is measured. Buckets are
// full then, and who makes clients wait has as many of them waiting as at the
// end.
func (s worthScenario) lead() time.Duration {
	switch d := s.deployments[0]; {
	case d.bucket > 0:
		return window
	case d.paid > 0:
		return patience
	}
	return 0
}

// payg is a pay-as-you-go deployment for so many requests in 10 seconds.
func payg(requests int, options ...string) deployment {
	return deployment{
		options:  strings.Join(append(options, "requests_per_minute "+itoa(requests*6)), "\n"),
		priority: 1, paid: float64(requests) / window.Seconds(),
	}
}

// tokens is a pay-as-you-go deployment for so many tokens a minute.
func tokens(perMinute int) deployment {
	return deployment{options: "tokens_per_minute " + itoa(perMinute), priority: 1,
		paid: float64(perMinute) / chatTokens / 60}
}

// provisioned is a PTU deployment for so many requests a second.
func provisioned(requests int, bucket float64) deployment {
	return deployment{
		options:  fmt.Sprintf("ptu %d\nbucket_seconds %g", requests*worthTokens*60/perUnit, bucket),
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
	atRandom(.8), atRandom(1), atRandom(1.1), atRandom(2),
	{name: "steering, 0.8 times the quotas", deployments: []deployment{tokens(30_000), tokens(30_000), tokens(60_000)}, rate: .8 * 120_000 / 60 / chatTokens, cooldown: 10, longest: 60, round: 2 * time.Minute, window: time.Minute, about: "Quotas of 30k, 30k and 60k tokens in a minute, of which each reply says how many are left. All have the same weight."},
	{name: "PTU with a bucket of 0.5 s", deployments: []deployment{provisioned(20, .5), behind}, rate: 40, cooldown: 1, about: "A PTU for 20 requests a second, with a pay-as-you-go deployment behind it, and 40 requests a second."},
	{name: "PTU with a bucket of 2 s", deployments: []deployment{provisioned(20, 2), behind}, rate: 40, cooldown: 1, about: "The same."},
	{name: "PTU with a bucket of 10 s", deployments: []deployment{provisioned(20, 10), behind}, rate: 40, cooldown: 1, about: "The same."},
	{name: "bursts", deployments: three(payg(50)), rate: 12, burst: 25, cooldown: 10, about: "Three quotas of 50 requests in 10 s, 12 requests a second that come 25 at a time."},
	{name: "no hint", deployments: three(payg(70, "hints azure_neg1", "error_body string_error")), rate: 40, cooldown: 1, about: "Three quotas of 70 requests in 10 s, twice as many requests, and 429s that do not say for how long."},
	{name: "a wrong hint", deployments: three(payg(70, "hints zero", "error_body string_error")), rate: 40, cooldown: 1, about: "The same, but each 429 asks to come back at once."},
	{name: "a hint of a day", deployments: three(payg(70, "hints azure_day")), rate: 40, cooldown: 1, longest: 1, about: "The same, but each 429 asks to come back after a day."},
	{name: "brown-out", deployments: three(unlimited), rate: 20, cooldown: 10, timeout: 2, outage: outage{slow: 2 * time.Second, stoppedFrom: 5 * time.Second, stoppedTo: 10 * time.Second}, round: 15 * time.Second, about: "One of three deployments without limits is silent for 5 of every 15 s. The contenders give each 2 s to answer."},
	silent("silence, 20 s", worthScenario{timeout: 20}, "The contenders give each 20 s to answer."),
	silent("silence, default timeouts", worthScenario{ownTimeouts: true}, "Each contender has its default timeout."),
	{name: "errors as first event", deployments: three(deployment{options: "fault sse_error_first:too_many_requests:no_capacity 20", priority: 1}), rate: 20, stream: true, cooldown: 10, about: "Streams, of which each deployment begins every 20th with an error, after a status of 200."},
	{name: "all exhausted", deployments: three(payg(35)), rate: 50, cooldown: 10, about: "Three quotas of 35 requests in 10 s, and nearly five times as many requests."},
}

// atRandom is a scenario of independent requests, so many times the quotas.
func atRandom(load float64) worthScenario {
	return worthScenario{
		name: fmt.Sprintf("at random, %.1f times the quotas", load), deployments: uneven, rate: 20 * load,
		poisson: true, cooldown: 10, round: 10 * time.Minute,
		about: "Quotas of 20, 60 and 120 requests in 10 s, for ten minutes. Requests come at random: in a window, there may be more of them than the quotas allow although there are fewer on average.",
	}
}

// silent is a scenario with a black hole.
func silent(name string, s worthScenario, timeouts string) worthScenario {
	s.name, s.deployments, s.rate, s.cooldown = name, []deployment{unlimited, unlimited}, 20, 10
	s.latency, s.p95 = 300*time.Millisecond, 900*time.Millisecond
	s.silence, s.round, s.slow, s.patience = 30*time.Second, 2*time.Minute, 2*time.Second, time.Minute
	s.about = "Two deployments that take 0.3 s for half of the requests, and up to 0.9 s for 95 % of them. One is a black hole for the last 30 s of every 120 s: " +
		"it accepts requests and sends nothing, also to those in progress. Clients are patient for 60 s. " + timeouts
	return s
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
			quota += d.paid * cmp.Or(s.window, window).Seconds()
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
			ends, used = a.at+cmp.Or(s.window, window), 0
		}
		if could[n] = used < quota; could[n] {
			used++
		}
	}
	return could
}
