package callers

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
)

var config = Config{Callers: []Caller{{Name: "alice", Allowance: Allowance{
	Requests: []Limit{{Limit: "1G/minute"}},
	Tokens:   []Limit{{Limit: "1000G/minute"}, {Limit: "1000G/day"}},
}}, {Name: "bob", Allowance: Allowance{Requests: []Limit{{Limit: "1/day"}}}}}}

func open(t testing.TB) *Callers {
	c := New(Options{Config: config, Pool: t.Name(), Logger: zap.NewNop()})
	t.Cleanup(func() { c.Close() })
	return c
}

func TestWithoutCallersThereIsNothing(t *testing.T) {
	c := New(Options{Pool: t.Name()})
	if c != nil || c.Models("alice") != nil || c.Close() != nil || LimitersOf(t.Name()) != nil {
		t.Error("there is something")
	}
	var a Admission
	a.Settle(time.Now(), limiter.Cost{Requests: 1})
	if a.Open() || a.Limited() || a.CountsTokens() || a.Tier() != 0 || a.Prompt() != 0 {
		t.Errorf("the zero Admission has something: %+v", a)
	}
}

// TestAdmissionAllocatesNothing holds what each request of a caller costs.
func TestAdmissionAllocatesNothing(t *testing.T) {
	c, now := open(t), time.Now()
	c.Admit(now, "alice", limiter.Estimate{Prompt: 1})
	if got := testing.AllocsPerRun(100, func() { admitAndSettle(c, now) }); got != 0 {
		t.Errorf("%v allocations", got)
	}
}

func admitAndSettle(c *Callers, now time.Time) {
	a, _ := c.Admit(now, "alice", limiter.Estimate{Prompt: 1000, Output: limiter.Undeclared})
	a.Settle(now, limiter.Cost{Requests: 1, Prompt: 900, Output: 100, Counted: true})
}

func BenchmarkAdmitAndSettle(b *testing.B) {
	c, now := open(b), time.Now()
	b.ReportAllocs()
	for b.Loop() {
		admitAndSettle(c, now)
	}
}

func BenchmarkHeader(b *testing.B) {
	c, now := open(b), time.Now()
	a, _ := c.Admit(now, "alice", limiter.Estimate{Prompt: 1000})
	header := http.Header{"Content-Type": {"application/json"}, "X-Request-Id": {"1"}}
	b.ReportAllocs()
	for b.Loop() {
		a.Limits(now).Set(header, false) // which has the fields, as if a backend had sent them
	}
}

func BenchmarkRefuse(b *testing.B) {
	c, now, r := open(b), time.Now(), httptest.NewRequest("POST", "/", nil)
	c.Admit(now, "bob", limiter.Estimate{})
	b.ReportAllocs()
	for b.Loop() {
		_, refusal := c.Admit(now, "bob", limiter.Estimate{})
		c.Refuse(r, now, "bob", refusal)
	}
}
