package azure

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

// answers is a transport that gives these answers, one after the other, and the
// last one again.
type answers struct {
	all  []func() (*http.Response, error)
	sent []time.Time
}

func (a *answers) RoundTrip(*http.Request) (*http.Response, error) {
	a.sent = append(a.sent, time.Now())
	return a.all[min(len(a.sent), len(a.all))-1]()
}

// says is an answer with headers.
func says(status int, body string, header ...string) func() (*http.Response, error) {
	return func() (*http.Response, error) {
		res := &http.Response{StatusCode: status, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(body))}
		for i := 0; i < len(header); i += 2 {
			res.Header.Set(header[i], header[i+1])
		}
		return res, nil
	}
}

// TestARequestToARMIsRepeatedWhenARMSays has the times of requests in seconds
// from the first one.
func TestARequestToARMIsRepeatedWhenARMSays(t *testing.T) {
	refused := func() (*http.Response, error) { return nil, errors.New("connection refused") }
	cut := func() (*http.Response, error) {
		res, _ := says(200, "")()
		res.Body = io.NopCloser(io.MultiReader(strings.NewReader(`{"value":[`), failing{}))
		return res, nil
	}
	const one = `{"value":[{"name":"a"}]}`
	throttled := `{"error":{"code":"TooManyRequests","message":"Slow down."}}`
	for _, c := range []struct {
		name    string
		answers []func() (*http.Response, error)
		timeout time.Duration
		times   []int
		err     string
	}{
		{"at once", []func() (*http.Response, error){says(200, one)}, time.Minute, []int{0}, ""},
		{"after the time of a throttle", []func() (*http.Response, error){says(429, throttled, "Retry-After", "17"), says(429, throttled, "Retry-After", "3"), says(200, one)}, time.Minute, []int{0, 17, 20}, ""},
		{"a throttle without a time", []func() (*http.Response, error){says(429, throttled), says(429, throttled), says(200, one)}, time.Minute, []int{0, 1, 3}, ""},
		{"failures", []func() (*http.Response, error){says(503, "", "Retry-After", "5"), refused, cut, says(500, ""), says(200, one)}, time.Minute, []int{0, 5, 6, 8, 12}, ""},
		{"a throttle to the end", []func() (*http.Response, error){says(429, throttled)}, time.Hour, []int{0, 1, 3, 7, 15, 31}, "/x: 429 Too Many Requests, TooManyRequests, Slow down., 6 times"},
		{"nobody there", []func() (*http.Response, error){refused}, time.Hour, []int{0, 1, 3, 7, 15, 31}, "arm.example: connection refused, 6 times"},
		{"a date beyond the limit", []func() (*http.Response, error){says(429, throttled, "Retry-After", "Sat, 01 Jan 2000 00:01:00 GMT")}, time.Minute, []int{0},
			"/x: 429 Too Many Requests, TooManyRequests, Slow down., and to wait for 1m0s would take longer than --timeout allows"},
		{"a refusal", []func() (*http.Response, error){says(403, `{"error":{"code":"AuthorizationFailed","message":"No.\n\u001b[2J eyJ0eXAiOiJKV1QiLCJhbGciOi.x"}}`)}, time.Minute, []int{0}, "/x: 403 Forbidden, AuthorizationFailed, No. �[2J …"},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble.Test(t, func(t *testing.T) {
				transport := &answers{all: c.answers}
				began := time.Now()
				a := newARM(&url.URL{Scheme: "https", Host: "arm.example"}, transport, "TOKEN", began.Add(c.timeout))
				all, err := list[*account](t.Context(), a, "/x")
				if c.err == "" && (err != nil || len(all) != 1 || all[0].Name != "a") || c.err != "" && (err == nil || err.Error() != c.err) {
					t.Errorf("got %v, %v, want %s", all, err, c.err)
				}
				if len(transport.sent) != len(c.times) {
					t.Fatalf("there were %d requests, want %d", len(transport.sent), len(c.times))
				}
				for i, at := range transport.sent {
					if got := at.Sub(began); got != time.Duration(c.times[i])*time.Second {
						t.Errorf("request %d was sent after %s, want %d s", i+1, got, c.times[i])
					}
				}
			})
		})
	}
}

func TestNothingWaitsForARMAfterAnInterrupt(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(10*time.Second, cancel)
		began := time.Now()
		a := newARM(&url.URL{Scheme: "https", Host: "arm.example"}, &answers{all: []func() (*http.Response, error){says(429, "", "Retry-After", "60")}}, "TOKEN", began.Add(time.Hour))
		if _, err := list[*account](ctx, a, "/x"); !errors.Is(err, context.Canceled) || time.Since(began) != 10*time.Second {
			t.Errorf("got %v after %s", err, time.Since(began))
		}
	})
}

// FuzzARM reads anything as a page, and as the deployments that a Caddyfile is
// made of.
func FuzzARM(f *testing.F) {
	f.Add(`{"value":[{"name":"a","sku":{"name":"Standard","capacity":3},"properties":{"model":{"name":"m","version":"1"},"rateLimits":[{"key":"token","count":1e3}]}}],"nextLink":"https://arm.example/x"}`, "https://a.openai.azure.com/")
	f.Fuzz(func(t *testing.T, page, endpoint string) {
		a := newARM(&url.URL{Scheme: "https", Host: "arm.example"}, &answers{all: []func() (*http.Response, error){says(200, page), says(403, "")}}, "TOKEN", time.Now())
		of := &account{Name: "a", Location: page}
		of.Properties.Endpoint, of.Properties.CustomSubDomainName = endpoint, "a"
		all, err := list[*deployment](t.Context(), a, "/x")
		if err != nil {
			return
		}
		for _, d := range all {
			if d != nil {
				d.account = of
				of.deployments = append(of.deployments, d)
			}
		}
		text := site("x", []*account{of}, []string{"auth azure_identity"})
		if formatted := string(caddyfile.Format([]byte(text))); formatted != text {
			t.Errorf("got\n%q\nformatted it is\n%q", text, formatted)
		}
		if _, err := caddyfile.Parse("Caddyfile", []byte(text)); err != nil {
			t.Errorf("%v in\n%s", err, text)
		}
	})
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }
