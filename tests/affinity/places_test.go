package affinity

import (
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// everyPlace returns requests that name an object in their path, their query or
// their body, by its id.
func everyPlace() map[string][]string {
	post := func(path string, bodies ...string) (requests []string) {
		for _, body := range bodies {
			requests = append(requests, "POST "+path+" "+body)
		}
		return requests
	}
	return map[string][]string{
		"resp_12345678": append(post("/v1/responses", `{"previous_response_id":"ID"}`, `{"previous_response_id":"ID","stream":true}`),
			"GET /v1/responses/ID", "GET /v1/responses/ID?stream=true&starting_after=4", "GET /v1/responses/ID/input_items", "DELETE /v1/responses/ID",
			"POST /v1/responses/ID/cancel", `POST /v1/responses/compact {"previous_response_id":"ID"}`, `POST /v1/responses/input_tokens {"previous_response_id":"ID"}`,
			"GET /openai/responses/ID?api-version=2025-04-01-preview", "GET /openai/v1/responses/ID"),
		"rs_12345678": append(post("/v1/responses", `{"input":[{"type":"reasoning","id":"ID","summary":[]}]}`, `{"input":[{"type":"item_reference","id":"ID"}]}`),
			"GET /v1/responses/resp_of_others/input_items?after=ID"),
		"msg_12345678":      post("/v1/responses", `{"input":[{"type":"message","id":"ID","content":[]}]}`),
		"mcpr_12345678":     post("/v1/responses", `{"input":[{"type":"mcp_approval_response","approval_request_id":"ID","approve":true}]}`),
		"gAAAAAB_encrypted": post("/v1/responses", `{"input":[{"type":"reasoning","summary":[],"encrypted_content":"ID"}],"store":false}`, `{"input":[{"type":"compaction","encrypted_content":"ID"}]}`),
		"conv_12345678": append(post("/v1/responses", `{"conversation":"ID"}`, `{"conversation":{"id":"ID"}}`),
			"GET /v1/conversations/ID", "POST /v1/conversations/ID {}", "DELETE /v1/conversations/ID", "POST /v1/conversations/ID/items {}", "GET /v1/conversations/ID/items/msg_of_others"),
		"pmpt_12345678": post("/v1/responses", `{"prompt":{"id":"ID","version":"3"}}`),
		"file-12345678": append(post("/v1/responses", `{"input":[{"role":"user","content":[{"type":"input_file","file_id":"ID"}]}]}`, `{"input":[{"role":"user","content":[{"type":"input_image","file_id":"ID"}]}]}`,
			`{"prompt":{"id":"pmpt_of_others","variables":{"page":{"type":"input_file","file_id":"ID"}}}}`, `{"tools":[{"type":"code_interpreter","container":{"type":"auto","file_ids":["ID"]}}]}`,
			`{"tools":[{"type":"image_generation","input_image_mask":{"file_id":"ID"}}]}`),
			`POST /v1/chat/completions {"messages":[{"role":"user","content":[{"type":"file","file":{"file_id":"ID"}}]}]}`, `POST /v1/images/edits {"images":[{"file_id":"ID"}]}`,
			`POST /v1/batches {"input_file_id":"ID"}`, `POST /v1/fine_tuning/jobs {"training_file":"ID"}`, `POST /v1/fine_tuning/jobs {"validation_file":"ID"}`,
			`POST /v1/vector_stores {"file_ids":["ID"]}`, `POST /v1/vector_stores/vs_of_others/files {"file_id":"ID"}`, `POST /v1/vector_stores/vs_of_others/file_batches {"files":[{"file_id":"ID"}]}`,
			`POST /v1/containers {"file_ids":["ID"]}`, `POST /v1/containers/cntr_of_others/files {"file_id":"ID"}`,
			`POST /v1/assistants {"tool_resources":{"code_interpreter":{"file_ids":["ID"]}}}`, `POST /v1/threads/thread_of_others/messages {"attachments":[{"file_id":"ID"}]}`,
			`POST /v1/evals/eval_of_others/runs {"data_source":{"type":"jsonl","source":{"type":"file_id","id":"ID"}}}`, `POST /v1/videos {"input_reference":{"file_id":"ID"}}`,
			"GET /v1/files/ID", "GET /v1/files/ID/content", "DELETE /v1/files/ID", "GET /v1/files?after=ID", "GET /openai/files/ID?api-version=1"),
		"assistant-12345678": append(post("/v1/responses", `{"input":[{"content":[{"type":"input_file","file_id":"ID"}]}]}`), "GET /openai/files/ID/content?api-version=1"),
		"upload_12345678":    {"POST /v1/uploads/ID/parts {}", `POST /v1/uploads/ID/complete {"part_ids":["part_of_others"]}`, "POST /v1/uploads/ID/cancel {}"},
		"part_12345678":      {`POST /v1/uploads/upload_of_others/complete {"part_ids":["ID"]}`},
		"batch_12345678":     {"GET /v1/batches/ID", "POST /v1/batches/ID/cancel {}", "GET /v1/batches?after=ID"},
		"vs_12345678": append(post("/v1/responses", `{"tools":[{"type":"file_search","vector_store_ids":["ID"]}]}`),
			`POST /v1/assistants {"tool_resources":{"file_search":{"vector_store_ids":["ID"]}}}`, "GET /v1/vector_stores/ID", "POST /v1/vector_stores/ID/search {}", "GET /v1/vector_stores/ID/files/file-of_others",
			"DELETE /v1/vector_stores/ID", "GET /v1/vector_stores?before=ID"),
		"cntr_12345678": append(post("/v1/responses", `{"tools":[{"type":"code_interpreter","container":"ID"}]}`, `{"input":[{"type":"code_interpreter_call","container_id":"ID"}]}`,
			`{"tools":[{"type":"shell","environment":{"type":"container_reference","container_id":"ID"}}]}`), "GET /v1/containers/ID", "GET /v1/containers/ID/files/cfile_of_others/content", `POST /v1/messages {"container":"ID"}`),
		"skill_12345678":    append(post("/v1/responses", `{"tools":[{"type":"shell","environment":{"type":"container_auto","skills":[{"type":"skill_reference","skill_id":"ID"}]}}]}`), "GET /v1/skills/ID", "GET /v1/skills/ID/versions"),
		"asst_12345678":     {`POST /v1/threads/runs {"assistant_id":"ID"}`, "GET /v1/assistants/ID", "DELETE /openai/assistants/ID?api-version=1"},
		"thread_12345678":   {"POST /v1/threads/ID/runs {}", "GET /v1/threads/ID/messages", "DELETE /v1/threads/ID"},
		"run_12345678":      {"GET /v1/threads/thread_of_others/runs/ID", "POST /v1/threads/thread_of_others/runs/ID/submit_tool_outputs {}"},
		"ftjob-12345678":    {"GET /v1/fine_tuning/jobs/ID", "GET /v1/fine_tuning/jobs/ID/checkpoints", "POST /v1/fine_tuning/jobs/ID/cancel {}", "GET /v1/fine_tuning/jobs?after=ID"},
		"eval_12345678":     {"GET /v1/evals/ID", "POST /v1/evals/ID/runs {}", "DELETE /v1/evals/ID"},
		"evalrun_12345678":  {"GET /v1/evals/eval_of_others/runs/ID", "GET /v1/evals/eval_of_others/runs/ID/output_items"},
		"video_12345678":    {"GET /v1/videos/ID", "GET /v1/videos/ID/content", "POST /v1/videos/ID/remix {}", `POST /v1/videos/edits {"video":{"id":"ID"}}`, "DELETE /v1/videos/ID"},
		"char_12345678":     {`POST /v1/videos {"characters":[{"id":"ID"}]}`, "GET /v1/videos/characters/ID"},
		"chatcmpl-12345678": {"GET /v1/chat/completions/ID", "GET /v1/chat/completions/ID/messages", "DELETE /v1/chat/completions/ID", "GET /v1/chat/completions?after=ID"},
		"audio_12345678":    {`POST /v1/chat/completions {"messages":[{"role":"assistant","audio":{"id":"ID"}},{"role":"user","content":"?"}]}`},
		"voice_12345678": {`POST /v1/audio/speech {"model":"tts","input":"x","voice":{"id":"ID"}}`, `POST /v1/chat/completions {"audio":{"voice":{"id":"ID"},"format":"wav"}}`,
			`POST /v1/realtime/client_secrets {"session":{"audio":{"output":{"voice":{"id":"ID"}}}}}`, `POST /v1/realtime/calls/rtc_of_others/accept {"audio":{"output":{"voice":{"id":"ID"}}}}`},
		"rtc_12345678":    {"POST /v1/realtime/calls/ID/accept {}", "POST /v1/realtime/calls/ID/hangup {}", "GET /v1/realtime?call_id=ID"},
		"sess_12345678":   {"POST /v1/realtime/sessions/ID {}"},
		"cksess_12345678": {"POST /v1/chatkit/sessions/ID/cancel {}"},
		"cthr_12345678":   {"GET /v1/chatkit/threads/ID", "GET /v1/chatkit/threads/ID/items", "DELETE /v1/chatkit/threads/ID"},
		"wf_12345678":     {`POST /v1/chatkit/sessions {"workflow":{"id":"ID"}}`},
	}
}

// TestEveryPlaceOfAnIDLeadsToItsOwner has the second account own what requests
// name. All other requests would go to the first one.
func TestEveryPlaceOfAnIDLeadsToItsOwner(t *testing.T) {
	for id, requests := range everyPlace() {
		inBubble(t, threeAccountsInOrder, func(t *testing.T, w *world) {
			w.Backends["a"].Replies(lbtest.Throttled("1"))
			w.Backends["b"].Replies(lbtest.Says(200, `{"id":"`+id+`"}`))
			w.call(alice, "POST", "/v1/files", `{}`).WantServed(t, "b")
			w.Backends["a"].Replies(lbtest.Says(404, `{"error":{"message":"No such object"}}`))
			w.Backends["b"].Recovers()
			time.Sleep(2 * time.Second)
			for _, request := range requests {
				method, rest, _ := strings.Cut(strings.ReplaceAll(request, "ID", id), " ")
				path, body, _ := strings.Cut(rest, " ")
				before := w.TotalCalls()
				if reply := w.call(alice, method, path, body); reply.Status != 200 || reply.Backend != "b" || w.TotalCalls() != before+1 {
					t.Errorf("%s: client got %d of %q, %d backends were asked, want only b", request, reply.Status, reply.Backend, w.TotalCalls()-before)
				}
			}
		})
	}
}
