package openailb

import (
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/openai-lb/caddy-openai-lb/internal/hint"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
)

// reply is what came of an attempt: a response, or an error in place of one.
type reply struct {
	res    *http.Response
	err    error
	class  verdict.Class
	status int
	wait   time.Duration
	source hint.Source
	hinted bool
	// whole tells that all of an error's body is there, and cut that it broke off.
	whole, cut bool
	// credential is ours that the request went with, if one did.
	credential Credential
	// secrets are the keys that the request went with.
	secrets secrets
	// upload is the request's body on its way.
	upload *bodyReader
	// body is that of a response that may become the client's.
	body *replyBody
}

func (r *reply) discard() {
	if r.res != nil {
		r.res.Body.Close()
	}
}

// presentable reports whether a client may see the reply.
func (r *reply) presentable() bool {
	return r.res != nil && !r.cut && r.class != verdict.Credential && r.class != verdict.NotPermitted
}

// tellsMore reports whether the reply tells the client more than that nobody
// could serve. With forward, a throttle does.
func (r *reply) tellsMore(forward bool) bool {
	if !r.presentable() {
		return false
	}
	switch r.class {
	case verdict.Failed, verdict.Overloaded, verdict.TooLarge, verdict.Quota, verdict.NoModel:
		return true
	}
	return forward && r.class == verdict.Throttled
}

const (
	// errorBodyLimit is how much of an error's body is read for what it says.
	errorBodyLimit = 64 << 10
	// errorBodyTimeout is how long that may take.
	errorBodyTimeout = 2 * time.Second
)

var errSlowBody = errors.New("the body of an error did not arrive in time")

// judge tells what a response means by its status and, if that is an error,
// its body.
func (t *Transport) judge(r *reply, cancel context.CancelCauseFunc) {
	listed := t.listed(r.status)
	counts := listed || len(t.UnhealthyStatus) == 0
	var text []byte
	decoded := false
	if counts && (listed || verdict.NeedsBody(r.status)) || len(r.secrets) > 0 && r.status >= 300 && encoded(r.res.Header) {
		text, r.whole, r.cut, decoded = peek(r.res, cancel)
	}
	if !counts {
		r.class = verdict.Served // whatever it is
	} else if r.class = judged(verdict.Reply{Status: r.status, Header: r.res.Header, Body: text}); listed && !r.class.Failover() {
		r.class = verdict.Failed
	}
	r.wait, r.source, r.hinted = hint.Read(r.status, r.res.Header, text, time.Now())
	r.secrets.guard(r.res, text, decoded)
}

// judged is the class of a reply. A request that is too long for the model is the client's own, as
// long as nobody looks for a backend with another model.
func judged(reply verdict.Reply) verdict.Class {
	if class := verdict.Judge(reply); !class.ContextLength(reply.Status) {
		return class
	}
	return verdict.ClientError
}

// peek reads the first part of an error's body, decoded, and puts it back in
// front of the rest. whole tells that it is all of the body, cut that the body
// broke off, or did not come in time, and decoded that the text is all of it.
func peek(res *http.Response, cancel context.CancelCauseFunc) (text []byte, whole, cut, decoded bool) {
	body := res.Body
	timer := time.AfterFunc(errorBodyTimeout, func() { cancel(errSlowBody) })
	raw, err := io.ReadAll(io.LimitReader(body, errorBodyLimit))
	cut = err != nil || !timer.Stop()
	whole = len(raw) < errorBodyLimit && !cut
	res.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(raw), body), body}
	text, decoded = decode(raw, res.Header.Get("Content-Encoding"))
	return text, whole, cut, whole && decoded
}

// decodable are the codings that backends may use: those that decode knows, but
// for zstd, of which it reads no windows as large as usual.
var decodable = []string{"gzip", "deflate", "identity"}

// decode undoes the compression of an error's body, as far as it gets: the
// body may be only the first part, and that may be enough. It reports whether
// the text is all there is.
func decode(raw []byte, encoding string) (text []byte, all bool) {
	if len(raw) == 0 {
		return nil, true
	}
	var decoder io.Reader
	var err error
	switch encoding {
	case "gzip":
		decoder, err = gzip.NewReader(bytes.NewReader(raw))
	case "deflate":
		decoder, err = zlib.NewReader(bytes.NewReader(raw))
	case "zstd":
		var z *zstd.Decoder
		z, err = zstd.NewReader(bytes.NewReader(raw), zstd.WithDecoderConcurrency(1),
			zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(1<<20))
		if err == nil {
			defer z.Close()
			decoder = z
		}
	case "", "identity":
		return raw, true
	default:
		return raw, false
	}
	if err != nil {
		return raw, false
	}
	text, err = io.ReadAll(io.LimitReader(decoder, errorBodyLimit))
	return text, err == nil && len(text) < errorBodyLimit
}
