package lacks

import (
	"fmt"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

func TestANameIsLackedForAMinuteOrUntilItIsThere(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var s Set
		s.Add("m", time.Now())
		time.Sleep(Lasts - time.Nanosecond)
		if !s.Has("m", time.Now()) || s.Has("n", time.Now()) {
			t.Errorf("before a minute is over it lacks m %v and n %v", s.Has("m", time.Now()), s.Has("n", time.Now()))
		}
		time.Sleep(time.Nanosecond)
		if s.Has("m", time.Now()) {
			t.Error("it lacks m after a minute")
		}
		s.Add("m", time.Now())
		s.Add("n", time.Now())
		if s.Remove("m"); s.Has("m", time.Now()) || !s.Has("n", time.Now()) {
			t.Error("to have m changes more or less than that")
		}
		if s.Clear(); s.Has("n", time.Now()) {
			t.Error("it lacks n after all was forgotten")
		}
	})
}

func TestMadeUpNamesTakeLimitedMemory(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var s Set
		for i := range 10 * maxNames {
			s.Add(fmt.Sprint(i), time.Now())
			if !s.Has(fmt.Sprint(i), time.Now()) {
				t.Fatalf("it has forgotten %d at once", i)
			}
		}
		if n := len(s.until); n > maxNames {
			t.Errorf("it remembers %d names, want %d", n, maxNames)
		}
	})
}

var chat = Use{"gpt-4o", "/chat/completions"}

func TestAStreakIsOfDifferentRequestsOfAUse(t *testing.T) {
	for name, c := range map[string]struct {
		replies []uint64 // 0: another reply
		ends    int      // after so many
	}{
		"three requests":              {[]uint64{1, 2, 3}, 3},
		"one, sent again and again":   {[]uint64{1, 1, 1, 1, 1}, 0},
		"two, sent in turns":          {[]uint64{1, 2, 1, 2, 1}, 0},
		"three, of which one is late": {[]uint64{1, 2, 1, 2, 3}, 5},
		"a reply in between":          {[]uint64{1, 2, 0, 3, 4}, 0},
		"one after the other":         {[]uint64{1, 2, 0, 3, 4, 5}, 6},
	} {
		var s Streaks
		ends := 0
		for i, digest := range c.replies {
			if digest == 0 {
				s.Passed(chat)
			} else if s.Refused(chat, digest) && ends == 0 {
				ends = i + 1
			}
		}
		if ends != c.ends {
			t.Errorf("%s: ended after %d, want %d", name, ends, c.ends)
		}
	}
}

func TestStreaksOfOtherUsesNeitherCountNorEndOne(t *testing.T) {
	for name, other := range map[string]Use{
		"another model":     {"gpt-5", chat.Operation},
		"another operation": {chat.Model, "/images/edits"},
	} {
		var s Streaks
		s.Refused(chat, 1)
		s.Refused(chat, 2)
		if s.Passed(other); s.Refused(other, 3) {
			t.Errorf("%s: its first refusal ended a streak", name)
		}
		if !s.Refused(chat, 3) {
			t.Errorf("%s: its reply ended the streak", name)
		}
	}
}

func TestStreaksAreBounded(t *testing.T) {
	var s Streaks
	for i := range 5 * maxNames {
		s.Refused(Use{Model: fmt.Sprint(i)}, 1)
	}
	if n := len(s.of); n != maxNames {
		t.Errorf("there are %d, want %d", n, maxNames)
	}
}
