package openailb

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
)

// BenchmarkOverhead compares openai_lb with a plain reverse_proxy, in one run
// and for the same backend.
func BenchmarkOverhead(b *testing.B) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"id":"chatcmpl-1","object":"chat.completion","choices":[]}`)
	}))
	defer server.Close()
	sites := []struct{ name, directive string }{
		{"reverse_proxy", "reverse_proxy " + server.URL},
		{"openai_lb", "openai_lb {\nbackend " + server.URL + "\n}"},
		{"openai_lb, model replaced", "openai_lb {\nbackend " + server.URL + " {\nmodel gpt-4o its-own-name\n}\n}"},
	}
	caddyfile := "{\nadmin off\nlog {\noutput discard\n}\n}\n"
	addresses := make([]string, len(sites))
	for i, site := range sites {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		addresses[i] = "http://" + l.Addr().String()
		l.Close()
		caddyfile += addresses[i] + " {\n" + site.directive + "\n}\n"
	}
	config, err := adapt(caddyfile)
	if err != nil {
		b.Fatal(err)
	}
	if err := caddy.Load([]byte(config), true); err != nil {
		b.Fatal(err)
	}
	defer caddy.Stop()
	for _, size := range []int{100, 100 << 10} {
		body := fmt.Sprintf(`{"messages":[{"role":"user","content":"%s"}],"model":"gpt-4o"}`, strings.Repeat("x", size))
		for i, site := range sites {
			b.Run(fmt.Sprintf("%d B prompt/%s", size, site.name), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					res, err := http.Post(addresses[i]+"/v1/chat/completions", "application/json", strings.NewReader(body))
					if err != nil {
						b.Fatal(err)
					}
					io.Copy(io.Discard, res.Body)
					res.Body.Close()
					if res.StatusCode != 200 {
						b.Fatal(res.Status)
					}
				}
			})
		}
	}
}
