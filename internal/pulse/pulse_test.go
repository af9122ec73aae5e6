package pulse

import (
	"math"
	"slices"
	"sync"
	"testing"
	"time"
)

// start is when tests begin.
var start = began.Add(time.Hour)

func at(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }

// used returns a pulse that usually waits for a second.
func used() *Pulse {
	p := new(Pulse)
	for range 20 {
		p.Sent(at(-1))
		p.Heard(at(-1), at(0), factor)
		p.Served(time.Second)
	}
	return p
}

func wantSilent(t *testing.T, p *Pulse, sent, now time.Time, want bool) {
	t.Helper()
	p.Look(sent, now, factor)
	if _, silent := p.Silent(); silent != want {
		t.Errorf("after %s: silent is %t, want %t", now.Sub(start), silent, want)
	}
}

func TestTwoRequestsThatWaitForLongerThanUsualAreASilence(t *testing.T) {
	p := used()
	p.Sent(at(0))
	wantSilent(t, p, at(0), at(100), false) // one request proves nothing
	p.Sent(at(100))
	wantSilent(t, p, at(0), at(103.9), false)
	f := p.Look(at(0), at(104), factor)
	if !f.Began || !f.Moves || f.Threshold != 4*time.Second {
		t.Errorf("after 4 s: %+v", f)
	}
	if f := p.Look(at(103), at(104), factor); f.Began || f.Moves || f.Again != 3*time.Second {
		t.Errorf("a request that has waited for 1 s: %+v", f)
	}
}

func TestAByteEndsASilence(t *testing.T) {
	p := used()
	p.Sent(at(0))
	p.Sent(at(0))
	wantSilent(t, p, at(0), at(5), true)
	if since, ended := p.Heard(at(0), at(6), factor); !ended || !since.Equal(at(5)) {
		t.Errorf("a byte: ended %t a silence since %s", ended, since)
	}
	wantSilent(t, p, at(0), at(100), false) // the other request is alone now
}

func TestThereIsNoSilenceBeforeTenSamples(t *testing.T) {
	p := new(Pulse)
	for range 9 {
		p.Served(time.Second)
	}
	p.Sent(at(0))
	p.Sent(at(0))
	wantSilent(t, p, at(0), at(1000), false)
	p.Served(time.Second)
	wantSilent(t, p, at(0), at(1000), true)
}

func TestTheThresholdIsTheLargestOfThree(t *testing.T) {
	for _, test := range []struct {
		waits []time.Duration
		want  time.Duration
	}{
		{[]time.Duration{time.Millisecond}, 500 * time.Millisecond},
		{[]time.Duration{time.Second}, 4 * time.Second},
		{[]time.Duration{time.Second, 90 * time.Second}, 90 * time.Second},
	} {
		p := new(Pulse)
		for range enough {
			for _, wait := range test.waits[:1] {
				p.Served(wait)
			}
		}
		for _, wait := range test.waits[1:] {
			p.Served(wait)
		}
		if got, ok := p.Threshold(factor); got != test.want || !ok {
			t.Errorf("%v: threshold %s, want %s", test.waits, got, test.want)
		}
	}
}

func TestTheLongestWaitIsForgottenSlowly(t *testing.T) {
	p := used()
	p.Served(90 * time.Second)
	for n, want := range []time.Duration{80 * time.Second, 30 * time.Second} {
		for range 10 + n*100 {
			p.Served(time.Second)
		}
		if got, _ := p.Threshold(factor); got < want || got > 2*want {
			t.Errorf("threshold %s, want about %s", got, want)
		}
	}
}

func TestClientsThatLeaveClearNothing(t *testing.T) {
	p := used()
	for i := range 20 { // each leaves after two seconds
		p.Sent(at(float64(i)))
		if i >= 2 {
			p.Left(at(float64(i-2)), at(float64(i)))
		}
	}
	wantSilent(t, p, at(19), at(20), true)
	p.Left(at(18), at(20))
	p.Left(at(19), at(20))
	wantSilent(t, p, at(19), at(60), true)
}

func TestTimeInWhichNoRequestWaitsIsNoSilence(t *testing.T) {
	p := used()
	p.Sent(at(0))
	p.Sent(at(0))
	p.Left(at(0), at(3))
	p.Left(at(0), at(3))
	p.Sent(at(1000))
	wantSilent(t, p, at(1000), at(1000.9), false)
	wantSilent(t, p, at(1000), at(1001), true)
}

func TestRequestsThatAreCancelledEarlyAreNoSilence(t *testing.T) {
	p := used()
	for i := range 100 { // each keystroke cancels the request of the one before
		p.Sent(at(float64(i) * 0.2))
		p.Left(at(float64(i)*0.2), at(float64(i)*0.2+0.2))
	}
	p.Sent(at(20))
	wantSilent(t, p, at(20), at(30), false)
}

func TestARequestThatIsCancelledEarlyIsNoEvidenceAgainstAnother(t *testing.T) {
	for _, gone := range []float64{10, 10.3} { // the first one or the second one
		p := used()
		p.Sent(at(10))
		p.Sent(at(10.3))
		p.Left(at(gone), at(10.6))
		wantSilent(t, p, at(20.3-gone), at(30), false)
		p.Sent(at(30))
		wantSilent(t, p, at(30), at(34), true)
	}
}

func TestOneRequestTriesASilentBackendAfterGrowingPauses(t *testing.T) {
	p := used()
	p.Sent(at(0))
	p.Sent(at(0))
	wantSilent(t, p, at(0), at(4), true)
	var tried []float64
	for now := at(4); now.Before(at(70)); now = now.Add(100 * time.Millisecond) {
		if p.Due(now) && p.Try(now) {
			tried = append(tried, math.Round(now.Sub(at(4)).Seconds()))
		}
		if p.Try(now) {
			t.Fatalf("two requests at once, after %s", now.Sub(at(4)))
		}
	}
	if want := []float64{1, 3, 7, 15, 31, 47, 63}; !slices.Equal(tried, want) {
		t.Errorf("tried after %v seconds, want %v", tried, want)
	}
}

func TestABackendAnswersThatHasRepliedInTime(t *testing.T) {
	const fallback = time.Second
	p := used() // heard at 0
	if got := p.Answers(at(10), factor, fallback); got != Yes {
		t.Errorf("after a reply: %d", got)
	}
	p.Sent(at(10))
	if got := p.Answers(at(13.9), factor, fallback); got != Yes {
		t.Errorf("while a request waits for its threshold: %d", got)
	}
	if got := p.Answers(at(14), factor, fallback); got != No {
		t.Errorf("while a request waits for longer: %d", got)
	}
	p.Heard(at(10), at(14.1), factor)
	if got := p.Answers(at(15), factor, fallback); got != No {
		t.Errorf("after a late reply: %d", got)
	}
	p.Sent(at(15))
	p.Heard(at(15), at(16), factor)
	if got := p.Answers(at(17), factor, fallback); got != Yes {
		t.Errorf("after a reply in time: %d", got)
	}
}

func TestOneRequestFindsOutWhetherABackendAnswersThatWasNotTriedLately(t *testing.T) {
	const fallback = time.Second
	for _, p := range []*Pulse{new(Pulse), used()} {
		now := at(100)
		if p.Answers(now, factor, fallback) != Perhaps || !p.Claim(now, factor, fallback) || p.Claim(now, factor, fallback) {
			t.Fatal("not exactly one request may find out")
		}
		p.Sent(now)
		if got := p.Answers(at(100.5), factor, fallback); got != No {
			t.Errorf("while that request waits: %d", got)
		}
		p.Heard(now, at(100.6), factor)
		if got := p.Answers(at(100.7), factor, fallback); got != Yes {
			t.Errorf("after its answer: %d", got)
		}
	}
}

func TestATableCountsItsSilences(t *testing.T) {
	var table Table
	if table.Of("m", Streamed) != nil || table.Make("m", Unfollowed) != nil {
		t.Error("an empty table has a pulse")
	}
	p := table.Make("m", Streamed)
	if table.Of("m", Streamed) != p || table.Of("m", Whole) == p {
		t.Error("the kinds of a model are not apart")
	}
	for range enough {
		p.Served(time.Second)
	}
	p.Sent(at(0))
	p.Sent(at(0))
	wantSilent(t, p, at(0), at(5), true)
	if !table.AnySilent() {
		t.Error("the silence does not count")
	}
	if s := table.Snapshot(); len(s) != 1 || s[0] != (State{"m", true, time.Second, at(5)}) {
		t.Errorf("snapshot: %+v", s)
	}
	p.Heard(at(0), at(6), factor)
	if table.AnySilent() {
		t.Error("the silence does not end")
	}
	for range maxModels {
		table.Make(time.Now().String(), Whole)
	}
	if table.Clear(); table.Of("m", Streamed) != nil {
		t.Error("a cleared table has a pulse")
	}
}

func TestATableFollowsALimitedNumberOfModels(t *testing.T) {
	var table Table
	for i := range maxModels {
		if table.Make(string(rune('a'+i)), Whole) == nil {
			t.Fatalf("model %d is not followed", i)
		}
	}
	if table.Make("one more", Whole) != nil || table.Make("a", Streamed) == nil {
		t.Error("the number of models is not limited")
	}
}

func TestManyRequestsAtOnceLeaveNothingBehind(t *testing.T) {
	p := used()
	var all sync.WaitGroup
	for i := range 50 {
		all.Go(func() {
			for n := range 200 {
				now := at(float64(n))
				p.Sent(now)
				p.Look(now, at(float64(n)+10), factor)
				if i%5 == 0 {
					p.Left(now, now.Add(time.Second))
				} else {
					p.Heard(now, now.Add(time.Second), factor)
				}
			}
		})
	}
	all.Wait()
	p.Sent(at(1000))
	p.Heard(at(1000), at(1001), factor)
	if _, silent := p.Silent(); silent || p.waiting.Load() != 0 || p.waits.Load() != 0 {
		t.Errorf("%d wait, silent %t", p.waiting.Load(), silent)
	}
}

// Sent and Heard cost at most 40 ns together, on a machine that does nothing else, and no allocation.
func BenchmarkSentAndHeard(b *testing.B) {
	p, sent, heard := used(), at(1), at(2)
	b.ReportAllocs()
	for b.Loop() {
		p.Sent(sent)
		p.Heard(sent, heard, factor)
	}
}

func BenchmarkServed(b *testing.B) {
	p := used()
	b.ReportAllocs()
	for b.Loop() {
		p.Served(time.Second)
	}
}

func TestARequestAllocatesNothing(t *testing.T) {
	p := used()
	if n := testing.AllocsPerRun(100, func() {
		p.Sent(at(1))
		p.Look(at(1), at(3), factor)
		p.Heard(at(1), at(2), factor)
		p.Served(time.Second)
	}); n > 0 {
		t.Errorf("%g allocations", n)
	}
}

func TestTwoRequestsThatAreCancelledEarlyAreNoEvidenceAgainstAnother(t *testing.T) {
	p := used()
	p.Sent(at(10))
	p.Sent(at(10.3))
	p.Left(at(10), at(10.6))
	p.Left(at(10.3), at(10.9))
	p.Sent(at(20))
	wantSilent(t, p, at(20), at(30), false)
}
