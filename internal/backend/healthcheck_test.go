package backend

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// fromCaddyfile returns a backend with these options, as a config has it.
func fromCaddyfile(t *testing.T, options string) (*Backend, error) {
	t.Helper()
	d := caddyfile.NewTestDispenser("openai_lb {\nbackend http://a.example/v1 {\n" + options + "\n}\n}")
	d.Next()
	var backends []*Backend
	if err := directive.Block(d, directive.Options{"backend": Directive(&backends)}); err != nil {
		return nil, err
	}
	text, err := json.Marshal(backends[0])
	if err != nil {
		t.Fatal(err)
	}
	return fromJSON(t, string(text))
}

func fromJSON(t *testing.T, config string) (*Backend, error) {
	t.Helper()
	b := new(Backend)
	if err := json.Unmarshal([]byte(config), b); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	t.Cleanup(cancel)
	return b, Provision(ctx, []*Backend{b})
}

// server is a transport to a server whose health can change.
type server struct {
	mu     sync.Mutex
	status int // 0: it cannot be reached
	hangs  bool
	checks []string
	header http.Header
	times  []time.Time
}

func (s *server) RoundTrip(r *http.Request) (*http.Response, error) {
	s.mu.Lock()
	s.checks, s.times, s.header = append(s.checks, r.Method+" "+r.Host+" "+r.URL.String()), append(s.times, time.Now()), r.Header
	status, hangs := s.status, s.hangs
	s.mu.Unlock()
	if status == 0 {
		return nil, errors.New("dial tcp 10.0.0.1:80: connect: connection refused")
	}
	httptrace.ContextClientTrace(r.Context()).GotConn(httptrace.GotConnInfo{})
	if hangs {
		<-r.Context().Done()
		return nil, r.Context().Err()
	}
	return &http.Response{StatusCode: status, Body: http.NoBody}, nil
}

func (s *server) becomes(status int, hangs bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status, s.hangs = status, hangs
}

// listener keeps the events of a pool.
type listener struct {
	mu     sync.Mutex
	events []pool.Event
}

func (l *listener) Happened(e pool.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, e)
}

// checked is a pool of a checked backend of this server, and of one without
// checks. Its checks last until unload.
func checked(t *testing.T, s *server, options string, listeners ...pool.Listener) (p *pool.Pool, unload func()) {
	t.Helper()
	b, err := fromCaddyfile(t, "name a\n"+options)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	other := &Backend{Name: "b", Resolved: Resolved{Origin: &url.URL{Scheme: "http", Host: "b"}}}
	c := &Rechecker{Context: ctx, Transport: s, Backends: []*Backend{b, other}}
	a := pool.NewMember("a", new(pool.Health))
	spare := pool.NewMember("b", new(pool.Health))
	a.AnyModel, spare.AnyModel, spare.Priority = true, true, 2
	p = pool.New([]*pool.Member{a, spare}, append(listeners, c)...)
	t.Cleanup(p.Close)
	c.Start(p)
	return p, cancel
}

// next returns the member that gets a request now, which was sent to the others
// that are named.
func next(p *pool.Pool, tried ...*pool.Member) string {
	synctest.Wait()
	ask := &pool.Ask{At: []pool.At{{Takes: true}, {Takes: true}}}
	for _, m := range tried {
		ask.At[m.Index].Bar = pool.Spent
	}
	m := p.Pick(ask, time.Now())
	if m == nil {
		return ""
	}
	m.Release()
	return m.Name
}

func TestABackendIsCheckedAtOnceAndThenAtItsInterval(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		s := &server{status: 204}
		began := time.Now()
		_, unload := checked(t, s, "health_uri /health?deep=1\nhealth_interval 5s\napi_key sk-of-the-backend-1234\nheader X-Gateway blue\nheader -User-Agent")
		time.Sleep(11 * time.Second)
		unload()
		time.Sleep(time.Minute)
		s.mu.Lock()
		defer s.mu.Unlock()
		if got := strings.Join(s.checks, "\n"); got != strings.Repeat("GET a.example http://a.example/health?deep=1\n", 2)+"GET a.example http://a.example/health?deep=1" {
			t.Errorf("checks:\n%s", got)
		}
		for i, at := range s.times {
			if want := time.Duration(i) * 5 * time.Second; at.Sub(began) != want {
				t.Errorf("check %d after %s, want %s", i, at.Sub(began), want)
			}
		}
		agent, has := s.header["User-Agent"]
		if s.header.Get("X-Gateway") != "blue" || s.header.Get("Authorization") != "" || !has || agent != nil {
			t.Errorf("the check has the header %v", s.header)
		}
	})
}

func TestABackendIsASuspectFromACheckThatFailsUntilOneThatPasses(t *testing.T) {
	for _, c := range []struct {
		name    string
		options string
		status  int
		hangs   bool
		want    pool.Reason
	}{
		{"it cannot be reached", "", 0, false, pool.Reason{Class: "unreachable", Cause: "refused"}},
		{"it answers with an error", "", 503, false, pool.Reason{Class: "failed", Status: 503, Cause: "health_status"}},
		{"it redirects", "", 307, false, pool.Reason{Class: "failed", Status: 307, Cause: "health_status"}},
		{"it does not answer in time", "", 200, true, pool.Reason{Class: "failed", Cause: "timeout"}},
		{"another code of the class", "health_status 200", 204, false, pool.Reason{Class: "failed", Status: 204, Cause: "health_status"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble.Test(t, func(t *testing.T) {
				s, heard := &server{status: 200}, new(listener)
				p, unload := checked(t, s, "health_uri /health\n"+c.options, heard)
				defer unload()
				if got := next(p); got != "a" {
					t.Errorf("%s gets a request before", got)
				}
				s.becomes(c.status, c.hangs)
				time.Sleep(30*time.Second + recheckTimeout)
				if got, left := next(p), next(p, p.Members[1]); got != "b" || left != "a" {
					t.Errorf("%s gets a request after a check that failed, and %s if that was tried", got, left)
				}
				p.Members[0].Served(pool.Scope{}, time.Now()) // what it serves as a suspect does not say that it is well
				if got := next(p); got != "b" {
					t.Errorf("%s gets a request after it has served one", got)
				}
				time.Sleep(time.Hour)
				s.becomes(200, false)
				time.Sleep(30*time.Second + recheckTimeout)
				if got := next(p); got != "a" {
					t.Errorf("%s gets a request after a check that passed", got)
				}
				heard.mu.Lock()
				defer heard.mu.Unlock()
				if len(heard.events) != 2 || heard.events[0].Happening != pool.CheckFailed || heard.events[1].Happening != pool.CheckPassed {
					t.Fatalf("events: %+v", heard.events)
				}
				got := heard.events[0].Reason
				if text := got.Error; text == "" {
					t.Error("the event has no error")
				}
				if got.Error = ""; got != c.want {
					t.Errorf("the reason is %+v, want %+v", got, c.want)
				}
			})
		})
	}
}

func TestACheckThatPassesEndsTheTimeInWhichABackendIsUnreachable(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		s := &server{}
		p, unload := checked(t, s, "health_uri /health\nhealth_interval 1s")
		defer unload()
		synctest.Wait()
		p.Members[0].CoolDown(pool.Refusal{Reason: pool.Reason{Class: "unreachable"}, Whole: true, Unreachable: true}, time.Now())
		time.Sleep(time.Hour + time.Minute/2)
		s.becomes(200, false)
		time.Sleep(time.Second)
		if got := next(p); got != "a" || p.Members[0].Unreachable() {
			t.Errorf("%s gets a request", got)
		}
	})
}

func TestHealthChecksEndWithTheConfigAlsoOneThatHangs(t *testing.T) {
	bubble.Test(t, func(t *testing.T) { // which notices a goroutine that stays
		s, heard := &server{status: 200, hangs: true}, new(listener)
		p, unload := checked(t, s, "health_uri /health", heard)
		time.Sleep(time.Second)
		unload()
		if got := next(p); got != "a" || len(heard.events) > 0 {
			t.Errorf("%s gets a request, events: %v", got, heard.events)
		}
	})
}

func TestOptionsOfHealthChecks(t *testing.T) {
	for options, want := range map[string]string{
		"health_uri /health":                         "/health 30s 2",
		"health_uri /health\nhealth_status 2xx":      "/health 30s 2",
		"health_uri /h?a=b\nhealth_status 418":       "/h?a=b 30s 418",
		"health_interval 90s\nhealth_uri /":          "/ 1m30s 2",
		"":                                           " 0s 0",
		"health_interval 30s":                        "health_interval requires health_uri, at Testfile:3",
		"health_status 200":                          "health_status requires health_uri, at Testfile:3",
		"health_uri health":                          "health_uri 'health' is not a path that begins with /, such as /health, at Testfile:3",
		"health_uri http://b.example/health":         "health_uri 'http://b.example/health' is not a path",
		"health_uri /health#now":                     "health_uri '/health#now' is not a path",
		"health_uri /{env.X}":                        "health_uri '/{env.X}' is not a path",
		"health_uri /health\nhealth_interval 0":      "health_interval '0' is not a duration above 0",
		"health_uri /health\nhealth_status 2":        "health_status '2' is not a status code or a class of them, such as 200 or 2xx",
		"health_uri /health\nhealth_status 200xx":    "health_status '200xx' is not",
		"health_uri /health\nhealth_status 6xx":      "health_status '6xx' is not",
		"health_uri /health\nhealth_status well":     "health_status 'well' is not",
		"health_uri /health\nhealth_status 200 2xx":  "unexpected argument '2xx'",
		"health_uri /health\nhealth_uri /health_two": "health_uri is given twice",
	} {
		b, err := fromCaddyfile(t, options)
		got := fmt.Sprint(err)
		if err == nil {
			got = fmt.Sprintf("%s %s %d", b.HealthURI, time.Duration(b.HealthInterval), b.HealthStatus)
		}
		if !strings.Contains(got, want) || err == nil && got != want {
			t.Errorf("%q: %s, want %s", options, got, want)
		}
	}
	for options, want := range map[string]string{
		`"health_interval":1`:                           "health_interval requires health_uri",
		`"health_status":2`:                             "health_status requires health_uri",
		`"health_uri":"/health","health_status":6`:      "health_status '6' is not",
		`"health_uri":"/health","health_status":-2`:     "health_status '-2' is not",
		`"health_uri":"/health","health_interval":-1`:   "health_interval '-1ns' is not a duration above 0",
		`"health_uri":"/health","health_interval":"1s"`: "<nil>",
	} {
		if _, err := fromJSON(t, `{"url":"http://a",`+options+`}`); !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%s: %v, want %s", options, err, want)
		}
	}
}

func TestAHeaderIsRemovedFromTheRequestsToABackend(t *testing.T) {
	fromFile, err := fromCaddyfile(t, "header -X-Stainless-Os\nheader X-Team blue\nheader -user-agent")
	if err != nil {
		t.Fatal(err)
	}
	inJSON, err := fromJSON(t, `{"url":"http://a.example/v1","header":{"x-stainless-os":null,"X-Team":["blue"],"User-Agent":null}}`)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []*Backend{fromFile, inJSON} {
		header := http.Header{"X-Stainless-Os": {"Linux"}, "X-Stainless-Lang": {"python"}, "User-Agent": {"OpenAI/Python 2"}}
		b.Direct(new(url.URL), header, new(openaiapi.Request), openaiapi.ParsePath("/v1/chat/completions"))
		var text strings.Builder
		if err := (&http.Request{Method: "GET", URL: b.Origin, Header: header}).Write(&text); err != nil {
			t.Fatal(err)
		}
		if got := text.String(); strings.Contains(got, "Linux") || strings.Contains(got, "User-Agent") || !strings.Contains(got, "X-Team: blue") || !strings.Contains(got, "python") {
			t.Errorf("the request is\n%s", got)
		}
	}
}

func TestAHeaderThatCannotBeRemovedIsRefused(t *testing.T) {
	for options, want := range map[string]string{
		"header X-Team":                       "header requires a name and a value, or - and a name to remove it, and has 1 argument",
		"header -X-Team blue":                 "header -X-Team does not take a value",
		"header -":                            "header -: expected - and the name of one header",
		"header -X-*":                         "header -X-*: expected - and the name of one header",
		"header -Host":                        "header -Host is not allowed: every request has a host",
		"header -X-Ms-Service-Tier":           "header -X-Ms-Service-Tier is not allowed: use service_tier",
		"header -Authorization":               "header -Authorization is not allowed: auth says which key the backend gets",
		"header -api-key":                     "header -api-key is not allowed",
		"header X-Team blue\nheader -x-team":  "header x-team is both set and removed",
		"header -x-team\nheader X-Team blue":  "header X-Team is both set and removed",
		"header -x-team\nheader -x-stainless": "<nil>",
	} {
		if _, err := fromCaddyfile(t, options); !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%q: %v, want %s", options, err, want)
		}
	}
	if _, err := fromJSON(t, `{"url":"http://a","header":{"X-Team":["blue"],"x-team":null}}`); !strings.Contains(fmt.Sprint(err), "is both set and removed") {
		t.Errorf("in JSON: %v", err)
	}
}
