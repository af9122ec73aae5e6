package simulator

import (
	"cmp"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/limits"
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/model"
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/wire"
)

// exchange is one request and its reply.
type exchange struct {
	h       *Handler
	r       *http.Request
	client  *wire.Client
	arrived time.Time

	route   route
	body    body
	request model.Request
	tier    string // that serves it, if it can ask for one
	charge  charge
}

// body is the body of a request.
type body struct {
	bytes []byte
	sum   string // hex, once the body was read
	// fields has the members of the body, if the request is about responses or
	// objects.
	fields object
}

// charge is the cost of a request to its deployment.
type charge struct {
	deployment *deployment // nil while it is not known
	cost       limits.Cost
	cached     int64 // tokens of the prompt that were in the cache
	admitted   bool  // and not settled yet
	produced   int64 // tokens generated so far
}

// open starts an exchange. The caller must call close, also after a panic.
func (h *Handler) open(w http.ResponseWriter, r *http.Request) *exchange {
	x := &exchange{h: h, r: r, arrived: h.now(), route: parseRoute(r)}
	x.client = wire.NewClient(h.ctx, w, r, func() { h.state.count(func(s *Status) { s.Faults++ }) }, x.isSilent)
	h.state.count(func(s *Status) { s.Requests++; s.InFlight++ })
	return x
}

// close ends the exchange. It runs also when a panic aborts the reply.
func (x *exchange) close() {
	x.settle()
	x.h.state.finish(x)
}

// refuse checks the request in the order in which a deployment does. It returns
// the error reply of the first check that fails, or nil.
func (x *exchange) refuse() *wire.Reply {
	known := x.h.authorized(x.r)
	var faultErr error
	if known {
		faultErr = x.chooseFault()
	}
	problem := x.readBody()
	x.client.HangIfSilent()
	if !known {
		x.h.state.count(func(s *Status) { s.Unauthorized++ })
		return x.statusError(http.StatusUnauthorized)
	}
	if faultErr != nil {
		return wire.Invalid(http.StatusBadRequest, "X-Simulator-Fault: "+faultErr.Error())
	}
	x.findDeployment()
	if rep := x.faultReply(); rep != nil {
		return rep
	}
	switch {
	case x.route.op == model.OpUnknown:
		return x.notFound()
	case problem != nil:
		return problem
	case x.route.op.Limited():
		return x.admit()
	}
	return nil
}

func (x *exchange) notFound() *wire.Reply {
	if x.route.classic {
		return wire.AzureError(http.StatusNotFound, "404", "Resource not found")
	}
	return wire.Invalid(http.StatusNotFound, fmt.Sprintf("Invalid URL (%s %s)", x.r.Method, x.r.URL.Path))
}

// statusError is the reply of the API that is called, with an error status
// other than 429.
func (x *exchange) statusError(status int) *wire.Reply {
	if x.route.openai {
		return wire.OpenAIStatus(status, x.route.deployment)
	}
	return wire.AzureStatus(status)
}

// readBody receives the whole body, hashes it and parses it. If something is
// wrong with the body, it returns the error reply.
func (x *exchange) readBody() *wire.Reply {
	var err error
	x.body.bytes, err = io.ReadAll(x.r.Body)
	switch {
	case errors.As(err, new(*http.MaxBytesError)): // the request_body directive has a limit
		return wire.Invalid(http.StatusRequestEntityTooLarge, "The request body is too large.")
	case err != nil:
		x.client.Leave()
	}
	sum := sha256.Sum256(x.body.bytes)
	x.body.sum = hex.EncodeToString(sum[:])
	return x.parseBody(x.r.Header.Get("Content-Type"))
}

// parseBody parses the body. If something is wrong with it, it returns the
// error reply.
func (x *exchange) parseBody(contentType string) *wire.Reply {
	if op := x.route.op; op == model.OpResponse || op == model.OpObject {
		_ = json.Unmarshal(x.body.bytes, &x.body.fields) // a form has none
	}
	if !x.route.op.Generates() {
		return nil
	}
	var problem string
	x.request, problem = model.ParseRequest(x.route.op, contentType, x.body.bytes)
	if problem != "" {
		return wire.Invalid(http.StatusBadRequest, problem)
	}
	return nil
}

// findDeployment finds the deployment: the one in the path, or else the model
// in the body.
func (x *exchange) findDeployment() {
	if !x.route.op.Limited() {
		return
	}
	x.route.deployment = cmp.Or(x.route.deployment, x.request.Model)
	if x.route.deployment != "" && x.h.serves(x.route.deployment) {
		x.charge.deployment = x.h.state.deployment(x.route.deployment)
		if x.charge.deployment.Early(x.arrived) {
			x.h.state.count(func(s *Status) { s.Early++ })
		}
	}
}

// admit charges the request to its deployment's limits, if a tier serves it.
func (x *exchange) admit() *wire.Reply {
	switch {
	case x.route.deployment == "":
		return wire.Invalid(http.StatusBadRequest, "you must provide a model parameter")
	case x.charge.deployment == nil:
		return x.statusError(http.StatusNotFound)
	}
	if rep := x.chooseTier(); rep != nil {
		return rep
	}
	c := &x.charge
	c.cost.Prompt, c.cost.Output = x.request.Cost(x.route.op)
	var prompt []model.Prefix
	if x.h.PromptCache > 0 {
		prompt = x.request.Prefixes(x.route.op)
	}
	c.cached = c.deployment.prompts.Find(prompt)
	charged := c.cost
	if c.deployment.Drain > 0 {
		charged.Prompt -= c.cached // "Provisioned throughput": they cost no capacity
	}
	refused, ok := x.admitCost(charged)
	if !ok {
		return x.h.rules.Style.Throttle(c.deployment.Limiter, x.asked(), refused, x.h.now())
	}
	c.admitted = true
	c.deployment.prompts.Use(prompt, x.h.PromptCache)
	x.h.state.count(func(s *Status) {
		s.Admitted++
		s.Tokens.Input += c.cost.Prompt
		s.Tokens.Cached += c.cached
	})
	return nil
}

// admitCost charges a cost to the deployment's limits, or counts that they
// refuse it.
func (x *exchange) admitCost(cost limits.Cost) (refused limits.Refusal, ok bool) {
	refused, ok = x.charge.deployment.Admit(x.h.now(), cost)
	x.h.state.count(func(s *Status) {
		if ok {
			s.Tokens.Estimated += cost.Tokens()
		} else {
			s.Throttled.add(refused.Limit)
		}
	})
	return refused, ok
}

// asked returns the parts of the request that a 429 names.
func (x *exchange) asked() limits.Asked {
	return limits.Asked{Operation: x.route.op.AzureName(), APIVersion: x.route.apiVersion,
		Deployment: x.route.deployment}
}

// settle ends the generation, finished or not.
func (x *exchange) settle() {
	if x.charge.admitted {
		x.charge.admitted = false
		x.settleCost(x.charge.cost, x.charge.produced)
	}
}

// settleCost replaces an estimate with the tokens that were generated.
func (x *exchange) settleCost(cost limits.Cost, produced int64) {
	x.charge.deployment.Settle(x.h.now(), cost, produced)
	x.h.state.count(func(s *Status) { s.Tokens.Output += produced })
}

// header writes the headers that every reply has.
func (x *exchange) header(status int) {
	hdr := x.client.Header()
	hdr.Set("x-request-id", newUUID())
	hdr.Set("apim-request-id", newUUID())
	hdr.Set("x-ms-region", limits.Region)
	hdr.Set("x-simulator", x.h.Name)
	if x.body.sum != "" {
		hdr.Set("x-simulator-body-sha256", x.body.sum)
	}
	if d := x.charge.deployment; d != nil {
		hdr.Set("x-ms-deployment-name", x.route.deployment)
		if status != http.StatusTooManyRequests {
			d.SetHeaders(hdr, x.h.now())
		}
	}
	// These three headers are about this host. A load balancer must not pass
	// them on, because clients would take them to be about its own host.
	hdr.Set("alt-svc", `h3=":443"; ma=86400`)
	hdr.Set("set-cookie", "simulator=1; Path=/; HttpOnly; SameSite=Lax")
	hdr.Set("strict-transport-security", "max-age=31536000; includeSubDomains; preload")
}

// newUUID returns a random UUID (RFC 9562 section 5.4), the form of the IDs
// that Azure gives to requests.
func newUUID() string {
	var id [16]byte
	_, _ = rand.Read(id[:]) // it never fails
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}

// reply sends a whole reply.
func (x *exchange) reply(rep *wire.Reply) {
	x.header(rep.Status)
	x.client.Send(rep)
}

// operations are the paths that take a POST, without the part before them.
var operations = map[string]model.Operation{
	"chat/completions":     model.OpChat,
	"embeddings":           model.OpEmbedding,
	"audio/transcriptions": model.OpTranscription,
	"responses":            model.OpResponse,
}

// route is the parsed request line.
type route struct {
	op         model.Operation
	classic    bool // of Azure's API that requires an api-version
	openai     bool // under /v1/, where OpenAI has its API
	deployment string
	object     objectPath
	apiVersion string
}

func parseRoute(r *http.Request) route {
	path, query := openaiapi.ParsePath(r.URL.EscapedPath()), r.URL.Query()
	rt := route{
		classic:    path.Dialect == openaiapi.AzureClassic,
		openai:     path.Dialect == openaiapi.OpenAI,
		deployment: path.Name(),
		apiVersion: query.Get("api-version"),
	}
	operation := strings.TrimPrefix(path.Operation, "/")
	rt.object = parseObjectPath(operation)
	_, isObject := collections[rt.object.name]
	switch post, get := r.Method == http.MethodPost, r.Method == http.MethodGet; {
	case path.Dialect == openaiapi.Other || path.Dialect == openaiapi.Bare || rt.classic && rt.apiVersion == "":
	case rt.deployment != "":
		// The Responses API has no classic path.
		if post && operation != "responses" {
			rt.op = operations[operation]
		}
	case isObject:
		rt.op = model.OpObject
	case rt.object.name == "responses" && rt.object.id != "":
		rt.op = model.OpStoredResponse
	case post:
		rt.op = operations[operation]
	case get && operation == "models":
		rt.op = model.OpModels
	case get && operation == "responses":
		rt.op = model.OpResponses
	case get && operation == "realtime":
		rt.op, rt.deployment = model.OpRealtime, cmp.Or(query.Get("model"), query.Get("deployment"))
	}
	return rt
}
