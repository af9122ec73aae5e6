package main

import (
	"context"
	"crypto/sha1" //nolint:gosec // as RFC 6455 wants it
	"encoding/base64"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// row is something that grows.
type row struct {
	name string
	// grows is the unit of what grows, and points are how many of it there are.
	grows  string
	points []int
	// unit is that of the costs.
	unit string
	// noise is by how much the cost at the last point may differ from the
	// table's without meaning anything, in thousandths of what relative
	// compares with.
	noise float64
	// measure returns the costs of both sides at a point.
	measure func(e effort, n int) (ours, plain float64, err error)
}

const (
	microseconds = "µs"
	kilobytes    = "KB"
	series       = "series"
)

// quarter is a quarter of a plain chat.
const quarter = 250

func rows() []row {
	return []row{
		// first, because metrics outlive a config: callers of other rows would
		// be counted, and fill the space for callers
		{"number of series", "caller, of 3 backends", []int{10, 20, 50, 100}, series, 100_000, numberOfSeries},
		{"new series", "hundred callers known", []int{1, 2, 3}, kilobytes, 2000, newSeries},
		{"bodies", "MiB", []int{1, 2, 4, 10}, microseconds, quarter, bodies},
		{"length of an event", "KiB, of 100 events", []int{1, 8, 32, 64, 256}, microseconds, quarter, lengthOfEvents},
		{"events of a stream", "event", []int{10, 100, 500, 1000}, microseconds, quarter, events},
		{"backends", "backend", []int{1, 10, 30, 100, 300}, microseconds, quarter, backends},
		{"backends, our own 429", "backend", []int{1, 10, 30, 100, 300}, microseconds, quarter, own429},
		{"throttled attempts", "attempt", []int{0, 1, 5, 20, 60}, microseconds, quarter, attempts},
		{"tiers with shares", "backend", []int{3, 10, 30, 100}, microseconds, quarter, shares},
		{"client_keys_file", "thousand keys", []int{1, 10, 50, 200}, microseconds, quarter, keysFile},
		{"client_key lines", "thousand lines to adapt", []int{1, 2, 4, 6}, microseconds, quarter, keyLines},
		{"model lists", "hundred models of 10 backends to load", []int{1, 5, 10, 30}, microseconds, quarter, modelLists},
		{"invented names", "thousand names", []int{1, 5, 10, 20}, microseconds, quarter, inventedNames},
		{"requests at a time", "request", []int{1, 4, 16, 32}, microseconds, quarter, parallel},
		{"status page", "backend, a second with one watcher", []int{3, 30, 100, 300}, microseconds, quarter, statusPage},
		{"declared memory", "connection that declares 32 MiB", []int{50, 100, 200, 400}, kilobytes, 100_000, declared},
		{"open streams", "stream", []int{50, 100, 200, 400}, kilobytes, 100_000, openStreams},
		{"idle WebSockets", "WebSocket", []int{50, 100, 200, 400}, kilobytes, 100_000, webSockets},
	}
}

var chat = prompt(1800, "")

// plainChat measures the cost of a chat with reverse_proxy.
func plainChat(e effort) (float64, error) {
	answer = serve
	sites, err := load(plain(3, ""))
	if err != nil {
		return 0, err
	}
	return inTurns(sites, chat, e)[0], sites[0].want(200)
}

// compare measures the same request with both sites.
func compare(e effort, plainSite, ourSite, body string) (ours, plain float64, err error) {
	sites, err := load(plainSite, ourSite)
	if err != nil {
		return 0, 0, err
	}
	return compareSites(e, sites, body)
}

func compareSites(e effort, sites []*site, body string) (ours, plain float64, err error) {
	costs := inTurns(sites, body, e)
	for _, s := range sites {
		if err := s.want(200); err != nil {
			return 0, 0, err
		}
	}
	return costs[1], costs[0], nil
}

func bodies(e effort, n int) (ours, plainly float64, err error) {
	answer = serve
	e.batch = max(1, 10/n)
	return compare(e, plain(3, ""), balancer(3, nil, ""), prompt(n<<20, ""))
}

func lengthOfEvents(e effort, n int) (ours, plainly float64, err error) {
	reply := stream(100, n<<10)
	answer = func(int, []byte) [][]byte { return reply }
	e.batch = max(1, 20/n)
	return compare(e, plain(3, ""), balancer(3, nil, ""), prompt(1800, `"stream":true,`))
}

func events(e effort, n int) (ours, plainly float64, err error) {
	reply := stream(n, 190)
	answer = func(int, []byte) [][]byte { return reply }
	e.batch = max(2, min(e.batch, 2000/n))
	return compare(e, plain(3, ""), balancer(3, nil, ""), prompt(1800, `"stream":true,`))
}

func backends(e effort, n int) (ours, plainly float64, err error) {
	answer = serve
	return compare(e, plain(n, ""), balancer(n, nil, ""), chat)
}

// own429 is the answer to a request while all backends are throttled.
func own429(e effort, n int) (ours, plainly float64, err error) {
	answer = func(int, []byte) [][]byte { return [][]byte{throttled} }
	sites, err := load("respond {} 429", balancer(n, nil, ""))
	if err != nil {
		return 0, 0, err
	}
	sites[1].run(chat, 2) // after which no backend is called
	costs := inTurns(sites, chat, e)
	return costs[1], costs[0], sites[1].want(429)
}

// attempts is a request that so many backends throttle before one serves it.
// Their cooldowns end before each request.
func attempts(e effort, n int) (ours, plainly float64, err error) {
	answer = func(port int, _ []byte) [][]byte {
		if port-firstBack < n {
			return [][]byte{throttled}
		}
		return [][]byte{served}
	}
	sites, err := load(
		plain(n+1, "lb_policy first\nlb_retries 200\nfail_duration 1m\nunhealthy_status 429\nlb_retry_match {\nexpression `{rp.status_code} == 429`\n}\n"),
		balancer(n+1, func(i int) string { return fmt.Sprintf("priority %d\n", i+1) }, ""),
	)
	if err != nil {
		return 0, 0, err
	}
	reset := func() {
		for _, entry := range pools.Default.Entries() {
			for _, member := range entry.Pool.Members {
				member.Reset(pool.Order{})
			}
		}
	}
	const batch = 10
	var with, without []float64
	for range max(5, e.rounds) {
		begin := cpu()
		for range batch {
			reset()
			sites[1].run(chat, 1)
		}
		middle := cpu()
		for range batch {
			reset()
		}
		with, without = append(with, (middle-begin)/batch), append(without, (cpu()-middle)/batch)
	}
	begin := cpu()
	sites[0].run(chat, batch) // all but the first of which leave out the upstreams that refused it
	return cheap(with) - cheap(without), (cpu() - begin) / batch, sites[1].want(200)
}

// shares is a chat of callers of two tiers with shares, of which little is
// left.
func shares(e effort, n int) (ours, plainly float64, err error) {
	reply := whole(200, "x-ratelimit-limit-tokens: 1000000\r\nx-ratelimit-remaining-tokens: 500000\r\n", completion)
	answer = func(int, []byte) [][]byte { return [][]byte{reply} }
	keys := []string{"sk-alice-0123456789", "sk-bob-0123456789abc"}
	options := "client_key alice " + keys[0] + "\nclient_key bob " + keys[1] +
		"\ntier t0 {\nreserve 40%\n}\ntier t1 {\nreserve 30%\n}\ntier t2\ncaller alice {\ntier t0\n}\ncaller bob {\ntier t1\n}\n"
	sites, err := load(plain(n, ""),
		balancer(n, func(i int) string { return fmt.Sprintf("account a%d\n", i) }, options))
	if err != nil {
		return 0, 0, err
	}
	sites[1].key = func(i int) string { return keys[i%2] }
	sites[1].run(chat, 5*n)
	return compareSites(e, sites, chat)
}

func keyOf(i int) string { return fmt.Sprintf("sk-caller-%032d", i) }

func keysFile(e effort, n int) (ours, plainly float64, err error) {
	answer = serve
	n *= 1000
	file := filepath.Join(os.Getenv("HOME"), "keys")
	var lines strings.Builder
	for i := range n {
		fmt.Fprintf(&lines, "caller-%d %s\n", i, keyOf(i))
	}
	if err := os.WriteFile(file, []byte(lines.String()), 0o600); err != nil {
		return 0, 0, err
	}
	sites, err := load(plain(3, ""), balancer(3, nil, "client_keys_file "+file+"\n"))
	if err != nil {
		return 0, 0, err
	}
	// few enough to be in the metrics before it is measured
	sites[1].key = func(i int) string { return keyOf(i % 100 * (n / 100)) }
	return compareSites(e, sites, chat)
}

// keyLines is the time to adapt a Caddyfile. The plain one has as many
// matchers.
func keyLines(_ effort, n int) (ours, plainly float64, err error) {
	var keys, matchers strings.Builder
	for i := range 1000 * n {
		fmt.Fprintf(&keys, "client_key caller-%d %s\n", i, keyOf(i))
		fmt.Fprintf(&matchers, "header_up X-%d %s\n", i, keyOf(i))
	}
	return fastest(
		func() error { _, err := adapt(balancer(3, nil, keys.String())); return err },
		func() error { _, err := adapt(plain(3, matchers.String())); return err },
	)
}

// fastest returns the least time that each side takes, in µs of CPU.
func fastest(oursOnce, plainOnce func() error) (ours, plainly float64, err error) {
	ours, plainly = math.Inf(1), math.Inf(1)
	for range 3 {
		begin := cpu()
		if err := oursOnce(); err != nil {
			return 0, 0, err
		}
		middle := cpu()
		if err := plainOnce(); err != nil {
			return 0, 0, err
		}
		ours, plainly = min(ours, middle-begin), min(plainly, cpu()-middle)
	}
	return ours, plainly, nil
}

// modelLists is the time to load a config. The plain one has no models.
func modelLists(_ effort, n int) (ours, plainly float64, err error) {
	var models strings.Builder
	for i := range 100 * n {
		fmt.Fprintf(&models, "model model-%d\n", i)
	}
	return fastest(
		func() error {
			_, err := load(balancer(10, func(int) string { return models.String() }, ""))
			return err
		},
		func() error { _, err := load(plain(10, "")); return err },
	)
}

// withCallers loads a balancer whose key for each request is that of the next
// of so many callers, whom no metric knows.
func withCallers(n int, kind string) ([]*site, error) {
	answer = serve
	var keys strings.Builder
	for i := range n {
		fmt.Fprintf(&keys, "client_key %s-%d-%d %s\n", kind, n, i, keyOf(i))
	}
	sites, err := load(plain(3, ""), balancer(3, nil, keys.String()))
	if err == nil {
		sites[1].key = func(i int) string { return keyOf(i % n) }
	}
	return sites, err
}

// newSeries is how much the first requests of further callers allocate.
func newSeries(_ effort, n int) (ours, plainly float64, err error) {
	const further = 50
	sites, err := withCallers(100*n+further, "new")
	if err != nil {
		return 0, 0, err
	}
	sites[1].run(chat, 100*n)
	sites[0].run(chat, 100)
	begin := allocated()
	sites[1].run(chat, further)
	middle := allocated()
	sites[0].run(chat, further)
	return (middle - begin) / further, (allocated() - middle) / further, sites[1].want(200)
}

// numberOfSeries is how many series there are after each caller was served a
// few times.
func numberOfSeries(_ effort, n int) (ours, plainly float64, err error) {
	sites, err := withCallers(n, "counted")
	if err != nil {
		return 0, 0, err
	}
	sites[0].run(chat, 5*n)
	before, err := gathered()
	if err != nil {
		return 0, 0, err
	}
	sites[1].run(chat, 5*n)
	after, err := gathered()
	return after - before, before, err
}

func gathered() (n float64, err error) {
	ctx := caddy.ActiveContext()
	families, err := ctx.GetMetricsRegistry().Gather()
	for _, family := range families {
		n += float64(len(family.Metric))
	}
	return n, err
}

// inventedNames measures the cost of a chat after backends have throttled other
// chats, which named n models.
func inventedNames(e effort, n int) (ours, plainly float64, err error) {
	answer = func(int, []byte) [][]byte { return [][]byte{throttled} }
	sites, err := load(plain(3, ""), balancer(3, nil, ""))
	if err != nil {
		return 0, 0, err
	}
	for i := range 1000 * n {
		sites[1].run(fmt.Sprintf(`{"model":"model-of-a-client-%d","messages":[]}`, i), 1)
	}
	answer = serve
	return compareSites(e, sites, chat)
}

// parallel measures the cost of a chat while n are served at a time, in CPU
// time: what waits for a lock spins first.
func parallel(e effort, n int) (ours, plainly float64, err error) {
	answer = serve
	sites, err := load(plain(3, ""), balancer(3, nil, ""))
	if err != nil {
		return 0, 0, err
	}
	costs := make([][]float64, 2)
	for range max(5, e.rounds/2) {
		for i, s := range sites {
			begin := cpu()
			var all sync.WaitGroup
			for range n {
				all.Go(func() {
					mine := *s
					mine.statuses = make(map[int]int)
					mine.run(chat, 20*e.batch/n)
				})
			}
			all.Wait()
			costs[i] = append(costs[i], (cpu()-begin)/float64(20*e.batch/n*n))
		}
	}
	return cheap(costs[1]), cheap(costs[0]), nil
}

// statusPage is the CPU time of a second in which one browser watches the
// status page, and the balancer serves a chat every 20 ms. The plain second has
// no watcher.
func statusPage(e effort, n int) (ours, plainly float64, err error) {
	answer = serve
	sites, err := load(balancer(n, nil, ""), "openai_lb_status")
	if err != nil {
		return 0, 0, err
	}
	sites[1].query = "events"
	seconds := 2 + e.rounds/10
	costs := make([]float64, 2)
	for i := range costs {
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(seconds)*time.Second)
		var watcher sync.WaitGroup
		if i == 1 {
			watcher.Go(func() { sites[1].watch(ctx) })
		}
		begin := cpu()
		for ctx.Err() == nil {
			sites[0].run(chat, 1)
			time.Sleep(20 * time.Millisecond)
		}
		costs[i] = (cpu() - begin) / float64(seconds)
		watcher.Wait()
		cancel()
	}
	return costs[1], costs[0], sites[0].want(200)
}

// pending is a body that never comes, after its first byte.
type pending struct {
	begun bool
	over  <-chan struct{}
}

func (p *pending) Read(b []byte) (int, error) {
	if !p.begun && len(b) > 0 {
		p.begun = true
		return copy(b, "{"), nil
	}
	<-p.over
	return 0, io.ErrUnexpectedEOF
}

// held returns how much memory so many requests take while nothing happens.
func held(s *site, n int, length int64, body func(over <-chan struct{}) io.Reader) (kilobytes float64) {
	before := memory()
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	for range n {
		mine := *s
		all.Go(func() { mine.post(ctx, length, body(ctx.Done())) })
	}
	settle()
	after := memory()
	cancel()
	all.Wait()
	return after - before
}

// settle waits until nothing more happens: no goroutine has run for a while.
func settle() {
	for last, same := -1.0, 0; same < 10; time.Sleep(20 * time.Millisecond) {
		if now := allocated() + float64(runtime.NumGoroutine()); now-last < 100 {
			same++
		} else {
			last, same = now, 0
		}
	}
}

func heldByBoth(n int, length int64, body func(over <-chan struct{}) io.Reader) (ours, plainly float64, err error) {
	sites, err := load(plain(3, ""), balancer(3, nil, ""))
	if err != nil {
		return 0, 0, err
	}
	for _, s := range sites {
		held(s, n, length, body) // what stays is not counted
	}
	return held(sites[1], n, length, body), held(sites[0], n, length, body), nil
}

func declared(_ effort, n int) (ours, plainly float64, err error) {
	answer = serve
	return heldByBoth(n, 32<<20, func(over <-chan struct{}) io.Reader { return &pending{over: over} })
}

func openStreams(_ effort, n int) (ours, plainly float64, err error) {
	begun := stream(2, 190)[:3]
	answer = func(int, []byte) [][]byte { return append(begun[:3:3], nil) }
	body := prompt(1800, `"stream":true,`)
	return heldByBoth(n, int64(len(body)), func(<-chan struct{}) io.Reader { return strings.NewReader(body) })
}

// webSockets are opened over the loopback, because only a connection of
// net/http's can be taken over.
func webSockets(_ effort, n int) (ours, plainly float64, err error) {
	answer = func(_ int, head []byte) [][]byte {
		_, key, _ := strings.Cut(string(head), "Sec-Websocket-Key: ")
		if key == "" {
			_, key, _ = strings.Cut(string(head), "Sec-WebSocket-Key: ")
		}
		key, _, _ = strings.Cut(key, "\r")
		sum := sha1.Sum([]byte(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11")) //nolint:gosec // as RFC 6455 wants it
		return [][]byte{[]byte("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: " +
			base64.StdEncoding.EncodeToString(sum[:]) + "\r\n\r\n"), nil}
	}
	sites, err := load(plain(3, ""), balancer(3, nil, ""))
	if err != nil {
		return 0, 0, err
	}
	costs := make([]float64, 2)
	for i, s := range sites {
		for range 2 { // what stays after the first time is not counted
			if costs[i], err = s.openWebSockets(n); err != nil {
				return 0, 0, err
			}
		}
	}
	return costs[1], costs[0], nil
}

// openWebSockets returns how much memory so many WebSockets take while nothing
// happens.
func (s *site) openWebSockets(n int) (kilobytes float64, err error) {
	before, connections := memory(), make([]net.Conn, n)
	defer func() {
		for _, c := range connections {
			if c != nil {
				_ = c.Close()
			}
		}
		settle()
	}()
	for i := range connections {
		if connections[i], err = net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", s.port)); err != nil {
			return 0, err
		}
		fmt.Fprintf(connections[i], "GET /v1/realtime?model=gpt-4o-mini HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"+
			"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n", s.port)
		begin := make([]byte, len("HTTP/1.1 101"))
		if _, err = io.ReadFull(connections[i], begin); err != nil {
			return 0, err
		}
		if !strings.HasSuffix(string(begin), "101") {
			return 0, fmt.Errorf("the handshake got %q", begin)
		}
	}
	settle()
	return memory() - before, nil
}
