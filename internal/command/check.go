package command

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptrace"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/backend"
	"github.com/openai-lb/caddy-openai-lb/internal/hint"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

const (
	// atOnce is how many requests of a check run at a time.
	atOnce = 64
	// maxBody is how much of a reply is read. OpenAI's list of models has some ten kilobytes.
	maxBody = 4 << 20
	// soon is how long before its end a certificate is reported.
	soon = 14 * 24 * time.Hour
	// maxError is how much of an error is shown.
	maxError = 256
	// classicVersion is the api-version of Azure's classic paths, for gateways that have only those.
	classicVersion = "api-version=2024-10-21"
)

// Status is what a check says of a backend, and of its models.
type Status string

// The statuses of a backend. One with a warning can serve.
const (
	OK      Status = "ok"
	Warning Status = "warning"
	Failed  Status = "failed"
)

// Checked is what a check found out about a backend.
type Checked struct {
	Pool    string `json:"pool"`
	Backend string `json:"backend"`
	Status  Status `json:"status"`
	// Address is the host and port of its URL, and IP where the connection went.
	Address string `json:"address"`
	IP      string `json:"ip,omitempty"`
	// CertificateUntil is when its certificate expires. It is nil without TLS.
	CertificateUntil *time.Time `json:"certificate_until,omitempty"`
	// Credential is accepted, refused, missing, none, caller's or unknown.
	Credential string `json:"credential"`
	// Models are those that its options name.
	Models []Model `json:"models"`
	// Listed is how many models it lists. It is nil if it lists none.
	Listed *int `json:"listed,omitempty"`
	// Milliseconds are the times of the first request by their parts.
	Milliseconds map[string]int64 `json:"milliseconds"`
	// Remaining are the requests and tokens that its rate limit leaves, as it says itself.
	Remaining map[string]int64 `json:"remaining"`
	Problems  []Problem        `json:"problems"`
}

// Model is a model of a backend, by the backend's name for it.
type Model struct {
	Name string `json:"name"`
	// State is found or missing in the list of models, served or refused with --spend, or unknown.
	State string `json:"state"`
}

// The states of a model.
const (
	found   = "found"
	missing = "missing"
	served  = "served"
	refused = "refused"
	unknown = "unknown"
)

// Problem is a reason for a status.
type Problem struct {
	Status Status `json:"status"`
	Text   string `json:"text"`
}

// checker checks backends.
type checker struct {
	timeout time.Duration
	spend   bool
	slots   chan struct{}
}

// check checks all backends of the pools at the same time.
func (c *checker) check(ctx context.Context, entries []*pools.Entry) []*Checked {
	c.slots = make(chan struct{}, atOnce)
	var all []*Checked
	var wait sync.WaitGroup
	for _, e := range entries {
		of := e.Rechecker.(*backend.Rechecker)
		for _, b := range of.Backends {
			o := &one{checker: c, Backend: b, transport: of.Transport, Checked: Checked{
				Pool: e.Name, Backend: b.Name, Status: OK, Address: b.Dial(), Credential: credentialOf(b),
				Models: []Model{}, Milliseconds: map[string]int64{}, Remaining: map[string]int64{}, Problems: []Problem{},
			}}
			all = append(all, &o.Checked)
			wait.Go(func() { o.check(ctx) })
		}
	}
	wait.Wait()
	return all
}

// credentialOf says which credential a backend gets, as long as it has not answered.
func credentialOf(b *backend.Backend) string {
	switch {
	case b.Credentials.Passthrough:
		return "caller's"
	case !b.HasCredential():
		return "none"
	}
	return unknown
}

// one is the check of one backend.
type one struct {
	*checker
	*backend.Backend
	transport http.RoundTripper
	Checked   Checked
}

// answer is what a backend said, or why it said nothing.
type answer struct {
	request *http.Request
	secrets keys.Secrets
	status  int
	header  http.Header
	body    []byte
	tls     *tls.ConnectionState
	ip      string
	err     error
	// credential reports that the error is about getting one.
	credential bool
	connected  bool
	// unresolved reports that the error is about the name of the host.
	unresolved bool
	times      map[string]int64
}

// problem records a problem. The status becomes the worst of all.
func (o *one) problem(status Status, format string, args ...any) {
	o.Checked.Problems = append(o.Checked.Problems, Problem{status, fmt.Sprintf(format, args...)})
	if status == Failed || o.Checked.Status == OK {
		o.Checked.Status = status
	}
}

// check asks the backend for its models, and then for each model that its options name.
func (o *one) check(ctx context.Context) {
	names := o.Names()
	o.Checked.Models = make([]Model, len(names))
	for i, name := range names {
		o.Checked.Models[i] = Model{name, unknown}
	}
	a := o.listModels(ctx)
	o.Checked.Milliseconds, o.Checked.IP = a.times, a.ip
	o.readCertificate(a)
	if a.err != nil {
		o.failed(a)
		return
	}
	o.readRemaining(a.header)
	if !o.readList(a) {
		return
	}
	if o.spend || o.Azure {
		o.askModels(ctx)
	}
	if o.spend && len(names) == 0 {
		o.problem(Warning, "the options name no model: no request was sent to one")
	}
	o.judgeModels()
}

// listModels asks for the list of models. A gateway with Azure's classic paths may have no others.
func (o *one) listModels(ctx context.Context) answer {
	a := o.ask(ctx, http.MethodGet, openaiapi.Route{Dialect: openaiapi.OpenAI, Operation: "/models"}, "", nil)
	if a.status == http.StatusNotFound && o.HasClassicPaths() {
		return o.ask(ctx, http.MethodGet, openaiapi.Route{Dialect: openaiapi.AzureClassic, Operation: "/models"}, classicVersion, nil)
	}
	return a
}

// ask sends a request and reads the reply, within the time limit.
func (o *one) ask(ctx context.Context, method string, route openaiapi.Route, query string, body []byte) (a answer) {
	o.slots <- struct{}{}
	defer func() { <-o.slots }()
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	t := newTrace()
	a.times = t.times
	a.request, a.secrets, a.err = o.NewRequest(httptrace.WithClientTrace(ctx, &t.ClientTrace), method, route, query, body)
	if a.err != nil {
		a.credential = true
		return a
	}
	res, err := o.transport.RoundTrip(a.request)
	t.end(&a)
	if err != nil {
		a.err = err
		return a
	}
	defer res.Body.Close()
	a.status, a.header, a.tls = res.StatusCode, res.Header, res.TLS
	a.body, a.err = io.ReadAll(io.LimitReader(res.Body, maxBody))
	return a
}

// readCertificate records until when the certificate is valid.
func (o *one) readCertificate(a answer) {
	var certificates []*x509.Certificate
	if a.tls != nil {
		certificates = a.tls.PeerCertificates
	} else if unverified, ok := errors.AsType[*tls.CertificateVerificationError](a.err); ok {
		certificates = unverified.UnverifiedCertificates
	}
	if len(certificates) == 0 {
		return
	}
	until := certificates[0].NotAfter
	o.Checked.CertificateUntil = &until
	switch left := time.Until(until); {
	case left <= 0 && a.err != nil:
		o.problem(Failed, "the certificate expired on %s", until.UTC().Format(time.DateOnly))
	case left < soon:
		o.problem(Warning, "the certificate expires on %s", until.UTC().Format(time.DateOnly))
	}
}

// failed records why there is no reply.
func (o *one) failed(a answer) {
	text := pool.CutText(Printable(a.secrets.Text(a.err.Error())), maxError)
	if a.credential {
		o.Checked.Credential = missing
		o.problem(Failed, "there is no credential: %s", text)
		return
	}
	switch cause := verdict.CauseOf(a.err); {
	case cause == "dns", a.unresolved:
		o.problem(Failed, "the host %s could not be resolved: %s", o.Origin.Hostname(), text)
	case cause == "refused":
		o.problem(Failed, "%s refuses connections", o.Checked.Address)
	case cause == "timeout" && !a.connected:
		o.problem(Failed, "no connection in time: is the address right, and does the network let it through?")
	case cause == "timeout":
		o.problem(Failed, "no reply within %s", o.timeout)
	case strings.Contains(text, "server gave HTTP response to HTTPS client"), strings.Contains(text, "first record does not look like a TLS handshake"):
		o.problem(Failed, "%s does not speak TLS: use http:// or another port", o.Checked.Address)
	case cause == "certificate" && slices.ContainsFunc(o.Checked.Problems, func(p Problem) bool { return p.Status == Failed }):
		// it has expired
	case cause == "certificate":
		o.problem(Failed, "the certificate is not trusted: %s", text)
	default:
		o.problem(Failed, "no reply: %s", text)
	}
}

// remainingNames are the headers with the rest of a rate limit.
var remainingNames = map[string][]string{
	"requests": {"X-Ratelimit-Remaining-Requests", "X-Rate-Limit-Remaining-Requests"},
	"tokens":   {"X-Ratelimit-Remaining-Tokens", "X-Rate-Limit-Remaining-Tokens"},
}

// readRemaining records what a rate limit leaves: the least that a reply said.
func (o *one) readRemaining(header http.Header) {
	for name, headers := range remainingNames {
		if n, ok := hint.Number(header, headers...); ok {
			if least, known := o.Checked.Remaining[name]; !known || int64(n) < least {
				o.Checked.Remaining[name] = int64(n)
			}
		}
	}
}

// refusal describes an error of the backend by its status and its code. Its message may contain a key.
func refusal(a answer) string {
	text := fmt.Sprintf("status %d", a.status)
	if code := verdict.Code(a.body); code != "" && code != strconv.Itoa(a.status) && !a.secrets.In(code) {
		text += " (" + code + ")"
	}
	return text
}

// judge records what the status of a reply says about the whole backend. It reports whether there is
// more to find out.
func (o *one) judge(a answer) (class verdict.Class, more bool) {
	class = verdict.Judge(verdict.Reply{Status: a.status, Header: a.header, Body: a.body})
	switch class {
	case verdict.Credential:
		switch {
		case o.Credentials.Passthrough:
		case o.HasCredential():
			o.Checked.Credential = refused
			o.problem(Failed, "the credential is refused: %s", refusal(a))
		default:
			o.Checked.Credential = missing
			o.problem(Failed, "a credential is required, and the options have none: %s", refusal(a))
		}
	case verdict.Quota:
		o.problem(Failed, "the account has no budget left: %s", refusal(a))
	case verdict.Throttled:
		o.problem(Warning, "throttled now: %s", refusal(a))
	case verdict.Failed, verdict.Overloaded:
		o.problem(Failed, "the backend fails: %s", refusal(a))
	default:
		return class, true
	}
	return class, false
}

// accepted records that the backend knows the credential.
func (o *one) accepted() {
	if o.Checked.Credential == unknown {
		o.Checked.Credential = "accepted"
	}
}

// readList reads the list of models. It reports whether there is more to find out.
func (o *one) readList(a answer) (more bool) {
	class, more := o.judge(a)
	if !more {
		return false
	}
	if class == verdict.NotPermitted { // a key for inference alone
		o.accepted()
		return true
	}
	if a.status != http.StatusOK {
		o.problem(Warning, "there is no list of models at %s: %s", a.request.URL.Path, refusal(a))
		return true
	}
	var list struct{ Data []struct{ ID string } }
	if err := json.Unmarshal(a.body, &list); err != nil || list.Data == nil {
		o.problem(Warning, "the reply from %s is not a list of models: is this the API?", a.request.URL.Path)
		return true
	}
	o.accepted()
	n := len(list.Data)
	if o.Checked.Listed = &n; o.Azure {
		return true // Azure lists the models that could be deployed, and no deployment
	}
	for i := range o.Checked.Models {
		m := &o.Checked.Models[i]
		m.State = missing
		if slices.ContainsFunc(list.Data, func(listed struct{ ID string }) bool { return listed.ID == m.Name }) {
			m.State = found
		}
	}
	return true
}

// askModels asks for each model that the options name. Without spend, the request has no messages: the
// backend refuses it at no cost, and says whether it has no such deployment.
func (o *one) askModels(ctx context.Context) {
	answers := make([]answer, len(o.Checked.Models))
	var wait sync.WaitGroup
	for i, m := range o.Checked.Models {
		wait.Go(func() { answers[i] = o.askModel(ctx, m.Name) })
	}
	wait.Wait()
	for i, a := range answers {
		o.readModel(&o.Checked.Models[i], a)
	}
}

// askModel asks a model for one token. A model that does not chat may embed.
func (o *one) askModel(ctx context.Context, name string) answer {
	body := map[string]any{"model": name}
	if o.spend {
		body["messages"] = []map[string]string{{"role": "user", "content": "Hi"}}
		body["max_completion_tokens"] = 1
	}
	a := o.infer(ctx, "/chat/completions", name, body)
	if o.spend && (a.status == http.StatusBadRequest || a.status == http.StatusNotFound) && !isNoModel(a) {
		if b := o.infer(ctx, "/embeddings", name, map[string]any{"model": name, "input": "Hi"}); b.status == http.StatusOK {
			return b
		}
	}
	return a
}

func isNoModel(a answer) bool {
	return verdict.Judge(verdict.Reply{Status: a.status, Body: a.body}) == verdict.NoModel
}

// infer sends a request to a model: by the v1 API, or by Azure's classic path if there is nothing.
func (o *one) infer(ctx context.Context, operation, name string, body map[string]any) answer {
	text, err := json.Marshal(body)
	if err != nil {
		return answer{err: err}
	}
	a := o.ask(ctx, http.MethodPost, openaiapi.Route{Dialect: openaiapi.OpenAI, Operation: operation}, "", text)
	if a.status == http.StatusNotFound && o.HasClassicPaths() && !isNoModel(a) {
		route := openaiapi.Route{Dialect: openaiapi.AzureClassic, Deployment: openaiapi.EscapeSegment(name), Operation: operation}
		return o.ask(ctx, http.MethodPost, route, classicVersion, text)
	}
	return a
}

// readModel records what a model answered.
func (o *one) readModel(m *Model, a answer) {
	if a.err != nil {
		o.problem(Failed, "model %s: no reply: %s", Printable(m.Name), verdict.CauseOf(a.err))
		return
	}
	o.readRemaining(a.header)
	class := verdict.Judge(verdict.Reply{Status: a.status, Header: a.header, Body: a.body})
	switch {
	case class == verdict.NoModel:
		m.State = missing
	case !o.spend: // it was not a valid request
	case class == verdict.Served, bytes.Contains(a.body, []byte("max_tokens or model output limit")):
		m.State = served
		o.accepted()
	case class == verdict.Throttled:
		m.State = refused
		o.problem(Warning, "model %s is throttled now: %s", Printable(m.Name), refusal(a))
	case class == verdict.Credential && o.Credentials.Passthrough:
	case class == verdict.ClientError && a.status == http.StatusBadRequest:
		m.State = refused
		o.problem(Warning, "model %s answers, but serves neither chat nor embeddings: %s", Printable(m.Name), refusal(a))
	default:
		m.State = refused
		o.problem(Failed, "model %s is not served: %s, %s", Printable(m.Name), class, refusal(a))
	}
}

// judgeModels records the models that are missing.
func (o *one) judgeModels() {
	var names []string
	for _, m := range o.Checked.Models {
		if m.State == missing {
			names = append(names, Printable(m.Name))
		}
	}
	if len(names) > 0 {
		o.problem(Failed, "the backend does not have %s", strings.Join(names, ", "))
	}
}

// trace measures the parts of a request.
type trace struct {
	httptrace.ClientTrace
	// mu guards the rest: net/http may still dial when the request is over.
	mu         sync.Mutex
	started    map[string]time.Time
	times      map[string]int64
	unresolved bool
	connected  bool
	ip         string
}

func newTrace() *trace {
	t := &trace{started: map[string]time.Time{}, times: map[string]int64{}}
	t.begin("total")
	t.DNSStart = func(httptrace.DNSStartInfo) { t.begin("resolve") }
	t.DNSDone = func(done httptrace.DNSDoneInfo) {
		t.done("resolve")
		t.mu.Lock()
		t.unresolved = done.Err != nil
		t.mu.Unlock()
	}
	t.ConnectStart = func(string, string) { t.begin("connect") }
	t.ConnectDone = func(_, _ string, err error) {
		if err == nil {
			t.done("connect")
		}
	}
	t.TLSHandshakeStart = func() { t.begin("tls") }
	t.TLSHandshakeDone = func(tls.ConnectionState, error) { t.done("tls") }
	t.GotConn = func(got httptrace.GotConnInfo) {
		t.mu.Lock()
		t.connected, t.ip = true, got.Conn.RemoteAddr().String()
		t.mu.Unlock()
		t.begin("reply")
	}
	t.GotFirstResponseByte = func() { t.done("reply") }
	return t
}

func (t *trace) begin(part string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, again := t.started[part]; !again {
		t.started[part] = time.Now()
	}
}

func (t *trace) done(part string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.times[part] = time.Since(t.started[part]).Milliseconds()
}

// end adds what was measured to an answer.
func (t *trace) end(a *answer) {
	t.done("total")
	t.mu.Lock()
	defer t.mu.Unlock()
	a.unresolved, a.connected, a.ip, a.times = t.unresolved, t.connected, t.ip, maps.Clone(t.times)
}
