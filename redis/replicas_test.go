package redis

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// measure has tests that take minutes run, and print figures of the machine.
var measure = flag.Bool("measure", false, "measure, for minutes")

func TestNeighboursDoNotCallABackendThatThrottlesOne(t *testing.T) {
	s := startServer(t)
	a := newAccount(t)
	replicas := startReplicas(t, 3, a.backends(5)+s.option())
	inTouch(t, replicas)
	for round := range 5 {
		name := fmt.Sprintf("r%d", round)
		a.throttle(name, true)
		first := replicas[round%3]
		if status := first.post(name); status != 200 {
			t.Errorf("the spare backend did not serve: %d", status)
		}
		for _, r := range replicas {
			lbtest.WaitFor(t, func() bool { return len(r.logged("cooldown started", name)) == 1 })
			for range 3 {
				if status := r.post(name); status != 200 {
					t.Errorf("the spare backend did not serve: %d", status)
				}
			}
		}
		if n := len(a.refusals(name)); n != 1 {
			t.Errorf("%s was called %d times while it throttled, want once", name, n)
		}
	}
	for _, key := range s.do("keys", "*").([]any) {
		text := fmt.Sprint(key, s.do("type", key))
		if s.do("type", key) == "hash" {
			text += fmt.Sprint(s.do("hgetall", key))
		}
		if strings.Contains(text, "s3cret") || strings.Contains(text, a.Listener.Addr().String()) || strings.Contains(text, "spare") {
			t.Errorf("Redis knows a key, a URL or a name: %s", text)
		}
	}
	late := startReplica(t, a.backends(5)+s.option())
	lbtest.WaitFor(t, func() bool { return len(late.logged("cooldown started", "r4")) == 1 })
}

// pace is how often a replica gets a request, about.
const pace = 50 * time.Millisecond

// load is clients that send requests to replicas, one each.
type load struct {
	done    chan struct{}
	clients sync.WaitGroup

	mu        sync.Mutex
	latencies []time.Duration
	failures  int
}

func startLoad(replicas []*replica, pace time.Duration, model func() string) *load {
	l := &load{done: make(chan struct{})}
	for _, r := range replicas {
		l.clients.Go(func() {
			for {
				select {
				case <-l.done:
					return
				case <-time.After(rand.N(2 * pace)):
				}
				began := time.Now()
				status := r.post(model())
				l.mu.Lock()
				l.latencies = append(l.latencies, time.Since(began))
				if status != 200 {
					l.failures++
				}
				l.mu.Unlock()
			}
		})
	}
	return l
}

func (l *load) stop() {
	close(l.done)
	l.clients.Wait()
}

func (l *load) failed() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.failures
}

// taken is how long requests took until now.
func (l *load) taken() []time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.latencies)
}
