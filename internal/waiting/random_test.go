package waiting

import (
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"
	"weak"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

// TestACallerThatSendsMoreGetsAsMuch has a backend that accepts ten requests a
// second. a sends a hundred a second, and b ten.
func TestACallerThatSendsMoreGetsAsMuch(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		var wg sync.WaitGroup
		var mu sync.Mutex
		served := map[string]int{}
		free := time.Now()
		r := Return{Key: key, Places: 20, Every: 100 * time.Millisecond}
		send := func(caller string) {
			now := time.Now()
			r := r
			mu.Lock()
			r.At = free
			mu.Unlock()
			p, _ := l.Join(now, Waiter{Caller: caller}, now.Add(2*time.Second), 1, r)
			if p == nil {
				return
			}
			wg.Go(func() {
				for p.Wait(nil) == Called {
					mu.Lock()
					now, at := time.Now(), free
					if now.Before(at) {
						mu.Unlock()
						r.At = at
						p.Stay(now, r)
						continue
					}
					free = now.Add(100 * time.Millisecond)
					served[caller]++
					mu.Unlock()
					p.Go(now, key)
					return
				}
			})
		}
		random := rand.New(rand.NewPCG(1, 1))
		for range 60 * 110 {
			time.Sleep(time.Duration(random.ExpFloat64() / 110 * float64(time.Second)))
			if random.IntN(11) == 0 {
				send("b")
			} else {
				send("a")
			}
		}
		wg.Wait()
		t.Log(served)
		if a, b := served["a"], served["b"]; a < b/2 || b < a/2 {
			t.Errorf("a got %d, b %d", a, b)
		}
	})
}

// TestOldQueuesAreForgotten although some queue has requests at all times, each
// of which waits in two queues.
func TestOldQueuesAreForgotten(t *testing.T) {
	l := New(time.Second, false)
	var weaks []weak.Pointer[Ticket]
	gone := 0
	const n = 1000
	ret := func(b int) Return {
		return Return{Key: Key{Backend: b}, Places: 10, At: time.Now()}
	}
	both := func(a, b int) *Ticket {
		now := time.Now()
		p, none := l.Join(now, Waiter{}, now.Add(time.Hour), 1, ret(a), ret(b))
		if p == nil {
			t.Fatal(none)
		}
		weaks = append(weaks, weak.Make(p))
		return p
	}
	last := both(0, 1)
	for i := 1; i < n; i++ {
		next := both(i%3, (i+1)%3)
		if last.Wait(nil) == Called {
			last.Go(time.Now(), Key{Backend: i % 3})
		} else {
			last.Leave(time.Now())
		}
		last = next
		time.Sleep(1100 * time.Microsecond)
	}
	for range 5 {
		runtime.GC()
		time.Sleep(10 * time.Millisecond)
	}
	for _, w := range weaks {
		if w.Value() == nil {
			gone++
		}
	}
	t.Logf("%d of %d are gone", gone, n)
	if gone < n-10 {
		t.Errorf("only %d of %d are gone", gone, n)
	}
	last.Leave(time.Now())
}

// TestNoCallIsLost whatever requests do.
func TestNoCallIsLost(t *testing.T) {
	for seed := range uint64(100) {
		bubble.Test(t, func(t *testing.T) {
			l := New(2*time.Second, seed%2 == 0)
			random := rand.New(rand.NewPCG(seed, 1))
			var rm sync.Mutex
			of := func(n int) int { rm.Lock(); defer rm.Unlock(); return random.IntN(n) }
			ms := func(n int) time.Duration { return time.Duration(of(n)) * time.Millisecond }
			returns := func(now, until time.Time) (all []Return) {
				for b := range 3 {
					if of(2) == 0 {
						continue
					}
					at := now.Add(ms(400))
					if of(3) == 0 {
						at = now
					}
					all = append(all, Return{Key: Key{Backend: b}, At: at, Places: float64(of(4)), Pause: ms(300), Every: ms(60), Yields: of(6) == 0})
				}
				return all
			}
			check := func() {
				l.mu.Lock()
				defer l.mu.Unlock()
				for _, q := range l.byKey {
					n := 0
					for i := range q.lines {
						held := 0
						for j, s := range q.lines[i].positions {
							n++
							if s.holds == q {
								held++
							}
							if s.holds == nil && s.called == nil {
								t.Errorf("a request that waits holds no place")
							}
							if j > 0 && compare(q.lines[i].positions[j-1], s) >= 0 {
								t.Errorf("order")
							}
							if s.called != nil && s.result != Called {
								t.Errorf("seed %d: a call is lost", seed)
							}
						}
						if held != q.lines[i].places {
							t.Errorf("%d places are held, %d counted", held, q.lines[i].places)
						}
					}
					if n == 0 && q.gate.Before(time.Now()) {
						t.Errorf("an empty queue is left")
					}
				}
			}
			var wg sync.WaitGroup
			for range 150 {
				time.Sleep(ms(40))
				check()
				if of(10) == 0 {
					l.Wake(time.Now(), "")
				}
				wg.Go(func() {
					now := time.Now()
					until := now.Add(ms(1500))
					rs := returns(now, until)
					if len(rs) == 0 {
						return
					}
					p, _ := l.Join(now, Waiter{Caller: string(rune('a' + of(3))), Tier: of(3)}, until, of(1000), rs...)
					if p == nil {
						return
					}
					done := make(chan struct{})
					if of(5) == 0 {
						time.AfterFunc(ms(1000), func() { close(done) })
					}
					for {
						res := p.Wait(done)
						if time.Now().After(until) {
							t.Errorf("late by %s", time.Since(until))
						}
						if res != Called {
							break
						}
						if of(3) == 0 {
							time.Sleep(ms(3)) // the try takes a while
						}
						now = time.Now()
						rs := returns(now, until)
						switch {
						case of(3) == 0:
							to := Key{Backend: of(3)}
							p.Go(now, to)
							time.Sleep(ms(200))
							if of(2) == 0 {
								p.FirstByte(time.Now())
							}
							now = time.Now()
							if rs = returns(now, until); of(3) == 0 && len(rs) > 0 && now.Before(until) {
								p.Stay(now, rs...)
								continue
							}
							return
						case len(rs) == 0 || !now.Before(until):
							p.Leave(now)
							return
						default:
							p.Stay(now, rs...)
						}
					}
				})
			}
			if seed%5 == 0 {
				time.Sleep(ms(700))
				l.Close()
			}
			wg.Wait()
			time.Sleep(10 * time.Second)
			check()
			if l.Len() != 0 || len(l.byKey) != 0 || bodies.Load() != 0 {
				t.Errorf("seed %d: %d wait in %d queues with %d bytes", seed, l.Len(), len(l.byKey), bodies.Load())
			}
		})
		if t.Failed() {
			return
		}
	}
}
