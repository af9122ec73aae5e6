package affinity

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

const threeAccountsInOrder = `openai_lb {
	client_key alice client-key-of-alice
	client_key bob client-key-of-bob
	backend http://a
	backend http://b {
		priority 2
	}
	backend http://c {
		priority 3
	}
}`

// TestAnUnknownOwnerIsFoundByAsking has requests name what was made before the
// balancer knew of it.
func TestAnUnknownOwnerIsFoundByAsking(t *testing.T) {
	for name, ask := range map[string]struct{ method, path, body, kind string }{
		"a stored response":    {"GET", "/v1/responses/ID", "", "resp"},
		"its stream":           {"GET", "/v1/responses/ID?stream=true&starting_after=2", "", "resp"},
		"a deletion":           {"DELETE", "/v1/responses/ID", "", "resp"},
		"a response before":    {"POST", "/v1/responses", `{"previous_response_id":"ID"}`, "resp"},
		"a conversation":       {"POST", "/v1/responses", `{"conversation":"ID","stream":true}`, "conv"},
		"an item":              {"POST", "/v1/responses", `{"input":[{"id":"ID"}]}`, "rs"},
		"an encrypted content": {"POST", "/v1/responses", `{"input":[{"encrypted_content":"ID"}]}`, "gAAAA"},
		"a batch of a file":    {"POST", "/v1/batches", `{"input_file_id":"ID"}`, "file"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, threeAccountsInOrder, func(t *testing.T, w *world) {
				all := w.accounts("a", "b", "c")
				id := all["b"].put(ask.kind)
				put := strings.NewReplacer("ID", id)
				for range 3 {
					w.call(alice, ask.method, put.Replace(ask.path), put.Replace(ask.body)).WantServed(t, "b")
				}
				wantAsked(t, all, map[string]int{"a": 1, "b": 3})

				for _, a := range all {
					delete(a.stored, id)
				}
				reply := w.call(alice, ask.method, put.Replace(ask.path), put.Replace(ask.body))
				if reply.Status != 400 && reply.Status != 404 || reply.Backend != "b" {
					t.Errorf("client got %d from %q", reply.Status, reply.Backend)
				}
				wantAsked(t, all, map[string]int{"b": 1}) // it is still the owner
			})
		})
	}
}

func TestWhatNobodyHasIsAskedForOnceEach(t *testing.T) {
	inBubble(t, threeAccountsInOrder[:len(threeAccountsInOrder)-1]+"lb_retries 0\n}", func(t *testing.T, w *world) {
		all := w.accounts("a", "b", "c")
		for range 2 {
			reply := w.call(alice, "POST", "/v1/responses", `{"previous_response_id":"resp_of_nobody"}`)
			reply.wantErrorOf(t, "c", 400, "Previous response with id 'resp_of_nobody' not found.")
			wantAsked(t, all, map[string]int{"a": 1, "b": 1, "c": 1})
		}
		w.call(alice, "GET", "/v1/files/file_of_nobody", "").wantErrorOf(t, "c", 404, "No such object: file_of_nobody")
		wantAsked(t, all, map[string]int{"a": 1, "b": 1, "c": 1})
		for name := range all {
			if n := len(w.Logged("cooldown started")); n > 0 {
				t.Errorf("%s got a cooldown", name)
			}
		}
	})
}

func TestARequestMayNameAThousandObjects(t *testing.T) {
	ids := func(n int) string { return strings.Repeat(`"file-12345",`, n-1) + `"file-12345"` }
	inBubble(t, threeAccountsInOrder, func(t *testing.T, w *world) {
		all := w.accounts("a", "b", "c")
		all["a"].stored["file-12345"] = true
		w.call(alice, "POST", "/v1/vector_stores", `{"file_ids":[`+ids(1000)+`]}`).WantServed(t, "a")
		wantAsked(t, all, map[string]int{"a": 1})
		w.call(alice, "POST", "/v1/vector_stores", `{"file_ids":[`+ids(1001)+`]}`).WantError(t, 400, "too_many_ids")
		wantAsked(t, all, map[string]int{})
	})
}

// wantErrorOf checks for an error of a backend's, unchanged.
func (r reply) wantErrorOf(t *testing.T, backend string, status int, message string) {
	t.Helper()
	if r.Err != nil || r.Status != status || r.Backend != backend || !strings.Contains(r.Body, message) {
		t.Errorf("client got %d %s from %q (%v), want %d with %q from %s", r.Status, r.Body, r.Backend, r.Err, status, message, backend)
	}
}

func TestAnAccountThatCannotBeAskedMayBeTheOwner(t *testing.T) {
	for _, tt := range []struct {
		name   string
		fails  http.HandlerFunc
		status int
		code   string
	}{
		{"it throttles", lbtest.Throttled("20"), 429, "rate_limit_exceeded"},
		{"it hangs up", lbtest.Aborts, 502, "upstream_unreachable"},
		{"it fails", lbtest.Status(500), 500, ""},
		{"it refuses its key", lbtest.Status(401), 502, "upstream_credentials_rejected"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, threeAccountsInOrder, func(t *testing.T, w *world) {
				all := w.accounts("a", "b", "c")
				id := all["a"].put("resp")
				all["a"].does(tt.fails)
				reply := w.call(alice, "GET", "/v1/responses/"+id, "")
				if reply.Status != tt.status || !strings.Contains(reply.Body, tt.code) {
					t.Errorf("client got %d %s", reply.Status, reply.Body)
				}
				if got := reply.Header.Get("Retry-After"); tt.status == 429 && got != "20" {
					t.Errorf("Retry-After is %q", got)
				}
				wantAsked(t, all, map[string]int{"a": 1, "b": 1, "c": 1})
				all["a"].does(nil)
				time.Sleep(10 * time.Minute)
				w.call(alice, "GET", "/v1/responses/"+id, "").WantServed(t, "a")
			})
		})
	}
}

func TestARefusalThatIsAboutSomethingElseEndsTheAsking(t *testing.T) {
	inBubble(t, threeAccountsInOrder, func(t *testing.T, w *world) {
		all := w.accounts("a", "b", "c")
		all["a"].does(lbtest.Says(400, `{"error":{"message":"Unsupported parameter: 'x'.","code":"unsupported_parameter"}}`))
		w.call(alice, "POST", "/v1/responses", `{"previous_response_id":"resp_12345678"}`).wantErrorOf(t, "a", 400, "Unsupported")
		wantAsked(t, all, map[string]int{"a": 1})
		all["a"].does(lbtest.Says(404, `{"error":{"message":"not found"}}`))
		w.call(alice, "POST", "/v1/responses", `{"input":"no id at all"}`).wantErrorOf(t, "a", 404, "not found")
		wantAsked(t, all, map[string]int{"a": 1})
	})
}

func TestNothingIsAskedTwiceAfterItMayHaveBeenExecuted(t *testing.T) {
	inBubble(t, threeAccountsInOrder, func(t *testing.T, w *world) {
		all := w.accounts("a", "b", "c")
		id := all["c"].put("file")
		all["b"].does(lbtest.Aborts)
		w.call(alice, "POST", "/v1/batches", fmt.Sprintf(`{"input_file_id":%q}`, id)).WantError(t, 502, "upstream_unreachable")
		wantAsked(t, all, map[string]int{"a": 1, "b": 1})
	})
}

// TestAListIsThatOfTheFirstAccount whatever becomes of it.
func TestAListIsThatOfTheFirstAccount(t *testing.T) {
	inBubble(t, threeAccountsInOrder, func(t *testing.T, w *world) {
		all := w.accounts("a", "b", "c")
		for _, path := range []string{"/v1/files", "/v1/batches?limit=3", "/v1/fine_tuning/jobs", "/openai/vector_stores?api-version=1"} {
			w.call(alice, "GET", path, "").WantServed(t, "a")
		}
		wantAsked(t, all, map[string]int{"a": 4})
		all["a"].does(lbtest.Throttled("20"))
		for range 2 {
			w.call(alice, "GET", "/v1/files", "").WantError(t, 429, "rate_limit_exceeded")
		}
		wantAsked(t, all, map[string]int{"a": 1})
		after := all["c"].put("file")
		all["a"].does(nil)
		time.Sleep(time.Minute)
		w.call(alice, "GET", "/v1/files/"+after, "").WantServed(t, "c")
		w.call(alice, "GET", "/v1/files?after="+after, "").WantServed(t, "c")
	})
}

func TestWithOneAccountNobodyIsAskedTwice(t *testing.T) {
	const one = "openai_lb {\nclient_key alice client-key-of-alice\nclient_key bob client-key-of-bob\nbackend http://a {\naccount one\n}\nbackend http://b {\npriority 2\naccount one\n}\n}"
	inBubble(t, one, func(t *testing.T, w *world) {
		all := w.accounts("a", "b")
		w.call(alice, "GET", "/v1/files/file_of_nobody", "").wantErrorOf(t, "a", 404, "file_of_nobody")
		id, _ := w.make(alice, "/v1/files", "{}")
		w.call(bob, "GET", "/v1/files/"+id, "").WantError(t, 404, "not_found")
		wantAsked(t, all, map[string]int{"a": 2})
	})
}

func TestTheModelOfTheOwnerCounts(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a {\nmodel m1\n}\nbackend http://b {\nmodel m2\n}\n}", func(t *testing.T, w *world) {
		all := w.accounts("a", "b")
		id, _ := w.make("", "/v1/responses", `{"model":"m2"}`)
		body := `{"model":%q,"previous_response_id":%q}`
		w.call("", "POST", "/v1/responses", fmt.Sprintf(body, "m2", id)).WantServed(t, "b")
		reply := w.call("", "POST", "/v1/responses", fmt.Sprintf(body, "m1", id))
		reply.WantError(t, 404, "model_not_found")
		if want := "The model 'm1' is not available where the response '" + id + "' is stored. Available models there: m2."; !strings.Contains(reply.Body, want) {
			t.Errorf("the error is %s, want %s", reply.Body, want)
		}
		reply = w.call("", "POST", "/v1/responses", fmt.Sprintf(body, "m3", id)) // which no backend has
		reply.WantError(t, 404, "model_not_found")
		if strings.Contains(reply.Body, "stored") {
			t.Errorf("the error is %s, which is not about what is stored", reply.Body)
		}
		if !strings.Contains(reply.Body, "Available models: m2.") {
			t.Errorf("client got %s", reply.Body)
		}
		wantAsked(t, all, map[string]int{"b": 2})
	})
}
