package waiting

import (
	"slices"
	"strconv"
	"testing"
	"time"
)

// joinAs gives a request of a caller a place for a second, at backends that
// accept so many. It is nil if there is none.
func joinAs(l *Queues, caller string, tier int, accept ...float64) *Ticket {
	var returns []Return
	for backend, places := range accept {
		if places > 0 {
			returns = append(returns, Return{Key: Key{Backend: backend, Model: key.Model}, At: time.Now().Add(time.Second), Places: places})
		}
	}
	p, _ := l.Join(time.Now(), Waiter{Caller: caller, Tier: tier}, time.Now().Add(time.Second), 10, returns...)
	return p
}

// callers lists whose requests wait for a backend, in their order.
func callers(l *Queues, backend int) (names string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if q := l.byKey[Key{Backend: backend, Model: key.Model}]; q != nil {
		for _, s := range positions(q) {
			names += s.waiter.Caller
		}
	}
	return names
}

func leaveAll(places []*Ticket) {
	for _, p := range places {
		if p != nil {
			p.Leave(time.Now())
		}
	}
}

func TestCallersTakeTurns(t *testing.T) {
	for _, row := range []struct{ waiting, joins, want string }{
		{"aaa", "b", "aba"},
		{"aaa", "a", "aaa"},
		{"aaa", "bc", "abc"},
		{"aaa", "bcd", "abc"}, // each caller has one
		{"aaa", "bb", "aba"},  // a and b have one, and a's second came before b's
		{"aabb", "c", "abca"},
		{"aaaa", "bbb", "abab"},
		{"aaaaaaaaaa", "bbbbbbb", "ababababab"},
	} {
		inBubble(t, func(t *testing.T, l *Queues) {
			var places []*Ticket
			for _, caller := range row.waiting + row.joins {
				places = append(places, joinAs(l, string(caller), 1, float64(len(row.waiting))))
			}
			if got := callers(l, 0); got != row.want {
				t.Errorf("%s, then %s: the requests of %s wait, want %s", row.waiting, row.joins, got, row.want)
			}
			leaveAll(places)
		})
	}
}

func TestARequestThatTriesKeepsItsPlace(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		tries := joinAs(l, "a", 1, 1)
		want(t, tries, Called, 0)
		b := joinAs(l, "b", 0, 1)
		if got := callers(l, 0); got != "ba" {
			t.Errorf("the requests of %s wait, want ba", got)
		}
		leaveAll([]*Ticket{tries, b})
	})
}

func TestARequestTakesNoPlaceOfABetterTier(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		places := []*Ticket{joinAs(l, "a", 1, 3), joinAs(l, "a", 1, 3), joinAs(l, "a", 1, 3)}
		if p := joinAs(l, "b", 2, 3); p != nil {
			t.Error("b got a place")
		}
		leaveAll(places)
	})
}

func TestABetterTierTakesThePlaceOfTheLastRequest(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		places := []*Ticket{joinAs(l, "c", 1, 3), joinAs(l, "a", 2, 3), joinAs(l, "a", 2, 3)}
		places = append(places, joinAs(l, "c", 1, 3))
		if got := callers(l, 0); got != "cca" {
			t.Errorf("the requests of %s wait, want cca", got)
		}
		want(t, places[2], Full, 0)
		leaveAll(places)
	})
}

func TestThereAreAsManyPlacesAsBackendsAccept(t *testing.T) {
	for _, row := range []struct {
		accept []float64
		want   int
	}{
		{[]float64{0}, 0}, {[]float64{.2}, 1}, {[]float64{1}, 1}, {[]float64{20}, 20},
		{[]float64{2, 6, 12}, 20}, {[]float64{3, 0, 4}, 7}, {[]float64{.2, .2}, 2},
	} {
		inBubble(t, func(t *testing.T, l *Queues) {
			var places []*Ticket
			for range 30 {
				places = append(places, joinAs(l, "", 0, row.accept...))
			}
			if got := l.Len(); got != row.want {
				t.Errorf("%d requests wait for backends that accept %v, want %d", got, row.accept, row.want)
			}
			leaveAll(places)
		})
	}
}

// The requests of b may go to the second backend alone.
func TestOneQueueForEachBackend(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		places := []*Ticket{joinAs(l, "b", 2, 0, 5), joinAs(l, "a", 1, 5, 5), joinAs(l, "a", 3, 5, 5)}
		if first, second := callers(l, 0), callers(l, 1); first != "aa" || second != "aba" {
			t.Errorf("%s and %s wait, want aa and aba", first, second)
		}
		for _, row := range []struct {
			backend, tier int
			behind        bool
		}{{0, 0, false}, {0, 1, true}, {0, 2, true}, {1, 0, false}, {1, 1, true}, {2, 9, false}} {
			if _, ok := l.Ahead(time.Now(), Key{Backend: row.backend, Model: key.Model}, Waiter{Caller: "c", Tier: row.tier}, nil); ok != row.behind {
				t.Errorf("a new request of tier %d is behind others at backend %d: %t", row.tier, row.backend, ok)
			}
		}
		leaveAll(places)
	})
}

func TestARequestThatGoesLeavesAllQueues(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		first, second := joinAs(l, "", 0, 5, 5), joinAs(l, "", 0, 0, 5)
		want(t, first, Called, 0)
		first.Go(time.Now(), Key{Backend: 0, Model: key.Model})
		want(t, second, Called, 0)
		second.Leave(time.Now())
	})
}

func TestBodiesThatWaitHaveAllTheirMemoryTogether(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		var places []*Ticket
		for range 9 {
			p, none := l.Join(time.Now(), Waiter{}, time.Now().Add(time.Second), 32<<20, in(time.Second))
			if places = append(places, p); p == nil && none != Full {
				t.Errorf("a request got no place: %s", none)
			}
		}
		if i := slices.Index(places, nil); i != 8 {
			t.Errorf("%d bodies of 32 MiB wait, want 8", i)
		}
		leaveAll(places)
	})
}

func TestAWorseTierLeavesMemoryToBetterOnes(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		fill := func(key Key, tier int) (n int) {
			for {
				r := in(time.Second)
				r.Key = key
				p, _ := l.Join(time.Now(), Waiter{Tier: tier}, time.Now().Add(time.Second), 1<<20, r)
				if p == nil {
					return n
				}
				defer p.Leave(time.Now())
				n++
			}
		}
		for tier, want := range []int{256, 227, 199, 170, 142, 113, 85, 56, 28} {
			if n := fill(key, tier); n != want {
				t.Errorf("%d bodies of 1 MiB of tier %d wait, want %d", n, tier, want)
			}
		}
		if n := fill(Key{Caller: "alice"}, 0); n != 128 {
			t.Errorf("%d bodies of 1 MiB wait for a limit, want 128", n)
		}
	})
}

// The requests of a go elsewhere: their turns there are not those here.
func TestTurnsAreThoseOfOneQueueAndTier(t *testing.T) {
	for name, elsewhere := range map[string]struct {
		key  Key
		tier int
	}{
		"a better tier":       {key, 0},
		"another model":       {Key{Model: "gpt-5"}, 1},
		"a limit of a caller": {Key{Caller: "a"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, l *Queues) {
				places := []*Ticket{joinAs(l, "b", 1, 9), joinAs(l, "b", 1, 9), joinAs(l, "b", 1, 9)}
				for range 20 {
					r := in(0)
					r.Key = elsewhere.key
					p, _ := l.Join(time.Now(), Waiter{"a", elsewhere.tier}, time.Now().Add(time.Second), 1, r)
					p.Wait(nil)
					p.Go(time.Now(), elsewhere.key)
				}
				places = append(places, joinAs(l, "c", 1, 9))
				if got := callers(l, 0); got != "bcbb" {
					t.Errorf("the requests of %s wait, want bcbb", got)
				}
				leaveAll(places)
			})
		})
	}
}

func TestAQueueHasAtMostAThousandPlaces(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Queues) {
		var places []*Ticket
		for range 1010 {
			places = append(places, joinAs(l, "", 0, many))
		}
		if l.Len() != maxPlaces {
			t.Errorf("%d requests wait, want %d", l.Len(), maxPlaces)
		}
		leaveAll(places)
	})
}

// It depends little on how many requests wait.
func BenchmarkJoin(b *testing.B) {
	for _, n := range []int{10, 100, 1000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			l := New(Longest, false)
			defer l.Close()
			for range n - 1 {
				joinAs(l, "a", 1, many, many, many)
			}
			for b.Loop() {
				joinAs(l, "b", 1, many, many, many).Leave(time.Now())
			}
		})
	}
}

// positions are the requests of a queue, in order.
func positions(q *queue) (all []*position) {
	for i := range q.lines {
		all = append(all, q.lines[i].positions...)
	}
	return all
}
