package failover

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
)

var (
	randomReplies = flag.Int("replies", fewReplies(), "how many replies TestRandomRepliesReachClientsAsTheyAre compares")
	firstReply    = flag.Uint64("reply", 0, "the seed of the first of them; 0: a random one")
)

// fewReplies is how many are compared by default.
func fewReplies() int {
	if lbtest.Race {
		return 20
	}
	return 200
}

// askedFor is what a client asks for.
type askedFor struct {
	method, path, body string
	infers, stream     bool
	once               bool // it must not be executed twice
}

var comparedOperations = []askedFor{
	{http.MethodPost, "/v1/chat/completions", `{"model":"m","messages":[]}`, true, false, false},
	{http.MethodPost, "/v1/chat/completions", `{"model":"m","stream":true}`, true, true, false},
	{http.MethodPost, "/v1/responses", `{"model":"m","stream":true}`, true, true, false},
	{http.MethodPost, "/v1/embeddings", `{"model":"m","input":"x"}`, true, false, false},
	{http.MethodGet, "/v1/files/file-1/content", "", false, false, false},
	{http.MethodHead, "/v1/files/file-1", "", false, false, false},
	{http.MethodPost, "/v1/batches", `{"input_file_id":"file-1"}`, false, false, true},
	{http.MethodDelete, "/v1/files/file-1", "", false, false, true},
}

// seen is what a client gets.
type seen struct {
	status   int
	interims []string
	header   http.Header
	body     string
	trailer  http.Header
	// none reports whether no reply came, and broken whether its end did not
	// come.
	none, broken bool
	// mayEnd reports whether a reply that is broken may also have come whole.
	mayEnd bool
	// own is the code of the error, if it is one of the balancer's own.
	own string
}

func (s *seen) String() string {
	body := s.body
	if len(body) > 300 {
		body = body[:150] + " … " + body[len(body)-150:]
	}
	return fmt.Sprintf("%v, then %d, own error %q, none: %v, broken: %v\nheader %q\ntrailers %q\n%d bytes: %q",
		s.interims, s.status, s.own, s.none, s.broken, s.header, s.trailer, len(s.body), body)
}

func (s *seen) clone() *seen {
	other := *s
	other.interims, other.header, other.trailer = slices.Clone(s.interims), s.header.Clone(), s.trailer.Clone()
	return &other
}

// compared is one comparison.
type compared struct {
	seed        uint64
	op          askedFor
	wire        string // what is spoken with the backend: HTTP/1 or HTTP/2
	version     string // of HTTP/1, that the backend answers by
	client      string // 1.0, 1.1 or 2
	passthrough bool   // the key that is sent is the client's
}

func newCompared(seed uint64) compared {
	pick := rand.New(rand.NewPCG(seed, 1))
	return compared{
		seed: seed, op: comparedOperations[pick.IntN(len(comparedOperations))], wire: []string{"HTTP/1", "HTTP/1", "HTTP/2"}[pick.IntN(3)], version: []string{"1.0", "1.1", "1.1"}[pick.IntN(3)],
		client: []string{"1.0", "1.1", "1.1", "2"}[pick.IntN(4)], passthrough: pick.IntN(4) == 0,
	}
}

// reply is what the backend does.
func (c *compared) reply() *randomReply {
	major := 1
	if c.wire == "HTTP/2" {
		major = 2
	}
	return newReply(c.seed, major)
}

func (c *compared) request(url string) *http.Request {
	r, err := http.NewRequest(c.op.method, url+c.op.path, strings.NewReader(c.op.body))
	if err != nil {
		panic(err)
	}
	if c.op.body == "" {
		r.Body = http.NoBody
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Authorization", "Bearer key-of-the-caller")
	r.Header.Set("Accept-Encoding", "gzip")
	r.Header.Set("X-Test-Seed", fmt.Sprint(c.seed))
	r.Header.Set("X-Test-Version", c.version)
	return r
}

// get sends a request by HTTP/1.1 or 2.
func get(client *http.Client, r *http.Request) *seen {
	got := new(seen)
	ctx, cancel := context.WithTimeout(httptrace.WithClientTrace(context.Background(), &httptrace.ClientTrace{Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
		got.interims = append(got.interims, interim(code, http.Header(header)))
		return nil
	}}), 30*time.Second)
	defer cancel()
	res, err := client.Transport.RoundTrip(r.WithContext(ctx))
	if err != nil {
		got.none = true
		return got
	}
	got.read(res)
	return got
}

func interim(code int, header http.Header) string {
	return fmt.Sprint(code, " ", slices.Sorted(maps.Keys(header)))
}

func (s *seen) read(res *http.Response) {
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	s.status, s.header, s.body, s.broken, s.trailer = res.StatusCode, res.Header, string(body), err != nil, res.Trailer
	maps.DeleteFunc(s.trailer, func(_ string, values []string) bool { return len(values) == 0 }) // announced, and not sent
}

// getOld sends a request by HTTP/1.0.
func getOld(address string, r *http.Request) *seen {
	got := new(seen)
	conn, err := net.Dial("tcp", address)
	if err != nil {
		got.none = true
		return got
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(30 * time.Second))
	fmt.Fprintf(conn, "%s %s HTTP/1.0\r\nHost: %s\r\nContent-Length: %d\r\n", r.Method, r.URL.Path, r.Host, r.ContentLength)
	r.Header.Write(conn)
	io.WriteString(conn, "\r\n")
	if r.Body != nil {
		io.Copy(conn, r.Body)
	}
	received := bufio.NewReader(conn)
	for {
		res, err := http.ReadResponse(received, r)
		if err != nil {
			got.none = true
			return got
		}
		if res.StatusCode < 200 {
			got.interims = append(got.interims, interim(res.StatusCode, res.Header))
			continue
		}
		got.read(res)
		return got
	}
}

// comparer compares replies, one after the other.
type comparer struct {
	address  string // of Caddy
	backends map[string]string
	site     string // the path of its balancers
	direct   *http.Client
	clients  map[string]*http.Client // by version
}

// reset has the balancers forget what they know of their backends.
func (c *comparer) reset(t *testing.T) {
	for _, route := range (status.API{}).Routes() {
		if !strings.HasSuffix(route.Pattern, "/backends/{name}/{order}") {
			continue
		}
		for name := range c.backends {
			r := httptest.NewRequest(http.MethodPost, "/openai_lb/backends/x/reset", nil)
			r.SetPathValue("name", c.site+name)
			r.SetPathValue("order", "reset")
			if err := route.Handler.ServeHTTP(httptest.NewRecorder(), r); err != nil {
				t.Fatal(err)
			}
		}
		return
	}
	t.Fatal("the admin API resets no backends")
}

func (c *comparer) through(kind string, one compared) *seen {
	key := "own"
	if one.passthrough {
		key = "passed"
	}
	r := one.request("http://" + c.address)
	r.URL.Path = strings.Join([]string{"", kind, c.site, key, one.wire[len("HTTP/"):]}, "/") + r.URL.Path
	if one.client == "1.0" {
		return getOld(c.address, r)
	}
	return get(c.clients[one.client], r)
}

// compare makes one comparison.
func (c *comparer) compare(t *testing.T, one compared) {
	direct := get(c.direct, one.request(c.backends[one.wire]))
	c.reset(t)
	got := c.through("lb", one)
	want, said := one.expect(direct)
	if difference := differs(want, got, one.op.method); difference != "" {
		plain := c.through("plain", one)
		t.Errorf("reply %d: %s (by these rules: %v)\n%s %s %s, client by HTTP/%s, backend by %s (%s), passthrough: %v\n--- the backend's reply: %s\n--- direct: %s\n--- expected: %s\n--- through openai_lb: %s\n--- through reverse_proxy: %s\n",
			one.seed, difference, said, one.op.method, one.op.path, one.op.body, one.client, one.wire, one.version, one.passthrough, one.reply(), direct, want, got, plain)
	}
}

// Each reply is sent to a client directly and through the balancer. What
// differs must follow from a sentence of docs/replies.md. -replies 10000
// compares more of them, and -replies 1 -reply N repeats one that failed.
func TestRandomRepliesReachClientsAsTheyAre(t *testing.T) {
	const workers = 4
	file, _ := lbtest.WriteCertificate(t)
	var comparers []*comparer
	var sites strings.Builder
	for n := range workers {
		c := &comparer{backends: replyServers(t), site: fmt.Sprintf("w%d", n)}
		comparers = append(comparers, c)
		for wire, url := range c.backends {
			transport := "transport http {\n}\n"
			if wire == "HTTP/2" {
				transport = "transport http {\ntls_trust_pool file " + filepath.ToSlash(file) + "\n}\n"
			}
			for key, auth := range map[string]string{"own": "api_key key-of-the-backend", "passed": "auth passthrough"} {
				path := c.site + "/" + key + "/" + wire[len("HTTP/"):]
				fmt.Fprintf(&sites, "handle_path /lb/%s/* {\nopenai_lb {\nbackend %s {\nname %s%s\n%s\n}\n%s}\n}\n", path, url, c.site, wire, auth, transport)
				fmt.Fprintf(&sites, "handle_path /plain/%s/* {\nreverse_proxy %s {\n%s}\n}\n", path, url, transport)
			}
		}
	}
	address := lbtest.ServeAt(t, sites.String(), "servers {\nprotocols h1 h2c\n}", "log {\noutput discard\n}")
	for _, c := range comparers {
		c.address = address
		c.direct = newComparing(t, 0)
		c.clients = map[string]*http.Client{"1.1": newComparing(t, 1), "2": newComparing(t, 2)}
	}
	first, next := *firstReply, atomic.Uint64{}
	if first == 0 {
		first = uint64(rand.IntN(1 << 40))
	}
	var running sync.WaitGroup
	for _, c := range comparers {
		running.Go(func() {
			for {
				n := next.Add(1) - 1
				if n >= uint64(*randomReplies) {
					return
				}
				c.compare(t, newCompared(first+n))
			}
		})
	}
	running.Wait()
}

// newComparing is a client by HTTP/1, by HTTP/2 without TLS, or by what a
// server speaks with TLS.
func newComparing(t *testing.T, major int) *http.Client {
	client := lbtest.NewClient(t)
	transport := client.Transport.(*http.Transport)
	transport.DisableCompression, transport.Protocols = true, new(http.Protocols)
	transport.Protocols.SetHTTP1(major < 2)
	transport.Protocols.SetHTTP2(major == 0)
	transport.Protocols.SetUnencryptedHTTP2(major == 2)
	if major == 0 {
		transport.TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
	}
	return client
}

// ownCode is the code of an error as the balancer writes it, or empty.
func ownCode(s *seen) string {
	var body struct {
		Error struct{ Type, Code string }
	}
	if s.header.Get("Content-Type") != "application/json" || json.Unmarshal([]byte(s.body), &body) != nil {
		return ""
	}
	return body.Error.Code
}

// differs says what is not as expected.
func differs(want, got *seen, method string) string {
	switch {
	case want.none != got.none:
		return fmt.Sprintf("a reply came: %v, want %v", !got.none, !want.none)
	case want.status != got.status:
		return fmt.Sprintf("the status is %d, want %d", got.status, want.status)
	case !slices.Equal(want.interims, got.interims):
		return fmt.Sprintf("the interim replies are %q, want %q", got.interims, want.interims)
	case want.own != "" && method != http.MethodHead && ownCode(got) != want.own:
		return fmt.Sprintf("the error is %q, want %q", ownCode(got), want.own)
	case want.broken != got.broken && !want.mayEnd:
		return fmt.Sprintf("it breaks off: %v, want %v", got.broken, want.broken)
	}
	if got.body == "" && got.header.Get("Content-Length")+want.header.Get("Content-Length") == "0" {
		got.header.Del("Content-Length") // an empty body says as much
		want.header.Del("Content-Length")
	}
	if fields := differingFields(want.header, got.header, want.own != ""); fields != "" {
		return "the header differs in " + fields
	}
	if want.own != "" {
		return ""
	}
	if fields := differingFields(want.trailer, got.trailer, false); fields != "" {
		return "the trailers differ in " + fields
	}
	cut := want.broken && (strings.HasPrefix(want.body, got.body) || strings.HasPrefix(got.body, want.body))
	if want.body != got.body && !cut {
		return fmt.Sprintf("the body differs: %d bytes, want %d", len(got.body), len(want.body))
	}
	return ""
}

const (
	anything = "(anything)" // the value of a field that may have any
	optional = "(optional)" // comes before the values of a field that need not be there
)

func differingFields(want, got http.Header, some bool) string {
	var differing []string
	for name, values := range want {
		if values[0] == optional && (got[name] == nil || len(values) == 1 || slices.Equal(values[1:], got[name])) {
			continue
		}
		one := len(values) == 1 && values[0] == anything && len(got[name]) == 1
		if !slices.Equal(values, got[name]) && !one {
			differing = append(differing, fmt.Sprintf("%s: %q, want %q", name, got[name], values))
		}
	}
	for name, values := range got {
		if want[name] == nil && !some {
			differing = append(differing, fmt.Sprintf("%s: %q, want none", name, values))
		}
	}
	return strings.Join(differing, "; ")
}
