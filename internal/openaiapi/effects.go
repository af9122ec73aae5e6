package openaiapi

import (
	"bytes"
	"strings"
)

// If a model executes an inference request twice, it only costs two answers.
// But a request may also have lasting effects: its answer becomes a part of a
// conversation, or a tool acts while the model works. Such a request must not
// be executed twice.
//
// So a request counts as one with effects unless everything in it is known to
// have none: each tool and each input item has a known type, and the request
// names no stored object that may act. New parameters appear every month. An
// unknown parameter with a plain value has no effect, because a switch or a
// number cannot act. An unknown object may contain anything, and counts as an
// effect.

// hasEffect reports whether a member means that the request may have an effect.
// at is the place of its object and member its own place. quoted is its name as
// it is written.
func hasEffect(at, member place, quoted, value []byte) bool {
	name := quoted
	if bytes.IndexByte(quoted, '\\') >= 0 {
		name = decodeName(quoted)
	}
	switch {
	case at == top && member == elsewhere:
		return hasObject(value) && !isPlainObject(string(name)) || isOddlyNamed(name, actingMembers)
	case at == top && member == memberBackground:
		return string(value) != "false" && !isNull(value)
	case at == top && (member == inside || member == holder || member == named):
		return namesActor(string(name), value)
	case at == tool && string(name) == "type":
		return !isHarmless(value, harmlessTools)
	case at == tool && (string(name) == "container" || string(name) == "environment"):
		return !isNull(value) && !isNewContainer(value)
	case at == tool && (string(name) == "container_id" || string(name) == "network_policy"):
		return !isNull(value)
	case at == item && string(name) == "type":
		return !isHarmless(value, harmlessItems)
	case at == tool:
		return isOddlyNamed(name, actingInTool)
	}
	return at == item && isOddlyNamed(name, actingInItem)
}

// namesActor reports whether a member that may name objects names one that may
// act or grow: a conversation, a stored prompt with its tools, or a container.
// The prompt of a completion is a text.
func namesActor(name string, value []byte) bool {
	switch name {
	case "conversation", "workflow", "assistant_id", "thread_id", "container_id":
		return !isNull(value)
	case "container":
		return !isNull(value) && !isNewContainer(value)
	}
	return hasObject(value)
}

var (
	actingMembers = []string{"tools", "conversation", "prompt", "container", "mcp_servers", "background", "input", "workflow"}
	actingInTool  = []string{"type", "tools", "container", "environment"}
	actingInItem  = []string{"type", "tools"}
)

// isOddlyNamed reports whether servers that ignore case or blanks may read the
// name as one of these.
func isOddlyNamed(name []byte, names []string) bool {
	if isPlainName(name) { // nearly all
		return false
	}
	for _, wanted := range names {
		if string(name) != wanted && isOdd(name, wanted) {
			return true
		}
	}
	return false
}

// isPlainName reports whether all servers read the name alike.
func isPlainName(name []byte) bool {
	for _, c := range name {
		if c != '_' && (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return false
		}
	}
	return true
}

func isNull(value []byte) bool { return string(value) == "null" }

// hasObject reports whether a value is an object, or a list that may contain
// one.
func hasObject(value []byte) bool {
	return value[0] == '{' && value[skipSpace(value, 1)] != '}' || value[0] == '[' && bytes.IndexByte(value, '{') >= 0
}

// isPlainObject reports whether a parameter that has objects has no effect. It
// lists parameters of OpenAI, Azure, Anthropic and servers in use.
func isPlainObject(name string) bool {
	switch name {
	case "metadata", "response_format", "text", "reasoning", "tool_choice", "logit_bias", "prediction", "web_search_options",
		"functions", "function_call", "moderation", "stop", "context_management", "client_metadata", "prompt_cache_options",
		"data_sources",
		"thinking", "system", "output_config", "output_format", "cache_control", "diagnostics",
		"chat_template_kwargs", "guided_json", "guided_choice", "structured_outputs", "mm_processor_kwargs", "documents",
		"kv_transfer_params", "vllm_xargs", "custom_params", "logits_processors",
		"provider", "usage", "search_parameters", "safety_settings", "citation_options", "options", "format":
		return true
	}
	return false
}

// isHarmless reports whether a type is one of these, in any dated version.
func isHarmless(quoted []byte, types map[string]bool) bool {
	if quoted[0] != '"' {
		return false
	}
	name := unquoteBytes(quoted)
	if types[string(name)] {
		return true
	}
	undated, date, ok := strings.Cut(string(name), "_20")
	return ok && strings.Trim(date, "0123456789_") == "" && types[undated]
}

// harmlessTools are the types of tools without lasting effects: the client runs
// them, they only read, or they run in a container that is created for the
// response.
var harmlessTools = setOf("function", "custom", "namespace", "tool_search", "file_search", "web_search", "web_search_preview",
	"code_interpreter", "image_generation", "computer", "computer_use", "computer_use_preview", "local_shell", "shell", "apply_patch",
	// those of Anthropic
	"bash", "text_editor", "web_fetch", "code_execution", "memory",
	"tool_search_tool_regex", "tool_search_tool_bm25")

// harmlessItems are the types of items that only tell the model what happened
// before, or which tools it has. Such tools are checked separately. An approval
// has an effect only with the tool that it approves.
var harmlessItems = setOf("message", "reasoning", "item_reference",
	"function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
	"file_search_call", "web_search_call", "image_generation_call", "code_interpreter_call",
	"computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output",
	"apply_patch_call", "apply_patch_call_output", "tool_search_call", "tool_search_output", "additional_tools",
	"mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response",
	"compaction", "compaction_summary", "compaction_trigger", "context_compaction")

func setOf(names ...string) map[string]bool {
	set := make(map[string]bool, len(names))
	for _, name := range names {
		set[name] = true
	}
	return set
}

// isNewContainer reports whether a value asks for a container that is created
// for the response and has no network, or for the client's own machine.
func isNewContainer(value []byte) bool {
	if value[0] != '{' {
		return false
	}
	for quoted, member := range Members(value) {
		switch name := string(decodeName(quoted)); {
		case name == "type":
			if kind := Text(member); kind != "auto" && kind != "container_auto" && kind != "local" {
				return false
			}
		case name == "network_policy":
			if !isNull(member) && Text(memberOf(member, "type")) != "disabled" {
				return false
			}
		case name == "id", name == "container_id":
			if !isNull(member) {
				return false
			}
		case !isPlainName([]byte(name)):
			return false
		}
	}
	return true
}
