package openaiapi

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

func idsIn(body string) (found []string) {
	ParseJSON([]byte(body), nil).EachID([]byte(body), func(kind IDKind, text []byte) {
		found = append(found, fmt.Sprint(kind, " ", string(text)))
	})
	return found
}

func TestIDsInABody(t *testing.T) {
	for _, tt := range []struct {
		name, body string
		want       []string
	}{
		{"a chat has none", `{"model":"gpt-4o","messages":[{"role":"user","content":"file-abcdef"}]}`, nil},
		{"the response before", `{"previous_response_id":"resp_123456","input":"hi"}`, []string{"1 resp_123456"}},
		{"a conversation", `{"conversation":"conv_123456"}`, []string{"0 conv_123456"}},
		{"a conversation as an object", `{"conversation":{"id":"conv_123456"}}`, []string{"0 conv_123456"}},
		{"input items", `{"input":[{"type":"item_reference","id":"msg_12345"},{"type":"reasoning","id":"rs_123456","summary":[],"encrypted_content":"gAAAAABx"}]}`,
			[]string{"2 msg_12345", "2 rs_123456", "3 gAAAAABx"}},
		{"one input item", `{"input":{"id":"msg_12345"}}`, []string{"2 msg_12345"}},
		{"items of a conversation", `{"items":[{"id":"msg_12345"}]}`, []string{"2 msg_12345"}},
		{"a file of a message", `{"input":[{"role":"user","content":[{"type":"input_file","file_id":"file-12345"},{"type":"input_text","text":"file-67890"}]}]}`, []string{"0 file-12345"}},
		{"an image that a function returned", `{"input":[{"type":"function_call_output","call_id":"call_12345","output":[{"file_id":"file-12345"}]}]}`, []string{"0 file-12345"}},
		{"a file of a chat", `{"messages":[{"content":[{"type":"file","file":{"file_id":"file-12345","filename":"file-name.pdf"}}]}]}`, []string{"0 file-12345"}},
		{"an image of an assistant's message", `{"messages":[{"content":[{"type":"image_file","image_file":{"file_id":"file-12345"}}],"attachments":[{"file_id":"file-67890","tools":[]}]}]}`,
			[]string{"0 file-12345", "0 file-67890"}},
		{"tools", `{"tools":[{"type":"file_search","vector_store_ids":["vs_12345","vs_67890"]},{"type":"code_interpreter","container":"cntr_12345"},{"type":"code_interpreter","container":{"type":"auto","file_ids":["file-12345"]}}]}`,
			[]string{"0 vs_12345", "0 vs_67890", "0 cntr_12345", "0 file-12345"}},
		{"resources of tools", `{"tool_resources":{"file_search":{"vector_store_ids":["vs_12345"],"vector_stores":[{"file_ids":["file-12345"]}]},"code_interpreter":{"file_ids":["file-67890"]}}}`,
			[]string{"0 vs_12345", "0 file-12345", "0 file-67890"}},
		{"a batch", `{"input_file_id":"file-12345","endpoint":"/v1/responses"}`, []string{"0 file-12345"}},
		{"a fine-tuning job", `{"training_file":"file-12345","validation_file":"file-67890"}`, []string{"0 file-12345", "0 file-67890"}},
		{"files of a vector store", `{"file_ids":["file-12345"],"files":[{"file_id":"file-67890"}]}`, []string{"0 file-12345", "0 file-67890"}},
		{"an upload's parts", `{"part_ids":["part_12345"]}`, []string{"0 part_12345"}},
		{"a run", `{"assistant_id":"asst_12345","thread":{"messages":[{"attachments":[{"file_id":"file-12345"}]}]}}`, []string{"0 asst_12345", "0 file-12345"}},
		{"an eval", `{"data_source":{"type":"jsonl","source":{"type":"file_id","id":"file-12345"}}}`, []string{"0 file-12345"}},
		{"a call of code in a history", `{"input":[{"type":"code_interpreter_call","id":"ci_123456","container_id":"cntr_12345","code":"x"}]}`, []string{"2 ci_123456", "0 cntr_12345"}},
		{"a video", `{"video":{"id":"video_12345"},"characters":[{"id":"char_12345"}]}`, []string{"0 video_12345", "0 char_12345"}},
		{"what an assistant said in a chat", `{"messages":[{"role":"assistant","audio":{"id":"audio_12345"}}],"audio":{"voice":"alloy-or-id","format":"wav"}}`, []string{"0 audio_12345"}},
		{"a prompt and its variables", `{"prompt":{"id":"pmpt_12345","version":"2","variables":{"id":"user-12345","file":{"type":"input_file","file_id":"file-12345"}}}}`,
			[]string{"0 pmpt_12345", "0 file-12345"}},
		{"a prompt that is a text", `{"prompt":"pmpt_12345"}`, nil},
		{"prompts that are texts", `{"prompt":["pmpt_12345"]}`, nil},
		{"a session", `{"session":{"type":"realtime","prompt":{"id":"pmpt_12345"},"audio":{"output":{"voice":"alloy-or-id"}}}}`, []string{"0 pmpt_12345"}},
		{"a workflow", `{"workflow":{"id":"wf_12345"}}`, []string{"0 wf_12345"}},
		{"an approval", `{"input":[{"type":"mcp_approval_response","approval_request_id":"mcpr_12345","approve":true}]}`, []string{"2 mcpr_12345"}},
		{"a shell", `{"tools":[{"type":"shell","environment":{"type":"container_reference","container_id":"cntr_12345","skills":[{"skill_id":"skill_12345"}]}}]}`,
			[]string{"0 cntr_12345", "0 skill_12345"}},
		{"a mask", `{"tools":[{"type":"image_generation","input_image_mask":{"file_id":"file-12345"}}]}`, []string{"0 file-12345"}},
		{"pictures", `{"images":[{"file_id":"file-12345"}],"mask":{"file_id":"file-67890"}}`, []string{"0 file-12345", "0 file-67890"}},
		{"a reference of a video", `{"input_reference":{"file_id":"file-12345"}}`, []string{"0 file-12345"}},
		{"a message of a thread", `{"thread_id":"thread_12345","additional_messages":[{"attachments":[{"file_id":"file-12345"}]}]}`, []string{"0 thread_12345", "0 file-12345"}},
		{"a search for vectors", `{"vector_store_id":"vs_12345"}`, []string{"0 vs_12345"}},
		{"compaction", `{"input":[{"type":"compaction","id":"cmp_12345","encrypted_content":"gAAAAABx"}]}`, []string{"2 cmp_12345", "3 gAAAAABx"}},
		{"an escaped key and an escaped id", `{"previous\u005fresponse\u005Fid":"resp\u005f123456"}`, []string{"1 resp_123456"}},
		{"white space everywhere", "{ \"input\" :\n[ { \"id\" : \"msg_12345\" } , { \"id\":\"msg_67890\" } ] }", []string{"2 msg_12345", "2 msg_67890"}},
		{"each of two that contradict", `{"previous_response_id":"resp_123456","previous_response_id":"resp_67890"}`, []string{"1 resp_123456", "1 resp_67890"}},

		{"metadata is the user's", `{"metadata":{"file_id":"file-12345","previous_response_id":"resp_123456"}}`, nil},
		{"so are arguments", `{"input":[{"type":"function_call","arguments":"{\"file_id\":\"file-12345\"}","name":"file_id"}]}`, nil},
		{"and schemas", `{"tools":[{"type":"function","parameters":{"properties":{"file_id":{"enum":["file-12345"]}},"file_id":"file-12345"}}],"text":{"format":{"schema":{"file_ids":["file-12345"]}}}}`, nil},
		{"and texts", `{"input":"\"previous_response_id\":\"resp_123456\"","instructions":"file-12345"}`, nil},
		{"and what filters ask for", `{"tools":[{"type":"file_search","filters":{"key":"file_id","value":"file-12345"}}]}`, nil},
		{"words are no ids", `{"conversation":"none","tools":[{"container":"auto"}],"input":[{"id":"1"},{"id":"msg_1"},{"id":"no separator"}]}`, nil},
		{"neither is what is too long", `{"previous_response_id":"resp_` + strings.Repeat("x", 600) + `"}`, nil},
		{"numbers and null are none", `{"previous_response_id":null,"input":[1,2],"file_ids":[null],"conversation":12345678}`, nil},
		{"what comes behind what is no id", `{"input":[1,null,-2.5e3,true,["msg_00000"],[],{"id":"msg_12345"}],"file_ids":[null,"file-12345",[],"file-67890",null],"conversation":"conv_12345"}`,
			[]string{"2 msg_12345", "0 file-12345", "0 file-67890", "0 conv_12345"}},
		{"a list in a list is none", `{"input":[["msg_12345"],[{"id":"msg_12345"}]]}`, nil},

		{"what came before the cut", `{"previous_response_id":"resp_123456","input":[{"id":"msg_12345"},{"id":"msg_67`, []string{"1 resp_123456", "2 msg_12345"}},
		{"what is not quite JSON", `{"input":[{"id":"msg_12345"}},"previous_response_id":"resp_123456"`, []string{"2 msg_12345", "1 resp_123456"}},
	} {
		if got := idsIn(tt.body); !slices.Equal(got, tt.want) {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestIDsInAForm(t *testing.T) {
	const body = "--x\r\nContent-Disposition: form-data; name=\"file_id\"\r\n\r\nfile-12345\r\n" +
		"--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"file_id\"\r\n\r\nfile-67890\r\n--x--\r\n"
	var got []string
	r := parseForm([]byte(body), "x")
	r.EachID([]byte(body), func(_ IDKind, text []byte) { got = append(got, string(text)) })
	if want := []string{"file-12345"}; !slices.Equal(got, want) || !r.HasIDs() {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestDeepBodiesCostNoStack(t *testing.T) {
	deep := strings.Repeat(`{"content":[`, 500_000)
	if got := ParseJSON([]byte(`{"messages":`+deep+strings.Repeat("]}", 500_000)+`,"model":"m"}`), nil); got.Model != "m" || got.HasIDs() {
		t.Errorf("got %+v", got)
	}
	if got := idsIn(`{"messages":` + deep); got != nil {
		t.Errorf("got %q", got)
	}
}

// reference finds ids with encoding/json.
type idReference struct {
	grammar grammar
	found   []string
}

func (r *idReference) value(dec *json.Decoder, at place, depth int) {
	token, _ := dec.Token()
	switch v := token.(type) {
	case string:
		text := readID(kinds[min(int(at), len(kinds)-1)], []byte(v))
		if at.isText() && ((at == encrypted || at == mentionEncrypted) && len(text) >= shortestID || isID(text)) {
			r.found = append(r.found, fmt.Sprint(kinds[at], " ", v))
		}
	case json.Delim:
		if depth >= maxDepth || at > mention && (at != guess || v != '[') {
			at = elsewhere
		}
		if v == '[' {
			r.array(dec, at, depth+1)
			return
		}
		for dec.More() {
			key, _ := dec.Token()
			within := elsewhere
			if at != elsewhere {
				within = r.grammar.place(at, []byte(key.(string)))
			}
			r.value(dec, within, depth+1)
		}
		_, _ = dec.Token()
	}
}

func (r *idReference) array(dec *json.Decoder, at place, depth int) {
	for dec.More() {
		var raw json.RawMessage
		_ = dec.Decode(&raw)
		within := at
		if raw[0] == '[' {
			within = elsewhere
		}
		r.value(json.NewDecoder(strings.NewReader(string(raw))), within, depth)
	}
	_, _ = dec.Token()
}

// FuzzIDs compares the scanner with a parser, for requests and replies.
func FuzzIDs(f *testing.F) {
	for _, body := range []string{
		`{"previous_response_id":"resp_123456","input":[{"id":"msg_12345","content":[{"file_id":"file-12345"}]}]}`,
		`{"conversation":{"id":"conv_123456"},"tools":[{"container":{"file_ids":["file-12345",1,"file-12345"]}}]}`,
		`{"input":[{"id":"msg\u005f12345","encrypted_content":"gAAAAABxyz"},[{"id":"msg_12345"}],{"id":"msg_12345"}],"store":false}`,
		`{"id":"resp_123456","output":[{"id":"msg_12345","content":[{"annotations":[{"file_id":"cfile_12345"}]}]}],"store":true}`,
		`{"data":[{"id":"file-12345"}],"response":{"id":"resp_123456"},"item":{"id":"rs_123456"},"result_files":["file-12345"]}`,
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		idsIn(string(body))
		w := walker{body: body, grammar: inReply}
		end := w.value(skipSpace(body, 0), top, 0)
		if end > len(body) {
			t.Fatalf("%q ends at %d", body, end)
		}
		if !json.Valid(body) || !utf8.Valid(body) || body[skipSpace(body, 0)] != '{' || strings.Contains(string(body), `\ud`) {
			return // what is no UTF-8 and lone surrogates have no text
		}
		for name, g := range map[string]grammar{"request": inRequest, "reply": inReply} {
			want := idReference{grammar: g}
			want.value(json.NewDecoder(strings.NewReader(string(body))), top, 0)
			w := walker{body: body, grammar: g}
			w.value(skipSpace(body, 0), top, 0)
			var got []string
			for _, id := range w.ids {
				text := unquoteBytes(body[id.span.start:id.span.end])
				got = append(got, fmt.Sprint(id.kind, " ", string(text)))
			}
			if len(got) != len(want.found) {
				t.Errorf("%s %q: got %q, want %q", name, body, got, want.found)
			}
			if name == "request" && !slices.ContainsFunc([]string{"model", "stream", "max_", `"n"`, "store", `\u`}, func(s string) bool { return strings.Contains(string(body), s) }) {
				if found := idsIn(string(body)); len(found) != len(want.found) {
					t.Errorf("%q: got %q, want %q", body, found, want.found)
				}
			}
		}
	})
}

func TestIDsInAReply(t *testing.T) {
	for _, tt := range []struct {
		name, body string
		want       []string
	}{
		{"a response", `{"id":"resp_123456","object":"response","metadata":{"id":"resp_67890"},"output":[{"id":"rs_123456","encrypted_content":"gAAAAABx"},{"id":"msg_12345","content":[{"text":"resp_67890","annotations":[{"file_id":"cfile_12345","container_id":"cntr_12345"}]}]}],"previous_response_id":"resp_67890","store":true,"conversation":{"id":"conv_12345"}}`,
			[]string{"resp_123456", "part rs_123456", "gAAAAABx", "part msg_12345", "mentioned cfile_12345", "mentioned cntr_12345", "mentioned conv_12345"}},
		{"a response that is not stored", `{"id":"resp_123456","output":[{"id":"rs_123456","encrypted_content":"gAAAAABx"}],"store":false}`, []string{"gAAAAABx"}},
		{"an event", `{"type":"response.created","response":{"id":"resp_123456","store":true}}`, []string{"resp_123456"}},
		{"an event of a response that is not stored", `{"response":{"id":"resp_123456","store":false}}`, nil},
		{"an item", `{"type":"response.output_item.done","item":{"id":"rs_123456","encrypted_content":"gAAAAABx"}}`, []string{"part rs_123456", "gAAAAABx"}},
		{"a list", `{"object":"list","data":[{"id":"file-12345"},{"id":"file-67890"}],"first_id":"file-00000"}`, []string{"file-12345", "file-67890"}},
		{"a list of items", `{"data":[{"id":"rs_123456","encrypted_content":"gAAAAABx"}]}`, []string{"rs_123456", "mentioned gAAAAABx"}},
		{"a run", `{"id":"run_12345","thread_id":"thread_12345"}`, []string{"run_12345", "part thread_12345"}},
		{"a batch", `{"id":"batch_123456","input_file_id":"file-12345","output_file_id":"file-67890","error_file_id":null}`, []string{"batch_123456", "part file-67890"}},
		{"a job", `{"id":"ftjob-12345","result_files":["file-12345"]}`, []string{"ftjob-12345", "part file-12345"}},
		{"what an upload becomes", `{"id":"upload_123456","file":{"id":"file-12345","object":"file"}}`, []string{"upload_123456", "part file-12345"}},
		{"what is said in a chat", `{"id":"chatcmpl-12345","choices":[{"message":{"content":"x","audio":{"id":"audio_12345","data":"AAAA"}}}]}`, []string{"chatcmpl-12345", "part audio_12345"}},
		{"what is said in a stream", `{"id":"chatcmpl-12345","choices":[{"delta":{"audio":{"id":"audio_12345"}}}]}`, []string{"chatcmpl-12345", "part audio_12345"}},
		{"what is cut off", `{"id":"resp_123456","output":[{"id":"rs_123456"},{"id":"msg_`, []string{"resp_123456", "part rs_123456"}},
		{"nothing", ``, nil},
		{"no object", `"resp_123456"`, nil},
	} {
		var got []string
		EachIDInReply([]byte(tt.body), func(kind IDKind, stored bool, text []byte) {
			if !stored {
				return
			}
			got = append(got, map[IDKind]string{ObjectID: "", EncryptedContent: "", PartID: "part ", MentionedID: "mentioned "}[kind]+string(text))
		})
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}
