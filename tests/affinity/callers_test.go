package affinity

import (
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// exchanged is a request, as a method, a path and a body, and the reply to it.
type exchanged struct{ request, reply string }

// do sends the requests of a caller, and has the only account answer as told.
func (w *world) do(key string, all ...exchanged) {
	w.T.Helper()
	for _, e := range all {
		var reply http.HandlerFunc
		if reply = lbtest.Says(200, e.reply); strings.HasPrefix(e.reply, "event: ") {
			reply = lbtest.Streams(e.reply)
		}
		w.Backends["a"].Replies(reply)
		w.ask(key, e.request).WantServed(w.T, "a")
	}
	w.Backends["a"].Recovers()
}

func (w *world) ask(key, request string) reply {
	method, rest, _ := strings.Cut(request, " ")
	path, body, _ := strings.Cut(rest, " ")
	return w.call(key, method, path, body)
}

const response = `{"id":"resp_of_bob","object":"response","output":[{"id":"msg_of_bob","content":[{"type":"output_text","annotations":[` +
	`{"type":"file_citation","file_id":"file-shared"},{"type":"container_file_citation","container_id":"cntr_shared","file_id":"cfile_shared"}]}]}],"conversation":{"id":"conv_shared"}}`

// TestWhatAReplyMentionsStaysEverybodys has bob's replies mention what all
// callers use, and alice use it afterwards.
func TestWhatAReplyMentionsStaysEverybodys(t *testing.T) {
	for name, c := range map[string]struct {
		bob []exchanged
		ids string // those that alice uses
	}{
		"a file that an answer cites": {[]exchanged{{`POST /v1/responses {"tools":[{"type":"file_search"}]}`, response}}, "file-shared cntr_shared cfile_shared conv_shared"},
		"the same in a stream": {[]exchanged{{`POST /v1/responses {"stream":true}`, "event: response.output_item.done\ndata: {\"item\":{\"id\":\"msg_of_bob\",\"content\":[{\"annotations\":[{\"file_id\":\"file-shared\"}]}]}}\n\n" +
			"event: response.completed\ndata: {\"response\":" + response + "}\n\n"}}, "file-shared conv_shared"},
		"the same of a stored response": {[]exchanged{{`POST /v1/responses {"background":true}`, `{"id":"resp_of_bob"}`}, {"GET /v1/responses/resp_of_bob", response}}, "file-shared conv_shared"},
		"files of a vector store":       {[]exchanged{{"POST /v1/vector_stores {}", `{"id":"vs_of_bob"}`}, {"GET /v1/vector_stores/vs_of_bob/files", `{"data":[{"id":"file-shared"}]}`}}, "file-shared"},
		"a file in a vector store": {[]exchanged{{"POST /v1/vector_stores {}", `{"id":"vs_of_bob"}`},
			{`POST /v1/vector_stores/vs_of_bob/files {"file_id":"file-shared"}`, `{"id":"file-shared","object":"vector_store.file","vector_store_id":"vs_of_bob"}`}}, "file-shared"},
		"what a search finds":                                 {[]exchanged{{"POST /v1/vector_stores {}", `{"id":"vs_of_bob"}`}, {"POST /v1/vector_stores/vs_of_bob/search {}", `{"data":[{"id":"chunk_shared","file_id":"file-shared"}]}`}}, "file-shared chunk_shared"},
		"a response that is cancelled":                        {[]exchanged{{"POST /v1/responses/resp_shared/cancel", strings.ReplaceAll(response, "_of_bob", "_shared")}}, "resp_shared msg_shared conv_shared"},
		"a batch that is cancelled":                           {[]exchanged{{"POST /v1/batches/batch_shared/cancel", `{"id":"batch_shared","output_file_id":"file-shared"}`}}, "batch_shared file-shared"},
		"a vector store that changes":                         {[]exchanged{{`POST /v1/vector_stores/vs_shared {"name":"x"}`, `{"id":"vs_shared"}`}}, "vs_shared"},
		"an upload that is completed":                         {[]exchanged{{`POST /v1/uploads/upload_shared/complete {"part_ids":[]}`, `{"id":"upload_shared","file":{"id":"file-shared"}}`}}, "upload_shared file-shared"},
		"a list":                                              {[]exchanged{{"GET /v1/batches", `{"data":[{"id":"batch_shared","output_file_id":"file-shared"}]}`}}, "batch_shared file-shared"},
		"a list after an object of his":                       {[]exchanged{{"POST /v1/batches {}", `{"id":"batch_of_bob"}`}, {"GET /v1/batches?after=batch_of_bob", `{"data":[{"id":"batch_shared","output_file_id":"file-shared"}]}`}}, "batch_shared file-shared"},
		"items of a conversation":                             {[]exchanged{{"GET /v1/conversations/conv_shared/items", `{"data":[{"id":"msg_shared","encrypted_content":"gAAAA_shared"}]}`}}, "msg_shared"},
		"what a list names as the content of an own response": {[]exchanged{{"POST /v1/responses {}", `{"id":"resp_of_bob"}`}, {"GET /v1/responses/resp_of_bob/input_items", `{"data":[{"id":"msg_shared"}]}`}}, "msg_shared"},
		"an item that was there before": {[]exchanged{{"GET /v1/conversations/conv_shared/items", `{"data":[{"id":"msg_shared"}]}`},
			{`POST /v1/responses/compact {"conversation":"conv_shared"}`, `{"id":"resp_of_bob","output":[{"id":"msg_shared"},{"id":"cmp_of_bob"}]}`}}, "msg_shared"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, oneAccount, func(t *testing.T, w *world) {
				w.do(bob, c.bob...)
				for id := range strings.FieldsSeq(c.ids) {
					w.ask(alice, "GET /v1/files/"+id).WantServed(t, "a")
				}
			})
		})
	}
}

// TestWhatARequestDoesNotShowStaysEverybodys has bob add a file to a vector
// store in a body that is not read as he means it: the reply has the file's id,
// as if he had made it.
func TestWhatARequestDoesNotShowStaysEverybodys(t *testing.T) {
	const file = `"file_id":"file-shared"}`
	for name, c := range map[string]struct {
		body    string
		headers []string
	}{
		"compressed":      {lbtest.Gzipped("{" + file), []string{"Content-Encoding", "gzip"}},
		"long":            {`{"attributes":{"x":"` + strings.Repeat("y", 5000) + `"},` + file, nil},
		"of two types":    {"{" + file, []string{"Content-Type", "multipart/form-data; boundary=x", "Content-Type", "application/json"}},
		"with a comment":  {`{/*"*/` + file, nil},
		"a misread form":  {"--x\r\nContent-Disposition: form-data; name=\"file_id\"; filename=\"\"\r\n\r\nfile-shared\r\n--x--\r\n", []string{"Content-Type", "multipart/form-data; boundary=x"}},
		"as it should be": {"{" + file, nil},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, strings.Replace(strict, "callers strict\n", "", 1), func(t *testing.T, w *world) {
				w.Backends["a"].Replies(lbtest.Says(200, `{"id":"file-shared","object":"vector_store.file"}`))
				r := w.Request("POST", "/v1/vector_stores/vs_shared/files", strings.NewReader(c.body))
				for i := 0; i+1 < len(c.headers); i += 2 {
					if i == 0 {
						r.Header.Del(c.headers[i])
					}
					r.Header.Add(c.headers[i], c.headers[i+1])
				}
				r.Header.Set("Authorization", "Bearer "+bob)
				w.Send(r).WantServed(t, "a")
				w.ask(alice, "GET /v1/files/file-shared").WantServed(t, "a")
			})
		})
	}
}

// TestNoSpellingOfAPathGetsPastTheOwner of the object in it.
func TestNoSpellingOfAPathGetsPastTheOwner(t *testing.T) {
	inBubble(t, oneAccount, func(t *testing.T, w *world) {
		w.do(alice, exchanged{"POST /v1/responses {}", `{"id":"resp_of_alice"}`})
		w.Backends["a"].Forget()
		for path, code := range map[string]string{
			"/v1/responses/resp_of_alice": "not_found", "/v1/responses/%72esp_of_alice": "not_found", "/v1/responses/resp_of_alice/": "not_found",
			"/v1/chat/completions/resp_of_alice": "not_found", "/openai/responses/resp_of_alice": "not_found",
			"/v1/%72esponses/resp_of_alice": "invalid_path", "/v1/Responses/resp_of_alice": "invalid_path", "/v1/responses%2Fresp_of_alice": "invalid_path",
			"/v1/responses%5Cresp_of_alice": "invalid_path", "/v1/responses;x/resp_of_alice": "invalid_path", "/v1/responses/resp_of_alice;x": "invalid_path",
			"/v1/responses/resp_of_alice%2F": "invalid_path", "/v1/chat/%63ompletions/resp_of_alice": "invalid_path", "/v1/chat/Completions/resp_of_alice": "invalid_path",
			"/openai/Responses/resp_of_alice": "invalid_path",
		} {
			reply := w.ask(bob, "GET "+path)
			if n := w.TotalCalls(); n > 0 || !strings.Contains(reply.Body, `"code":"`+code+`"`) {
				t.Errorf("%s: client got %d %s, and %d backends were asked", path, reply.Status, reply.Body, n)
			}
			w.Backends["a"].Forget()
		}
		w.ask(alice, "GET /v1/responses/%72esp_of_alice").WantServed(t, "a")
	})
}

// TestWhatARequestMakesIsItsCallers has alice make objects, and bob name them.
func TestWhatARequestMakesIsItsCallers(t *testing.T) {
	for name, c := range map[string]struct {
		alice []exchanged
		ids   string
	}{
		"a file":           {[]exchanged{{"POST /v1/files {}", `{"id":"file-of-alice"}`}}, "file-of-alice"},
		"a run":            {[]exchanged{{`POST /v1/threads/runs {"assistant_id":"asst_shared"}`, `{"id":"run_of_alice","thread_id":"thread_of_alice"}`}}, "run_of_alice thread_of_alice"},
		"a streamed run":   {[]exchanged{{`POST /v1/threads/runs {"stream":true}`, "event: thread.created\ndata: {\"id\":\"thread_of_alice\"}\n\nevent: thread.run.created\ndata: {\"id\":\"run_of_alice\"}\n\nevent: thread.message.created\ndata: {\"id\":\"msg_of_alice\"}\n\n"}}, "run_of_alice thread_of_alice msg_of_alice"},
		"items":            {[]exchanged{{`POST /v1/conversations/conv_shared/items {"items":[{"type":"message"}]}`, `{"data":[{"id":"msg_of_alice"}]}`}}, "msg_of_alice"},
		"a remix":          {[]exchanged{{"POST /v1/videos/video_shared/remix {}", `{"id":"video_of_alice"}`}}, "video_of_alice"},
		"a batch's output": {[]exchanged{{"POST /v1/batches {}", `{"id":"batch_of_alice"}`}, {"GET /v1/batches/batch_of_alice", `{"id":"batch_of_alice","output_file_id":"file-of-alice","error_file_id":"file-of-errors"}`}}, "file-of-alice file-of-errors"},
		"a job's results":  {[]exchanged{{"POST /v1/fine_tuning/jobs {}", `{"id":"ftjob-of-alice"}`}, {"GET /v1/fine_tuning/jobs/ftjob-of-alice", `{"id":"ftjob-of-alice","result_files":["file-of-alice"]}`}}, "file-of-alice"},
		"an upload's file": {[]exchanged{{"POST /v1/uploads {}", `{"id":"upload_of_alice"}`}, {`POST /v1/uploads/upload_of_alice/complete {}`, `{"id":"upload_of_alice","file":{"id":"file-of-alice"}}`}}, "upload_of_alice file-of-alice"},
		"the output of a response that was made in the background": {[]exchanged{{`POST /v1/responses {"background":true}`, `{"id":"resp_of_alice"}`},
			{"GET /v1/responses/resp_of_alice", `{"id":"resp_of_alice","output":[{"id":"rs_of_alice"}]}`}}, "resp_of_alice rs_of_alice"},
		"what a list had shown before the reply came": {[]exchanged{{"GET /v1/files", `{"data":[{"id":"file-of-alice"}]}`}, {"POST /v1/files {}", `{"id":"file-of-alice"}`}}, "file-of-alice"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, oneAccount, func(t *testing.T, w *world) {
				w.do(alice, c.alice...)
				for id := range strings.FieldsSeq(c.ids) {
					w.ask(bob, "GET /v1/files/"+id).WantError(t, 404, "not_found")
					w.ask(alice, "GET /v1/files/"+id).WantServed(t, "a")
				}
			})
		})
	}
}
