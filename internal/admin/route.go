// Package admin has what features share that show something to operators:
// routes of Caddy's admin API that answer with JSON (route.go), sums over all
// replicas that share state (replicas.go), and subcommands of `caddy openai-lb`
// that call the routes (client.go, address.go).
//
// A feature registers an `admin.api` module of its own with its routes, adds
// its subcommands to package cli, and registers with [Answer] how it answers
// the questions of other replicas.
//
// # Questions to replicas
//
// [AskAll] asks the chosen replicas at the same time, waits for patience at
// most, and passes the rows of those that have answered to its caller, which
// adds them up. A replica that is silent is missing in the sum, and the answer
// says so: Included is false. Only if a single replica was asked for, its
// silence is an error.
//
// Anyone who can write to the store of the replicas can make up answers, so
// [MaxAnswer] and the other constants bound what is read. An answer beyond them
// counts as missing.
//
// [Answer] is for init functions. All other functions may be called
// concurrently, and keep no state.
package admin

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// Shows returns a route that answers GET with a value.
func Shows(path string, value func(*http.Request) (any, error)) caddy.AdminRoute {
	return caddy.AdminRoute{Pattern: path,
		Handler: caddy.AdminHandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
			if err := AllowMethods(w, r, http.MethodGet, http.MethodHead); err != nil {
				return err
			}
			v, err := value(r)
			if err != nil {
				return err
			}
			return WriteJSON(w, v)
		})}
}

// AllowMethods refuses other methods.
func AllowMethods(w http.ResponseWriter, r *http.Request, methods ...string) error {
	if slices.Contains(methods, r.Method) {
		return nil
	}
	allowed := strings.Join(methods, ", ")
	w.Header().Set("Allow", allowed)
	return Refuse(http.StatusMethodNotAllowed, "method %s is not allowed here, only %s", r.Method, allowed)
}

// QueryOf returns the query, and a function that reports whether its `?pool=`
// selects a pool. Without `?pool=`, it selects every pool. Each of the allowed
// parameters may be in the query once, and no other parameter.
func QueryOf(r *http.Request, allowed ...string) (query url.Values, inPool func(pool string) bool, err error) {
	if query, err = url.ParseQuery(r.URL.RawQuery); err != nil {
		return nil, nil, Refuse(http.StatusBadRequest, "the query cannot be read: %v", err)
	}
	for name, values := range query {
		if !slices.Contains(allowed, name) || len(values) > 1 {
			return nil, nil, Refuse(http.StatusBadRequest, "query parameter '%s': expected at most one of each of %s",
				name, strings.Join(allowed, ", "))
		}
	}
	var names []string
	for _, entry := range pools.Default.Entries() {
		names = append(names, entry.Name)
	}
	wanted := query.Get("pool")
	if query.Has("pool") && !slices.Contains(names, wanted) {
		return nil, nil, Refuse(http.StatusNotFound, "no pool is called '%s': there are %s", wanted, Listed(names))
	}
	return query, func(pool string) bool { return pool == wanted || !query.Has("pool") }, nil
}

// InQuery returns the pool in the query after a preposition. It is empty
// without one.
func InQuery(r *http.Request, preposition string) string {
	if query := r.URL.Query(); query.Has("pool") {
		return fmt.Sprintf("%s the pool '%s'", preposition, query.Get("pool"))
	}
	return ""
}

// Listed returns the names as text.
func Listed(names []string) string { return cmp.Or(strings.Join(names, ", "), "none") }

// Refuse returns an error that Caddy's admin API sends to its client.
func Refuse(status int, format string, args ...any) error {
	return caddy.APIError{HTTPStatus: status, Err: fmt.Errorf(format, args...)}
}

// WriteJSON answers with a value. Its errors are about the value: a client that
// has left needs no answer.
func WriteJSON(w http.ResponseWriter, value any) error {
	body, err := json.Marshal(value)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write(append(body, '\n'))
	return nil
}
