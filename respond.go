package openailb

import (
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/attempt"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/replay"
)

// respond gives the client the reply of a backend, or the answer if no backend
// serves the request. An error means that the reply was cut, or that the client
// took no more of it.
func (b *balancer) respond(t *transaction, reply *attempt.Reply, a answer) error {
	q, o := &t.request, &t.outcome
	if reply != nil {
		res := b.commit(t, reply, time.Now())
		o.reply, o.status = reply, res.StatusCode
		if res.StatusCode == http.StatusSwitchingProtocols {
			return b.respondUpgrade(t, reply, res)
		}
		if q.socket != nil {
			q.socket.Answer(res)
			return nil
		}
		return write(q.writer, res, reply.HasBegun())
	}
	if o.answer = a; a.Response == nil {
		o.status = clientClosedRequest
		if q.socket == nil {
			q.writer.WriteHeader(clientClosedRequest) // for the access log
		}
		return nil
	}
	o.status = a.StatusCode
	if q.socket != nil {
		q.socket.Answer(a.Response)
		return nil
	}
	header := q.writer.Header()
	if a.from == nil && !q.received.Begun() && q.incoming.ProtoMajor == 1 && q.incoming.Header["Expect"] != nil {
		// the client waits for the answer before it sends a body. net/http's
		// server cannot see that through Caddy's wrappers of the body, and
		// would wait for the body first
		header["Connection"] = []string{"close"}
	}
	return write(q.writer, a.Response, true)
}

// commit makes the reply the client's, whatever follows in it. internal/attempt
// follows its body, and finish learns how it ended.
func (b *balancer) commit(t *transaction, r *attempt.Reply, now time.Time) *http.Response {
	s := &t.search
	to := s.current
	t.wait.firstByte(now)
	s.firstByte.End()
	s.decided()
	s.placement.Served(to.backend.AccountKey, r.Response)
	if r.Status != http.StatusSwitchingProtocols {
		removeHopByHop(r.Response.Header) // before the fields of our own, which a backend's Connection may name
	}
	res, counts := r.Commit(t.request.writer, now, nil)
	t.bill.follow(counts, s.charge())
	t.outcome.usage = counts
	s.forbidRetry(res.Header)
	b.setRateLimits(t, res.Header, now)
	return res
}

// lingering is for how long the rest of an upload is read after its answer, as
// net/http's server does.
const lingering = 500 * time.Millisecond

// answerUpload lets the answer go out although the client has not sent all of
// its body. Over HTTP/1.1, net/http's server would first wait for the rest,
// which may never come. The rest is read for a while after the answer, because
// a connection that is closed with bytes unread is reset, and with that the
// client may lose the answer.
func answerUpload(w http.ResponseWriter, r *http.Request) {
	if r.ProtoMajor != 1 {
		return
	}
	controller := http.NewResponseController(w) // not all writers have these methods
	_ = controller.EnableFullDuplex()
	_ = controller.SetReadDeadline(time.Now().Add(lingering))
	w.Header()["Connection"] = []string{"close"}
}

// hopByHop are the fields that are about one connection (RFC 9110 section
// 7.6.1), and Alt-Svc, which would lead clients past the balancer.
var hopByHop = []string{
	"Alt-Svc", "Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection",
	"Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

func removeHopByHop(header http.Header) {
	for _, value := range header["Connection"] {
		for name := range strings.SplitSeq(value, ",") {
			header.Del(strings.TrimSpace(name))
		}
	}
	for _, name := range hopByHop {
		delete(header, name)
	}
}

// addFields adds the fields of a reply to those that handlers around this one
// have set. A field without values, because they had a key, is left out: for
// net/http's server, the name alone means that it must not set the field
// itself.
func addFields(to, fields http.Header) {
	for name, values := range fields {
		switch {
		case len(values) == 0:
		case to[name] == nil:
			to[name] = values[:len(values):len(values)] // handlers may append to it
		default:
			to[name] = append(to[name], values...)
		}
	}
}

// write writes a response to the client. begun reports whether some of its body
// can be read at once. Without that, the header of a stream is not kept waiting
// for it.
func write(w http.ResponseWriter, res *http.Response, begun bool) error {
	flushes := res.ContentLength < 0 || openaiapi.ContentType(res.Header) == openaiapi.TypeEventStream ||
		caddyhttp.IsIncremental(res.Header)
	header := w.Header()
	delete(header, "Server") // a proxy says Via instead, also with the answers of its own
	header["Via"] = append(header["Via"], viaField(res))
	addFields(header, res.Header)
	closes := true // unless a handler around this one panics
	defer func() {
		if closes {
			res.Body.Close()
		}
	}()
	w.WriteHeader(res.StatusCode)
	controller := http.NewResponseController(w)
	if flushes && !begun {
		_ = controller.Flush() // of a writer that cannot, the client gets the header with the body
	}
	err := copyBody(w, res.Body, controller, flushes)
	closes = false
	res.Body.Close() // which may add trailers
	if err != nil {
		_ = controller.Flush() // so that the client sees what there is
		return err
	}
	if len(res.Trailer) == 0 {
		return nil
	}
	// a body that has trailers must be chunked, however short it is
	if err := controller.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	for name, values := range res.Trailer { // none was announced: they are added when the body is closed
		header[http.TrailerPrefix+name] = values
	}
	return nil
}

// viaField returns the field with which a proxy names itself (RFC 9110 section
// 7.6.3), as Caddy's reverse_proxy does.
func viaField(res *http.Response) string {
	if res.ProtoMajor == 1 && res.ProtoMinor == 1 {
		return "1.1 Caddy"
	}
	return strconv.Itoa(res.ProtoMajor) + "." + strconv.Itoa(res.ProtoMinor) + " Caddy"
}

const (
	// firstCopy is how much of a body is copied at a time at first. Most
	// replies fit in, and so do most events.
	firstCopy = 4 << 10
	// mostCopy is up to how much that grows while what comes fills it. An event
	// that is copied in one piece is also read in one piece, without being kept
	// until its end comes.
	mostCopy = 64 << 10
)

// copyBody copies a body to the client until its end, and flushes each piece if
// it has to.
func copyBody(w io.Writer, body io.Reader, controller *http.ResponseController, flushes bool) error {
	buffer := replay.GetBuffer(firstCopy)
	defer func() { buffer.Put() }()
	size := firstCopy
	for {
		n, err := body.Read(buffer.Bytes[:size])
		if n > 0 {
			if _, err := w.Write(buffer.Bytes[:n]); err != nil {
				return err
			}
			if flushes {
				if err := controller.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
					return err
				}
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case n == size && size < mostCopy:
			buffer.Put()
			size *= 2
			buffer = replay.GetBuffer(size)
		}
	}
}

// respondUpgrade joins the two ends of a WebSocket that a backend has opened,
// until it is over.
func (b *balancer) respondUpgrade(t *transaction, reply *attempt.Reply, res *http.Response) error {
	client := t.request.socket
	if client == nil {
		w := t.request.writer
		upgrade := res.Header.Get("Upgrade")
		removeHopByHop(res.Header)
		openaiapi.SetUpgrade(res.Header, upgrade)
		if accept, ok := res.Header["Sec-Websocket-Accept"]; ok {
			delete(res.Header, "Sec-Websocket-Accept")
			res.Header["Sec-WebSocket-Accept"] = accept //nolint:canonicalheader // as RFC 6455 spells it
		}
		addFields(w.Header(), res.Header)
		var err error
		if client, err = b.webSockets.Open(w, b.webSocketOptions); err != nil {
			res.Body.Close()
			b.logger.Error("WebSocket cannot be opened for the client", zap.Error(err))
			return nil
		}
	}
	if err := reply.Relay(client, t.reader.converse(b, t)); err != nil {
		b.logger.Error("WebSocket cannot be opened for the client", zap.Error(err))
	}
	return nil
}
