package simulator

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/google/uuid"
)

// parsedBytes is how much of a request body is kept and parsed. The whole body
// is received and hashed. It is a variable for a test, which needs less.
var parsedBytes int64 = 64 << 20

// exchange is one request and its reply.
type exchange struct {
	h       *Handler
	w       http.ResponseWriter
	r       *http.Request
	arrived time.Time

	route   route
	request request
	// body is what was kept of it, and fields what it says, if the request is
	// about responses or objects.
	body   []byte
	fields map[string]any
	call   *toolCall // nil: the reply is a text
	fault  action

	bodyRead  bool
	bodyBytes int64
	bodySum   string // hex, once the body was read

	limiter  *limiter // nil while the deployment is not known
	cost     cost
	cached   int64 // tokens of the prompt that were in the cache
	admitted bool
	settled  bool
	produced int64 // tokens generated so far
	faulted  bool

	status    int // 0: no reply
	cancelled bool
}

// open starts an exchange. The caller must call close, also after a panic.
func (h *Handler) open(w http.ResponseWriter, r *http.Request) *exchange {
	x := &exchange{h: h, w: w, r: r, arrived: h.now()}
	x.route = parseRoute(r)
	h.state.count(func(s *Status) { s.Requests++; s.InFlight++ })
	return x
}

// close ends the exchange. It runs also when a panic aborts the reply.
func (x *exchange) close() {
	x.settle()
	x.h.state.finish(x)
}

// serve answers, or aborts the connection.
func (x *exchange) serve() {
	if rep := x.refuse(); rep != nil {
		x.reply(rep)
		return
	}
	x.generate()
}

// refuse checks the request in the order in which a deployment does. It returns
// the error reply of the first check that fails, or nil.
func (x *exchange) refuse() *reply {
	known := x.h.authorized(x.r)
	var faultErr error
	if known {
		faultErr = x.chooseFault()
	}
	if x.fault.kind == faultEarly429 {
		return x.throttleEarly()
	}
	problem := x.readBody()
	if !known {
		x.h.state.count(func(s *Status) { s.Unauthorized++ })
		return x.statusError(http.StatusUnauthorized)
	}
	if faultErr != nil {
		return openaiError(http.StatusBadRequest, "invalid_request_error", nil, "X-Simulator-Fault: "+faultErr.Error())
	}
	x.findDeployment()
	if rep := x.faultReply(); rep != nil {
		return rep
	}
	switch {
	case x.route.op == opUnknown:
		return x.notFound()
	case problem != nil:
		return problem
	case x.route.op.limited() && x.route.deployment == "" && !x.cut():
		return openaiError(http.StatusBadRequest, "invalid_request_error", nil, "you must provide a model parameter")
	case x.route.op.limited() && x.limiter == nil:
		return x.statusError(http.StatusNotFound)
	}
	return x.admit()
}

func (x *exchange) notFound() *reply {
	if x.route.classic {
		return azureError(http.StatusNotFound, "404", "Resource not found")
	}
	return openaiError(http.StatusNotFound, "invalid_request_error", nil,
		fmt.Sprintf("Invalid URL (%s %s)", x.r.Method, x.r.URL.Path))
}

// readBody receives the whole body, hashes it and parses it. If something is
// wrong with the body, it returns the error reply.
func (x *exchange) readBody() *reply {
	sum := sha256.New()
	var kept bytes.Buffer
	body := &meteredReader{r: x.r.Body, sum: sum}
	_, err := io.Copy(&kept, io.LimitReader(body, parsedBytes))
	if err == nil {
		_, err = io.Copy(io.Discard, body)
	}
	x.bodyBytes = body.n
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge): // the request_body directive has a limit
		return openaiError(http.StatusRequestEntityTooLarge, "invalid_request_error", nil, "The request body is too large.")
	case err != nil:
		x.cancelled = true
		x.abort()
	}
	x.bodyRead = true
	x.bodySum = hex.EncodeToString(sum.Sum(nil))
	if op := x.route.op; op == opResponse || op == opObject {
		x.body = kept.Bytes()
		_ = json.Unmarshal(x.body, &x.fields) // a form has none
	}
	if !x.route.op.generates() {
		return nil
	}
	var problem string
	x.request, problem = parseRequest(x.route.op, x.r.Header.Get("Content-Type"), kept.Bytes(), x.cut())
	if problem != "" {
		return openaiError(http.StatusBadRequest, "invalid_request_error", nil, problem)
	}
	return nil
}

// cut reports whether the body was too large to be parsed to its end.
func (x *exchange) cut() bool { return x.bodyBytes > parsedBytes }

// meteredReader counts and hashes what passes.
type meteredReader struct {
	r   io.Reader
	sum hash.Hash
	n   int64
}

func (m *meteredReader) Read(p []byte) (int, error) {
	n, err := m.r.Read(p)
	m.sum.Write(p[:n])
	m.n += int64(n)
	return n, err
}

// findDeployment finds the deployment: the one in the path, or else the model in
// the body.
func (x *exchange) findDeployment() {
	if !x.route.op.limited() {
		return
	}
	if x.route.deployment == "" {
		x.route.deployment = x.request.Model
	}
	if (x.route.deployment != "" || x.cut()) && x.h.serves(x.route.deployment) {
		x.limiter = x.h.state.limiter(x.route.deployment)
		if x.limiter.early(x.arrived) {
			x.h.state.count(func(s *Status) { s.Early++ })
		}
	}
}

// admit charges the request to its deployment's limits.
func (x *exchange) admit() *reply {
	if !x.route.op.limited() {
		return nil
	}
	x.cost = x.request.cost(x.route.op)
	if x.cut() && x.route.op != opTranscription {
		x.cost.prompt = x.bodyBytes / 4 // its text was not parsed
	}
	prompt := x.cacheable()
	x.cached = x.limiter.prompts.find(prompt)
	charged := x.cost
	if x.limiter.drain > 0 {
		charged.prompt -= x.cached // "Provisioned throughput": they cost no capacity
	}
	refused, ok := x.limiter.admit(x.h.now(), charged)
	if !ok {
		x.h.state.count(func(s *Status) { s.Throttled.add(refused.limit) })
		return x.throttle(refused)
	}
	x.admitted = true
	x.limiter.prompts.use(prompt, x.h.PromptCache)
	x.h.state.count(func(s *Status) {
		s.Admitted++
		s.Tokens.Estimated += charged.tokens()
		s.Tokens.Input += x.cost.prompt
		s.Tokens.Cached += x.cached
	})
	return nil
}

// settle ends the generation, finished or not.
func (x *exchange) settle() {
	if x.admitted && !x.settled {
		x.settled = true
		x.limiter.settle(x.h.now(), x.cost, x.produced)
		x.h.state.count(func(s *Status) { s.Tokens.Output += x.produced })
	}
}

// header sends the status and the headers that every reply has.
func (x *exchange) header(status int) {
	hdr := x.w.Header()
	hdr.Set("x-request-id", uuid.NewString())
	hdr.Set("apim-request-id", uuid.NewString())
	hdr.Set("x-ms-region", x.h.Region)
	hdr.Set("x-simulator", x.h.Name)
	if x.limiter != nil && x.route.deployment != "" {
		hdr.Set("x-ms-deployment-name", x.route.deployment)
	}
	if x.bodyRead {
		hdr.Set("x-simulator-body-sha256", x.bodySum)
	}
	if x.limiter != nil && status != http.StatusTooManyRequests {
		setLimitHeaders(hdr, x.h.Hints, x.limiter, x.h.now())
	}
	// These three headers are about this host. A load balancer must not pass
	// them on, because clients would take them to be about its own host.
	hdr.Set("alt-svc", `h3=":443"; ma=86400`)
	hdr.Set("set-cookie", "simulator=1; Path=/; HttpOnly; SameSite=Lax")
	hdr.Set("strict-transport-security", "max-age=31536000; includeSubDomains; preload")
	x.status = status
	x.w.WriteHeader(status)
}

// reply sends a whole reply.
func (x *exchange) reply(rep *reply) {
	hdr := x.w.Header()
	for name, values := range rep.header {
		hdr[name] = values
	}
	if rep.contentType != "" {
		hdr.Set("content-type", rep.contentType)
	}
	hdr.Set("content-length", strconv.Itoa(len(rep.body)))
	x.header(rep.status)
	if x.r.Method == http.MethodHead {
		return
	}
	if x.fault.kind == faultJSONCut && rep.status == http.StatusOK {
		x.acted()
		_, _ = x.w.Write(rep.body[:len(rep.body)/2])
		_ = x.flush()
		x.abort()
	}
	if _, err := x.w.Write(rep.body); err != nil {
		x.cancelled = true
	}
}

// flush sends what was written so far. It is not an error if the writer cannot
// flush.
func (x *exchange) flush() error {
	err := http.NewResponseController(x.w).Flush()
	if errors.Is(err, http.ErrNotSupported) {
		return nil
	}
	return err
}

// wait waits for d. It reports whether the client is still connected.
func (x *exchange) wait(d time.Duration) bool {
	if d > 0 {
		select {
		case <-time.After(d):
		case <-x.r.Context().Done():
		}
	}
	return !x.gone()
}

// hang waits until the client leaves, or the config is unloaded.
func (x *exchange) hang() {
	select {
	case <-x.r.Context().Done():
		x.cancelled = true
	case <-x.h.ctx.Done():
	}
	x.abort()
}

// gone reports whether the client has left. It also records that in x.
func (x *exchange) gone() bool {
	if x.r.Context().Err() != nil {
		x.cancelled = true
	}
	return x.cancelled
}

// abort breaks the connection, so that the client sees that the reply is
// incomplete.
func (x *exchange) abort() {
	panic(http.ErrAbortHandler)
}
