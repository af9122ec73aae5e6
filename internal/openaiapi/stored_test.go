package openaiapi

import (
	"reflect"
	"strings"
	"testing"
)

func TestStoredObjectsInAPath(t *testing.T) {
	teaches := func(ids ...string) Stored { return Stored{IDs: ids, Teaches: true} }
	list := Stored{List: true, Teaches: true}
	for request, want := range map[[3]string]Stored{
		{"POST", "/embeddings", ""}:                                             {},
		{"POST", "/audio/speech", ""}:                                           {},
		{"GET", "/models/file-12345", ""}:                                       {},
		{"GET", "", ""}:                                                         {},
		{"POST", "/chat/completions", ""}:                                       {TeachesIfStored: true},
		{"GET", "/chat/completions", ""}:                                        list,
		{"GET", "/chat/completions/chatcmpl-12345/messages", ""}:                teaches("chatcmpl-12345"),
		{"POST", "/responses", ""}:                                              teaches(),
		{"POST", "/responses/", ""}:                                             teaches(),
		{"POST", "/responses/input_tokens", ""}:                                 teaches(),
		{"GET", "/responses/resp_12345", "stream=true&starting_after=3"}:        teaches("resp_12345"),
		{"POST", "/responses/resp_12345/cancel", ""}:                            teaches("resp_12345"),
		{"GET", "/responses/resp%5F12345/input_items", "after=msg_12345"}:       teaches("resp_12345", "msg_12345"),
		{"GET", "/responses", ""}:                                               teaches(),
		{"GET", "/files/f", ""}:                                                 teaches(),
		{"GET", "/files", "limit=10"}:                                           list,
		{"HEAD", "/files", ""}:                                                  list,
		{"GET", "/files", "after=file-12345"}:                                   teaches("file-12345"),
		{"GET", "/files/file-12345/content", ""}:                                {IDs: []string{"file-12345"}},
		{"DELETE", "/files/file-12345", ""}:                                     teaches("file-12345"),
		{"GET", "/vector_stores/vs_12345/files/file-12345", ""}:                 teaches("vs_12345", "file-12345"),
		{"GET", "/threads/thread_12345/runs/run_12345/steps/step_12345", ""}:    teaches("thread_12345", "run_12345", "step_12345"),
		{"POST", "/threads/runs", ""}:                                           teaches(),
		{"GET", "/fine_tuning/jobs", ""}:                                        list,
		{"GET", "/fine_tuning/jobs/ftjob-12345/events", ""}:                     teaches("ftjob-12345"),
		{"GET", "/realtime", "model=gpt-realtime"}:                              {},
		{"GET", "/realtime", "call_id=rtc_12345"}:                               {IDs: []string{"rtc_12345"}},
		{"POST", "/realtime/calls", ""}:                                         teaches(),
		{"POST", "/realtime/calls/rtc_12345/hangup", ""}:                        teaches("rtc_12345"),
		{"GET", "/videos/characters/char_12345", ""}:                            teaches("char_12345"),
		{"GET", "/videos/video_12345/content", "variant=video"}:                 {IDs: []string{"video_12345"}},
		{"POST", "/videos/edits", ""}:                                           teaches(),
		{"GET", "/skills/skill_12345/versions/1", ""}:                           teaches("skill_12345"),
		{"GET", "/evals/eval_12345/runs/evalrun_12345/output_items/item_1", ""}: teaches("eval_12345", "evalrun_12345"), // too short for an id
	} {
		got := ReadStored(request[0], request[1], request[2])
		got.Creates, got.Subject, got.Makes = false, "", MakesNothing // see TestWhatCreatesAnObject
		if len(got.IDs) == 0 {
			got.IDs = nil
		}
		if len(want.IDs) == 0 {
			want.IDs = nil
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%q: got %+v, want %+v", request, got, want)
		}
	}
}

// TestWhatCreatesAnObject has requests, the objects that they are about, and
// whether they make something.
func TestWhatCreatesAnObject(t *testing.T) {
	type about struct {
		subject string
		creates bool
	}
	for request, want := range map[[2]string]about{
		{"POST", "/responses"}:                                                    {"", true},
		{"POST", "/chat/completions"}:                                             {"", true},
		{"POST", "/threads/runs"}:                                                 {"", true},
		{"POST", "/videos/edits"}:                                                 {"", true},
		{"GET", "/files"}:                                                         {"", false},
		{"POST", "/embeddings"}:                                                   {"", false},
		{"POST", "/responses/resp_12345/cancel"}:                                  {"resp_12345", false},
		{"POST", "/vector_stores/vs_12345"}:                                       {"vs_12345", false},
		{"POST", "/vector_stores/vs_12345/search"}:                                {"vs_12345", false},
		{"POST", "/vector_stores/vs_12345/files"}:                                 {"vs_12345", true},
		{"GET", "/vector_stores/vs_12345/files"}:                                  {"vs_12345", false},
		{"POST", "/vector_stores/vs_12345/files/file-12345"}:                      {"file-12345", false},
		{"POST", "/vector_stores/vs_12345/file_batches/vsfb_12345/cancel"}:        {"vsfb_12345", false},
		{"POST", "/threads/thread_12345/runs"}:                                    {"thread_12345", true},
		{"POST", "/threads/thread_12345/runs/run_12345/submit_tool_outputs"}:      {"run_12345", false},
		{"POST", "/uploads/upload_12345/parts"}:                                   {"upload_12345", true},
		{"POST", "/uploads/upload_12345/complete"}:                                {"upload_12345", false},
		{"POST", "/fine_tuning/jobs/ftjob-12345/cancel"}:                          {"ftjob-12345", false},
		{"POST", "/fine_tuning/checkpoints/ft:gpt-4o:x::ckpt-step-1/permissions"}: {"ft:gpt-4o:x::ckpt-step-1", true},
		{"POST", "/videos/video_12345/remix"}:                                     {"video_12345", true},
		{"POST", "/conversations/conv_12345/items"}:                               {"conv_12345", true},
	} {
		if s := ReadStored(request[0], request[1], ""); (about{s.Subject, s.Creates}) != want {
			t.Errorf("%q: got %+v, want %+v", request, s, want)
		}
	}
}

// TestWhatIsUsedTogether has what requests make in a collection.
func TestWhatIsUsedTogether(t *testing.T) {
	for request, want := range map[string]Made{
		"POST /files": MakesObject, "POST /vector_stores/": MakesObject, "POST /batches": MakesObject, "POST /assistants": MakesObject,
		"POST /containers": MakesObject, "POST /uploads": MakesObject, "POST /skills": MakesObject, "POST /evals": MakesObject,
		"POST /conversations": MakesHistory, "POST /threads": MakesHistory, "POST /responses": MakesResponse,
		"POST /responses/compact": MakesNothing, "POST /threads/runs": MakesNothing, "POST /chat/completions": MakesNothing, "POST /videos": MakesNothing,
		"POST /fine_tuning/jobs": MakesNothing, "POST /realtime/calls": MakesNothing, "POST /uploads/upload_12345/parts": MakesNothing, "GET /files": MakesNothing,
	} {
		method, operation, _ := strings.Cut(request, " ")
		if got := ReadStored(method, operation, "").Makes; got != want {
			t.Errorf("%s: got %d, want %d", request, got, want)
		}
	}
}

func TestTheIDInALocation(t *testing.T) {
	for location, want := range map[string]string{
		"/v1/realtime/calls/rtc_12345":                        "rtc_12345",
		"https://api.openai.com/v1/realtime/calls/rtc_12345":  "rtc_12345",
		"https://x.openai.azure.com/openai/v1/files/file-123": "file-123",
		"/elsewhere": "",
		"%zz":        "",
		"":           "",
	} {
		if got := IDInLocation(location); got != want {
			t.Errorf("%q: got %q, want %q", location, got, want)
		}
	}
}

func TestWhatARequestCanReach(t *testing.T) {
	for request, want := range map[[2]string]Reach{
		{"POST", "/chat/completions"}:                ReachesNamed,
		{"POST", "/responses"}:                       ReachesNamed,
		{"POST", "/responses/compact"}:               ReachesNamed,
		{"POST", "/embeddings/"}:                     ReachesNamed,
		{"GET", "/models"}:                           ReachesNamed,
		{"GET", "/models/gpt-4o"}:                    ReachesNamed,
		{"DELETE", "/models/ft:gpt-4o"}:              ReachesUnknown,
		{"GET", "/responses/resp_12345"}:             ReachesNamed,
		{"GET", "/responses"}:                        ReachesAll,
		{"POST", "/files"}:                           ReachesNamed,
		{"GET", "/files"}:                            ReachesAll,
		{"DELETE", "/files"}:                         ReachesAll,
		{"DELETE", "/files/file-12345"}:              ReachesNamed,
		{"GET", "/files/file%2D12345/content"}:       ReachesNamed,
		{"GET", "/files/short"}:                      ReachesUnknown,
		{"GET", "/threads/short/messages/msg_12345"}: ReachesUnknown,
		{"GET", "/chat/completions"}:                 ReachesAll,
		{"GET", "/chat/completions/chatcmpl-12345"}:  ReachesNamed,
		{"GET", "/chat/else/chatcmpl-12345"}:         ReachesUnknown,
		{"POST", "/threads/runs"}:                    ReachesNamed,
		{"GET", "/threads/runs"}:                     ReachesAll,
		{"POST", "/threads/thread_12345/runs"}:       ReachesNamed,
		{"GET", "/videos/characters/char_12345"}:     ReachesNamed,
		{"GET", "/fine_tuning/jobs"}:                 ReachesAll,
		{"POST", "/fine_tuning/jobs"}:                ReachesNamed,
		{"POST", "/fine_tuning/checkpoints/ft:gpt-4o:x::ckpt-step-1/permissions"}: ReachesNamed,
		{"POST", "/fine_tuning/alpha/graders/run"}:                                ReachesUnknown,
		{"POST", "/batches"}:                 ReachesUnseen,
		{"GET", "/batches"}:                  ReachesAll,
		{"GET", "/batches/batch_12345"}:      ReachesNamed,
		{"POST", "/evals/eval_12345/runs"}:   ReachesUnseen,
		{"GET", "/realtime"}:                 ReachesUnseen,
		{"POST", "/realtime/client_secrets"}: ReachesUnseen,
		{"POST", "/chatkit/sessions"}:        ReachesUnseen,
		{"GET", "/organization/users"}:       ReachesUnknown,
		{"GET", "/Files"}:                    ReachesUnknown,
		{"GET", "/files%2Ffile-12345"}:       ReachesUnknown,
		{"GET", ""}:                          ReachesUnknown,
	} {
		if got := ReachOf(request[0], request[1]); got != want {
			t.Errorf("%q: got %d, want %d", request, got, want)
		}
	}
	for operation, want := range map[string]bool{
		"/files": true, "/audio/transcriptions": true, "/audio/speech": false, "/uploads/upload_12345/parts": true, "/embeddings": true,
		"/chat/completions": false, "/responses": false, "/images/edits": false, "/containers/cntr_12345/files": false, "/uploads/upload_12345/complete": false, "/files/file-12345": false,
	} {
		if got := BodyNamesNothing("POST", operation); got != want {
			t.Errorf("a body of %s names nothing: %v", operation, got)
		}
	}
}
