package keys

import (
	"maps"
	"net/http"
	"slices"
	"strconv"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/fileserver"
)

// Unreachable returns the names of the handlers that answer every request
// before it can reach a handler for which looksFor returns true. It returns nil
// if requests reach such a handler.
func Unreachable(app *caddyhttp.App, looksFor func(caddyhttp.MiddlewareHandler) bool) []string {
	u := unreachable{looksFor: looksFor, answerers: make(map[string]bool)}
	for _, server := range app.Servers {
		u.walk(server.Routes, "")
	}
	if u.reached {
		return nil
	}
	return slices.Sorted(maps.Keys(u.answerers))
}

// unreachable finds handlers that no request reaches.
type unreachable struct {
	looksFor  func(caddyhttp.MiddlewareHandler) bool
	answerers map[string]bool
	reached   bool
}

// walk follows requests through routes. answered is the name of the handler
// that answers all of them before the routes, or empty. walk returns the name
// of the handler that answers all of them after the routes, or empty.
func (u *unreachable) walk(routes caddyhttp.RouteList, answered string) string {
	for _, route := range routes {
		answerer := answered
		for _, h := range route.Handlers {
			if subroute, ok := h.(*caddyhttp.Subroute); ok {
				answerer = u.walk(subroute.Routes, answerer)
				continue
			}
			if u.looksFor(h) {
				u.reached = u.reached || answerer == ""
				if answerer != "" {
					u.answerers[answerer] = true
				}
			}
			if answerer == "" && answersEverything(h) {
				answerer = nameOf(h)
			}
		}
		if len(route.MatcherSets) == 0 {
			answered = answerer
		}
	}
	return answered
}

// answersEverything reports whether a handler never passes a request on.
func answersEverything(h caddyhttp.MiddlewareHandler) bool {
	switch h := h.(type) {
	case *caddyhttp.StaticResponse:
		return string(h.StatusCode) != strconv.Itoa(http.StatusEarlyHints) // it goes before another answer
	case *fileserver.FileServer:
		return !h.PassThru
	}
	return answersAnybody(h)
}
