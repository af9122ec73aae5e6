package websocket

import (
	"cmp"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/gobwas/ws"

	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// relay connects the two ends of a WebSocket.
//
// One goroutine reads each end and writes to the other end. The caller of Relay
// reads the backend's end, and a separate goroutine the client's. An end is
// over when it has sent a close frame, when its connection has ended, or when
// it breaks the protocol. The other end then has some time to end as well,
// after which both connections are closed. If the balancer closes the WebSocket
// itself, both ends get a close frame, and what they still send is dropped.
type relay struct {
	client  *Client
	backend *Backend
	session seam.WebSocketSession
	talk    *Conversation // is nil if nobody reads the messages
	filter  filter

	queue sync.WaitGroup // has the goroutine that passes the messages that waited for the backend

	mu            sync.Mutex
	clientClosed  bool  // the client has sent a close frame
	backendClosed bool  // the backend has
	shutting      bool  // the balancer closes the WebSocket
	failed        error // is why the backend took no more, while the client was connected
	until         time.Time
	timer         *time.Timer // closes the connections. It is nil while both ends go on
	end           seam.WebSocketEnd
}

// Relay implements seam.WebSocket.
func (c *Client) Relay(b seam.WebSocketBackend, s seam.WebSocketSession) seam.WebSocketEnd {
	r := &relay{client: c, backend: b.(*Backend), session: s, filter: filter{secrets: s.Secrets}}
	if s.Rules != nil {
		r.talk = newConversation(s.Rules, s.First, c.lane())
	}
	r.run()
	return r.end
}

func (r *relay) run() {
	c := r.client
	defer r.finish()
	defer c.recovered(c.Abort)
	if c.Timeout > 0 {
		timeout := time.AfterFunc(c.Timeout, c.goAway)
		defer timeout.Stop()
	}
	r.backend.beat.begin(c.Options, &r.backend.in, &r.backend.out, r.backendSilent, c.Abort)
	r.attach()
	r.backendEnded(r.fromBackend())
	<-c.done
}

// finish closes both ends. Responses that are still open were cut.
func (r *relay) finish() {
	c := r.client
	c.forget()
	r.endBeats()
	r.mu.Lock()
	if r.timer != nil {
		r.timer.Stop()
	}
	r.mu.Unlock()
	if c.Abort(); c.relayed() == nil {
		return // it has panicked before it began
	}
	<-c.done
	r.queue.Wait()
	if r.talk != nil {
		r.talk.end()
	}
	c.release()
}

// attach starts to pass the client's messages, first those in the queue.
func (r *relay) attach() {
	c := r.client
	c.turn.take()
	c.mu.Lock()
	c.asked.release()
	queue := c.queue
	c.relay, c.queue, c.queued = r, nil, 0
	gone := c.gone.Err() != nil || c.fault != nil
	c.mu.Unlock()
	switch {
	case !c.accepted:
		read := r.copyFromClient
		if r.session.Holds {
			read = c.readMessages
		}
		go c.serve(read)
	case gone:
		for i := range queue {
			queue[i].release()
		}
		r.clientEnded(io.ErrUnexpectedEOF)
	case len(queue) > 0:
		r.queue.Go(func() {
			defer c.turn.give()
			defer c.recovered(c.Abort)
			r.passQueue(queue)
		})
		return
	}
	c.turn.give()
}

// passQueue passes the queued messages to the backend.
func (r *relay) passQueue(queue []message) {
	defer func() {
		for i := range queue {
			queue[i].release()
		}
	}()
	for _, m := range queue {
		if err := r.fromClient(m.text); err != nil {
			r.clientEnded(err)
			return
		}
	}
}

// fromClient passes a message of the client to the backend, or answers it.
func (r *relay) fromClient(text []byte) error {
	if r.isShutting() {
		return errClosed
	}
	v := r.talk.sent(text)
	if len(v.answer) > 0 {
		say := func() error { return r.client.out.say(v.answer) }
		if err := r.client.timely(3*silence, say); err != nil {
			return err
		}
	}
	switch {
	case v.close != nil:
		return v.close
	case !v.passes:
		return nil
	case len(v.instead) > 0:
		return r.toBackend(r.backend.out.pass(v.instead...))
	}
	return r.toBackend(r.backend.out.pass(text))
}

// errRefused ends the client's side after a write to the backend has failed.
var errRefused = errors.New("the backend takes no more")

// toBackend records a failed write to the backend. It returns errRefused if err
// is not nil.
func (r *relay) toBackend(err error) error {
	if err == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.timer == nil && !r.shutting {
		r.failed = err
	}
	return errRefused
}

// controlFromClient passes a control frame of the client, unless it is the
// answer to the balancer's own ping.
func (r *relay) controlFromClient(p piece) error {
	if p.op == ws.OpPong && r.client.beat.isOwn(p.text) {
		return nil
	}
	if p.op == ws.OpClose { // it is known before the backend may answer it
		r.mu.Lock()
		r.clientClosed = true
		r.mu.Unlock()
	}
	if err := r.toBackend(r.backend.out.control(p.op, p.text)); err != nil {
		return err
	}
	if p.op == ws.OpClose {
		return errClosed
	}
	return nil
}

// copyFromClient passes the messages of a client without reading them.
func (r *relay) copyFromClient() error {
	d := direction{from: &r.client.in, to: &r.backend.out, control: r.controlFromClient,
		data: func(p piece) []byte { return p.text }, tunnel: r.tunnelFromClient}
	err := d.copy()
	if errors.Is(err, errWrite) {
		return r.toBackend(err)
	}
	return err
}

// clientEnded handles the end of the client's side.
func (r *relay) clientEnded(err error) {
	fault := new(Close)
	switch {
	case errors.Is(err, errClosed), errors.Is(err, errRefused):
		r.limit(Grace)
	case errors.As(err, &fault):
		r.shut(fault)
	case errors.Is(err, io.EOF) && r.limit(Grace) && closeWrite(r.backend.conn) == nil:
	default: // it is gone
		r.limit(0)
	}
}

// fromBackend reads the backend's messages and passes them to the client.
func (r *relay) fromBackend() error {
	d := direction{from: &r.backend.in, to: &r.client.out, control: r.controlFromBackend, data: r.dataFromBackend}
	if !r.session.Holds {
		d.tunnel = r.tunnelFromBackend
	}
	first := r.backend.first
	r.backend.first = nil
	for _, p := range first {
		if err := d.add(p); err != nil {
			return err
		}
	}
	return d.copy()
}

func (r *relay) controlFromBackend(p piece) error {
	if p.op == ws.OpPong && r.backend.beat.isOwn(p.text) {
		return nil
	}
	r.session.Secrets.Star(p.text, true)
	if p.op == ws.OpClose {
		r.mu.Lock()
		r.backendClosed = true
		r.mu.Unlock()
	}
	if err := r.client.out.control(p.op, p.text); err != nil {
		return errWrite
	}
	if p.op == ws.OpClose {
		return errClosed
	}
	return nil
}

// dataFromBackend reads a piece of a message, and returns the data for the
// client.
func (r *relay) dataFromBackend(p piece) []byte {
	r.end.Begun = true
	passes := r.filter.pass(p.text, p.last)
	if r.talk != nil {
		r.talk.heard(passes, p.last)
	}
	return passes
}

// backendEnded handles the end of the backend's side, and decides whether the
// WebSocket is broken.
func (r *relay) backendEnded(err error) {
	if errors.Is(err, errClosed) {
		r.limit(Grace)
		return
	}
	var fault *Close
	r.mu.Lock()
	var reason error
	switch {
	case r.backendClosed, r.clientClosed, errors.Is(err, errWrite):
	case r.failed != nil:
		reason = r.failed
	case r.shutting, r.timer != nil: // by the balancer, or after the client's end
	case errors.As(err, &fault):
		reason = errUnreadable
	default:
		reason = closedIfEnd(err)
	}
	r.end.Broken, r.end.Begun = reason, r.end.Begun || r.backend.in.frames > 0
	r.mu.Unlock()
	switch {
	case fault != nil && reason != nil:
		r.shut(&Close{ws.StatusInternalServerError, "the server sent what cannot be read"})
	case errors.Is(err, io.EOF) && r.limit(Grace) && closeWrite(r.client.conn) == nil:
	default:
		r.limit(0)
	}
}

// backendSilent closes the connection of a backend that answers no pings.
func (r *relay) backendSilent() {
	_ = r.toBackend(errNoPong)
	r.backend.conn.Close()
}

// shut closes the WebSocket on the balancer's own initiative.
func (r *relay) shut(reason *Close) {
	if r.stop() {
		return
	}
	r.limit(lingering)
	_ = r.client.out.close(reason) // a side that cannot be told is gone, or closed in time
	_ = r.backend.out.close(goingAway)
}

// stop records that the balancer closes the WebSocket. It reports whether that
// was recorded before.
func (r *relay) stop() (before bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	before, r.shutting = r.shutting, true
	return before
}

func (r *relay) isShutting() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.shutting
}

// limit closes the connections after this time, or sooner if an earlier call
// says so. It always reports true.
func (r *relay) limit(d time.Duration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	until := time.Now().Add(d)
	switch {
	case r.timer == nil:
		r.timer, r.until = time.AfterFunc(d, r.client.Abort), until
	case until.Before(r.until):
		r.until = until
		r.timer.Reset(d)
	}
	return true
}

// tunnelFromClient copies the data of a client that does not use the WebSocket
// protocol.
func (r *relay) tunnelFromClient(from io.Reader) error {
	r.endBeats()
	_, err := io.Copy(r.backend.conn, from)
	return cmp.Or(err, io.EOF)
}

// tunnelFromBackend copies the data of a backend that does not use the
// WebSocket protocol. It replaces keys in the data, too.
func (r *relay) tunnelFromBackend(from io.Reader) error {
	r.endBeats()
	r.end.Begun = true
	_, err := io.Copy(r.client.conn, r.session.Secrets.Body(io.NopCloser(from)))
	return cmp.Or(err, io.EOF)
}

// endBeats stops the pings of both sides.
func (r *relay) endBeats() {
	r.client.beat.end()
	r.backend.beat.end()
}

// direction passes messages in one direction, without holding them.
type direction struct {
	from    *reader
	to      *writer
	control func(piece) error
	// data returns the part of a piece that is passed on. It is empty if all of
	// it is held back.
	data func(piece) []byte
	// tunnel copies the data if the first bytes are not a frame, because the
	// side uses another protocol than WebSocket. It is nil if that is an error,
	// because messages have to be read.
	tunnel func(io.Reader) error

	out       *batch // is nil if nothing waits to be written
	inMessage bool   // a message was begun that has not ended
}

// errWrite ends a direction because a write to the other side has failed.
var errWrite = errors.New("the other side of the WebSocket has ended")

// copy passes frames until the side ends. Frames that arrive together are
// written together. While no frame arrives, it has no buffers.
func (d *direction) copy() (err error) {
	defer func() {
		if flushed := d.flush(); err == nil || flushed != nil && !errors.Is(err, errClosed) {
			err = flushed
		}
	}()
	for {
		if !d.from.ready() {
			if err = d.flush(); err != nil {
				return err
			}
		}
		err = d.from.await()
		if d.tunnel != nil && !d.from.framed && errors.As(err, new(*Close)) {
			return d.tunnel(d.from.unframed())
		}
		if err != nil {
			return err
		}
		if err = d.next(); err != nil {
			return err
		}
	}
}

// next passes the next piece.
func (d *direction) next() error {
	room := takeRoom()
	defer rooms.Put(room)
	if d.from.size() > d.from.from.Buffered() || d.from.isControl() {
		if err := d.flush(); err != nil {
			return err
		}
	}
	p, err := d.from.read(room[:])
	if err != nil {
		return err
	}
	if d.from.isControl() {
		return d.control(p)
	}
	return d.add(p)
}

// add adds a piece to the next write.
func (d *direction) add(p piece) error {
	text := d.data(p)
	if len(text) == 0 && !p.last {
		return nil
	}
	if d.out != nil && len(d.out.frames)+ws.MaxHeaderSize+len(text) > maxBatch {
		if err := d.flush(); err != nil {
			return err
		}
	}
	if d.out == nil {
		d.out = takeBatch()
	}
	op := p.op
	if d.inMessage {
		op = ws.OpContinuation
	}
	d.inMessage = !p.last
	d.out.add(d.to.head(op, p.last), text)
	if p.last && d.to.hasPending() {
		return d.flush()
	}
	return nil
}

func (d *direction) flush() error {
	if d.out == nil {
		return nil
	}
	out := d.out
	d.out = nil
	defer out.put()
	if err := d.to.flush(out, d.inMessage); err != nil {
		return errWrite
	}
	return nil
}
