package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	_ "github.com/caddyserver/caddy/v2/modules/filestorage"
	_ "github.com/caddyserver/caddy/v2/modules/logging"
	_ "github.com/caddyserver/caddy/v2/modules/metrics"

	openailb "github.com/openai-lb/caddy-openai-lb"
	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
)

// prepareCaddy makes Caddy keep its files in the folder.
func prepareCaddy(folder string) error {
	for _, name := range []string{"HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"} {
		if err := os.Setenv(name, folder); err != nil {
			return err
		}
	}
	caddy.ConfigAutosavePath = filepath.Join(folder, "autosave.json")
	caddy.DefaultStorage.Path = folder
	return nil
}

// site is one of the sites of the config that is loaded.
type site struct {
	server *caddyhttp.Server
	port   int
	// path and query are where it is asked, and key the key that the n-th
	// request has.
	path, query string
	key         func(n int) string
	sent        int
	// statuses counts the replies.
	statuses map[int]int
}

const (
	firstPort = 29000 // of the sites, which no client connects to
	firstBack = 20001 // of the backends, which are in memory
)

// adapt returns the config with a site for each of the directives.
func adapt(directives ...string) ([]byte, error) {
	text := "{\nadmin off\nmetrics\ndefault_bind 127.0.0.1\nlog {\noutput discard\nlevel ERROR\n}\n}\n"
	for i, d := range directives {
		text += fmt.Sprintf("http://127.0.0.1:%d {\n%s\n}\n", firstPort+i, d)
	}
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), nil)
	return config, err
}

// load runs Caddy with a site for each of the directives. Their backends are in
// memory.
func load(directives ...string) ([]*site, error) {
	config, err := adapt(directives...)
	if err != nil {
		return nil, err
	}
	if err := caddy.Load(config, true); err != nil {
		return nil, err
	}
	app, err := caddy.ActiveContext().App("http")
	if err != nil {
		return nil, err
	}
	sites := make([]*site, len(directives))
	for _, server := range app.(*caddyhttp.App).Servers {
		_, port, _ := net.SplitHostPort(server.Listen[0])
		n, _ := strconv.Atoi(port)
		sites[n-firstPort] = &site{server: server, port: n, path: "/v1/chat/completions", statuses: make(map[int]int)}
		connect(server.Routes)
	}
	return sites, nil
}

// connect makes the handlers in the routes connect to backends in memory.
func connect(routes caddyhttp.RouteList) {
	dial := func(_ context.Context, _, address string) (net.Conn, error) { return newBackend(address), nil }
	for _, route := range routes {
		for _, handler := range route.Handlers {
			switch h := handler.(type) {
			case *caddyhttp.Subroute:
				connect(h.Routes)
			case *reverseproxy.Handler:
				if transport, ok := h.Transport.(*reverseproxy.HTTPTransport); ok {
					transport.Transport.DialContext = dial
				}
			case *openailb.Handler:
				h.Sender.HTTP.Transport.DialContext = attempt.Dialing(dial)
			}
		}
	}
}

// client is the client's end of a request.
type client struct {
	header http.Header
	status int
}

func (c *client) Header() http.Header         { return c.header }
func (c *client) Write(p []byte) (int, error) { return len(p), nil }
func (c *client) WriteHeader(status int)      { c.status = status }
func (c *client) Flush()                      {}

var anyServer = new(http.Server)

// post sends a request, and returns the status of its reply.
func (s *site) post(ctx context.Context, length int64, body io.Reader) (status int) {
	ctx = context.WithValue(ctx, http.ServerContextKey, anyServer)
	ctx = context.WithValue(ctx, http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: s.port})
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	key := "client-key"
	if s.key != nil {
		key = s.key(s.sent)
	}
	s.sent++
	r := &http.Request{
		Method: http.MethodPost, URL: &url.URL{Path: s.path}, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{
			"Content-Type": {"application/json"}, "Authorization": {"Bearer " + key}, "Accept": {"application/json"},
			"Content-Length": {strconv.FormatInt(length, 10)}, "User-Agent": {"OpenAI/Python 1.99.1"},
		},
		Body: io.NopCloser(body), ContentLength: length, Host: "127.0.0.1:" + strconv.Itoa(s.port),
		RemoteAddr: "127.0.0.1:40000", RequestURI: s.path,
	}
	c := &client{header: make(http.Header)}
	defer func() {
		// handlers end a reply that is cut with ErrAbortHandler
		if cut := recover(); cut != nil && cut != any(http.ErrAbortHandler) {
			panic(cut)
		}
		status = c.status
	}()
	s.server.ServeHTTP(c, r.WithContext(ctx))
	return c.status
}

// run sends the same request so many times.
func (s *site) run(body string, times int) {
	for range times {
		status := s.post(context.Background(), int64(len(body)), strings.NewReader(body))
		s.statuses[status]++
	}
}

// want returns an error if a reply had another status than this one.
func (s *site) want(status int) error {
	if len(s.statuses) != 1 || s.statuses[status] == 0 {
		return fmt.Errorf("got the statuses %v, want only %d", s.statuses, status)
	}
	return nil
}

// inTurns returns the cost of a request at each site, in µs of CPU. They take
// turns. The cheapest tenth of the rounds counts: what is more is the
// machine's.
func inTurns(sites []*site, body string, e effort) (costs []float64) {
	all := make([][]float64, len(sites))
	for _, s := range sites {
		s.run(body, min(e.batch, 100)) // connections are opened, buffers are made
		clear(s.statuses)
	}
	runtime.GC()
	for round := range e.rounds {
		for k := range sites {
			i := (k + round) % len(sites)
			begin := cpu()
			sites[i].run(body, e.batch)
			all[i] = append(all[i], (cpu()-begin)/float64(e.batch))
		}
	}
	for _, took := range all {
		costs = append(costs, cheap(took))
	}
	return costs
}

// cheap returns the tenth percentile.
func cheap(costs []float64) float64 {
	slices.Sort(costs)
	return costs[len(costs)/10]
}

// cpu is the CPU time of this process in µs.
func cpu() float64 {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		panic(err)
	}
	return float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e3
}

// memory returns the size of the heap and the stacks, in KB.
func memory() float64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc+m.StackInuse) / 1e3
}

// allocated is how much was allocated so far, in KB.
func allocated() float64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.TotalAlloc) / 1e3
}

// plain is a reverse_proxy with so many upstreams.
func plain(upstreams int, options string) string {
	var b strings.Builder
	b.WriteString("reverse_proxy")
	for i := range upstreams {
		fmt.Fprintf(&b, " 127.0.0.1:%d", firstBack+i)
	}
	return b.String() + " {\nrequest_buffers 64MiB\nheader_up Api-Key key-of-backend\n" + options + "}"
}

// balancer is an openai_lb with so many backends. each returns the options of
// one.
func balancer(backends int, each func(i int) string, options string) string {
	var b strings.Builder
	b.WriteString("openai_lb {\nrequest_buffers 64MiB\n")
	for i := range backends {
		fmt.Fprintf(&b, "backend http://127.0.0.1:%d {\nname b%d\nauth api_key\napi_key key-of-backend-%d\n",
			firstBack+i, i, i)
		if each != nil {
			b.WriteString(each(i))
		}
		b.WriteString("}\n")
	}
	return b.String() + options + "}"
}

// prompt is the body of a chat of about that length. fields are further
// members.
func prompt(length int, fields string) string {
	head := `{"model":"gpt-4o-mini",` + fields + `"messages":[{"role":"system","content":"You are a helpful assistant."},{"role":"user","content":"`
	return head + strings.Repeat("What is the first letter of the alphabet? ", max(1, (length-len(head))/42)) + `"}]}`
}

// watch reads the events of a page until the context ends.
func (s *site) watch(ctx context.Context) {
	ctx = context.WithValue(ctx, http.ServerContextKey, anyServer)
	ctx = context.WithValue(ctx, http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: s.port})
	r := &http.Request{
		Method: http.MethodGet, URL: &url.URL{Path: s.path, RawQuery: s.query}, Proto: "HTTP/1.1", ProtoMajor: 1,
		ProtoMinor: 1,
		Header:     http.Header{"Accept": {"text/event-stream"}}, Body: http.NoBody,
		Host: "127.0.0.1:" + strconv.Itoa(s.port), RemoteAddr: "127.0.0.1:40000", RequestURI: s.path,
	}
	c := &client{header: make(http.Header)}
	s.server.ServeHTTP(c, r.WithContext(ctx))
	s.statuses[c.status]++
}
