package failover

import (
	"encoding/json"
	"maps"
	"mime"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// rule is a part of docs/replies.md that says why a client gets another reply
// than directly.
type rule string

const (
	noReply       rule = "reset or cut before the headers; not HTTP"
	onlyWhole     rule = "the last complete error reply of a class that fails over, except for throttled, credential, not_permitted and no_credential"
	noContent     rule = "200 for inference whose stream ends before any content"
	errorIn200    rule = "200 for inference whose stream has an error before any content"
	noAnswer      rule = "200 for inference that is neither JSON nor a stream"
	brokenJSON    rule = "whose JSON (up to 64 KiB) is cut or invalid"
	notRepeated   rule = "So the reply has `x-should-retry: false`, whatever the backend said."
	ownHints      rule = "unchanged except for `retry-after` and `retry-after-ms`"
	callersKey    rule = "A request that such a backend refuses does not fail over"
	rejected      rule = "502 `upstream_credentials_rejected`"
	rateLimited   rule = "**A 429**, if any backend throttles. The headers `retry-after` and `retry-after-ms` have the shortest wait"
	withheldError rule = "A compressed error or redirect that cannot be searched for keys to its end is replaced by an error `upstream_error` with the same status."
	addedFields   rule = "`Via` and [some other headers](clients.md#added-headers) are added."
	removedFields rule = "Hop-by-hop headers, and headers and trailers [that apply to the backend's host](clients.md#removed-headers-and-credentials), are removed."
	fewInterims   rule = "At most 20 interim (1xx) replies pass, without headers, and none to clients of HTTP/1.0."
	fewTrailers   rule = "Trailers that RFC 9110 forbids are removed. HTTP/1.1 has none after a `content-length` or a 204 or 304."
	cutLong       rule = "If a longer reply is cut, or its JSON or its compression ends too early, the client gets a cut 200"
	noEndMark     rule = "A stream of `/responses` or `/messages` without an end mark is cut"
	cutEarlier    rule = "A cut reply is cut for the client, too, perhaps earlier."
)

func TestTheDocsHaveEachRuleByWhichRepliesDiffer(t *testing.T) {
	docs := strings.Join(strings.Fields(string(lbtest.ReadFile(t, filepath.Join("..", "..", "docs", "replies.md")))), " ")
	for _, r := range []rule{noReply, onlyWhole, noContent, errorIn200, noAnswer, brokenJSON, notRepeated, ownHints, callersKey, rejected, rateLimited, withheldError, addedFields, removedFields, fewInterims, fewTrailers, cutLong, noEndMark, cutEarlier} {
		if !strings.Contains(docs, string(r)) {
			t.Errorf("docs/replies.md does not say %q", r)
		}
	}
}

const openingLimit = 64 << 10

// expectation is what a client gets in place of what it gets directly.
type expectation struct {
	seen
	compared
	reply *randomReply
	rules []rule
}

// expect returns what a client gets through the balancer, and the rules by
// which that differs.
func (c *compared) expect(direct *seen) (*seen, []rule) {
	e := &expectation{seen: *direct.clone(), compared: *c, reply: c.reply()}
	e.limitInterims()
	switch {
	case direct.none:
		e.fails(noReply)
	case e.isNoAnswer(direct):
		e.fails(noAnswer)
	case direct.status >= 300:
		e.refused(direct)
	case e.opens() && e.contentType() == "text/event-stream" && !e.compressed():
		e.opensStream(direct)
	case (e.opens() || e.op.once) && e.contentType() == "application/json" && !e.isLong(direct):
		e.opensJSON(direct)
	case e.opens() && e.contentType() == "application/json" && !direct.broken && endsTooEarly(direct):
		e.by(cutLong)
		e.broken = true
	}
	if e.own == "" {
		e.passes()
	}
	return &e.seen, e.rules
}

// endsTooEarly reports whether a reply that ends cleanly is the beginning of an
// object.
func endsTooEarly(direct *seen) bool {
	text, whole := plainText(direct.header, direct.body)
	return strings.HasPrefix(strings.TrimLeft(text, " \r\n"), "{") && (!whole || !json.Valid([]byte(text)))
}

// isNoAnswer reports whether a success is no answer to inference.
func (e *expectation) isNoAnswer(direct *seen) bool {
	text, whole := plainText(direct.header, direct.body)
	text = strings.TrimLeft(text, " \r\n")
	kind := e.contentType()
	typed := kind == "application/json" || kind == "text/event-stream"
	isJSON := text != "" && slices.Contains([]byte(`{["n`), text[0])
	isStream := strings.HasPrefix(text, "data:") || strings.HasPrefix(text, ":")
	switch {
	case !e.op.infers || direct.status >= 400:
		return false
	case direct.status >= 300, direct.status == 204, direct.status == 205:
		return true
	case direct.status != 200:
		return false
	case direct.body == "" && !direct.broken && direct.header.Get("Content-Length") == "0":
		return true
	case typed && (kind != "application/json" || !e.op.stream || !whole || e.isLongByLength(direct)), !typed && e.compressed():
		return false
	case isStream, e.compressed() && max(len(text), len(direct.body)) >= openingLimit:
		return false
	case !isJSON, e.op.stream:
		return true
	case direct.broken:
		return len(direct.body) < openingLimit
	}
	return len(direct.body) < openingLimit && !json.Valid([]byte(text))
}

// isLongByLength reports whether a reply is too long to be held back, as its
// length says.
func (e *expectation) isLongByLength(direct *seen) bool {
	return direct.header.Get("Content-Length") != "" && len(e.reply.body) > openingLimit
}

func (e *expectation) by(r rule) { e.rules = append(e.rules, r) }

func (e *expectation) opens() bool { return e.op.infers && e.status == http.StatusOK }

func (e *expectation) contentType() string {
	kind, _, err := mime.ParseMediaType(e.seen.header.Get("Content-Type"))
	if err != nil {
		kind, _, _ = strings.Cut(e.seen.header.Get("Content-Type"), ";")
		kind = strings.ToLower(strings.TrimSpace(kind))
	}
	return kind
}

func (e *expectation) compressed() bool {
	return slices.Contains(e.seen.header["Content-Encoding"], "gzip")
}

// isLong reports whether a reply is too long to be held back.
func (e *expectation) isLong(direct *seen) bool {
	if length := direct.header.Get("Content-Length"); length != "" {
		return len(e.reply.body) > openingLimit
	}
	return len(direct.body) >= openingLimit
}

func (e *expectation) answers(status int, code string) {
	e.seen = seen{status: status, own: code, interims: e.interims, header: make(http.Header)}
}

// fails replaces the reply with the error for one that failed.
func (e *expectation) fails(why rule) {
	e.by(why)
	refused := e.status == 503 || 400 <= e.status && e.status < 500 && classOf(e.status, "") != "failed"
	executed := e.op.once && !refused
	e.answers(http.StatusBadGateway, "upstream_unreachable")
	if executed {
		e.mustNotRepeat()
	}
}

func (e *expectation) mustNotRepeat() {
	e.by(notRepeated)
	e.seen.header["X-Should-Retry"] = []string{"false"}
}

func (e *expectation) hints(always bool) {
	hinted := always
	for _, name := range []string{"Retry-After", "Retry-After-Ms", "X-Ms-Retry-After-Ms"} {
		hinted = hinted || e.seen.header[name] != nil
		delete(e.seen.header, name)
	}
	if hinted {
		e.by(ownHints)
		e.seen.header["Retry-After"], e.seen.header["Retry-After-Ms"] = []string{anything}, []string{anything}
	}
}

var wholeCode = regexp.MustCompile(`^{"error":{"message":"it is so","code":"(\w*)"`)

// codeOf is the code of an error, if all of it is there.
func codeOf(s *seen) string {
	text, _ := plainText(s.header, s.body)
	if m := wholeCode.FindStringSubmatch(text); m != nil {
		return m[1]
	}
	return ""
}

// refused is about a redirect or an error.
func (e *expectation) refused(direct *seen) {
	code := codeOf(direct)
	cut := direct.broken && len(direct.body) < openingLimit
	withheld := func() bool {
		text, whole := plainText(direct.header, direct.body)
		return e.compressed() && (!whole || len(text) >= openingLimit || direct.broken || len(direct.body) >= openingLimit)
	}
	class := e.classOf(direct, code)
	if e.passthrough && slices.Contains(ofCredential, class) {
		e.by(callersKey)
		class = "client_error"
	}
	switch {
	case class == "credential" || class == "not_permitted":
		e.by(rejected)
		e.answers(http.StatusBadGateway, "upstream_credentials_rejected")
	case class == "throttled", class == "quota" && cut:
		e.by(rateLimited)
		e.answers(http.StatusTooManyRequests, "rate_limit_exceeded")
	case class == "client_error":
		if withheld() {
			e.withheld()
		}
	case cut:
		e.fails(onlyWhole)
	default:
		if withheld() {
			e.withheld()
		}
		if class != "not_here" {
			e.hints(class == "overloaded")
		}
		if e.op.once && (e.status >= 500 && e.status != 503 || class == "failed") {
			e.mustNotRepeat()
		}
	}
}

// classOf is the class of a redirect or an error.
func (e *expectation) classOf(direct *seen, code string) string {
	text, _ := plainText(direct.header, direct.body)
	text = strings.TrimLeft(text, " \r\n")
	isPage := text != "" && text[0] > ' ' && text[0] != '{' && text[0] != '['
	_, hint := verdict.ReadHint(e.status, direct.header, nil, time.Now())
	class := classOf(e.status, code)
	switch {
	case e.status == 403 && class == "credential" && hint != verdict.NoHint:
		return "quota"
	case e.status == 403 && class == "credential" && isPage:
		return "blocked"
	case (e.status == 404 || e.status == 405) && isPage && e.op.infers:
		return "not_here"
	}
	return class
}

// ofCredential are the classes that are the caller's if the key is.
var ofCredential = []string{"throttled", "quota", "too_large", "credential", "not_permitted", "no_model"}

func (e *expectation) withheld() {
	e.by(withheldError)
	e.answers(e.status, "upstream_error")
}

// classOf is the class of an error with a code.
func classOf(status int, code string) string {
	switch {
	case status < 400:
		return "client_error"
	case status == 400 && code == "context_length_exceeded":
		return "too_large"
	case status == 401 && code == "missing_scope", status == 403 && code == "missing_scope":
		return "not_permitted"
	case status == 402:
		return "quota"
	case code == "insufficient_quota" && status < 500 && !ofItsStatus(status):
		return "quota"
	case code == "DeploymentNotFound" && status < 500 && !ofItsStatus(status):
		return "no_model"
	case status == 403 && (code == "content_filter" || code == "external_connector_error"), status == 424 && (code == "external_connector_error" || code == "content_filter"):
		return "client_error"
	case (status == 403 || status == 404) && code == "DeploymentNotFound":
		return "no_model"
	case status == 401 || status == 403:
		return "credential"
	case status == 429 && code == "insufficient_quota":
		return "quota"
	case status == 503, status == 529, status == 498, (status == 429 || status >= 500) && code == "no_capacity":
		return "overloaded"
	case status == 429:
		return "throttled"
	case status >= 500, status == 424, status == 408:
		return "failed"
	}
	return "client_error"
}

// ofItsStatus reports whether the status of a 4xx says more than its code.
func ofItsStatus(status int) bool {
	return slices.Contains([]int{401, 408, 424, 429, 498}, status)
}

// opensStream is about a stream of inference.
func (e *expectation) opensStream(direct *seen) {
	rest := direct.body
	for strings.HasPrefix(rest, lbtest.StreamPreamble) {
		rest = rest[len(lbtest.StreamPreamble):]
	}
	switch {
	case strings.Contains(direct.body, lbtest.StreamContent):
		isEnded := strings.Contains(rest, "data: [DONE]") || strings.Contains(rest, lbtest.StreamError)
		if strings.HasSuffix(e.op.path, "/responses") && !direct.broken && !isEnded {
			e.by(noEndMark)
			e.broken = true
			// All that was announced may have come. HTTP/2 says after it that
			// the stream has ended, or was reset.
			if e.mayEnd = direct.header.Get("Content-Length") != "" && e.client != "2"; e.mayEnd {
				perhaps(e.seen.trailer, slices.Collect(maps.Keys(e.seen.trailer))...)
			} else {
				e.seen.trailer = nil
			}
		}
	case strings.HasPrefix(rest, lbtest.StreamError):
		e.by(errorIn200)
		e.answers(http.StatusServiceUnavailable, "server_is_overloaded")
	default:
		e.fails(noContent)
	}
}

// opensJSON is about a JSON reply to inference, or to what must not be executed
// twice.
func (e *expectation) opensJSON(direct *seen) {
	mustBeJSON := e.op.infers && !e.op.stream
	text, whole := plainText(direct.header, direct.body)
	switch {
	case direct.broken:
		e.fails(brokenJSON)
	case mustBeJSON && !whole && len(text) >= openingLimit:
		e.by(cutLong)
		e.broken = true
	case mustBeJSON && (direct.body == "" || whole && !json.Valid([]byte(text))):
		e.fails(brokenJSON)
	}
}

// limitInterims leaves the interim replies that a client gets.
func (e *expectation) limitInterims() {
	if len(e.interims) > 0 {
		e.by(fewInterims)
	}
	for n, interim := range e.interims {
		status, _, _ := strings.Cut(interim, " ")
		e.interims[n] = status + " [Server]" // which is Caddy's
	}
	if e.client == "1.0" {
		e.interims = nil
	}
	if len(e.interims) > 20 {
		e.interims = e.interims[:20]
	}
}

// withheldFields are those that are between a provider and its own clients, or
// between two machines.
var withheldFields = []string{
	"Set-Cookie", "Alt-Svc", "Strict-Transport-Security", "Public-Key-Pins", "Clear-Site-Data", "Nel", "Report-To", "Reporting-Endpoints", "Proxy-Authenticate",
	"Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authorization", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

// passes is about a reply that is the backend's.
func (e *expectation) passes() {
	e.by(removedFields)
	e.by(addedFields)
	if e.broken {
		e.by(cutEarlier)
	}
	hops := withheldFields
	for _, line := range e.seen.header["Connection"] {
		for name := range strings.SplitSeq(line, ",") {
			hops = append(hops[:len(hops):len(hops)], http.CanonicalHeaderKey(strings.TrimSpace(name)))
		}
	}
	for _, name := range hops {
		delete(e.seen.header, name)
	}
	for _, name := range withheldFields {
		delete(e.seen.trailer, name)
	}
	if len(e.seen.trailer) > 0 {
		e.by(fewTrailers)
	}
	for name := range e.seen.trailer {
		if !httpguts.ValidTrailerHeader(name) {
			delete(e.seen.trailer, name)
		}
	}
	bodiless := e.status == http.StatusNoContent || e.status == http.StatusNotModified
	if bodiless {
		perhaps(e.seen.header, "Content-Length", "Content-Type")
	}
	if e.header["Content-Type"] == nil && e.body != "" {
		perhaps(e.seen.header, "Content-Type")
	}
	if e.client != "2" && (bodiless || e.header["Content-Length"] != nil) { // HTTP/1.1 cannot have both
		perhaps(e.seen.trailer, slices.Collect(maps.Keys(e.seen.trailer))...)
	}
	e.seen.header["Via"] = append([]string{e.proto() + " Caddy"}, e.seen.header["Via"]...)
	if e.seen.header["Date"] == nil {
		e.seen.header["Date"] = []string{anything}
	}
	if e.client == "1.0" {
		e.seen.trailer = nil
	}
}

// perhaps makes fields of a header optional.
func perhaps(header http.Header, names ...string) {
	for _, name := range names {
		header[name] = append([]string{optional}, header[name]...)
	}
}

func (e *expectation) proto() string {
	if e.wire == "HTTP/2" {
		return "2.0"
	}
	return e.version
}
