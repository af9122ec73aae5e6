package model

import (
	"cmp"
	"crypto/rand"
	"encoding/json"
	"strings"
)

// toolCall is a call of one of the functions that a request offers. A reply calls
// a function instead of saying something.
type toolCall struct {
	id, name string
	// pieces are its arguments, a token each.
	pieces []string
}

// chooseCall decides whether the reply calls a function: always if tool_choice
// demands it, and otherwise as an answer to the user, but not to a function's
// result, so that an agent's loop ends.
func (r Request) chooseCall(op Operation) *toolCall {
	if op != OpChat && op != OpResponse {
		return nil
	}
	wanted, demanded := "", false
	switch choice := r.ToolChoice.(type) {
	case string:
		if choice == "none" {
			return nil
		}
		demanded = choice == "required"
	case map[string]any:
		if wanted, demanded = functionName(choice), true; wanted == "" {
			return nil // it is about another kind of tool
		}
	}
	if !demanded && !endsWithUser(r.Messages) && !endsWithUser(r.Input) {
		return nil
	}
	tools, _ := r.Tools.([]any)
	for _, tool := range tools {
		tool, _ := tool.(map[string]any)
		name := functionName(tool)
		if name == "" || wanted != "" && name != wanted {
			continue
		}
		parameters := tool["parameters"]
		if f, ok := tool["function"].(map[string]any); ok {
			parameters = f["parameters"]
		}
		arguments, _ := json.Marshal(madeUp(parameters)) // it was JSON before
		return newCall("call_"+rand.Text(), name, string(arguments))
	}
	return nil
}

// functionName is the name of a function in tools or tool_choice, where chat has
// it in a separate object. It is empty for other kinds of tools.
func functionName(tool map[string]any) string {
	if tool["type"] != "function" {
		return ""
	}
	if f, ok := tool["function"].(map[string]any); ok {
		tool = f
	}
	name, _ := tool["name"].(string)
	return name
}

// endsWithUser reports whether the user said the last message of a prompt.
func endsWithUser(prompt any) bool {
	list, _ := prompt.([]any)
	if len(list) == 0 {
		_, ok := prompt.(string)
		return ok
	}
	last, _ := list[len(list)-1].(map[string]any)
	return last["role"] == "user"
}

func newCall(id, name, arguments string) *toolCall {
	c := &toolCall{id: id, name: name}
	const size = 4 // characters of a token
	text := []rune(arguments)
	for ; len(text) > size; text = text[size:] {
		c.pieces = append(c.pieces, string(text[:size]))
	}
	c.pieces = append(c.pieces, string(text))
	return c
}

// faker makes up values for JSON schemas.
type faker struct {
	root any
	left int // values that it may still make: a schema can contain itself
}

// madeUp returns arguments for the parameters of a function, with the properties
// that are required.
func madeUp(parameters any) any {
	f := faker{root: parameters, left: 1000}
	if arguments, ok := f.value(parameters).(map[string]any); ok {
		return arguments
	}
	return map[string]any{}
}

// formatted are texts of the formats of JSON Schema.
var formatted = map[string]string{
	"date":      "2026-01-02",
	"time":      "03:04:05Z",
	"date-time": "2026-01-02T03:04:05Z",
	"email":     "simulated@example.com",
	"uri":       "https://example.com/simulated",
	"uuid":      "00000000-0000-4000-8000-000000000000",
}

func (f *faker) value(schema any) any {
	s, _ := schema.(map[string]any)
	if f.left--; f.left < 0 {
		return nil
	}
	if c, ok := s["const"]; ok {
		return c
	}
	for _, name := range []string{"enum", "anyOf", "oneOf", "allOf"} {
		if list, _ := s[name].([]any); len(list) > 0 && name == "enum" {
			return list[0]
		} else if len(list) > 0 {
			return f.value(list[0])
		}
	}
	if ref, ok := s["$ref"].(string); ok {
		return f.value(f.resolve(ref))
	}
	kind := s["type"]
	if kinds, _ := kind.([]any); len(kinds) > 0 {
		kind = kinds[0]
	}
	switch kind {
	case "string":
		format, _ := s["format"].(string)
		return cmp.Or(formatted[format], "simulated")
	case "integer", "number":
		least, _ := s["minimum"].(float64)
		return least
	case "boolean":
		return true
	case "array":
		list := []any{}
		for n, _ := s["minItems"].(float64); float64(len(list)) < n && f.left > 0; {
			list = append(list, f.value(s["items"]))
		}
		return list
	case "null":
		return nil
	}
	o := map[string]any{}
	properties, _ := s["properties"].(map[string]any)
	required, _ := s["required"].([]any)
	for _, name := range required {
		if name, ok := name.(string); ok {
			o[name] = f.value(properties[name])
		}
	}
	return o
}

// resolve returns the schema at a place like #/$defs/Place.
func (f *faker) resolve(ref string) any {
	at := f.root
	for name := range strings.SplitSeq(strings.TrimPrefix(ref, "#/"), "/") {
		s, _ := at.(map[string]any)
		at = s[name]
	}
	return at
}
