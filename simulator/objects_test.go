package simulator

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"strings"
	"testing"
)

func made(t *testing.T, body string) (o struct {
	ID       string
	Object   string
	Status   string
	Deleted  bool
	Output   []struct{ ID string }
	OutputID string `json:"output_file_id"`
}) {
	t.Helper()
	if err := json.Unmarshal([]byte(body), &o); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	return o
}

func TestFilesBatchesAndVectorStoresAreKept(t *testing.T) {
	srv := listen(t, &Handler{})
	var form bytes.Buffer
	w := multipart.NewWriter(&form)
	_ = w.WriteField("purpose", "batch")
	part, _ := w.CreateFormFile("file", "a.jsonl")
	_, _ = io.WriteString(part, "{}\n{}\n")
	_ = w.Close()
	res, err := http.Post(srv.URL+"/v1/files", w.FormDataContentType(), &form)
	if err != nil {
		t.Fatal(err)
	}
	text, _ := io.ReadAll(res.Body)
	res.Body.Close()
	file := made(t, string(text))
	if !strings.HasPrefix(file.ID, "file-") || !strings.Contains(string(text), `"a.jsonl"`) || !strings.Contains(string(text), `"bytes":6`) {
		t.Fatalf("got %s", text)
	}
	_, body := call(t, srv, "POST", "/openai/v1/batches", fmt.Sprintf(`{"input_file_id":%q,"endpoint":"/v1/responses"}`, file.ID))
	batch := made(t, body)
	_, body = call(t, srv, "POST", "/v1/vector_stores", fmt.Sprintf(`{"name":"docs","file_ids":[%q]}`, file.ID))
	store := made(t, body)
	for _, want := range []struct {
		method, path, body string
		status             int
		text               string
	}{
		{"GET", "/v1/files/" + file.ID, "", 200, file.ID},
		{"GET", "/v1/files/" + file.ID + "/content", "", 200, "{}\n{}\n"},
		{"GET", "/v1/batches/" + batch.ID, "", 200, `"completed"`},
		{"GET", "/v1/files/" + batch.OutputID + "/content", "", 200, "{}\n"},
		{"POST", "/v1/vector_stores/" + store.ID + "/files", fmt.Sprintf(`{"file_id":%q}`, file.ID), 200, store.ID},
		{"GET", "/v1/vector_stores/" + store.ID + "/files/" + file.ID, "", 200, `"vector_store.file"`},
		{"POST", "/v1/responses", fmt.Sprintf(`{"model":"m","tools":[{"type":"file_search","vector_store_ids":[%q]}],"input":[{"content":[{"file_id":%q}]}]}`, store.ID, file.ID), 200, "resp_"},
		{"DELETE", "/v1/vector_stores/" + store.ID + "/files/" + file.ID, "", 200, `"deleted":true`},
		{"DELETE", "/v1/files/" + file.ID, "", 200, `"deleted":true`},
		{"GET", "/v1/files/" + file.ID, "", 404, "No such File object: " + file.ID},
		{"POST", "/v1/batches", fmt.Sprintf(`{"input_file_id":%q}`, file.ID), 404, "No such File object"},
		{"GET", "/v1/vector_stores/" + store.ID + "/files/" + file.ID, "", 404, "No file found with id"},
		{"POST", "/v1/vector_stores/" + store.ID + "/files", `{"file_id":"file-1"}`, 404, "No such File object: file-1"},
		{"GET", "/v1/vector_stores/vs_1", "", 404, "Vector store with id 'vs_1' not found."},
		{"GET", "/v1/batches/" + store.ID, "", 404, "No batch found with id"},
		{"POST", "/v1/responses", `{"model":"m","tools":[{"vector_store_ids":["vs_1"]}]}`, 404, "Vector store with id 'vs_1' not found."},
		{"POST", "/v1/responses", `{"model":"m","input":[{"content":[{"file_id":"file-1"}]}]}`, 404, "No such File object: file-1"},
		{"POST", "/v1/responses", `{"model":"m","metadata":{"file_id":"file-1"},"instructions":"file-1"}`, 200, "resp_"},
		{"PATCH", "/v1/files", "", 404, "Invalid URL"},
	} {
		res, body := call(t, srv, want.method, want.path, want.body)
		if res.StatusCode != want.status || !strings.Contains(body, want.text) {
			t.Errorf("%s %s: got %d %s, want %d with %q", want.method, want.path, res.StatusCode, body, want.status, want.text)
		}
	}
}

func TestConversationsAndTheItemsOfResponsesAreKept(t *testing.T) {
	srv := listen(t, &Handler{})
	_, body := call(t, srv, "POST", "/v1/conversations", `{}`)
	conversation := made(t, body)
	_, body = call(t, srv, "POST", "/v1/responses", fmt.Sprintf(`{"model":"m","conversation":%q}`, conversation.ID))
	response := made(t, body)
	for text, want := range map[string]string{
		fmt.Sprintf(`"previous_response_id":%q`, response.ID):                             "",
		fmt.Sprintf(`"input":[{"type":"item_reference","id":%q}]`, response.Output[0].ID): "",
		`"input":[{"type":"message","role":"assistant","id":"msg_1","content":[]}]`:       "",
		`"input":[{"type":"item_reference","id":"msg_1"}]`:                                "404 Item with id 'msg_1' not found.",
		`"previous_response_id":"resp_1"`:                                                 "400 previous_response_not_found",
		`"conversation":"conv_1"`:                                                         "404 Conversation with id 'conv_1' not found.",
	} {
		res, body := call(t, srv, "POST", "/v1/responses", `{"model":"m",`+text+`}`)
		status, words, refused := strings.Cut(want, " ")
		if refused != (res.StatusCode != 200) || refused && (fmt.Sprint(res.StatusCode) != status || !strings.Contains(body, words)) {
			t.Errorf("%s: got %d %s", text, res.StatusCode, body)
		}
	}
}

func TestABackgroundResponseCanBeResumedAndCancelled(t *testing.T) {
	srv := listen(t, &Handler{OutputTokens: 5})
	_, whole := call(t, srv, "POST", "/v1/responses", `{"model":"m","background":true,"stream":true}`)
	_, id, _ := strings.Cut(whole, `"id":"`)
	id, _, _ = strings.Cut(id, `"`)
	events := strings.SplitAfter(whole, "\n\n")
	for after := range len(events) - 1 {
		_, rest := call(t, srv, "GET", fmt.Sprintf("/v1/responses/%s?stream=true&starting_after=%d", id, after), "")
		if want := strings.Join(events[after+1:], ""); rest != want {
			t.Fatalf("after %d: got %s\nwant %s", after, rest, want)
		}
	}
	_, body := call(t, srv, "POST", "/v1/responses", `{"model":"m","background":true}`)
	response := made(t, body)
	for _, step := range []struct{ method, path, status string }{
		{"GET", "", "completed"}, {"POST", "/cancel", "cancelled"}, {"GET", "", "cancelled"}, {"GET", "/input_items", ""}, {"DELETE", "", ""},
	} {
		res, body := call(t, srv, step.method, "/v1/responses/"+response.ID+step.path, "")
		if got := made(t, body); res.StatusCode != 200 || got.Status != step.status || response.Status != "queued" {
			t.Errorf("%s: got %d %s", step, res.StatusCode, body)
		}
	}
	_, body = call(t, srv, "POST", "/v1/responses", `{"model":"m"}`)
	if res, body := call(t, srv, "POST", "/v1/responses/"+made(t, body).ID+"/cancel", ""); res.StatusCode != 400 || !strings.Contains(body, "Only background responses") {
		t.Errorf("got %d %s", res.StatusCode, body)
	}
}
