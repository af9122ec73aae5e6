package waiting

import (
	"testing"
	"time"
)

// joinAs gives a request of a caller a place for a second. nil: it gets none.
func joinAs(l *Lists, caller string, tier int) *Place {
	p, _ := l.Join(time.Now(), key, Who{Caller: caller, Tier: tier}, time.Now().Add(time.Second), in(time.Second))
	return p
}

// callers lists whose requests wait, in their order.
func callers(l *Lists) (names string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.byKey[key].places {
		names += p.who.Caller
	}
	return names
}

func TestACallerWithoutAPlaceTakesTheLastOneOfTheCallerThatHasMost(t *testing.T) {
	for _, row := range []struct{ waiting, joins, want string }{
		{"aaa", "b", "aab"},
		{"aaa", "a", "aaa"},
		{"aaa", "bc", "abc"},
		{"aaa", "bcd", "abc"}, // each caller has one
		{"aaa", "bb", "aab"},  // b has one already
		{"abb", "c", "abc"},
		{"aabb", "c", "aabc"},
		{"aaab", "c", "aabc"},
		{"baaa", "b", "baab"},
		{"bbaaa", "cd", "bbacd"},
		{"aaaa", "bbb", "aabb"}, // each has half
		{"aaaaaaaaaa", "bbbbbbb", "aaaaabbbbb"},
		{"aaaaaaaaaa", "bcbcbcbcbc", "aaaaabcbcb"},
		{"aaaaabbbbb", "ac", "aaaaabbbbc"},
	} {
		inBubble(t, len(row.waiting), func(t *testing.T, l *Lists) {
			var places []*Place
			for _, caller := range row.waiting + row.joins {
				if p := joinAs(l, string(caller), 1); p != nil {
					places = append(places, p)
				}
			}
			if got := callers(l); got != row.want {
				t.Errorf("%s, then %s: the requests of %s wait, want %s", row.waiting, row.joins, got, row.want)
			}
			for _, p := range places {
				p.Leave(time.Now())
			}
		})
	}
}

func TestARequestThatTriesKeepsItsPlace(t *testing.T) {
	inBubble(t, 2, func(t *testing.T, l *Lists) {
		first, tries := joinAs(l, "a", 1), joinAs(l, "a", 1)
		want(t, first, Turn, 0)
		first.Go(time.Now())
		want(t, tries, Turn, 0)
		first.Stay(time.Now(), in(time.Second)) // it was refused, and is before the other one again
		b := joinAs(l, "b", 1)
		want(t, first, Full, 0)
		tries.Leave(time.Now())
		want(t, b, Turn, 0)
		b.Leave(time.Now())
	})
}

func TestACallerTakesNoPlaceOfABetterTier(t *testing.T) {
	inBubble(t, 3, func(t *testing.T, l *Lists) {
		places := []*Place{joinAs(l, "a", 1), joinAs(l, "a", 1), joinAs(l, "a", 1)}
		if p := joinAs(l, "b", 2); p != nil {
			t.Error("b got a place")
		}
		for _, p := range places {
			p.Leave(time.Now())
		}
	})
}

func TestABetterTierTakesThePlaceOfTheCallerThatHasMostOfTheWorstTier(t *testing.T) {
	inBubble(t, 4, func(t *testing.T, l *Lists) {
		places := []*Place{joinAs(l, "c", 1), joinAs(l, "a", 2), joinAs(l, "a", 2), joinAs(l, "b", 2)}
		places = append(places, joinAs(l, "c", 1))
		if got := callers(l); got != "ccab" {
			t.Errorf("the requests of %s wait, want ccab", got)
		}
		for _, p := range places {
			p.Leave(time.Now())
		}
	})
}
