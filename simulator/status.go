package simulator

import (
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/openai-lb/caddy-openai-lb/simulator/internal/limits"
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/model"
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/wire"
)

// statusPath is where the status page is.
const statusPath = "/_simulator/status"

const (
	// keptRequests is how many requests the status shows.
	keptRequests = 100
	// keptResponses bounds the stored responses and other objects; the oldest
	// go first.
	keptResponses = 10_000
)

// Status is the status page of a simulator. It counts from the load of the
// config or from the latest reset.
type Status struct {
	Name         string    `json:"name"`
	Requests     int64     `json:"requests"`     // all but those for the status
	Admitted     int64     `json:"admitted"`     // let in by the limits
	Throttled    Throttled `json:"throttled"`    // refused by the limits
	Faults       int64     `json:"faults"`       // requests that met a fault
	Unauthorized int64     `json:"unauthorized"` // without a valid key
	Cancelled    int64     `json:"cancelled"`    // the client left before the end
	InFlight     int64     `json:"in_flight"`
	// Early counts requests that came before the wait of an earlier 429 of
	// their deployment was over, as far as its limit required that wait. They
	// arrived after the 429 was sent, by early_grace or more.
	Early       int64     `json:"early"`
	Tokens      Tokens    `json:"tokens"`
	Utilization float64   `json:"utilization"` // of the fullest provisioned deployment, in percent
	Last        []Request `json:"last"`        // the latest finished requests, the oldest first
}

// Throttled counts refused requests by the limit that was reached, or by the
// lack of flex.
type Throttled struct {
	Requests int64 `json:"requests"`
	Tokens   int64 `json:"tokens"`
	PTU      int64 `json:"ptu"`
	Flex     int64 `json:"flex"`
}

func (t *Throttled) add(limit string) {
	*map[string]*int64{limits.Requests: &t.Requests, limits.Tokens: &t.Tokens, limits.PTU: &t.PTU,
		flex: &t.Flex}[limit]++
}

// Tokens are the tokens of admitted requests: charged on arrival, in prompts,
// in the beginnings of prompts that were cached, and generated.
type Tokens struct {
	Estimated int64 `json:"estimated"`
	Input     int64 `json:"input"`
	Cached    int64 `json:"cached"`
	Output    int64 `json:"output"`
}

// Request is one request in the status. It contains no values of headers.
type Request struct {
	Time       time.Time `json:"time"` // of arrival
	Method     string    `json:"method"`
	Path       string    `json:"path"`
	Deployment string    `json:"deployment"`
	Status     int       `json:"status"` // 0: the connection was broken before a reply
	BodyBytes  int64     `json:"body_bytes"`
	BodySHA256 string    `json:"body_sha256"` // empty if the body was not read
	Cancelled  bool      `json:"cancelled"`
	Headers    []string  `json:"headers"`
}

// state is everything that a simulator keeps in memory.
type state struct {
	rules limits.Rules

	mu          sync.Mutex
	status      Status
	numbered    map[string]int64 // by kind: requests with a valid key, and those for a tier
	deployments map[string]*deployment
	responses   map[string][]byte
	order       []string // of the responses, the oldest first
}

// deployment has the counters and the memory of one deployment.
type deployment struct {
	*limits.Limiter
	prompts model.PromptCache
}

func newState(r limits.Rules) *state {
	s := &state{rules: r}
	s.reset()
	return s
}

// reset forgets everything but the requests that are in flight.
func (s *state) reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status = Status{InFlight: s.status.InFlight}
	s.numbered = make(map[string]int64)
	s.deployments = make(map[string]*deployment)
	s.responses = make(map[string][]byte)
	s.order = nil
}

func (s *state) count(change func(*Status)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.status)
}

// next numbers what is of one kind, from 1 on.
func (s *state) next(kind string) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.numbered[kind]++
	return s.numbered[kind]
}

func (s *state) deployment(name string) *deployment {
	s.mu.Lock()
	defer s.mu.Unlock()
	d, ok := s.deployments[name]
	if !ok {
		d = &deployment{Limiter: &limits.Limiter{Rules: s.rules}}
		s.deployments[name] = d
	}
	return d
}

func (s *state) finish(x *exchange) {
	request := Request{
		Time:       x.arrived,
		Method:     x.r.Method,
		Path:       x.r.URL.Path,
		Deployment: x.route.deployment,
		Status:     x.client.Status,
		BodyBytes:  int64(len(x.body.bytes)),
		BodySHA256: x.body.sum,
		Cancelled:  x.client.Cancelled,
		Headers:    slices.Sorted(maps.Keys(x.r.Header)),
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status.InFlight--
	if x.client.Cancelled {
		s.status.Cancelled++
	}
	s.status.Last = append(s.status.Last, request)
	s.status.Last = s.status.Last[max(0, len(s.status.Last)-keptRequests):]
}

func (s *state) snapshot(now time.Time) Status {
	s.mu.Lock()
	status := s.status
	status.Last = append([]Request{}, s.status.Last...)
	deployments := slices.Collect(maps.Values(s.deployments))
	s.mu.Unlock()
	for _, d := range deployments {
		status.Utilization = max(status.Utilization, d.Utilization(now))
	}
	return status
}

func (s *state) store(id string, body []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.responses[id] == nil {
		s.order = append(s.order, id)
	}
	s.responses[id] = body
	if len(s.order) > keptResponses {
		delete(s.responses, s.order[0])
		s.order = s.order[1:]
	}
}

func (s *state) stored(id string) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.responses[id]
}

func (s *state) forget(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.responses, id)
	s.order = slices.DeleteFunc(s.order, func(kept string) bool { return kept == id })
}

// serveStatus shows the counters, or resets them and the limits.
func (h *Handler) serveStatus(w http.ResponseWriter, r *http.Request) error {
	w.Header().Set("x-simulator", h.Name)
	switch r.Method {
	case http.MethodGet, http.MethodHead:
		status := h.state.snapshot(h.now())
		status.Name = h.Name
		w.Header().Set("content-type", wire.JSONType)
		w.Header().Set("cache-control", "no-store")
		return json.NewEncoder(w).Encode(status)
	case http.MethodDelete, http.MethodPost:
		h.state.reset()
		w.WriteHeader(http.StatusNoContent)
	default:
		w.Header().Set("allow", "GET, HEAD, POST, DELETE")
		w.WriteHeader(http.StatusMethodNotAllowed)
	}
	return nil
}
