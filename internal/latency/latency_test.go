package latency

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

// used returns a tracker that usually waits for a second.
func used() *Tracker {
	p := new(Tracker)
	for range 20 {
		serve(p, at(-1), time.Second)
	}
	return p
}

// serve has a request wait for so long.
func serve(p *Tracker, sent time.Time, wait time.Duration) {
	r := &Wait{Kind: kind, Sent: sent, Threshold: p.Usual(kind).Threshold()}
	p.Sent(r)
	p.Heard(r, sent.Add(wait))
	p.Served(r)
}

// send sends a request.
func send(p *Tracker, sent time.Time) *Wait {
	r := &Wait{Kind: kind, Sent: sent, Threshold: p.Usual(kind).Threshold()}
	p.Sent(r)
	return r
}

func wantSilent(t *testing.T, p *Tracker, now time.Time, want bool, looking ...*Wait) {
	t.Helper()
	for _, r := range looking {
		p.Look(r, now)
	}
	if p.IsSilent() != want {
		t.Errorf("after %s: silent is %t, want %t", now.Sub(start), p.IsSilent(), want)
	}
}

func TestTwoRequestsThatWaitForLongerThanUsualAreASilence(t *testing.T) {
	p := used()
	first := send(p, at(0))
	wantSilent(t, p, at(100), false, first, first) // one request proves nothing
	second := send(p, at(100))
	wantSilent(t, p, at(103.9), false, first, second)
	if f := p.Look(second, at(104)); f.Change != (Change{FellSilent, at(104)}) || !f.Moves {
		t.Errorf("after 4 s: %+v", f)
	}
	if f := p.Look(send(p, at(103.5)), at(104)); f.Change != (Change{}) || f.Moves || f.Again != time.Second {
		t.Errorf("a request that has waited for half a second: %+v", f)
	}
}

func TestAByteInTimeEndsASilence(t *testing.T) {
	p := used()
	first, second := send(p, at(0)), send(p, at(0))
	wantSilent(t, p, at(5), true, first, second)
	late := send(p, at(6))
	if c := p.Heard(late, at(7)); c != (Change{Answered, at(5)}) {
		t.Errorf("a byte: %+v", c)
	}
	wantSilent(t, p, at(100), false, first, second) // they were sent before
	wantSilent(t, p, at(100), true, send(p, at(8)), send(p, at(8)))
}

func TestABackendThatSendsBytesTooLateIsSlow(t *testing.T) {
	p := used()
	first, second := send(p, at(0)), send(p, at(0))
	wantSilent(t, p, at(5), true, first, second)
	if c := p.Heard(first, at(6)); c != (Change{BecameSlow, at(5)}) {
		t.Errorf("a late byte: %+v", c)
	}
	tries := send(p, at(6))
	if !p.Due(at(6)) || p.Look(tries, at(17.9)).Happened != Nothing || p.Look(second, at(17.9)).Moves {
		t.Error("the slow backend is not tried, or requests that it answers move")
	}
	if f := p.Look(tries, at(18)); f.Change != (Change{FellSilent, at(5)}) { // twice what it took
		t.Errorf("when it sends nothing any more: %+v", f)
	}
	if c := p.Heard(send(p, at(19)), at(20)); c != (Change{Answered, at(5)}) {
		t.Errorf("a byte in time: %+v", c)
	}
}

func TestWhatIsUsualAtABackendThatBecameSlowIsLearned(t *testing.T) {
	p := used()
	wantSilent(t, p, at(5), true, send(p, at(0)), send(p, at(0)))
	now, moved := at(5), 0
	for n := 0; p.IsSilent(); n++ { // every other second a request comes, which waits for ten seconds
		if now = now.Add(2 * time.Second); n == 900 {
			t.Fatalf("it is silent after half an hour, its usual wait is %s", p.Usual(kind).Wait)
		}
		if !p.Due(now) || !tries(p, now) {
			continue
		}
		r := send(p, now)
		if f := p.Look(r, now.Add(10*time.Second)); f.Moves {
			moved++
			p.Left(r, now, 0)
			continue
		}
		serveLate(p, r, 10*time.Second)
	}
	if moved > 20 {
		t.Errorf("%d requests moved before one had the patience", moved)
	}
}

// serveLate answers a request that waits.
func serveLate(p *Tracker, r *Wait, wait time.Duration) {
	p.Heard(r, r.Sent.Add(wait))
	p.Served(r)
}

func TestTheFewerRepliesTheLongerIsTheThreshold(t *testing.T) {
	p := new(Tracker)
	if got := p.Usual(kind).Threshold(); got != 0 {
		t.Errorf("without replies, the threshold is %s", got)
	}
	for _, want := range []float64{40, 20, 0, 10, 8, 0, 0, 5, 0, 4, 4} {
		serve(p, at(0), time.Second)
		if got := p.Usual(kind).Threshold(); got.Seconds() != want && want > 0 {
			t.Errorf("the threshold is %s, want %g s", got, want)
		}
	}
	wantSilent(t, p, at(15), true, send(p, at(10)), send(p, at(10)))
}

func TestTheThresholdIsTheLargestOfThree(t *testing.T) {
	for _, test := range []struct {
		waits []time.Duration
		want  time.Duration
	}{
		{[]time.Duration{time.Millisecond}, 500 * time.Millisecond},
		{[]time.Duration{time.Second}, 4 * time.Second},
		{[]time.Duration{time.Second, 90 * time.Second, 80 * time.Second}, 80 * time.Second},
	} {
		p := new(Tracker)
		for range enough {
			serve(p, at(0), test.waits[0])
		}
		for _, wait := range test.waits[1:] {
			serve(p, at(0), wait)
		}
		if got := p.Usual(kind).Threshold(); got != test.want {
			t.Errorf("%v: threshold %s, want %s", test.waits, got, test.want)
		}
	}
}

func TestOneOutlierDoesNotSetTheThreshold(t *testing.T) {
	const outlier, most = 9 * time.Second, 700 * time.Millisecond
	for _, before := range []int{0, 1, 2, 5, 20, 1000} {
		p := new(Tracker)
		for range before {
			serve(p, at(0), 100*time.Millisecond)
		}
		serve(p, at(0), outlier)
		for range enough {
			if before < enough { // it becomes known
				serve(p, at(0), 100*time.Millisecond)
			}
		}
		if got := p.Usual(kind).Threshold(); got > most {
			t.Errorf("one of %s after %d of 100 ms: the threshold is %s", outlier, before, got)
		}
	}
}

func TestLongWaitsAreForgottenSlowly(t *testing.T) {
	p := used()
	serve(p, at(0), 90*time.Second)
	serve(p, at(0), 90*time.Second)
	for n, want := range []time.Duration{80 * time.Second, 30 * time.Second} {
		for range 10 + n*100 {
			serve(p, at(0), time.Second)
		}
		if got := p.Usual(kind).Threshold(); got < want || got > 2*want {
			t.Errorf("threshold %s, want about %s", got, want)
		}
	}
}

func TestRequestsAreComparedWithThoseOfTheirSize(t *testing.T) {
	small, long, large := KindOf(false, 1000, 100), KindOf(false, 100_000, 100), KindOf(false, 1000, math.MaxInt64)
	for _, others := range [][2]Kind{{small, KindOf(true, 1000, 100)}, {small, long}, {small, large}, {long, large}, {small, KindOf(false, 1000, 0)}} {
		if others[0] == others[1] || others[0] == Unfollowed || int(others[1]) > kinds {
			t.Errorf("kinds %v", others)
		}
	}
	if int(KindOf(true, math.MaxInt64, math.MaxInt64)) != kinds || KindOf(false, 0, 0) != 1 {
		t.Error("the kinds are not numbered from 1")
	}
	p := used() // for the first kind
	for range enough {
		r := &Wait{Kind: long, Sent: at(0)}
		p.Sent(r)
		serveLate(p, r, 20*time.Second)
	}
	if got := p.Usual(long).Threshold(); got != 80*time.Second {
		t.Errorf("the threshold of long prompts is %s", got)
	}
	if got := p.Usual(kind).Threshold(); got != 4*time.Second {
		t.Errorf("the threshold of others is %s", got)
	}
	if got := p.Slowest().Wait; got != 20*time.Second {
		t.Errorf("the slowest wait for %s", got)
	}
}

func TestClientsThatLeaveClearNothing(t *testing.T) {
	p := used()
	var change Change
	for i := range 20 { // one after the other, each leaves after two seconds
		sent := at(float64(2 * i))
		if c := p.Left(send(p, sent), sent.Add(2*time.Second), p.Usual(kind).Longest); c.Happened != Nothing {
			change = c
		}
	}
	if change != (Change{FellSilent, at(8)}) {
		t.Errorf("four that waited for half of the threshold: %+v", change)
	}
}

func TestTimeInWhichNoRequestWaitsIsNoSilence(t *testing.T) {
	p := used()
	p.Left(send(p, at(0)), at(3), time.Second)
	p.Left(send(p, at(0)), at(3), time.Second)
	third := send(p, at(1000))
	wantSilent(t, p, at(1003.9), false, third)
	wantSilent(t, p, at(1004), true, third)
}

func TestRequestsThatAreCancelledEarlyAreNoSilence(t *testing.T) {
	p := used()
	for i := range 100 { // each keystroke cancels the request of the one before
		sent := at(float64(i) * 0.2)
		p.Left(send(p, sent), sent.Add(200*time.Millisecond), p.Usual(kind).Longest)
	}
	wantSilent(t, p, at(30), false, send(p, at(20)))
}

func TestOneRequestLeadsTheOthers(t *testing.T) {
	p := used()
	first, second := send(p, at(0)), send(p, at(0))
	wantSilent(t, p, at(4), true, first, second)
	for _, step := range []struct {
		at   float64
		want bool
	}{{4, true}, {4, false}, {7.9, false}, {8, true}, {15.9, false}, {16, true}} { // each has twice as long
		if got := p.Lead(second, at(step.at)); got != step.want {
			t.Errorf("after %g s, a request may move: %t", step.at, got)
		}
	}
	p.Stay() // there is no backend for it
	if !p.Lead(first, at(16)) || p.Lead(second, at(16)) {
		t.Error("the next one does not lead")
	}
	p.Follow()
	if !p.Lead(first, at(17)) || !p.Lead(second, at(17)) {
		t.Error("the others do not follow")
	}
}

func TestOneRequestTriesASilentBackendAfterGrowingPauses(t *testing.T) {
	p := used()
	wantSilent(t, p, at(4), true, send(p, at(0)), send(p, at(0)))
	var tried []float64
	for now := at(4); now.Before(at(70)); now = now.Add(100 * time.Millisecond) {
		if p.Due(now) && tries(p, now) {
			tried = append(tried, math.Round(now.Sub(at(4)).Seconds()))
		}
		if tries(p, now) {
			t.Fatalf("two requests at once, after %s", now.Sub(at(4)))
		}
	}
	if want := []float64{1, 3, 7, 15, 31, 47, 63}; !slices.Equal(tried, want) {
		t.Errorf("tried after %v seconds, want %v", tried, want)
	}
}

func TestFewRequestsInASilenceHavePatience(t *testing.T) {
	p := used()
	wantSilent(t, p, at(4), true, send(p, at(0)), send(p, at(0)))
	for n, moves := range []float64{4, 8, 16, 4, 16} {
		now := []float64{67.9, 68, 196, 451.9, 452}[n]
		tries, other := send(p, at(now)), send(p, at(now))
		if p.Look(other, at(now+3.8)).Moves || !p.Look(other, at(now+4)).Moves {
			t.Error("another request has more patience, too")
		}
		if p.Look(tries, at(now+moves-0.1)).Moves || !p.Look(tries, at(now+moves)).Moves {
			t.Errorf("try %d does not move after %g s", n, moves)
		}
	}
}

func TestABackendAnswersThatHasRepliedInTime(t *testing.T) {
	const fallback = time.Second
	p := used() // heard at 0
	if got := p.Answers(at(10), fallback); got != Yes {
		t.Errorf("after a reply: %d", got)
	}
	r := send(p, at(10))
	p.Look(r, at(13.9))
	if got := p.Answers(at(13.9), fallback); got != Yes {
		t.Errorf("while a request waits for its threshold: %d", got)
	}
	p.Look(r, at(14))
	if got := p.Answers(at(14), fallback); got != No {
		t.Errorf("while a request waits for longer: %d", got)
	}
	p.Heard(r, at(14.1))
	if got := p.Answers(at(15), fallback); got != No {
		t.Errorf("after a late reply: %d", got)
	}
	serve(p, at(15), time.Second)
	if got := p.Answers(at(17), fallback); got != Yes {
		t.Errorf("after a reply in time: %d", got)
	}
}

func tries(p *Tracker, now time.Time) bool {
	_, ok := p.Try(now)
	return ok
}

func TestOneRequestFindsOutWhetherABackendAnswersThatWasNotTriedLately(t *testing.T) {
	const fallback = time.Second
	claims := func(p *Tracker, now time.Time) bool {
		_, ok := p.Claim(now, fallback)
		return ok
	}
	for _, p := range []*Tracker{new(Tracker), used()} {
		now := at(100)
		if p.Answers(now, fallback) != Perhaps || !claims(p, now) || claims(p, now) {
			t.Fatal("not exactly one request may find out")
		}
		r := send(p, now)
		if got := p.Answers(at(100.5), fallback); got != No {
			t.Errorf("while that request waits: %d", got)
		}
		p.Heard(r, at(100.6))
		if got := p.Answers(at(100.7), fallback); got != Yes {
			t.Errorf("after its answer: %d", got)
		}
	}
}

func TestATableCountsItsSilences(t *testing.T) {
	var table Table
	if table.Of(Use{Model: "m"}) != nil || table.AnySilent() {
		t.Error("an empty table has a tracker")
	}
	p := table.Make(Use{Model: "m"})
	if table.Of(Use{Model: "m"}) != p || table.Make(Use{Model: "m"}) != p {
		t.Error("a model has two trackers")
	}
	for range enough {
		serve(p, at(-1), time.Second)
	}
	first, second := send(p, at(0)), send(p, at(0))
	wantSilent(t, p, at(5), true, first, second)
	if !table.AnySilent() {
		t.Error("the silence does not count")
	}
	if s := table.Snapshot(at(5)); len(s) != 1 || s[0] != (State{Use{Model: "m"}, time.Second, 0, at(5), false, time.Time{}}) {
		t.Errorf("snapshot: %+v", s)
	}
	p.Heard(first, at(6))
	if s := table.Snapshot(at(5)); !table.AnySilent() || !s[0].Slow || !s[0].Since.Equal(at(5)) {
		t.Errorf("snapshot of a slow one: %+v", s)
	}
	serve(p, at(6), time.Second)
	if table.AnySilent() {
		t.Error("the silence does not end")
	}
	for range maxUses {
		table.Make(Use{Model: time.Now().String()})
	}
	if table.Clear(); table.Of(Use{Model: "m"}) != nil {
		t.Error("a cleared table has a tracker")
	}
}

func TestATableFollowsALimitedNumberOfUses(t *testing.T) {
	var table Table
	for i := range maxUses {
		if table.Make(Use{Model: string(rune('a' + i))}) == nil {
			t.Fatalf("use %d is not followed", i)
		}
	}
	if table.Make(Use{Model: "one more"}) != nil || table.Make(Use{Model: "a"}) == nil {
		t.Error("the number of uses is not limited")
	}
}

func TestManyRequestsAtOnceLeaveNothingBehind(t *testing.T) {
	p := used()
	var all sync.WaitGroup
	for i := range 50 {
		all.Go(func() {
			for n := range 200 {
				r := send(p, at(float64(n)))
				if f := p.Look(r, r.Sent.Add(10*time.Second)); f.Moves && p.Lead(r, r.Sent) {
					p.Stay()
				}
				if i%5 == 0 {
					p.Left(r, r.Sent.Add(time.Second), 0)
				} else {
					serveLate(p, r, time.Second)
				}
			}
		})
	}
	all.Wait()
	serve(p, at(1000), time.Second)
	if p.IsSilent() || p.waiting.Load() != 0 || p.evidence.Load() != 0 {
		t.Errorf("%d wait, silent %t", p.waiting.Load(), p.IsSilent())
	}
}

// Sent and Heard cost at most 40 ns together, on a machine that does nothing
// else, and no allocation.
func BenchmarkSentAndHeard(b *testing.B) {
	p, heard := used(), at(2)
	r := &Wait{Kind: kind, Sent: at(1), Threshold: 4 * time.Second}
	b.ReportAllocs()
	for b.Loop() {
		p.Sent(r)
		p.Heard(r, heard)
	}
}

func BenchmarkServed(b *testing.B) {
	p := used()
	r := send(p, at(0))
	p.Heard(r, at(1))
	b.ReportAllocs()
	for b.Loop() {
		p.Served(r)
	}
}

func TestARequestAllocatesNothing(t *testing.T) {
	p := used()
	if n := testing.AllocsPerRun(100, func() {
		r := Wait{Kind: kind, Sent: at(1), Threshold: p.Usual(kind).Threshold()}
		p.Sent(&r)
		p.Look(&r, at(3))
		p.Heard(&r, at(2))
		p.Served(&r)
	}); n > 0 {
		t.Errorf("%g allocations", n)
	}
}

func TestASilenceThatNoRequestTriesIsNotKnownToLast(t *testing.T) {
	var table Table
	p := table.Make(Use{Model: "m"})
	for range 20 {
		serve(p, at(-1), time.Second)
	}
	wants := func(seconds float64, want State) {
		t.Helper()
		want.Model, want.Whole = "m", time.Second
		if s := table.Snapshot(at(seconds)); len(s) != 1 || s[0] != want {
			t.Errorf("after %v s: %+v, want %+v", seconds, s, want)
		}
	}
	first, second := send(p, at(0)), send(p, at(0))
	wantSilent(t, p, at(5), true, first, second)
	wants(300, State{Since: at(5)}) // they wait
	p.Left(first, at(301), 0)
	p.Left(second, at(301), 0)
	wants(301, State{Untried: at(5)})
	tries := send(p, at(310))
	wants(310, State{Since: at(5)})
	p.Left(tries, at(311), 0)
	wants(355, State{Since: at(5)})
	wants(356, State{Untried: at(310)})
	p.Heard(send(p, at(400)), at(400.5))
	wants(401, State{})
}
