package failover

import (
	"bufio"
	"compress/gzip"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// field is a line of a header, as it is on the wire.
type field struct{ name, value string }

// randomReply is what a backend does with a request. A seed decides it.
type randomReply struct {
	status   int
	fields   []field
	trailers []field
	interims []int
	body     string
	framing  string // with HTTP/1: a "length", "chunked", or the end of the connection
	// cut is after how much it breaks off, in thousandths, and -1 if it does
	// not. How is "closed" or "reset".
	cut int
	how string
	// code is what the body of an error says.
	code string

	pick *rand.Rand
}

func (r *randomReply) one(in int) bool { return r.pick.IntN(in) == 0 }

func anyOf[T any](r *randomReply, choices ...T) T { return choices[r.pick.IntN(len(choices))] }

// String is the reply without the middle of its body.
func (r *randomReply) String() string {
	body := r.body
	if len(body) > 400 {
		body = body[:200] + " … " + body[len(body)-100:]
	}
	return fmt.Sprintf("%v, then %d, by its %s, cut after %d‰ (%s)\nheader %q\ntrailers %q\n%d bytes of body: %q",
		r.interims, r.status, r.framing, r.cut, r.how, r.fields, r.trailers, len(r.body), body)
}

// errorCodes are codes of errors, which need not be those of their status.
var errorCodes = []string{"", "", "insufficient_quota", "context_length_exceeded", "DeploymentNotFound", "content_filter", "missing_scope", "external_connector_error", "no_capacity"}

// newReply is the reply of a seed, for HTTP/1 or 2.
func newReply(seed uint64, major int) *randomReply {
	r := &randomReply{pick: rand.New(rand.NewPCG(seed, 40)), cut: -1}
	r.status = anyOf(r, 200, 200, 200, 200, 200, 200, 201, 202, 204, 205, 206, 226, 299, 300, 301, 302, 304, 307, 308,
		400, 400, 401, 402, 403, 404, 405, 408, 409, 412, 413, 416, 422, 424, 425, 429, 429, 431, 451, 498, 499, 500, 500, 501, 502, 503, 504, 529, 599, 777)
	for range max(0, r.pick.IntN(40)-30) * (1 + r.pick.IntN(3)) {
		r.interims = append(r.interims, anyOf(r, 100, 102, 103, 103, 103, 199))
	}
	for range r.pick.IntN(12) {
		r.fields = append(r.fields, anyOf(r, randomFields...))
	}
	if major == 2 { // which must not have them (RFC 9113 section 8.2.2)
		r.fields = slices.DeleteFunc(r.fields, func(f field) bool { return slices.Contains(connectionFields, f.name) })
	}
	r.chooseBody()
	if r.framing = anyOf(r, "length", "chunked", "chunked", "end"); r.framing == "chunked" || major == 2 {
		for range r.pick.IntN(4) * r.pick.IntN(2) {
			r.trailers = append(r.trailers, anyOf(r, append([]field{{"X-Late", "1"}, {"x-checksum", "abc"}, {"X-Late", ""}}, randomFields...)...))
		}
	}
	whole := major == 2 && (r.status == 204 || r.status == 304) // with its header
	if r.one(4) && !whole {
		r.cut, r.how = r.pick.IntN(1000), anyOf(r, "closed", "reset")
		if len(r.body) > 10_000 {
			r.how = "closed" // a reset drops what was not read
		}
	}
	return r
}

// chooseBody makes the body, and the fields that say what it is.
func (r *randomReply) chooseBody() {
	kind := anyOf(r, "json", "json", "stream", "stream", "stream", "empty", "binary", "text", "big json", "big binary", "big stream")
	if r.status >= 400 {
		kind = anyOf(r, "error", "error", "error", "error", "json", "empty", "text", "big binary", "big json", "stream")
	}
	media := ""
	switch kind {
	case "json":
		r.body, media = anyOf(r, `{"id":"chatcmpl-1","object":"chat.completion","choices":[]}`, `[]`, `{}`, ` {"error":null}`, `"text"`, `{"id":`), "application/json"
	case "big json":
		r.body, media = `{"object":"chat.completion","text":"`+lbtest.Noise(50_000+r.pick.IntN(200_000))+`"}`, "application/json"
	case "error":
		r.code, media = anyOf(r, errorCodes...), "application/json"
		r.body = fmt.Sprintf(`{"error":{"message":"it is so","code":%q}}`, r.code)
	case "stream", "big stream":
		media = "text/event-stream"
		for range r.pick.IntN(3) {
			r.body += lbtest.StreamPreamble
		}
		for range r.pick.IntN(4) {
			r.body += lbtest.StreamContent
		}
		if kind == "big stream" {
			r.body += strings.Repeat(lbtest.StreamContent, 3000)
		}
		r.body += anyOf(r, lbtest.StreamEnd, lbtest.StreamEnd, lbtest.StreamEnd, "", lbtest.StreamError, ": ping\n\n", "data: [DONE]")
	case "binary", "big binary":
		r.body, media = "\x00\xff"+lbtest.Noise(1+r.pick.IntN(1000)), anyOf(r, "application/octet-stream", "audio/mpeg", "")
		if kind == "big binary" {
			r.body += lbtest.Noise(200_000)
		}
	case "text":
		r.body, media = anyOf(r, "<html>why", "plain text", "\n", "null"), anyOf(r, "text/plain", "text/html; charset=utf-8", "", "application/json")
	}
	if r.status == 204 || r.status == 304 {
		r.body = ""
	}
	if len(r.body) > 0 && r.one(6) {
		r.body = lbtest.Gzipped(r.body)
		r.fields = append(r.fields, field{"Content-Encoding", "gzip"})
	}
	if media = anyOf(r, media, media, media, media, strings.ToUpper(media), media+"; charset=utf-8"); media != "" && !strings.HasPrefix(media, ";") {
		r.fields = append(r.fields, field{anyOf(r, "Content-Type", "content-type", "CONTENT-TYPE"), media})
	}
}

// connectionFields are about the connection.
var connectionFields = []string{"Connection", "Keep-Alive", "Proxy-Connection", "Upgrade", "TE", "HTTP2-Settings"}

// randomFields are what replies may have in a header.
var randomFields = []field{
	{"X-Request-Id", "req_1"}, {"x-request-id", "req_2"}, {"X-REQUEST-ID", "req_3"}, {"apim-request-id", "1-2-3"},
	{"openai-processing-ms", "12"}, {"OpenAI-Organization", "org"}, {"openai-version", "2020-10-01"}, {"openai-model", ""},
	{"x-ratelimit-limit-requests", "100"}, {"x-ratelimit-remaining-requests", "0"}, {"x-ratelimit-reset-requests", "6m0s"}, {"x-ratelimit-remaining-tokens", "-1"},
	{"Retry-After", "7"}, {"retry-after", "Wed, 21 Oct 2015 07:28:00 GMT"}, {"retry-after-ms", "43"}, {"x-ms-retry-after-ms", "90000"}, {"Retry-After", ""}, {"X-Should-Retry", "true"},
	{"Set-Cookie", "a=1"}, {"set-cookie", "b=2; Secure"}, {"Alt-Svc", `h3=":443"`}, {"Strict-Transport-Security", "max-age=1"}, {"Public-Key-Pins", "x"},
	{"Clear-Site-Data", "*"}, {"NEL", "{}"}, {"Report-To", "{}"}, {"Reporting-Endpoints", "x"}, {"Proxy-Authenticate", "Basic"}, {"Proxy-Authorization", "x"},
	{"Connection", "X-Hop"}, {"X-Hop", "1"}, {"Connection", "close"}, {"Connection", "keep-alive, x-other-hop"}, {"x-other-hop", "1"}, {"Keep-Alive", "timeout=5"},
	{"Proxy-Connection", "keep-alive"}, {"Upgrade", "h2c"}, {"TE", "trailers"}, {"Trailer", "X-Late"}, {"trailer", "x-checksum, Set-Cookie"}, {"Trailer", "X-Never"},
	{"Server", "uvicorn"}, {"server", "cloudflare"}, {"Via", "1.1 apim"}, {"Date", "Wed, 21 Oct 2015 07:28:00 GMT"}, {"Date", "never"}, {"Age", "0"},
	{"Vary", "Accept-Encoding"}, {"vary", "Origin"}, {"Cache-Control", "no-store"}, {"ETag", `W/"1"`}, {"Last-Modified", "x"}, {"Location", "/elsewhere"}, {"Location", "https://example.com/"},
	{"WWW-Authenticate", "Bearer"}, {"X-Empty", ""}, {"X-Blank", " \t a  b \t"}, {"X-Latin", "caf\xe9"}, {"X-UTF8", "é"}, {"X-Long", strings.Repeat("long ", 800)}, {"x_under", "1"}, {"X-", "1"},
	{"Content-Language", "en"}, {"Content-Disposition", `attachment; filename="a"`}, {"Content-Range", "bytes 0-1/2"}, {"Accept-Ranges", "bytes"}, {"Content-MD5", "x"}, {"Content-Type", "text/plain"},
	{"Incremental", "?1"}, {"X-Accel-Buffering", "no"}, {"X-Accel-Redirect", "/x"}, {"X-Sendfile", "/x"}, {"Link", "</x>"}, {"Refresh", "1"}, {"Status", "200 OK"}, {"Content-Encoding", "identity"},
	{"Access-Control-Allow-Origin", "*"}, {"Access-Control-Expose-Headers", "x"}, {"Server-Timing", "a;dur=1"}, {"Proxy-Status", "x"}, {"X-Backend", "a"}, {"Warning", "199 x"}, {"HTTP2-Settings", "x"},
}

// seedOf is the seed that a request brings.
func seedOf(r *http.Request) uint64 {
	seed, _ := strconv.ParseUint(r.Header.Get("X-Test-Seed"), 10, 64)
	return seed
}

// wire is the reply by HTTP/1.0 or 1.1, and reports whether the connection can
// be used again.
func (r *randomReply) wire(method, version string) (text string, again bool) {
	var b strings.Builder
	if version == "1.1" {
		for _, status := range r.interims {
			fmt.Fprintf(&b, "HTTP/1.1 %d Wait\r\nLink: </x>\r\nX-Interim: 1\r\n\r\n", status)
		}
	}
	fmt.Fprintf(&b, "HTTP/%s %d %s\r\n", version, r.status, anyOf(r, "As Told", "", "OK"))
	framing := r.framing
	if framing == "chunked" && version == "1.0" {
		framing = "end"
	}
	bodiless := method == http.MethodHead || r.status == 204 || r.status == 304
	switch framing {
	case "length":
		fmt.Fprintf(&b, "%s: %d\r\n", anyOf(r, "Content-Length", "content-length"), len(r.body))
	case "chunked":
		fmt.Fprintf(&b, "Transfer-Encoding: %s\r\n", anyOf(r, "chunked", "Chunked"))
	}
	for _, f := range r.fields {
		fmt.Fprintf(&b, "%s: %s\r\n", f.name, f.value)
	}
	b.WriteString("\r\n")
	switch {
	case bodiless:
	case framing == "chunked":
		r.chunk(&b)
	default:
		b.WriteString(r.body)
	}
	return b.String(), version == "1.1" && (framing != "end" || bodiless)
}

// chunk writes the body in chunks.
func (r *randomReply) chunk(b *strings.Builder) {
	for rest := r.body; len(rest) > 0; {
		n := min(len(rest), 1+anyOf(r, r.pick.IntN(10), r.pick.IntN(1000), 100_000))
		fmt.Fprintf(b, anyOf(r, "%x\r\n", "%X\r\n", "00%x\r\n", "%x;name=value\r\n")+"%s\r\n", n, rest[:n])
		rest = rest[n:]
	}
	b.WriteString("0\r\n")
	for _, f := range r.trailers {
		fmt.Fprintf(b, "%s: %s\r\n", f.name, f.value)
	}
	b.WriteString("\r\n")
}

// serveHTTP1 serves a connection with what the requests ask for.
func serveHTTP1(conn net.Conn) {
	defer conn.Close()
	received := bufio.NewReader(conn)
	for {
		request, err := http.ReadRequest(received)
		if err != nil {
			return
		}
		io.Copy(io.Discard, request.Body)
		r := newReply(seedOf(request), 1)
		text, again := r.wire(request.Method, request.Header.Get("X-Test-Version"))
		if r.cut >= 0 {
			text = text[:len(text)*r.cut/1000]
		}
		for len(text) > 0 {
			n := min(len(text), 1+anyOf(r, r.pick.IntN(100), 100_000, 1_000_000))
			if _, err := io.WriteString(conn, text[:n]); err != nil {
				return
			}
			text = text[n:]
		}
		if r.cut >= 0 && r.how == "reset" {
			reset(conn)
		}
		if r.cut >= 0 || !again {
			return
		}
	}
}

// reset closes the TCP connection at once (RST).
func reset(conn net.Conn) {
	conn.(*net.TCPConn).SetLinger(0)
	conn.Close()
}

// serveHTTP2 does what the request asks for. A reply that is cut ends with a
// reset of its stream.
func serveHTTP2(w http.ResponseWriter, request *http.Request) {
	io.Copy(io.Discard, request.Body)
	r := newReply(seedOf(request), 2)
	for _, status := range r.interims {
		w.Header().Set("Link", "</x>")
		w.WriteHeader(status)
	}
	clear(w.Header())
	w.Header()["Date"], w.Header()["Content-Type"] = nil, nil // which net/http adds otherwise
	if r.framing == "length" {
		w.Header().Set("Content-Length", strconv.Itoa(len(r.body)))
	}
	for _, f := range r.fields {
		w.Header().Add(f.name, strings.TrimSpace(f.value))
	}
	w.WriteHeader(r.status)
	rest := r.body
	if r.cut >= 0 {
		rest = rest[:len(rest)*r.cut/1000]
	}
	for len(rest) > 0 {
		n := min(len(rest), 1+anyOf(r, r.pick.IntN(1000), 100_000))
		io.WriteString(w, rest[:n])
		w.(http.Flusher).Flush()
		rest = rest[n:]
	}
	if r.cut >= 0 {
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
	for _, f := range r.trailers {
		// net/http would send one of two spellings of a name, by the order of
		// its map
		w.Header().Add(http.TrailerPrefix+http.CanonicalHeaderKey(f.name), strings.TrimSpace(f.value))
	}
}

// replyServers are the backends of random replies, by what is spoken with them.
func replyServers(t *testing.T) map[string]string {
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	secured := httptest.NewUnstartedServer(nil)
	secured.EnableHTTP2 = true
	secured.Config.Handler = http.HandlerFunc(serveHTTP2)
	lbtest.StartTLS(t, secured)
	t.Cleanup(func() { plain.Close() })
	go func() {
		for {
			conn, err := plain.Accept()
			if err != nil {
				return
			}
			go serveHTTP1(conn)
		}
	}()
	return map[string]string{"HTTP/1": "http://" + plain.Addr().String(), "HTTP/2": secured.URL}
}

// plainText is a body without its compression, and whether all of it is there.
func plainText(header http.Header, body string) (text string, whole bool) {
	if !slices.Contains(header["Content-Encoding"], "gzip") || body == "" {
		return body, true
	}
	r, err := gzip.NewReader(strings.NewReader(body))
	if err != nil {
		return "", false
	}
	plain, err := io.ReadAll(r)
	return string(plain), err == nil
}
