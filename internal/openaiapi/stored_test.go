package openaiapi

import (
	"reflect"
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
		{"GET", "/chat/else", ""}:                                               {},
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
		{"POST", "/fine_tuning/alpha/graders/run", ""}:                          {},
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
