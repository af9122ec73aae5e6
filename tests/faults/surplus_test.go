package faults

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// Such a reply is malformed (RFC 9113 section 8.1.1), and what came of it is
// not known to be all.
func TestAReplyOverHTTP2ThatIsLongerThanItSaysIsNoCleanOne(t *testing.T) {
	config, trust := backendTLS(t)
	s := lbtest.NewSites(t, "https")
	var rows []lbtest.Row
	for _, c := range []struct {
		name, method, path, kind string
		length                   int
		pieces                   []string
		// status is 200 if the reply is cut after its beginning, as the client
		// sees
		status int
	}{
		{"short JSON", "POST", "chat/completions", "application/json", 2, []string{"{}x"}, 502},
		{"JSON, and more in another frame", "POST", "chat/completions", "application/json", 2, []string{"{}", "x"}, 502},
		{"no body, and then one", "POST", "chat/completions", "application/json", 0, []string{"x"}, 502},
		{"long JSON", "POST", "chat/completions", "application/json", 100_000, []string{strings.Repeat("x", 100_001)}, 200},
		{"long JSON, and more in another frame", "POST", "chat/completions", "application/json", 100_000, []string{strings.Repeat("x", 100_000), "x"}, 200},
		{"a stream", "POST", "chat/completions", "text/event-stream", len(lbtest.StreamContent), []string{lbtest.StreamContent, "data: more\n\n"}, 502},
		{"a stream of two events", "POST", "chat/completions", "text/event-stream", 2 * len(lbtest.StreamContent), []string{lbtest.StreamContent, lbtest.StreamContent, "data: more\n\n"}, 200},
		{"a file", "GET", "files/file-1/content", "application/octet-stream", 5, []string{"hello", "more"}, 200},
		{"a file at once", "GET", "files/file-1/content", "application/octet-stream", 5, []string{"hellomore"}, 200},
		{"an empty file", "GET", "files/file-1/content", "application/octet-stream", 0, []string{"more"}, 200},
		{"an error", "POST", "files", "application/json", 2, []string{"{}", "x"}, 502},
	} {
		status := "200"
		if c.name == "an error" {
			status = "500"
		}
		steps := []func(frames){sendsHeaders(status, "content-type", c.kind, "content-length", fmt.Sprint(c.length))}
		for _, piece := range c.pieces {
			for ; len(piece) > 16<<10; piece = piece[16<<10:] {
				steps = append(steps, brings(piece[:16<<10]))
			}
			steps = append(steps, brings(piece))
		}
		url := s.Add("openai_lb {\nbackend https://" + rawBackend(t, overTLS(config, answers(append(steps, ends)...))) + "\n" + trust + "\n}")
		for version := 1; version <= 2; version++ {
			rows = append(rows, lbtest.Row{Name: fmt.Sprintf("%s, client by HTTP/%d", c.name, version), Test: func(t *testing.T) {
				r := lbtest.NewRequest(t, c.method, strings.Replace(url, "chat/completions", c.path, 1), nil)
				if c.method == http.MethodPost {
					r.Body = io.NopCloser(strings.NewReader(`{"stream":true}`))
				}
				res, err := s.NewClient(t, version).Do(r)
				if err != nil {
					if c.status != 200 {
						t.Error(err)
					}
					return // the cut came before anything was sent
				}
				defer res.Body.Close()
				_, err = io.ReadAll(res.Body)
				if res.StatusCode != c.status || (err == nil) != (c.status != 200) {
					t.Errorf("the client got %d, and then %v", res.StatusCode, err)
				}
			}})
		}
	}
	s.Serve(t)
	lbtest.SideBySide(t, rows)
}
