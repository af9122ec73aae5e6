package status

import (
	"net/http"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/admin"
	"github.com/openai-lb/caddy-openai-lb/internal/metrics"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

func init() {
	caddy.RegisterModule(API{})
}

// API adds these routes to Caddy's admin API:
//
//   - `GET /openai_lb/backends` lists the backends of all pools.
//   - `POST /openai_lb/backends/{name}/drain` takes a backend out of use: it gets
//     requests only when no other backend is left.
//   - `POST /openai_lb/backends/{name}/resume` puts it back into use.
//   - `POST /openai_lb/backends/{name}/reset` ends its cooldowns.
//   - `GET /openai_lb/callers` lists the callers, and how much of their limits is used.
//   - `POST /openai_lb/callers/{name}/reset` gives a caller its use back, at all replicas.
//   - `GET /openai_lb/replicas` lists the replicas that share state.
//   - `GET /openai_lb/problems` lists the problems that this replica knows, and what to do about each.
//   - `GET /openai_lb/version` returns the versions of openai_lb and of Caddy.
//
// `?pool=` limits the routes of backends and callers to a pool. With
// `?replica=*` they answer with the sum over all replicas, and with a host or
// the beginning of an id with what that replica knows. `?by=` and `?reason=` of
// an order are logged, and those of a drain are shown while the backend is
// drained.
type API struct{}

// CaddyModule returns the Caddy module information.
func (API) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "admin.api.openai_lb",
		New: func() caddy.Module { return new(API) },
	}
}

// The paths of the routes. The orders are below backendsPath.
const (
	backendsPath = "/openai_lb/backends"
	callersPath  = "/openai_lb/callers"
	replicasPath = "/openai_lb/replicas"
	problemsPath = "/openai_lb/problems"
	versionPath  = "/openai_lb/version"
)

// Routes implements caddy.AdminRouter.
func (a API) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{
		admin.Shows(backendsPath, a.list),
		{Pattern: backendsPath + "/{name}/{order}", Handler: caddy.AdminHandlerFunc(a.order)},
		admin.Shows(callersPath, a.callers),
		{Pattern: callersPath + "/{name}/{order}", Handler: caddy.AdminHandlerFunc(a.resetCaller)},
		admin.Shows(replicasPath, func(*http.Request) (any, error) { return seam.Statuses(), nil }),
		admin.Shows(problemsPath, a.problems),
		admin.Shows(versionPath, func(*http.Request) (any, error) { return thisBuild(), nil }),
	}
}

// list returns the backends.
func (API) list(r *http.Request) (any, error) {
	query, inPool, err := admin.QueryOf(r, "pool", "replica")
	if err != nil {
		return nil, err
	}
	if !query.Has("replica") {
		return Backends(time.Now(), inPool), nil
	}
	return allBackends(r.Context(), query.Get("replica"), inPool)
}

// problems returns the problems of the pools.
func (API) problems(r *http.Request) (any, error) {
	_, inPool, err := admin.QueryOf(r, "pool")
	if err != nil {
		return nil, err
	}
	return allProblems(time.Now(), inPool), nil
}

// callers returns the callers of all pools that limit them.
func (API) callers(r *http.Request) (any, error) {
	query, inPool, err := admin.QueryOf(r, "pool", "replica")
	if err != nil {
		return nil, err
	}
	if !query.Has("replica") {
		return callersIn(time.Now(), inPool), nil
	}
	others, err := askCallers(r.Context(), query.Get("replica"), inPool)
	return others.With(time.Now(), inPool), err
}

// resetCaller resets the use of the callers of a name, and answers with these
// callers.
func (API) resetCaller(w http.ResponseWriter, r *http.Request) error {
	name := r.PathValue("name")
	if action := r.PathValue("order"); action != "reset" {
		return admin.Refuse(http.StatusNotFound, "'%s' is not reset", action)
	}
	order, inPool, err := orderOf(w, r)
	if err != nil {
		return err
	}
	var all []Caller
	for _, entry := range pools.Default.Entries() {
		if inPool(entry.Name) && entry.Callers != nil && entry.Callers.Reset(name, order) {
			all = append(all, slices.DeleteFunc(Callers(time.Now(), entry.Name),
				func(c Caller) bool { return c.Name != name })...)
		}
	}
	if all == nil {
		return admin.Refuse(http.StatusNotFound, "no caller called '%s' has sent a request%s", name, admin.InQuery(r, " to"))
	}
	return admin.WriteJSON(w, all)
}

// orderOf returns the operator's order from a request, and a function that
// reports whether the order is for a pool.
func orderOf(w http.ResponseWriter, r *http.Request) (order pool.Order, inPool func(pool string) bool, err error) {
	if err := admin.AllowMethods(w, r, http.MethodPost); err != nil {
		return order, nil, err
	}
	query, inPool, err := admin.QueryOf(r, "pool", "by", "reason")
	if err != nil {
		return order, nil, err
	}
	order = pool.Order{Time: time.Now(), By: query.Get("by"), Reason: query.Get("reason")}
	if err := order.Check(); err != nil {
		return order, nil, admin.Refuse(http.StatusBadRequest, "query parameter %v", err)
	}
	return order, inPool, nil
}

// Build has the versions in this binary.
type Build struct {
	Version string `json:"version"`
	// Commit is omitted if it is unknown.
	Commit       string `json:"commit,omitempty"`
	CaddyVersion string `json:"caddy_version"`
}

func thisBuild() Build { return Build{metrics.Version(), metrics.Commit(), metrics.CaddyVersion()} }

// order executes an order for the backends of a name, and answers with these
// backends.
func (API) order(w http.ResponseWriter, r *http.Request) error {
	execute, known := orders[r.PathValue("order")]
	if !known {
		return admin.Refuse(http.StatusNotFound, "'%s' is not one of drain, resume, reset", r.PathValue("order"))
	}
	order, inPool, err := orderOf(w, r)
	if err != nil {
		return err
	}
	var names []string
	found := false
	for _, b := range Backends(time.Now(), inPool) {
		if b.Name == r.PathValue("name") {
			execute(b, order)
			found = true
		} else if !slices.Contains(names, b.Name) {
			names = append(names, b.Name)
		}
	}
	if !found {
		return admin.Refuse(http.StatusNotFound, "no backend is called '%s'%s: there are %s",
			r.PathValue("name"), admin.InQuery(r, " in"), admin.Listed(names))
	}
	return admin.WriteJSON(w, slices.DeleteFunc(Backends(time.Now(), inPool),
		func(b Backend) bool { return b.Name != r.PathValue("name") }))
}

// Interface guards
var (
	_ caddy.Module      = API{}
	_ caddy.AdminRouter = API{}
)
