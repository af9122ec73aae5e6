package statuspage

import (
	"context"
	"errors"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/modules/replicas"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
	"github.com/openai-lb/caddy-openai-lb/state/statetest"
)

// One of the replicas is dead, and still counts for 10 s. No page may wait for
// it.
func TestThePageWaitsForNoReplica(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		usePool(t, "llm", "a")
		hub := statetest.NewHub()
		var stop []func()
		for range 2 {
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() { replicas.New(hub.Store(), zap.NewNop()).Run(ctx); close(done) }()
			stop = append(stop, func() { cancel(); <-done })
		}
		defer stop[0]()
		h, _ := newHandler(t, 1)
		shows := func(want string) {
			t.Helper()
			began := time.Now()
			got, err := ask(t, h, http.MethodGet, "/status?callers")
			if took := time.Since(began); err != nil || !strings.Contains(got.Body.String(), want) || took > 0 && began.Second() > 5 {
				t.Errorf("got %v after %v, and no %s in\n%s", err, took, want, got.Body)
			}
		}
		time.Sleep(3 * time.Second)
		shows("Sums over ")
		page, err := ask(t, h, http.MethodGet, "/status")
		if text := regexp.MustCompile(`Sums over \d replicas: \S+ [0-9a-f]{8} \(this one\), `); err != nil || !text.MatchString(page.Body.String()) {
			t.Errorf("the page does not say whose backends it shows (%v): %s", err, page.Body)
		}
		time.Sleep(2 * time.Second)
		stop[1]()
		for range 20 {
			time.Sleep(time.Second)
			shows("(this one)")
		}
		shows("No other replica: ")
		hub.Fail(errors.New("down"))
		time.Sleep(3 * time.Second)
		shows("Not connected to other replicas")
		time.Sleep(20 * time.Second) // what is asked in the background ends
	})
}

func TestReplicasWithDifferentConfigurationsAreAProblemAfterFiveMinutes(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		usePool(t, "llm", "a")
		usePool(t, "other", "a")
		hub := statetest.NewHub()
		configure := func(llm string) (reload func(llm string)) {
			r := replicas.New(hub.Store(), zap.NewNop())
			open := func(llm string) (links []*replicas.Link) {
				for pool, digest := range map[string]string{"llm": llm, "other": "cccccccccccc"} {
					l := r.NewLink()
					l.Configured(pool, digest)
					links = append(links, l)
				}
				return links
			}
			links := open(llm)
			for _, l := range links {
				l.Open(pool.New(nil))
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() { r.Run(ctx); close(done) }()
			t.Cleanup(func() { cancel(); <-done })
			return func(llm string) {
				for _, l := range open(llm) {
					l.Open(pool.New(nil))
				}
			}
		}
		configure("aaaaaaaaaaaa")
		reload := configure("aaaaaaaaaaaa")
		wants := func(problems int, texts ...string) {
			t.Helper()
			s := statusAt(time.Now(), status.Others{})
			for _, p := range s.Pools {
				if want := map[string]int{"llm": problems}[p.Pool]; len(p.Problems) != want {
					t.Errorf("the pool %s has the problems %+v, want %d", p.Pool, p.Problems, want)
				}
				for _, problem := range p.Problems {
					if !problem.NeedsOperator || problem.Class != status.ConfigDiffers || problem.Cause == "" || problem.Models == nil ||
						time.Since(*problem.Since).Round(5*time.Second) < 5*time.Minute || problem.RunbookURL != status.RunbookURL(status.ConfigDiffers) {
						t.Errorf("the problem is %+v", problem)
					}
				}
			}
			h, _ := newHandler(t, 1)
			got, err := ask(t, h, http.MethodGet, "/status")
			for _, text := range texts {
				if err != nil || !strings.Contains(got.Body.String(), text) {
					t.Errorf("got %v and no %s in\n%s", err, text, got.Body)
				}
			}
		}
		time.Sleep(10 * time.Minute)
		wants(0, "<br>llm aaaaaaaaaaaa<br>other cccccccccccc</small>")
		reload("bbbbbbbbbbbb")
		time.Sleep(4*time.Minute + 58*time.Second)
		wants(0, "<br>llm bbbbbbbbbbbb differs since 1 Jan 00:", "<br>llm aaaaaaaaaaaa differs since 1 Jan 00:")
		time.Sleep(5 * time.Second)
		wants(1, "configured differently: ", "Needs action")
		reload("aaaaaaaaaaaa")
		time.Sleep(3 * time.Second)
		wants(0, "<br>llm aaaaaaaaaaaa<br>other cccccccccccc</small>")
	})
}
