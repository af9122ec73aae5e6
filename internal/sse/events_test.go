package sse

import (
	"os"
	"strings"
	"testing"
)

// beginnings and endings are the events that are no content of a reply, or not
// only that.
var (
	beginnings = []string{"response.created", "response.in_progress", "response.queued"}
	endings    = []string{"response.completed", "response.incomplete", "response.failed", "error",
		"image_generation.completed", "image_edit.completed", "transcript.text.done"}
)

// contents are the events between them. For "…" stands each of the words after
// them.
var contents = []string{
	"image_edit.… partial_image",
	"image_generation.… partial_image",
	"response.audio.… delta done",
	"response.audio.transcript.… delta done",
	"response.code_interpreter_call.… completed in_progress interpreting",
	"response.code_interpreter_call_code.… delta done",
	"response.compaction.… compacting",
	"response.content_part.… added done",
	"response.custom_tool_call_input.… delta done",
	"response.file_search_call.… completed in_progress searching",
	"response.function_call_arguments.… delta done",
	"response.image_generation_call.… completed generating in_progress partial_image",
	"response.mcp_call.… completed failed in_progress",
	"response.mcp_call_arguments.… delta done",
	"response.mcp_list_tools.… completed failed in_progress",
	"response.output_item.… added done",
	"response.output_text.annotation.… added",
	"response.output_text.… delta done",
	"response.reasoning_summary_part.… added done",
	"response.reasoning_summary_text.… delta done",
	"response.reasoning_text.… delta done",
	"response.refusal.… delta done",
	"response.shell_call_command.… added delta done",
	"response.shell_call_output_content.… delta done",
	"response.… steer",
	"response.steer.… accepted failed pending",
	"response.web_search_call.… completed in_progress searching",
	"transcript.text.… delta segment",
}

// TestEveryEventOfOpenAIsSDKIsKnown reads what e2e/python/vocabulary.py has
// found in the package of the SDK. An event that is not in the lists is
// content, too, but somebody should look at it first: it may be another
// beginning or ending.
func TestEveryEventOfOpenAIsSDKIsKnown(t *testing.T) {
	type meaning struct {
		opening Opening
		ended   bool
	}
	known := make(map[string]meaning)
	for _, name := range beginnings {
		known[name] = meaning{Preamble, false}
	}
	for _, name := range endings {
		known[name] = meaning{Content, true}
	}
	known["error"], known["response.failed"] = meaning{Failure, true}, meaning{Failure, true}
	for _, names := range contents {
		words := strings.Fields(names)
		for _, word := range words[1:] {
			known[strings.Replace(words[0], "…", word, 1)] = meaning{Content, false}
		}
	}
	text, err := os.ReadFile("../openaiapi/testdata/openai-python.txt")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		name, ok := strings.CutPrefix(strings.TrimSpace(line), "event ")
		if !ok {
			continue
		}
		want, ok := known[name]
		if !ok {
			t.Errorf("no list has the event %s", name)
			continue
		}
		var w Watcher
		w.Watch([]byte("event: " + name + "\ndata: {\"type\":\"" + name + "\"}\n\n"))
		if got := (meaning{w.Opening, w.Ended}); got != want {
			t.Errorf("%s is %+v, want %+v", name, got, want)
		}
	}
}
