package tools

import (
	"context"
	"crypto/tls"
	"io"
	"maps"
	"net/http"
	"net/http/httptrace"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// backendReply is the reply of a backend, or why there is none.
type backendReply struct {
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
	// step is the part of the request that had begun last.
	step  string
	times map[string]int64
}

// class returns the class of the reply.
func (a *backendReply) class() verdict.Class {
	return verdict.Judge(verdict.Reply{Status: a.status, Header: a.header, Body: a.body})
}

// ask sends a request and reads the reply, within the time limit. It asks once
// more if the audience of a token is refused and there is one for another
// audience.
func (o *backendCheck) ask(ctx context.Context, method string, route openaiapi.Route, query string,
	body []byte) backendReply {
	o.slots <- struct{}{}
	defer func() { <-o.slots }()
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	credential, err := o.Credentials.Credential(ctx)
	if err != nil {
		return backendReply{err: err, credential: true, times: map[string]int64{}}
	}
	a := o.send(ctx, credential, method, route, query, body)
	if text := verdict.AboutAudience(a.status, a.body); text != "" {
		if renewed, ok := o.Credentials.Renew(ctx, credential, text); ok {
			return o.send(ctx, renewed, method, route, query, body)
		}
	}
	return a
}

func (o *backendCheck) send(ctx context.Context, credential keys.Credential, method string, route openaiapi.Route,
	query string, body []byte) (a backendReply) {
	t := newReplyTrace()
	a.times = t.times
	a.request, a.secrets, a.err = o.NewRequest(httptrace.WithClientTrace(ctx, &t.ClientTrace), credential, method,
		route, query, body)
	if a.err != nil {
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

// replyTrace measures the parts of a request.
type replyTrace struct {
	httptrace.ClientTrace
	// mu guards the rest: net/http may still dial when the request is over.
	mu      sync.Mutex
	started map[string]time.Time
	times   map[string]int64
	step    string
	ip      string
}

func newReplyTrace() *replyTrace {
	t := &replyTrace{started: map[string]time.Time{}, times: map[string]int64{}}
	t.begin("total")
	t.DNSStart = func(httptrace.DNSStartInfo) { t.begin("resolve") }
	t.DNSDone = func(httptrace.DNSDoneInfo) { t.done("resolve") }
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
		t.ip = got.Conn.RemoteAddr().String()
		t.mu.Unlock()
		t.begin("reply")
	}
	t.GotFirstResponseByte = func() { t.done("reply") }
	return t
}

func (t *replyTrace) begin(part string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.step = part
	if _, again := t.started[part]; !again {
		t.started[part] = time.Now()
	}
}

func (t *replyTrace) done(part string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.times[part] = time.Since(t.started[part]).Milliseconds()
}

// end adds what was measured to an answer.
func (t *replyTrace) end(a *backendReply) {
	t.done("total")
	t.mu.Lock()
	defer t.mu.Unlock()
	a.step, a.ip, a.times = t.step, t.ip, maps.Clone(t.times)
}
