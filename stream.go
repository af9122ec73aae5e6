package openailb

import (
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/contentcoding"
	"github.com/openai-lb/caddy-openai-lb/internal/mediatype"
	"github.com/openai-lb/caddy-openai-lb/internal/replybody"
	"github.com/openai-lb/caddy-openai-lb/internal/roundtrip"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// watchOver puts a limit on the time of each read of a reply's body. It returns
// nil for a reply without a body, and for one whose body is a connection.
func (t *Transport) watchOver(r *reply, rt *roundTrip) *replybody.Body {
	if r.res.Body == http.NoBody || r.res.StatusCode == http.StatusSwitchingProtocols {
		return nil
	}
	rt.body = replybody.Body{Source: r.res.Body, Response: r.res, Secrets: r.secrets,
		KeepTrailers: rt.KeepInterimHeader, Deadline: &rt.Timeout, Idle: time.Duration(t.StreamIdleTimeout), MustEnd: t.StreamRequireEnd}
	r.res.Body = &rt.body
	return &rt.body
}

// open holds a reply to inference back until it is certain that the request was
// served. A stream that brings an error instead of content, or nothing at all,
// becomes the error that it stands for, and a reply that is not JSON a failure.
// The reply to a request that must not be executed twice is held back until it is
// whole: if it is cut, a client that has its status can no longer be told not to
// send the request again. The reply to a GET is passed on at once: a stored
// response that failed long ago is not a failure.
func (t *Transport) open(ex *exchange, r *reply) {
	inferred := ex.asked.infers && r.status == http.StatusOK
	once := !ex.asked.repeatable && r.status < 300
	kind := mediatype.Of(r.res.Header)
	if inferred && r.body != nil && (kind == mediatype.JSON || !ex.balancer.plain) {
		r.body.ReadUsage()
	}
	switch {
	case kind == mediatype.EventStream && inferred && !contentcoding.Compressed(r.res.Header):
		t.judgeOpening(r, r.openStream)
	case kind == mediatype.JSON && (inferred || once) && r.res.ContentLength <= replybody.OpeningLimit:
		t.judgeOpening(r, func() (*sse.Error, error) { return r.openJSON(ex) })
	}
	if r.body != nil {
		r.res = r.body.ForClient(r.res)
	}
}

func (r *reply) openStream() (*sse.Error, error) {
	if r.body == nil {
		return nil, replybody.ErrEmpty
	}
	return r.body.OpenStream()
}

func (r *reply) openJSON(ex *exchange) (*sse.Error, error) {
	mustBeJSON := ex.asked.infers && !ex.asked.body.Stream
	if r.body == nil {
		if mustBeJSON {
			return nil, replybody.ErrNotJSON
		}
		return nil, nil
	}
	if err := r.body.ReadAhead(); err != nil || !ex.asked.infers {
		return nil, err
	}
	failure := r.body.ErrorIn(strings.HasSuffix(ex.request.URL.Path, "/responses"))
	if failure == nil && mustBeJSON && r.body.NotJSON() {
		return nil, replybody.ErrNotJSON
	}
	return failure, nil
}

// judgeOpening classifies the beginning of a reply.
func (t *Transport) judgeOpening(r *reply, open func() (*sse.Error, error)) {
	switch failure, err := open(); {
	case failure != nil:
		t.becomeError(r, failure)
	case errors.Is(err, roundtrip.ErrNoReply):
		r.breakOff(err)
		r.class = verdict.Timeout
	case err != nil:
		r.breakOff(err)
	}
}

// breakOff makes the reply a failure that no client may see.
func (r *reply) breakOff(reason error) {
	r.class, r.err, r.cut = verdict.Failed, reason, true
}
