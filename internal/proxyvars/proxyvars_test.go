package proxyvars

import (
	"net/http"
	"sync"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

func TestWhatIsTakenFromReverseProxyCanBeAskedFor(t *testing.T) {
	want := map[string]any{
		"upstream.address": "tcp/[::1]:8443", "upstream.hostport": "[::1]:8443", "upstream.host": "::1", "upstream.port": "8443",
		"upstream.requests": 0, "upstream.max_requests": 7, "upstream.fails": 0,
		"status_text": "200 OK", "header.X-Id": "1,2",
	}
	repl := caddy.NewEmptyReplacer()
	for key := range want {
		repl.Set("http.reverse_proxy."+key, "as reverse_proxy set it")
	}
	repl.Set("http.reverse_proxy.status_code", 200)

	v := Vars{Replacer: repl}
	if value, ok := v.Value("http.reverse_proxy.header.X-Id"); ok {
		t.Errorf("before any reply, it is %v", value)
	}
	upstream := &reverseproxy.Upstream{Dial: "[::1]:8443", Host: new(reverseproxy.Host), MaxRequests: 7}
	reply := &http.Response{Status: "200 OK", Header: http.Header{"X-Id": {"1", "2"}}}
	v.Take(upstream, reply)
	v.Closed()
	for key, want := range want {
		key = "http.reverse_proxy." + key
		if value, ok := v.Value(key); !ok || value != want {
			t.Errorf("%s is %v, want %v", key, value, want)
		}
		if value, ok := repl.Get(key); ok && key != "http.reverse_proxy.header.X-Id" {
			t.Errorf("%s is %v besides", key, value)
		}
	}
	for _, key := range []string{"status_code", "upstream.latency", "upstream.none", "header.X-None", "none"} {
		if value, ok := v.Value("http.reverse_proxy." + key); ok {
			t.Errorf("%s is %v", key, value)
		}
	}
	if value, _ := repl.Get("http.reverse_proxy.status_code"); value != 200 {
		t.Errorf("the status is %v", value)
	}
	var dial sync.WaitGroup // of an earlier request, which asks while this one goes on
	dial.Go(func() { v.Value("http.reverse_proxy.upstream.host") })
	v.Take(upstream, reply)
	dial.Wait()
	var none *Vars
	none.Closed()
}
