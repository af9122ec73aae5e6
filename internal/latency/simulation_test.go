package latency

import (
	"container/heap"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// simulation is two backends, each of which gets half of the requests, in a
// time of its own.
type simulation struct {
	random   *rand.Rand
	now      time.Time
	backends [2]*Tracker
	// wait is how long a request waits for its first byte at a backend, from
	// now on.
	wait func(backend int) time.Duration
	// patience is for how long a client waits before it leaves, from now on. It
	// may be nil.
	patience func() time.Duration
	left     int
	// silent reports until when a backend sends nothing. It may be nil.
	silent   func(backend int, now time.Time) time.Time
	agenda   agenda
	requests int
	moves    int
	// waits are those of all requests, from their arrival to the first byte.
	waits []time.Duration
}

type request struct {
	Wait
	arrived time.Time
	backend int
	over    bool
	// from is the backend that it has moved from, if it did, and leads how long
	// it leads others.
	from  *Tracker
	leads time.Duration
}

type step struct {
	at  time.Time
	run func()
}

type agenda []step

func (a agenda) Len() int           { return len(a) }
func (a agenda) Less(i, j int) bool { return a[i].at.Before(a[j].at) }
func (a agenda) Swap(i, j int)      { a[i], a[j] = a[j], a[i] }
func (a *agenda) Push(x any)        { *a = append(*a, x.(step)) }
func (a *agenda) Pop() any {
	last := (*a)[len(*a)-1]
	*a = (*a)[:len(*a)-1]
	return last
}

func (s *simulation) after(d time.Duration, run func()) {
	heap.Push(&s.agenda, step{s.now.Add(d), run})
}

// run sends n requests at this rate.
func (s *simulation) run(n int, perSecond float64) {
	s.backends = [2]*Tracker{new(Tracker), new(Tracker)}
	s.now = began
	var arrive func()
	arrive = func() {
		if s.requests++; s.requests < n {
			s.after(time.Duration(s.random.ExpFloat64()/perSecond*float64(time.Second)), arrive)
		}
		to := s.random.IntN(2)
		if _, silent := s.backends[to].Silent(); silent && (!s.backends[to].Due(s.now) || !tries(s.backends[to], s.now)) {
			if _, both := s.backends[1-to].Silent(); !both {
				to = 1 - to
			}
		}
		s.send(&request{arrived: s.now, backend: to})
	}
	s.after(0, arrive)
	for len(s.agenda) > 0 {
		next := heap.Pop(&s.agenda).(step)
		s.now = next.at
		next.run()
	}
}

func (s *simulation) send(r *request) {
	p := s.backends[r.backend]
	r.Wait = Wait{Kind: kind, Sent: s.now, Threshold: s.usual(r.backend).Threshold()}
	sent := r.Sent
	s.reply(r, sent, s.wait(r.backend))
	s.after(p.Sent(&r.Wait), func() { s.look(r, sent) })
	if s.patience != nil {
		s.after(s.patience(), func() {
			if !r.over && r.Sent.Equal(sent) {
				r.over = true
				s.left++
				p.Left(&r.Wait, s.now, s.usual(r.backend).Longest)
			}
		})
	}
}

// kind is that of all requests.
const kind = Kind(1)

// usual returns what is usual at a backend, or at both until that is known.
func (s *simulation) usual(backend int) Usual {
	if u := s.backends[backend].Usual(kind); u.Known() {
		return u
	}
	return s.backends[0].Usual(kind).With(s.backends[1].Usual(kind))
}

// reply answers a request that was sent at sent, unless it has moved since.
// What a silent backend would send comes when it is back.
func (s *simulation) reply(r *request, sent time.Time, in time.Duration) {
	s.after(in, func() {
		if r.Sent != sent || r.over {
			return
		}
		if s.silent != nil {
			if until := s.silent(r.backend, s.now); until.After(s.now) {
				s.reply(r, sent, until.Sub(s.now))
				return
			}
		}
		r.over = true
		if r.from != nil && s.now.Sub(sent) <= r.leads {
			r.from.Follow()
		}
		s.backends[r.backend].Heard(&r.Wait, s.now)
		s.backends[r.backend].Served(&r.Wait)
		s.waits = append(s.waits, s.now.Sub(r.arrived))
	})
}

func (s *simulation) look(r *request, sent time.Time) {
	if r.over || r.Sent != sent {
		return
	}
	r.Threshold = s.usual(r.backend).Threshold()
	its, other := s.backends[r.backend], s.backends[1-r.backend]
	f := its.Look(&r.Wait, s.now)
	if f.Moves && r.from == nil && its.Lead(&r.Wait, s.now) {
		if _, ok := other.Claim(s.now, r.Threshold); ok {
			s.moves++
			its.Left(&r.Wait, s.now, 0)
			r.from, r.leads, r.backend = its, r.Threshold, 1-r.backend
			s.send(r)
			return
		}
		its.Stay()
	}
	s.after(f.Again, func() { s.look(r, sent) })
}

// logNormal returns waits with this median and 95th percentile.
func logNormal(random *rand.Rand, median, p95 time.Duration) func(int) time.Duration {
	sigma := math.Log(float64(p95)/float64(median)) / 1.6449
	return func(int) time.Duration {
		return time.Duration(float64(median) * math.Exp(sigma*random.NormFloat64()))
	}
}

func TestHealthyBackendsAreHardlyEverTakenForSilent(t *testing.T) {
	const requests = 100_000
	random := rand.New(rand.NewPCG(1, 2))
	reasons := func(share float64) func(int) time.Duration {
		quick, long := logNormal(random, time.Second, 2*time.Second), logNormal(random, 90*time.Second, 120*time.Second)
		return func(b int) time.Duration {
			if random.Float64() < share {
				return long(b)
			}
			return quick(b)
		}
	}
	leaves := func() time.Duration { // every other client, soon
		return time.Duration(random.IntN(2))*time.Hour + time.Duration(random.Int64N(int64(500*time.Millisecond)))
	}
	for _, test := range []struct {
		name      string
		perSecond float64
		wait      func(int) time.Duration
		most      int // moves in 100,000 requests
		patience  func() time.Duration
	}{
		{"quick, 20/s", 20, logNormal(random, 300*time.Millisecond, 900*time.Millisecond), 10, nil},
		{"quick, 0.2/s", 0.2, logNormal(random, 300*time.Millisecond, 900*time.Millisecond), 10, nil},
		{"heavy tail, 5/s", 5, logNormal(random, time.Second, 20*time.Second), 100, nil},
		{"heavy tail, 0.2/s", 0.2, logNormal(random, time.Second, 20*time.Second), 100, nil},
		{"a tenth takes 90 s, 5/s", 5, reasons(0.1), 100, nil},
		{"a tenth takes 90 s, 0.2/s", 0.2, reasons(0.1), 100, nil},
		{"a hundredth takes 90 s, 0.2/s", 0.2, reasons(0.01), 100, nil},
		{"quick, 0.02/s, clients leave", 0.02, logNormal(random, 300*time.Millisecond, 900*time.Millisecond), 10, leaves},
		{"quick, 2/s, clients leave", 2, logNormal(random, 300*time.Millisecond, 900*time.Millisecond), 10, leaves},
		{"heavy tail, 0.2/s, clients leave", 0.2, logNormal(random, time.Second, 20*time.Second), 20, leaves},
	} {
		s := &simulation{random: random, wait: test.wait, patience: test.patience}
		s.run(requests, test.perSecond)
		if len(s.waits)+s.left != requests || s.moves*100_000 > test.most*requests {
			t.Errorf("%s: %d of %d requests moved, %d were answered, and %d clients left", test.name, s.moves, s.requests, len(s.waits), s.left)
		}
	}
}

func TestRequestsLeaveABackendThatIsSilent(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for _, test := range []struct {
		perSecond           float64
		mostSlow, mostTwice int // of 10,000
		p99                 time.Duration
	}{
		{2, 200, 400, 2500 * time.Millisecond},
		{5, 120, 200, 2500 * time.Millisecond},
		{20, 100, 150, 2500 * time.Millisecond},
		{100, 100, 150, 2500 * time.Millisecond},
	} {
		s := &simulation{random: random, wait: logNormal(random, 300*time.Millisecond, 900*time.Millisecond)}
		s.silent = func(b int, now time.Time) time.Time {
			if into := now.Sub(began) % (2 * time.Minute); b == 0 && into >= 90*time.Second {
				return now.Add(2*time.Minute - into)
			}
			return now
		}
		s.run(30_000, test.perSecond)
		slow := 0
		for _, wait := range s.waits {
			if wait > 2*time.Second {
				slow++
			}
		}
		slices.Sort(s.waits)
		if p99 := s.waits[len(s.waits)*99/100]; slow*10_000 > test.mostSlow*len(s.waits) || s.moves*10_000 > test.mostTwice*s.requests || p99 > test.p99 {
			t.Errorf("%g/s: of %d requests, %d took over 2 s and %d moved, and the p99 is %s", test.perSecond, s.requests, slow, s.moves, p99)
		}
	}
}
