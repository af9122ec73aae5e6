package affinity

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/state"
	"github.com/openai-lb/caddy-openai-lb/state/statetest"
)

// strict is a pool of three accounts whose callers reach only what they made.
var strict = threeAccountsInOrder[:len(threeAccountsInOrder)-1] + "request_buffers 4KiB\naffinity {\ncallers strict\n}\n}"

// TestAStrictPoolKeepsEveryIDFromOtherCallers wherever requests name it, and
// whether it is another caller's or nobody's.
func TestAStrictPoolKeepsEveryIDFromOtherCallers(t *testing.T) {
	inBubble(t, strict, func(t *testing.T, w *world) {
		for id, requests := range everyPlace() {
			for _, request := range requests {
				reply := w.ask(bob, strings.ReplaceAll(request, "ID", id))
				if reply.Status != 404 && reply.Status != 403 || w.TotalCalls() > 0 {
					t.Errorf("%s of what is not known: client got %d %s, %d backends were asked", request, reply.Status, reply.Body, w.TotalCalls())
				}
			}
			w.AllReply(func(rw http.ResponseWriter, r *http.Request) {
				if body, _ := io.ReadAll(r.Body); strings.Contains(string(body), `"stream":true`) {
					lbtest.Streams(lbtest.StreamContent, lbtest.StreamEnd)(rw, r)
					return
				}
				lbtest.Says(200, `{"id":"`+id+`","object":"stored"}`)(rw, r)
			})
			w.ask(alice, "POST /v1/files {}").WantServed(t, "a")
			w.Backends["a"].Forget()
			for _, request := range requests {
				request = strings.ReplaceAll(request, "ID", id)
				if reply := w.ask(bob, request); reply.Status != 404 && reply.Status != 403 || w.TotalCalls() > 0 {
					t.Errorf("%s of what is alice's: client got %d %s, %d backends were asked", request, reply.Status, reply.Body, w.TotalCalls())
				}
				if strings.Contains(request, "_of_others") {
					continue
				}
				reply := w.ask(alice, request)
				available := !strings.Contains(request, "/realtime") && !strings.Contains(request, "/chatkit") && !strings.Contains(request, "/evals") &&
					!strings.HasPrefix(request, "POST /v1/batches {") && !strings.Contains(request, "s?after=") && !strings.Contains(request, "s?before=") && !strings.Contains(request, "/openai/files?")
				if served := reply.Status == 200 && w.TotalCalls() == 1; served != available {
					t.Errorf("%s: alice got %d %s", request, reply.Status, reply.Body)
				}
				w.Backends["a"].Forget()
			}
		}
	})
}

// TestInAStrictPoolACallerGoesOnWithWhatItMade and with what belongs to that.
func TestInAStrictPoolACallerGoesOnWithWhatItMade(t *testing.T) {
	for name, requests := range map[string][]exchanged{
		"a conversation": {{"POST /v1/conversations {}", `{"id":"conv_of_alice"}`}, {`POST /v1/conversations/conv_of_alice/items {"items":[{"type":"message"}]}`, `{"data":[{"id":"msg_of_alice"}]}`},
			{`POST /v1/responses {"conversation":"conv_of_alice","input":[{"type":"item_reference","id":"msg_of_alice"}]}`, `{"id":"resp_of_alice","conversation":{"id":"conv_of_alice"}}`},
			{`POST /v1/responses {"previous_response_id":"resp_of_alice"}`, `{"id":"resp_2_of_alice"}`}, {"GET /v1/conversations/conv_of_alice/items?after=msg_that_came_otherwise", `{"data":[]}`},
			{"GET /v1/conversations/conv_of_alice/items/msg_that_came_otherwise", `{}`}, {"POST /v1/responses/resp_of_alice/cancel", `{"id":"resp_of_alice"}`}},
		"what nobody stores": {{`POST /v1/responses {"store":false}`, `{"id":"resp_unstored","store":false,"output":[{"id":"rs_of_alice","encrypted_content":"gAAAA_of_alice"},{"id":"msg_of_alice"}]}`},
			{`POST /v1/responses {"store":false,"input":[{"id":"rs_of_alice","encrypted_content":"gAAAA_of_alice"},{"type":"message","id":"msg_of_alice","content":[]}]}`, `{"store":false}`}},
		"a stream that nobody stores": {{`POST /v1/responses {"store":false,"stream":true}`, "event: response.created\ndata: {\"response\":{\"id\":\"resp_unstored\",\"store\":false}}\n\nevent: response.output_item.done\ndata: {\"item\":{\"id\":\"fc_of_alice\"}}\n\nevent: response.completed\ndata: {}\n\n"},
			{`POST /v1/responses {"store":false,"input":[{"id":"fc_of_alice","type":"function_call"}]}`, `{"store":false}`}},
		"an upload": {{"POST /v1/uploads {}", `{"id":"upload_of_alice"}`}, {"POST /v1/uploads/upload_of_alice/parts " + strings.Repeat("x", 5000), `{"id":"part_of_alice"}`}, {`POST /v1/uploads/upload_of_alice/complete {"part_ids":["part_of_alice"]}`, `{"id":"upload_of_alice","file":{"id":"file-of-alice"}}`},
			{`POST /v1/vector_stores {"file_ids":["file-of-alice"]}`, `{"id":"vs_of_alice"}`}, {`POST /v1/responses {"tools":[{"type":"file_search","vector_store_ids":["vs_of_alice"]}]}`, `{"id":"resp_of_alice"}`}},
		"a job":       {{"POST /v1/fine_tuning/jobs {}", `{"id":"ftjob-of-alice"}`}, {"GET /v1/fine_tuning/jobs/ftjob-of-alice", `{"id":"ftjob-of-alice","result_files":["file-of-alice"]}`}, {"GET /v1/files/file-of-alice/content", "x"}},
		"a run":       {{"POST /v1/threads/runs {}", `{"id":"run_of_alice","thread_id":"thread_of_alice"}`}, {"GET /v1/threads/thread_of_alice/messages?after=msg_of_the_run", "{}"}},
		"a container": {{"POST /v1/containers {}", `{"id":"cntr_of_alice"}`}, {"GET /v1/containers/cntr_of_alice/files/cfile_that_code_made/content", "x"}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, strict, func(t *testing.T, w *world) { w.do(alice, requests...) })
		})
	}
}

// TestAStrictPoolRefusesWhatItCannotSee and says why, before a backend is
// asked.
func TestAStrictPoolRefusesWhatItCannotSee(t *testing.T) {
	long := `{"input":"` + strings.Repeat("x", 5000) + `","previous_response_id":"resp_of_alice"}`
	websocket := []string{"", "Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA=="}
	form := func(field, value string) []string {
		return []string{"--x\r\nContent-Disposition: form-data; name=\"" + field + "\"\r\n\r\n" + value + "\r\n--x--\r\n", "Content-Type", "multipart/form-data; boundary=x"}
	}
	part := func(headers string) []string {
		return []string{"--x\r\n" + headers + "\r\n\r\nfile-of-bob\r\n--x--\r\n", "Content-Type", "multipart/form-data; boundary=x"}
	}
	const disposition = `Content-Disposition: form-data; name="file_id"`
	const toContainer = "POST /v1/containers/cntr_of_alice/files"
	twoForms := "--x\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n1\r\n--y\r\n" + disposition + "\r\n\r\nfile-of-bob\r\n--y--\r\n\r\n--x--\r\n"
	for name, c := range map[string]struct {
		request string
		body    []string // and headers in pairs
		status  int
		code    string
	}{
		"a list":                        {"GET /v1/files", nil, 403, "callers_kept_apart"},
		"a list after an own object":    {"GET /v1/files?after=file-of-alice", nil, 403, "callers_kept_apart"},
		"a list of chats":               {"GET /v1/chat/completions", nil, 403, "callers_kept_apart"},
		"another WebSocket":             {"GET /v1/files/file-of-alice", websocket, 403, "callers_kept_apart"},
		"a session":                     {"POST /v1/realtime/client_secrets", []string{"{}"}, 403, "callers_kept_apart"},
		"a batch":                       {"POST /v1/batches", []string{`{"input_file_id":"file-of-alice"}`}, 403, "callers_kept_apart"},
		"what is not known":             {"GET /v1/organization/users", nil, 403, "callers_kept_apart"},
		"a model that goes":             {"DELETE /v1/models/ft:gpt-4o:alice", nil, 403, "callers_kept_apart"},
		"a long body":                   {"POST /v1/responses", []string{long}, 413, "request_too_large"},
		"a compressed body":             {"POST /v1/responses", []string{lbtest.Gzipped("{}"), "Content-Encoding", "gzip"}, 415, "unsupported_content_encoding"},
		"UTF-16":                        {"POST /v1/responses", []string{"{\x00}\x00"}, 400, "invalid_body"},
		"UTF-16 from its other end":     {"POST /v1/responses", []string{"\x00{\x00}"}, 400, "invalid_body"},
		"a comment":                     {"POST /v1/responses", []string{`{"input":[/*"*/{"id":"msg_of_bob"}/*"*/]}`}, 400, "invalid_body"},
		"two objects":                   {"POST /v1/responses", []string{`{}{"previous_response_id":"resp_of_bob"}`}, 400, "invalid_body"},
		"JSON as a form":                {"POST /v1/responses", []string{`{"previous_response_id":"resp_of_bob"}`, "Content-Type", "multipart/form-data; boundary=x"}, 400, "invalid_body"},
		"a form without a boundary":     {"POST /v1/responses", []string{form("file_id", "file-of-bob")[0], "Content-Type", "multipart/form-data; ="}, 400, "invalid_body"},
		"an object in a form":           {"POST /v1/videos", form("input_reference", `{"file_id":"file-of-bob"}`), 400, "invalid_body"},
		"a member of one":               {"POST /v1/videos", form("input_reference[file_id]", "file-of-bob"), 400, "invalid_body"},
		"a parameter twice":             {toContainer, part(disposition + "; a=1; a=2"), 400, "invalid_body"},
		"a parameter without a name":    {toContainer, part(disposition + "; ="), 400, "invalid_body"},
		"two dispositions":              {toContainer, part("Content-Disposition: form-data; name=x\r\n" + disposition), 400, "invalid_body"},
		"an id that is a file":          {toContainer, part(disposition + `; filename=""`), 400, "invalid_body"},
		"a space after a header's name": {toContainer, part(strings.Replace(disposition, ":", " :", 1)), 400, "invalid_body"},
		"a form after its end":          {toContainer, append([]string{"--x\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\nb\r\n--x--y\r\n" + part(disposition)[0]}, part("")[1:]...), 400, "invalid_body"},
		"an id in base64":               {toContainer, part(strings.Replace(disposition, "file_id", "x", 1) + "\r\nContent-Transfer-Encoding: base64"), 400, "invalid_body"},
		"an encoded name":               {toContainer, part(strings.Replace(disposition, "file_id", "x", 1) + "; name*=UTF-8''file_id"), 400, "invalid_body"},
		"an encoded boundary":           {toContainer, []string{twoForms, "Content-Type", "multipart/form-data; boundary=x; boundary*=UTF-8''y"}, 400, "invalid_body"},
		"a boundary that ends in space": {toContainer, []string{twoForms, "Content-Type", `multipart/form-data; boundary="x "`}, 400, "invalid_body"},
		"an id in UTF-7":                {"POST /v1/responses", []string{`{"previous+AF8-response+AF8-id":"resp_of_bob"}`, "Content-Type", "application/json; charset=utf-7"}, 400, "invalid_body"},
		"a form of two types":           {toContainer, []string{twoForms, "Content-Type", "multipart/form-data; boundary=x", "Content-Type", "multipart/form-data; boundary=y"}, 400, "invalid_body"},
		"JSON of two types":             {"POST /v1/responses", []string{"{}", "Content-Type", "application/json", "Content-Type", "multipart/form-data; boundary=y"}, 400, "invalid_body"},
		"an id in a form":               {"POST /v1/containers/cntr_of_alice/files", form("file_id", "file-of-bob"), 404, "not_found"},
		"an id behind null":             {"POST /v1/responses", []string{`{"input":[null,{"id":"msg_of_bob"}]}`}, 404, "not_found"},
		"what is not like an id":        {"POST /v1/responses", []string{`{"previous_response_id":"bob"}`}, 404, "not_found"},
		"the same in a path":            {"GET /v1/files/bob", nil, 403, "callers_kept_apart"},
		"an object below one of bob's":  {"GET /v1/threads/thread_of_bob/messages/msg_of_alice", nil, 404, "not_found"},
		"a second after":                {"GET /v1/files?after=file-of-alice&after=file-of-bob", nil, 403, "callers_kept_apart"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, strict, func(t *testing.T, w *world) {
				for _, id := range []string{"resp_of_alice", "file-of-alice", "cntr_of_alice", "msg_of_alice"} {
					w.do(alice, exchanged{"POST /v1/files {}", `{"id":"` + id + `"}`})
				}
				w.Backends["a"].Forget()
				method, path, _ := strings.Cut(c.request, " ")
				r := w.Request(method, path, nil)
				if len(c.body) > 0 && c.body[0] != "" {
					r = w.Request(method, path, strings.NewReader(c.body[0]))
				}
				for i := 1; i+1 < len(c.body); i += 2 {
					if i == 1 {
						r.Header.Del(c.body[i])
					}
					r.Header.Add(c.body[i], c.body[i+1])
				}
				r.Header.Set("Authorization", "Bearer "+alice)
				reply := w.Send(r)
				reply.WantError(t, c.status, c.code)
				if n := w.TotalCalls(); n != 0 {
					t.Errorf("%d backends were asked", n)
				}
			})
		})
	}
}

// TestAStrictPoolServesWhatNamesNothing however long it is.
func TestAStrictPoolServesWhatNamesNothing(t *testing.T) {
	inBubble(t, strict, func(t *testing.T, w *world) {
		for _, c := range []struct{ path, body, contentType string }{
			{"/v1/chat/completions", `{"model":"gpt-4o","messages":[{"role":"user","content":"resp_of_bob"}]}`, "application/json"},
			{"/openai/deployments/gpt-4o/chat/completions", `{"messages":[]}`, "application/json"},
			{"/v1/responses", `{"model":"gpt-4o","input":"hi"}`, "application/json"},
			{"/v1/embeddings", `{"model":"e","input":"` + strings.Repeat("x", 9000) + `"}`, "application/json"},
			{"/v1/embeddings", `{"model":"e","input":[[1,2],[3]]}`, "application/json"},
			{"/v1/files", "--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n" + strings.Repeat("x", 9000) + "\r\n--x--\r\n", "multipart/form-data; boundary=x"},
			{"/v1/audio/transcriptions", string(bytes.Repeat([]byte{0}, 9000)), "multipart/form-data; boundary=x"},
		} {
			r := w.Request("POST", c.path, strings.NewReader(c.body))
			r.Header.Set("Authorization", "Bearer "+alice)
			r.Header.Set("Content-Type", c.contentType)
			if reply := w.Send(r); reply.Status != 200 {
				t.Errorf("%s: client got %d %s", c.path, reply.Status, reply.Body)
			}
		}
		w.ask(alice, "GET /v1/models").WantServed(t, "a")
	})
}

func TestAStrictPoolNeedsNames(t *testing.T) {
	for options, want := range map[string]string{
		"affinity {\ncallers strict\n}":                                      "callers strict requires client_key, client_keys_file or caller_identity",
		"client_key alice " + alice + "-1234\naffinity {\ncallers lax\n}":    "callers 'lax' is not one of strict",
		"client_key alice " + alice + "-1234\naffinity {\ncallers strict\n}": "",
	} {
		err := lbtest.ValidateCaddyfile(t, fmt.Sprintf("{\nadmin off\n}\nhttp://:%d {\nopenai_lb {\nbackend http://a\n%s\n}\n}", 1234, options))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", options, err, want)
		}
	}
}

// engine is one of state that nobody has started yet.
type engine struct{}

func init() { caddy.RegisterModule(engine{}) }

func (engine) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.openai_lb.state.silent", New: func() caddy.Module { return new(engine) }}
}
func (engine) Identity() string                                { return "silent" }
func (engine) Open() (state.Store, error)                      { return statetest.NewHub().Store(), nil }
func (engine) UnmarshalCaddyfile(d *caddyfile.Dispenser) error { d.Next(); return nil }

// TestARequestIsToComeBackWhileTheStoreDoesNotAnswer if its pool is strict.
func TestARequestIsToComeBackWhileTheStoreDoesNotAnswer(t *testing.T) {
	inBubble(t, strings.Replace(strict, "request_buffers", "state silent\nrequest_buffers", 1), func(t *testing.T, w *world) {
		reply := w.ask(bob, "GET /v1/responses/resp_of_alice")
		reply.WantError(t, 503, "owners_unknown")
		if got := reply.Header.Get("Retry-After"); got != "1" || w.TotalCalls() > 0 {
			t.Errorf("Retry-After is %q, and %d backends were asked", got, w.TotalCalls())
		}
		w.do(alice, exchanged{"POST /v1/responses {}", `{"id":"resp_of_alice"}`}, exchanged{"GET /v1/responses/resp_of_alice", "{}"})
		w.ask(bob, "GET /v1/responses/resp_of_alice").WantError(t, 404, "not_found")
	})
}
