package observe

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/caddyevents/eventsconfig"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func init() { caddy.RegisterModule(new(eventTaker)) }

// eventTaker is an event handler that shows what it gets to the test, and waits
// for it.
type eventTaker struct{}

var (
	takenEvents chan string
	takeAnother chan struct{}
)

func (*eventTaker) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "events.handlers.openai_lb_test", New: func() caddy.Module { return new(eventTaker) }}
}

func (*eventTaker) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	return nil
}

func (*eventTaker) Handle(_ context.Context, e caddy.Event) error {
	text := e.Name() + " from " + string(e.Origin().CaddyModule().ID) + ":"
	for _, name := range slices.Sorted(maps.Keys(e.Data)) {
		if value := fmt.Sprint(e.Data[name]); value != "" {
			text += " " + name + "=" + value
		}
	}
	takenEvents <- text
	<-takeAnother
	if strings.Contains(text, "panics") {
		panic("as told")
	}
	return nil
}

func TestEventsReportCooldowns(t *testing.T) {
	takenEvents, takeAnother = make(chan string), make(chan struct{})
	a, serverA := lbtest.Listen(t, "a")
	b, serverB := lbtest.Listen(t, "b")
	address := lbtest.ServeAt(t, fmt.Sprintf("openai_lb {\npool eventful\nbackend %s {\nname a\n}\nbackend %s {\nname b\n}\n}", serverA.URL, serverB.URL),
		"events {\non openai_lb.cooldown_started openai_lb_test\non openai_lb.cooldown_ended openai_lb_test\non openai_lb.all_throttled openai_lb_test\n}")
	chat := func(model string) lbtest.Reply {
		return lbtest.Post(lbtest.NewClient(t), "http://"+address+"/v1/chat/completions", `{"model":"`+model+`"}`)
	}
	wantEvent := func(want string) {
		t.Helper()
		if got := <-takenEvents; got != want {
			t.Errorf("the event is %q, want %q", got, want)
		}
	}
	const from = " from http.handlers.openai_lb: "
	// a throttle of some milliseconds is no event
	for _, backend := range []*lbtest.Backend{a, b} {
		backend.Replies(lbtest.Status(429, "Retry-After-Ms", "20"))
	}
	chat("short")
	wantEvent("openai_lb.all_throttled" + from + "pool=eventful requests=1")
	// a handler that does not return holds no request up
	for _, backend := range []*lbtest.Backend{a, b} {
		backend.Replies(lbtest.Status(401))
	}
	for range 3 {
		if reply := chat("gpt-4o"); reply.Status != 502 {
			t.Errorf("client got %d %s", reply.Status, reply.Body)
		}
	}
	takeAnother <- struct{}{}
	first := <-takenEvents
	if want := "openai_lb.cooldown_started" + from + "backend="; !strings.HasPrefix(first, want) || !strings.HasSuffix(first, "cause=test class=credential pool=eventful seconds=60 status=401") {
		t.Errorf("the event is %q", first)
	}
	takeAnother <- struct{}{}
	<-takenEvents // of the other backend
	a.Recovers()
	b.Recovers()
	chat("gpt-4o").WantStatus(t, 200)
	takeAnother <- struct{}{}
	if got := <-takenEvents; !strings.HasPrefix(got, "openai_lb.cooldown_ended"+from+"backend=") || !strings.Contains(got, "class=credential pool=eventful seconds=") || strings.Contains(got, "seconds=60") {
		t.Errorf("the event is %q", got)
	}
	takeAnother <- struct{}{}
	// there was no other event, and there is one a minute of throttled pools
	for _, backend := range []*lbtest.Backend{a, b} {
		backend.Replies(lbtest.Throttled("60"))
	}
	for range 2 {
		chat("last").WantStatus(t, 429)
	}
	for range 2 {
		if got := <-takenEvents; !strings.HasPrefix(got, "openai_lb.cooldown_started"+from) || !strings.Contains(got, "deployment=last hint=retry-after pool=eventful seconds=60") {
			t.Errorf("the event is %q", got)
		}
		takeAnother <- struct{}{}
	}
}

func TestAHandlerOfEventsThatPanicsDoesNotEndCaddy(t *testing.T) {
	takenEvents, takeAnother = make(chan string), make(chan struct{})
	a, server := lbtest.Listen(t, "a")
	address := lbtest.ServeAt(t, fmt.Sprintf("openai_lb {\npool panics\nbackend %s {\nname a\n}\n}", server.URL), "events {\non openai_lb.cooldown_started openai_lb_test\n}")
	a.Replies(lbtest.Throttled("60"))
	for _, model := range []string{"one", "two"} {
		lbtest.Post(lbtest.NewClient(t), "http://"+address+"/v1/chat/completions", `{"model":"`+model+`"}`).WantStatus(t, http.StatusTooManyRequests)
		if got := <-takenEvents; !strings.Contains(got, "deployment="+model+" ") {
			t.Errorf("the event is %q", got)
		}
		takeAnother <- struct{}{}
	}
}

func TestEventsTellOfLimitsThatAreReached(t *testing.T) {
	takenEvents, takeAnother = make(chan string), make(chan struct{})
	_, server := lbtest.Listen(t, "a")
	pool := lbtest.Unique("limited")
	address := lbtest.ServeAt(t, "openai_lb {\npool "+pool+"\nbackend "+server.URL+"\nclient_key alice key-of-alice-0123\nclient_key bob key-of-bob-01234567\n"+
		"caller * {\nrequests 5/day\nrequests 1M/second\n}\n}",
		"events {\non openai_lb.caller_near_limit openai_lb_test\non openai_lb.caller_at_limit openai_lb_test\n}")
	client := lbtest.NewClient(t)
	chats := func(key string, n, want int) {
		t.Helper()
		for range n {
			lbtest.Post(client, "http://"+address+"/v1/chat/completions", `{"model":"gpt-4o"}`, "Api-Key", key).WantStatus(t, want)
		}
	}
	wantEvent := func(name, caller, used string) {
		t.Helper()
		want := "openai_lb." + name + " from http.handlers.openai_lb: allowed=5 caller=" + caller + " kind=requests limit=5/day pool=" + pool + " used=" + used
		if got := <-takenEvents; got != want {
			t.Errorf("the event is %q, want %q", got, want)
		}
		takeAnother <- struct{}{}
	}
	chats("key-of-alice-0123", 4, 200)
	wantEvent("caller_near_limit", "alice", "4")
	chats("key-of-alice-0123", 1, 200)
	wantEvent("caller_at_limit", "alice", "5")
	chats("key-of-alice-0123", 3, 429) // each is an event once in a window
	chats("key-of-bob-01234567", 4, 200)
	wantEvent("caller_near_limit", "bob", "4")
}
