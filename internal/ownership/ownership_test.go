package ownership

import (
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

var start = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

const month = 720 * time.Hour

func id(i int) Key { return KeyOf(fmt.Sprintf("resp_%048x", i)) }

func (m *Memory) wantOwner(t *testing.T, id Key, now time.Time, want Owner) {
	t.Helper()
	if got, ok := m.Get(id, now); !ok || got != want {
		t.Fatalf("the owner is %+v (%v), want %+v", got, ok, want)
	}
}

func (m *Memory) wantNone(t *testing.T, id Key, now time.Time) {
	t.Helper()
	if got, ok := m.Get(id, now); ok {
		t.Fatalf("the owner is %+v, want none", got)
	}
}

func TestAnIDIsRememberedForItsTime(t *testing.T) {
	m := NewMemory(1000)
	m.wantNone(t, id(1), start)
	m.Put(id(1), Owner{Account: "a"}, start, month)
	m.wantOwner(t, id(1), start.Add(month-time.Second), Owner{Account: "a"})
	m.wantNone(t, id(1), start.Add(month))
	m.wantNone(t, id(2), start)
	m.Put(id(1), Owner{Account: "a"}, start.Add(month/2), month)
	m.wantOwner(t, id(1), start.Add(month), Owner{Account: "a"})
}

func TestACallersIDStaysThatCallers(t *testing.T) {
	alice, bob := CallerNamed("alice"), CallerNamed("bob")
	m := NewMemory(1000)
	m.Put(id(1), Owner{"a", alice}, start, month)
	m.Put(id(1), Owner{"b", bob}, start, month)
	m.wantOwner(t, id(1), start, Owner{"a", alice})
	m.Put(id(1), Owner{Account: "b"}, start, month)
	m.wantOwner(t, id(1), start, Owner{"b", alice})
	m.Put(id(1), Owner{"b", bob}, start.Add(2*month), month)
	m.wantOwner(t, id(1), start.Add(2*month), Owner{"b", bob})
	m.Put(id(1), Owner{"b", NoCaller}, start.Add(2*month), time.Minute)
	m.wantOwner(t, id(1), start.Add(3*month-time.Second), Owner{"b", bob})
	for _, tt := range []struct {
		owner, who CallerDigest
		want       bool
	}{{NoCaller, alice, true}, {alice, alice, true}, {alice, bob, false}, {alice, 0, true}, {0, alice, true}, {0, 0, true}} {
		if got := (Owner{Caller: tt.owner}).MayUse(tt.who); got != tt.want {
			t.Errorf("%v may use an id of %v: %v", tt.who, tt.owner, got)
		}
	}
}

// TestNoCallerIsKnownForItsTime whatever replies mention meanwhile, and the
// account for longer.
func TestNoCallerIsKnownForItsTime(t *testing.T) {
	alice := CallerNamed("alice")
	m := NewMemory(1000)
	m.Put(id(1), Owner{Account: "a"}, start, month)
	m.Put(id(1), Owner{"a", NoCaller}, start, time.Minute)
	m.Put(id(1), Owner{Account: "b"}, start.Add(time.Minute), month)
	m.wantOwner(t, id(1), start.Add(Unclaimed-time.Second), Owner{"b", NoCaller})
	m.wantOwner(t, id(1), start.Add(Unclaimed), Owner{Account: "b"})
	m.wantOwner(t, id(1), start.Add(month), Owner{Account: "b"})
	m.wantNone(t, id(1), start.Add(month+time.Minute))
	m.Put(id(1), Owner{"b", NoCaller}, start, month)
	m.Put(id(1), Owner{"b", alice}, start, month)
	m.wantOwner(t, id(1), start.Add(time.Hour), Owner{"b", alice})
}

func TestOnlyNewsIsWorthTelling(t *testing.T) {
	alice, bob := CallerNamed("alice"), CallerNamed("bob")
	m := NewMemory(1000)
	for i, step := range []struct {
		put   Owner
		after time.Duration
		kept  Owner
		news  bool
	}{
		{Owner{Account: "a"}, 0, Owner{Account: "a"}, true},
		{Owner{Account: "a"}, time.Hour, Owner{Account: "a"}, false},
		{Owner{"a", NoCaller}, time.Hour, Owner{"a", NoCaller}, false},
		{Owner{"a", alice}, time.Hour, Owner{"a", alice}, true},
		{Owner{Account: "a"}, time.Hour, Owner{"a", alice}, false},
		{Owner{"b", bob}, month / 2, Owner{"a", alice}, false},
		{Owner{Account: "b"}, time.Hour, Owner{"b", alice}, true},
		{Owner{"b", alice}, time.Minute, Owner{"b", alice}, false}, // sooner than before
		{Owner{"b", alice}, month / 2, Owner{"b", alice}, true},
		{Owner{"a", bob}, 2 * month, Owner{"a", bob}, true},
	} {
		if kept, news := m.Put(id(1), step.put, start.Add(step.after), month); kept != step.kept || news != step.news {
			t.Errorf("step %d: kept is %+v, which is news: %v", i, kept, news)
		}
	}
}

func TestTheOldestIDsGoFirst(t *testing.T) {
	const limit = 64 * 100
	m := NewMemory(limit)
	for i := range 10 * limit {
		m.Put(id(i), Owner{Account: "a"}, start, month)
		m.Put(id(0), Owner{Account: "b"}, start, month) // is never the oldest
	}
	if n := m.Len(); n > limit || n < limit*99/100 {
		t.Errorf("%d ids are held, want about %d", n, limit)
	}
	m.wantOwner(t, id(0), start, Owner{Account: "b"})
	m.wantOwner(t, id(10*limit-1), start, Owner{Account: "a"})
	m.wantNone(t, id(1), start)
	young := 0
	for i := 9 * limit; i < 10*limit; i++ {
		if _, ok := m.Get(id(i), start); ok {
			young++
		}
	}
	if young < limit*85/100 {
		t.Errorf("of the youngest %d, %d are held", limit, young)
	}
}

func TestKeysTellTextsApart(t *testing.T) {
	long := strings.Repeat("x", 5000)
	texts := []string{"", "a", "b", "resp_1", "resp_10", long, long + "x", "y" + long[1:], long[1:] + "y", long[:96], long[:97], long[:104]}
	seen := make(map[Key]string)
	for _, text := range texts {
		k := KeyOf(text)
		if other, ok := seen[k]; ok {
			t.Errorf("%.20q and %.20q have one key", text, other)
		}
		seen[k] = text
		if k != KeyOf([]byte(text)) {
			t.Errorf("%.20q has another key as bytes", text)
		}
	}
	if CallerNamed("") != 0 || CallerNamed("alice") == 0 || CallerNamed("alice") == CallerNamed("bob") {
		t.Error("callers are not told apart")
	}
}

func TestManyRequestsUseAStoreAtOnce(t *testing.T) {
	m := NewMemory(2000)
	var all sync.WaitGroup
	for g := range 8 {
		all.Go(func() {
			for i := range 2000 {
				k := id(i*7 + g)
				m.Put(k, Owner{Account: fmt.Sprint(g)}, start, month)
				if o, ok := m.Get(k, start); ok && len(o.Account) != 1 {
					t.Errorf("got %+v", o)
				}
				if i%500 == 0 {
					m.Save(start)
				}
			}
		})
	}
	all.Wait()
	if m.Len() > 2000 {
		t.Errorf("%d ids are held", m.Len())
	}
}

func TestALookupAllocatesNothing(t *testing.T) {
	m := filled(1000)
	text := []byte("resp_0123456789abcdef0123456789abcdef0123456789abcdef")
	if n := testing.AllocsPerRun(100, func() { m.Get(KeyOf(text), start) }); n != 0 {
		t.Errorf("a lookup allocates %v times", n)
	}
}

func filled(n int) *Memory {
	m := NewMemory(n)
	for i := range n {
		m.Put(id(i), Owner{Account: "api.openai.com 0123456789abcdef"}, start, month)
	}
	return m
}

// BenchmarkLookup is what a request pays for each id in it.
func BenchmarkLookup(b *testing.B) {
	m := filled(200_000)
	ids := make([][]byte, 1024)
	for i := range ids {
		ids[i] = fmt.Appendf(nil, "resp_%048x", i*150)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		m.Get(KeyOf(ids[i%len(ids)]), start)
	}
}

// BenchmarkLookupOfContent is the same for an encrypted content of 20 kB.
func BenchmarkLookupOfContent(b *testing.B) {
	m := filled(1000)
	content := []byte(strings.Repeat("g", 20_000))
	b.ReportAllocs()
	for b.Loop() {
		m.Get(KeyOf(content), start)
	}
}

func BenchmarkPut(b *testing.B) {
	m := filled(200_000)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		m.Put(id(i), Owner{Account: "a"}, start, month)
	}
}

func TestAnIDTakesLittleMemory(t *testing.T) {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	m := filled(250_000)
	runtime.GC()
	runtime.ReadMemStats(&after)
	if n := (after.HeapAlloc - before.HeapAlloc) / uint64(m.Len()); n > 70 {
		t.Errorf("it takes %d bytes", n)
	}
}

// BenchmarkMemory measures how much memory an id takes.
func BenchmarkMemory(b *testing.B) {
	for _, n := range []int{200_000, 1_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			var before, after runtime.MemStats
			for b.Loop() {
				runtime.GC()
				runtime.ReadMemStats(&before)
				m := filled(n)
				runtime.GC()
				runtime.ReadMemStats(&after)
				b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/float64(m.Len()), "B/id")
			}
		})
	}
}
