package redis

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/modules/replicas"
)

// orders counts how often a member is taken out of use or put back.
type orders struct{ drained, resumed atomic.Int64 }

func (o *orders) Happened(e pool.Event) {
	switch e.Happening {
	case pool.Drained:
		o.drained.Add(1)
	case pool.Resumed:
		o.resumed.Add(1)
	}
}

func TestTheLatestOrderHoldsInARedisThatKeepsNothing(t *testing.T) {
	for _, name := range []string{"maxmemory", "a read-only replica"} {
		t.Run(name, func(t *testing.T) {
			f := &faulty{t: t, server: startServer(t)}
			var members []*pool.Member
			var heard []*orders
			for range 3 {
				m, o := pool.NewMember("a", new(pool.Health)), new(orders)
				r := replicas.New(open(t, f.server.engine()), zap.NewNop())
				link := r.NewLink()
				link.Name(m, "https://a key")
				p := pool.New([]*pool.Member{m}, link, o)
				link.Open(p)
				members, heard = append(members, m), append(heard, o)
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan struct{})
				go func() { defer close(done); r.Run(ctx) }()
				t.Cleanup(func() { cancel(); <-done; p.Close() })
			}
			lbtest.WaitFor(t, func() bool {
				in := 0
				for _, s := range seam.Statuses() {
					if s.InTouch && len(s.Peers) == 3 {
						in++
					}
				}
				return in == 3
			})
			var repeated atomic.Int64
			listening, listener := make(chan struct{}), open(t, f.server.engine())
			go listener.Listen(t.Context(), func() { close(listening) }, func(message []byte) {
				if strings.Contains(string(message), `"resume"`) {
					repeated.Add(1)
				}
			})
			<-listening
			faults[name].begin(f)
			members[0].Drain(pool.Order{})
			for _, m := range members {
				lbtest.WaitFor(t, m.Drained)
			}
			members[1].Resume(pool.Order{})
			lbtest.WaitFor(t, func() bool { return repeated.Load() >= 3 })
			for i, m := range members {
				if d, r := heard[i].drained.Load(), heard[i].resumed.Load(); m.Drained() || d != 1 || r != 1 {
					t.Errorf("replica %d took a out of use %d times and put it back %d times, want once each", i, d, r)
				}
			}
		})
	}
}
