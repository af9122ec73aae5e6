package model

import (
	"crypto/rand"
	"slices"
	"strings"
)

// toolCall is a call of one of the functions that a request offers. A reply
// calls a function instead of saying something.
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
	var wanted any
	demanded := false
	switch choice := r.ToolChoice.(type) {
	case string:
		if choice == "none" {
			return nil
		}
		demanded = choice == "required"
	case object:
		if wanted, demanded = function(choice)["name"], true; wanted == nil {
			return nil // it is about another kind of tool
		}
	}
	if !demanded && !endsWithUser(r.Messages) && !endsWithUser(r.Input) {
		return nil
	}
	tools, _ := r.Tools.([]any)
	for _, tool := range tools {
		f := function(tool)
		if name, ok := f["name"].(string); ok && name != "" && (wanted == nil || wanted == name) {
			return newCall("call_"+rand.Text(), name, string(encode(madeUp(f["parameters"]))))
		}
	}
	return nil
}

// function is the function of tools or tool_choice, which chat has in a
// separate object. It is nil for other kinds of tools.
func function(tool any) object {
	t, _ := tool.(object)
	if t["type"] != "function" {
		return nil
	}
	if f, ok := t["function"].(object); ok {
		return f
	}
	return t
}

// endsWithUser reports whether the user said the last message of a prompt.
func endsWithUser(prompt any) bool {
	list, _ := prompt.([]any)
	if len(list) == 0 {
		_, ok := prompt.(string)
		return ok
	}
	last, _ := list[len(list)-1].(object)
	return last["role"] == "user"
}

func newCall(id, name, arguments string) *toolCall {
	c := &toolCall{id: id, name: name}
	const size = 4 // characters of a token
	for piece := range slices.Chunk([]rune(arguments), size) {
		c.pieces = append(c.pieces, string(piece))
	}
	return c
}

// faker makes up values for JSON schemas.
type faker struct {
	root any
	left int // values that it may still make: a schema can contain itself
}

// madeUp returns arguments for the parameters of a function, with the
// properties that are required.
func madeUp(parameters any) any {
	f := faker{root: parameters, left: 1000}
	if arguments, ok := f.value(parameters).(object); ok {
		return arguments
	}
	return object{}
}

func (f *faker) value(schema any) any {
	s, _ := schema.(object)
	if f.left--; f.left < 0 {
		return nil
	}
	if c, ok := s["const"]; ok {
		return c
	}
	if list, _ := s["enum"].([]any); len(list) > 0 {
		return list[0]
	}
	for _, name := range []string{"anyOf", "oneOf", "allOf"} {
		if list, _ := s[name].([]any); len(list) > 0 {
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
		return "simulated"
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
	o := object{}
	properties, _ := s["properties"].(object)
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
		s, _ := at.(object)
		at = s[name]
	}
	return at
}
