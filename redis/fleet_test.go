package redis

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/modules/replicas"
)

var (
	fleet     = flag.Duration("fleet", 0, "how long TestALimitHoldsInAFleet measures; 0: it is skipped")
	fleetSize = flag.Int("fleet-size", 100, "how many replicas TestALimitHoldsInAFleet has")
)

// fleetVariable has the part of a fleet that a process of this program is to
// be.
const fleetVariable = "OPENAI_LB_TEST_FLEET"

// fleetPart is some replicas in one process. Each busy caller asks for three
// times its limit at all replicas together, and each idle one for a request in
// five minutes.
type fleetPart struct {
	Address               string
	Replicas, Of          int
	Callers, Busy         int
	Limit                 int64
	Begin                 time.Time
	Warm, Long, PerStream time.Duration
}

// fleetUse is what was admitted: of each busy caller, at what time and how many
// tokens.
type fleetUse struct {
	Millis [][]int64
	Tokens [][]int64
	// Errors are refusals of idle callers.
	Errors int
	// CPU is how many seconds of a processor the process has used while it was
	// measured.
	CPU float64
}

// runFleetPart prints what was admitted.
func runFleetPart(config string) {
	var p fleetPart
	if err := json.Unmarshal([]byte(config), &p); err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Until(p.Begin.Add(p.Warm+p.Long)))
	limits := limiter.Settings{Limits: []ratelimit.Limit{{Kind: ratelimit.Tokens, Amount: p.Limit, Unit: ratelimit.Minute}, {Kind: ratelimit.Tokens, Amount: 1000 * p.Limit, Unit: ratelimit.Day}}}
	var all []*limiter.Limiters
	var running sync.WaitGroup
	for range p.Replicas {
		engine := &Engine{Address: []string{p.Address}}
		caddyContext, _ := caddy.NewContext(caddy.Context{Context: context.Background()})
		if err := engine.Provision(caddyContext); err != nil {
			log.Fatal(err)
		}
		store, err := engine.Open()
		if err != nil {
			log.Fatal(err)
		}
		r, callers := replicas.New(store, zap.NewNop()), limiter.NewLimiters(nil)
		callers.Configure(time.Now(), func(string) limiter.Settings { return limits })
		r.NewLink().ShareUse("the pool", callers)
		running.Go(func() {
			time.Sleep(rand.N(time.Second)) // not all at once
			r.Run(ctx)
		})
		all = append(all, callers)
	}
	u := fleetUse{Millis: make([][]int64, p.Busy), Tokens: make([][]int64, p.Busy)}
	const cost = 2000
	part := float64(p.Replicas) / float64(p.Of)
	busy, idle := 3*float64(p.Limit)/cost*float64(p.Busy)/60*part, float64(p.Callers-p.Busy)/300*part // requests a second
	time.Sleep(time.Until(p.Begin))
	measured, before := p.Begin.Add(p.Warm), 0.0
	for next := p.Begin; ctx.Err() == nil; {
		next = next.Add(time.Duration(rand.ExpFloat64() / (busy + idle) * float64(time.Second)))
		time.Sleep(time.Until(next))
		now, i := time.Now(), p.Busy+rand.IntN(p.Callers-p.Busy)
		if rand.Float64()*(busy+idle) < busy {
			i = rand.IntN(p.Busy)
		}
		if before == 0 && now.After(measured) {
			before = cpuOf(os.Getpid())
		}
		tokens := cost/2 + rand.Int64N(cost)
		r, refusal := all[rand.IntN(len(all))].Get(now, fmt.Sprint("caller ", i)).Try(now, ratelimit.Estimate{Prompt: tokens})
		switch {
		case refusal == nil:
			time.AfterFunc(p.PerStream, func() { r.Settle(time.Now(), ratelimit.Cost{Requests: 1, Prompt: tokens, Counted: true}) })
			if i < p.Busy {
				u.Millis[i], u.Tokens[i] = append(u.Millis[i], now.UnixMilli()), append(u.Tokens[i], tokens)
			}
		case i >= p.Busy:
			u.Errors++
		}
	}
	u.CPU = cpuOf(os.Getpid()) - before
	running.Wait()
	cancel()
	if err := json.NewEncoder(os.Stdout).Encode(u); err != nil {
		log.Fatal(err)
	}
}

// TestALimitHoldsInAFleet of many replicas in four processes, with 2,000
// callers, of which one tenth is busy. It prints how much of a processor Redis
// takes, and a replica with the load on it.
//
//	go test -run InAFleet -fleet 2m -timeout 10m -v .
func TestALimitHoldsInAFleet(t *testing.T) {
	if *fleet == 0 {
		t.Skip("it takes minutes: go test -run InAFleet -fleet 2m -timeout 10m -v .")
	}
	const processes = 4
	s := startServer(t)
	part := fleetPart{Address: s.address, Replicas: *fleetSize / processes, Of: *fleetSize, Callers: 2000, Busy: 200, Limit: 120_000,
		Begin: time.Now().Add(12 * time.Second), Warm: 30 * time.Second, Long: *fleet, PerStream: 3 * time.Second}
	config, err := json.Marshal(part)
	if err != nil {
		t.Fatal(err)
	}
	results := make([]fleetUse, processes)
	var running sync.WaitGroup
	for i := range results {
		process := exec.Command(os.Args[0])
		process.Env = append(os.Environ(), fleetVariable+"="+string(config))
		process.Stderr = os.Stderr
		running.Go(func() {
			text, err := process.Output()
			if err == nil {
				err = json.Unmarshal(text, &results[i])
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	time.Sleep(time.Until(part.Begin.Add(part.Warm)))
	before, writes := s.cpu(), s.info("stats", "total_writes_processed")
	time.Sleep(*fleet - time.Second)
	redis := float64(s.cpu()-before) / float64(*fleet-time.Second)
	writes = (s.info("stats", "total_writes_processed") - writes) / (*fleet - time.Second).Seconds()
	connections := s.connected()
	running.Wait()
	highest, sum, refused, cpu := 0.0, int64(0), 0, 0.0
	for caller := range part.Busy {
		var all []use
		for _, r := range results {
			for i, at := range r.Millis[caller] {
				all = append(all, use{at: time.UnixMilli(at), tokens: int(r.Tokens[caller][i])})
				if at >= part.Begin.Add(part.Warm).UnixMilli() {
					sum += r.Tokens[caller][i]
				}
			}
		}
		peak, _ := most(all, time.Minute)
		highest = max(highest, float64(peak)/float64(part.Limit))
	}
	for _, r := range results {
		refused, cpu = refused+r.Errors, cpu+r.CPU
	}
	minutes := part.Long.Minutes()
	t.Logf("%d replicas, %d callers, %d of them busy: at most %.1f %% of a limit in 60 s, %.1f %% on average", part.Of, part.Callers, part.Busy, 100*highest, 100*float64(sum)/minutes/float64(part.Busy)/float64(part.Limit))
	t.Logf("Redis takes %.2f %% of a processor and writes %.0f times a second, a replica with its load takes %.2f %%; refused requests of idle callers: %d",
		100*redis, writes, 100*cpu/part.Long.Seconds()/float64(part.Of), refused)
	if connections > 6**fleetSize {
		t.Errorf("%d connections: replicas lose theirs, because the machine is too busy for so many", connections)
	}
	if highest > 1.1 || refused > 0 {
		t.Error("a limit does not hold")
	}
	if redis > .1 || cpu/part.Long.Seconds()/float64(part.Of) > .01 {
		t.Error("it takes too much of a processor")
	}
	lbtest.WaitFor(t, func() bool { return s.connected() == 0 })
}
