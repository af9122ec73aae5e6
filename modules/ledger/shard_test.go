package ledger

import (
	"sync"
	"testing"
	"time"
)

func TestRequestsDoNotWaitForTheReadersOfTheBill(t *testing.T) {
	l, now := newLedger("main"), time.Now()
	many := func() {
		for range 1000 {
			l.Add(now, keyOf("alice"), one, "")
		}
	}
	many() // so that all shards hold the row
	done := make(chan struct{})
	l.mu.Lock()
	go func() {
		defer close(done)
		many()
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Error("they wait")
	}
	l.mu.Unlock()
	<-done
	if got := used(l, "alice", func(Key) bool { return true }); got.Requests != 2000 {
		t.Errorf("%d of 2000 requests are billed", got.Requests)
	}
}

func TestShardsHoldOnlyWhatIsInUse(t *testing.T) {
	l, now := newLedger("main"), time.Now()
	for _, caller := range []string{"alice", "bob"} {
		for range 1000 {
			l.Add(now, keyOf(caller), one, "")
		}
		l.mu.Lock()
		l.collect()
		l.mu.Unlock()
	}
	for i := range l.shards {
		if n := len(l.shards[i].rows); n != 1 {
			t.Errorf("a shard holds %d rows, want that of the caller who was there last", n)
		}
	}
}

func TestNoUseIsLostWhileTheBillIsRead(t *testing.T) {
	l, now := newLedger("main"), time.Now()
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for k := range 2000 {
				l.Add(now, keyOf([]string{"alice", "bob"}[(i+k)%2]), one, "")
				if k%100 == 0 {
					l.pages(func(*day) bool { return true })
				}
			}
		})
	}
	all.Wait()
	for _, caller := range []string{"alice", "bob"} {
		if got := used(l, caller, func(Key) bool { return true }); got.Requests != 8000 {
			t.Errorf("%s is billed %d of 8000 requests", caller, got.Requests)
		}
	}
}
