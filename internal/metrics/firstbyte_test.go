package metrics

import (
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

func TestRequestsWaitForTheirFirstByte(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var f FirstBytes
		wants := func(requests, overdue int64, oldest float64) {
			t.Helper()
			got := f.At(time.Now())
			if got.Requests != requests || got.Overdue != overdue || got.OldestSeconds > oldest || got.OldestSeconds < oldest-2 {
				t.Errorf("%+v, want %d requests, %d overdue, the oldest of %v s", got, requests, overdue, oldest)
			}
		}
		wants(0, 0, 0)
		first := f.Begin(time.Now(), 0)
		slow := f.Begin(time.Now(), 5*time.Minute)
		time.Sleep(30 * time.Second)
		second := f.Begin(time.Now(), time.Second)
		wants(3, 0, 30)
		time.Sleep(34 * time.Second)
		wants(3, 1, 64)
		time.Sleep(30 * time.Second)
		wants(3, 2, 94)
		if !f.At(time.Now()).Stuck() {
			t.Error("two requests are overdue, and nothing is stuck")
		}
		first.End()
		first.End()
		wants(2, 1, 94)
		second.End()
		wants(1, 0, 94)
		time.Sleep(4 * time.Minute)
		wants(1, 1, 334)
		slow.End()
		wants(0, 0, 0)
		for range 2 { // the slots are used again, and nothing is left in them
			time.Sleep(70 * time.Minute)
			wants(0, 0, 0)
		}
	})
}

func TestAWaitCostsNoAllocation(t *testing.T) {
	f, now := new(FirstBytes), time.Now()
	if n := testing.AllocsPerRun(100, func() {
		wait := f.Begin(now, time.Second)
		wait.End()
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
