package callers

import (
	"net/http/httptest"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

var config = Config{Callers: []Caller{{Name: "alice", Allowance: Allowance{
	Requests: []Limit{{Limit: "1G/minute"}},
	Tokens:   []Limit{{Limit: "1000G/minute"}, {Limit: "1000G/day"}},
}}, {Name: "bob", Allowance: Allowance{Requests: []Limit{{Limit: "1/day"}}}}}}

func open(t testing.TB) *Callers {
	c := New(Options{Config: config, AdmissionConfig: seam.AdmissionConfig{Pool: t.Name(), Logger: zap.NewNop()}})
	t.Cleanup(func() { c.Close() })
	return c
}

// TestAdmissionAllocatesOnlyItsCharge holds what each request of a caller
// costs.
func TestAdmissionAllocatesOnlyItsCharge(t *testing.T) {
	c, now := open(t), time.Now()
	admitAndSettle(c, now)
	if got := testing.AllocsPerRun(100, func() { admitAndSettle(c, now) }); got > 1 {
		t.Errorf("%v allocations", got)
	}
}

func admitAndSettle(c *Callers, now time.Time) {
	c.Grant(keys.Caller{Name: "alice"})
	r, _ := c.Caller(now, "alice").Admit(now, ratelimit.Estimate{Prompt: 1000, Output: ratelimit.Undeclared})
	c.Settle(now, r, ratelimit.Cost{Requests: 1, Prompt: 900, Output: 100, Counted: true})
}

func BenchmarkAdmitAndSettle(b *testing.B) {
	c, now := open(b), time.Now()
	b.ReportAllocs()
	for b.Loop() {
		admitAndSettle(c, now)
	}
}

func BenchmarkRefuse(b *testing.B) {
	c, now, r := open(b), time.Now(), httptest.NewRequest("POST", "/", nil)
	c.Caller(now, "bob").Admit(now, ratelimit.Estimate{})
	b.ReportAllocs()
	for b.Loop() {
		_, refusal := c.Caller(now, "bob").Admit(now, ratelimit.Estimate{})
		c.Refuse(r, now, "bob", refusal)
	}
}

// spend charges a caller with a request that costs so many tokens.
func spend(c *Callers, name string, tokens int64) {
	r, _ := c.Caller(time.Now(), name).Admit(time.Now(), ratelimit.Estimate{Prompt: 1})
	c.Settle(time.Now(), r, ratelimit.Cost{Requests: 1, Prompt: tokens})
}
