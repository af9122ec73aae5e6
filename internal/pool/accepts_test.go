package pool

import (
	"net/http"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/quota"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

func TestReplicasDivideWhatReturns(t *testing.T) {
	for replicas, want := range map[int]float64{0: 20, 1: 20, 4: 5} {
		p := New([]*Member{NewMember("a", new(Health))})
		p.Replicas = func() int { return replicas }
		m := p.Members[0]
		m.Models = []string{"gpt-4o"}
		now := time.Now()
		m.Quota("gpt-4o").See(quota.Reply{Rates: verdict.ReadRates(http.Header{
			"X-Ratelimit-Limit-Requests": {"120"}, "X-Ratelimit-Remaining-Requests": {"0"}, "X-Ratelimit-Reset-Requests": {"1"},
		}), Sent: now}, "gpt-4o", now)
		m.CoolDown(Refusal{Throttle: true, Model: "gpt-4o", Wait: time.Second}, now)
		r := &Ask{At: []At{{Model: "gpt-4o", Takes: true}}}
		returns := p.Returns(r, nil, now, now.Add(2*time.Second))
		if len(returns) != 1 || returns[0].Places != want || !returns[0].At.Equal(now.Add(time.Second)) {
			t.Errorf("with %d replicas, %+v returns, want %v places", replicas, returns, want)
		}
		if returns := p.Returns(r, nil, now, now.Add(time.Second-1)); returns != nil {
			t.Errorf("before its time, %+v returns", returns)
		}
	}
}

func TestALateZeroDoesNotHideTheTimeThatAMemberNamed(t *testing.T) {
	p := New([]*Member{NewMember("a", new(Health))})
	m := p.Members[0]
	now := time.Now()
	r := &Ask{At: []At{{Model: "gpt-4o", Takes: true}}}
	atOnce := Refusal{Throttle: true, Model: "gpt-4o", Wait: 50 * time.Millisecond, Longest: 10 * time.Second, Started: now}
	m.CoolDown(Refusal{Throttle: true, Model: "gpt-4o", Wait: 2 * time.Second, Started: now}, now)
	m.CoolDown(atOnce, now.Add(100*time.Millisecond))
	if got := p.Returns(r, nil, now.Add(200*time.Millisecond), now.Add(5*time.Second)); len(got) != 1 || !got[0].At.Equal(now.Add(2*time.Second)) {
		t.Errorf("%+v returns, want a after 2 s", got)
	}
	m.Reset(Order{})
	m.CoolDown(atOnce, now.Add(300*time.Millisecond))
	if got := p.Returns(r, nil, now.Add(310*time.Millisecond), now.Add(5*time.Second)); got != nil {
		t.Errorf("%+v returns, although a asked to be called at once", got)
	}
}
