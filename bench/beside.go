package main

import (
	"bytes"
	"cmp"
	"io"
	"maps"
	"math"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"
)

const (
	largePrompt = 400_000 // characters, 100k tokens
	wrongKey    = "26-characters-of-each-key."
)

// besideScenario is a load beside which ten clients send small chats.
type besideScenario struct {
	name, about string
	load        closedLoop
	columns     []column
}

var smallColumns = []column{
	{Name: "p50 alone", Unit: "ms", Digits: 2, Better: "lower"},
	{Name: "p99 alone", Unit: "ms", Digits: 2, Better: "lower"},
	{Name: "p50 beside", Unit: "ms", Digits: 2, Better: "lower"},
	{Name: "p99 beside", Unit: "ms", Digits: 2, Better: "lower"},
	{Name: "p50, times", Digits: 2, Better: "lower"},
	{Name: "p99, times", Digits: 2, Better: "lower"},
	{Name: "others a second", Better: "higher"},
}

var besideScenarios = []besideScenario{
	{
		name: "large prompts", about: "Three clients send prompts of 100k tokens (400 KB).",
		load: closedLoop{body: chatRequest(largePrompt, false), clients: 3}, columns: smallColumns,
	},
	{
		name: "wrong keys", about: "Eight clients send chats as fast as they are refused, each with another wrong key. There is an access log, and Caddy has its metrics.",
		load: closedLoop{body: chatRequest(300, false), clients: 8, varies: wrongKey},
		columns: append(slices.Clone(smallColumns),
			column{Name: "p50 after", Unit: "ms", Digits: 2, Better: "lower"},
			column{Name: "memory before", Unit: "MB", Digits: 1}, column{Name: "memory after", Unit: "MB", Digits: 1},
			column{Name: "new time series"}, column{Name: "log for each refusal", Unit: "bytes"}),
	},
}

// runBeside measures small chats alone and beside other requests, in front of
// three equal backends.
func (b *bench) runBeside() error {
	backends, err := startBackends(b.tools, 1, 1, 1)
	if err != nil {
		return err
	}
	defer backends.stop()
	for _, s := range besideScenarios {
		if !b.only.MatchString("beside: " + s.name) {
			continue
		}
		which := slices.DeleteFunc(slices.Clone(b.contenders),
			func(c contender) bool { return s.load.varies != "" && !c.checksKeys })
		all := b.runAll(which, func(int) setup {
			return setup{Backends: backends.upstreams, Cooldown: 10, Longest: 10, HeaderTimeout: 600,
				ChecksKeys: s.load.varies != ""}
		})
		t := &table{Title: "Beside: " + s.name, Base: plain, Columns: s.columns,
			About: "Ten clients send chats of 0.3 KB, each 20 ms after its last reply, alone and beside other requests. " +
				"“Times”: the ratio of these two. " + s.about}
		for round := range b.rounds {
			for _, r := range rotated(all, round) {
				t.add(r.name, b.beside(s, r)...)
			}
		}
		stopAll(all)
		b.report.print(t)
	}
	return nil
}

func (b *bench) beside(s besideScenario, r *running) []float64 {
	small := closedLoop{body: chatRequest(300, false), clients: 10, pause: 20 * time.Millisecond}.of(r)
	others := s.load.of(r)
	if s.load.varies != "" {
		others.headers = maps.Clone(r.headers)
		others.headers["Authorization"] = "Bearer sk-" + wrongKey
	}
	small.run(b.slice)
	others.run(b.slice / 4) // what the first ones of a kind need
	memory, series, logged := r.resident(), r.series(), r.logged()
	alone := small.run(4 * b.slice)
	var beside, other loopResult
	var both sync.WaitGroup
	both.Go(func() { other = others.run(4 * b.slice) })
	beside = small.run(4 * b.slice)
	both.Wait()
	sent := float64(len(other.took) + other.failed)
	if small := alone.failed + beside.failed; small > 0 || (s.load.varies != "") == (len(other.took) > 0) {
		b.problem("%s, %s: %d small chats failed, and %d of %.0f others were served: %v",
			r.name, s.name, small, len(other.took), sent, cmp.Or(alone.failure, beside.failure))
	}
	p := func(result loopResult, share float64) float64 { return percentile(result.took, share) / 1e6 }
	values := []float64{p(alone, .5), p(alone, .99), p(beside, .5), p(beside, .99),
		p(beside, .5) / p(alone, .5), p(beside, .99) / p(alone, .99), sent / other.elapsed.Seconds()}
	if s.load.varies == "" {
		return values
	}
	series, logged = r.series()-series, r.logged()-logged
	return append(values, p(small.run(b.slice), .5), memory/1e6, r.resident()/1e6, series, logged/sent)
}

// logged is how many bytes the program has logged.
func (p *process) logged() float64 {
	text, _ := os.ReadFile(p.log)
	return float64(len(text))
}

// series is how many time series Caddy's metrics have.
func (p *process) series() float64 {
	res, err := http.Get("http://" + p.admin + "/metrics")
	if err != nil {
		return math.NaN()
	}
	defer res.Body.Close()
	text, _ := io.ReadAll(res.Body)
	return float64(bytes.Count(text, []byte("\n")) - bytes.Count(text, []byte("\n#")))
}
