package model

import (
	"encoding/json"
	"strings"
	"testing"
)

const weather = `{"type":"object","properties":{"city":{"type":"string"},"days":{"type":"integer","minimum":2},"units":{"enum":["C","F"]}},"required":["city","days"]}`

func TestArgumentsHaveWhatTheSchemaRequires(t *testing.T) {
	for schema, want := range map[string]string{
		`null`:             `{}`,
		`true`:             `{}`,
		`{}`:               `{}`,
		`{"type":"array"}`: `{}`,
		weather:            `{"city":"simulated","days":2}`,
		`{"properties":{"a":{"const":7},"b":{"type":["boolean","null"]},"c":{"type":"null"},"d":{"type":"array","minItems":2,"items":{"type":"number"}}},"required":["a","b","c","d"]}`:                              `{"a":7,"b":true,"c":null,"d":[0,0]}`,
		`{"$defs":{"P":{"type":"object","properties":{"x":{"type":"integer"}},"required":["x"]}},"properties":{"p":{"$ref":"#/$defs/P"},"q":{"anyOf":[{"$ref":"#/$defs/P"},{"type":"null"}]}},"required":["p","q"]}`: `{"p":{"x":0},"q":{"x":0}}`,
		`{"properties":{"a":{"$ref":"#/nowhere/at/all"}},"required":["a",1]}`: `{"a":{}}`,
	} {
		var v any
		if err := json.Unmarshal([]byte(schema), &v); err != nil {
			t.Fatal(err)
		}
		if got, err := json.Marshal(madeUp(v)); string(got) != want || err != nil {
			t.Errorf("%s: got %s, %v, want %s", schema, got, err, want)
		}
	}
}

// FuzzChooseCall looks for requests whose tools make a call that is no JSON, or
// that never ends.
func FuzzChooseCall(f *testing.F) {
	f.Add(`{"messages":[{"role":"user"}],"tools":[{"type":"web_search"},{"type":"function","function":{"name":"weather","parameters":` + weather + `}}]}`)
	f.Add(`{"input":"x","tool_choice":"required","tools":[{"type":"function","name":"weather","parameters":` + weather + `},{"type":"function","name":"time"}]}`)
	f.Add(`{"input":"x","tools":[{"type":"function","name":"f","parameters":{"properties":{"a":{"$ref":"#"},"b":{"type":"array","minItems":1e9,"items":{"$ref":"#"}}},"required":["a","b"]}}]}`)
	f.Fuzz(func(t *testing.T, body string) {
		req, problem := ParseRequest(OpResponse, "", []byte(body))
		if problem != "" {
			return
		}
		if c := req.chooseCall(OpResponse); c != nil {
			var o map[string]any
			if err := json.Unmarshal([]byte(strings.Join(c.pieces, "")), &o); err != nil || o == nil {
				t.Errorf("%v in %q", err, c.pieces)
			}
		}
	})
}
