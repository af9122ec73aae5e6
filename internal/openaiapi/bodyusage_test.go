package openaiapi

import (
	"bytes"
	"encoding/json"
	"reflect"
	"testing"
)

func TestTheUsageOfAStreamIsAskedForWhereItBelongs(t *testing.T) {
	for _, tt := range []struct {
		body string
		asks bool // by itself
		want string
	}{
		{`{"stream":true}`, false, `{"stream_options":{"include_usage":true},"stream":true}`},
		{"\xef\xbb\xbf { \"stream\":true}", false, "\xef\xbb\xbf {\"stream_options\":{\"include_usage\":true}, \"stream\":true}"},
		{`{"model":"a","stream":true}`, false, `{"stream_options":{"include_usage":true},"model":"new","stream":true}`},
		{`{"stream":true,"stream_options":{},"model":"a"}`, false, `{"stream":true,"stream_options":{"include_usage":true},"model":"new"}`},
		{`{"stream":true,"stream_options":{ },"model":"new"}`, false, `{"stream":true,"stream_options":{"include_usage":true },"model":"new"}`},
		{`{"model":"a","stream_options" : null}`, false, `{"model":"new","stream_options" : {"include_usage":true}}`},
		{`{"model":"a","stream_options":{"include_usage" : false ,"x":[1]},"model":"b"}`, false, `{"model":"new","stream_options":{"include_usage" : true ,"x":[1]},"model":"new"}`},
		{`{"stream_options":{"x":{"include_usage":false},"include_usage":null}}`, false, `{"stream_options":{"x":{"include_usage":false},"include_usage":true}}`},
		{`{"stream_options":{"include_obfuscation":false}}`, false, `{"stream_options":{"include_usage":true,"include_obfuscation":false}}`},
		{`{"stream\u005foptions":{"include\u005fusage":"no"}}`, false, `{"stream\u005foptions":{"include\u005fusage":true}}`},
		{`{"include_usage":true,"messages":[{"stream_options":{"include_usage":true}}]}`, false, `{"stream_options":{"include_usage":true},"include_usage":true,"messages":[{"stream_options":{"include_usage":true}}]}`},

		{`{"stream_options":{"include_usage":true}}`, true, ``},
		{`{"stream_options":{"include_usage":false,"include_usage":true}}`, true, ``},
		{`{"stream_options":{"include_usage":true},"stream_options":{"include_usage":true}}`, true, ``},
		{`{"stream_options":null,"stream_options":{"include_usage":false}}`, false, ``},
		{`{"stream_options":{"include_usage":true,"include_usage":false}}`, false, ``},
		{`{"stream_options":"all"}`, false, ``},
		{`{"stream_options":[]}`, false, ``},
		{`{"stream_options":{"include_usage" true}}`, false, ``},
		{`{"stream_options":{1:2}}`, false, ``},
		{`{}`, false, ``},
		{`[]`, false, ``},
		{``, false, ``},
		{`{"stream":true`, false, ``},
		{`{"stream_options":{"include_usage":false},"messages":[`, false, ``},
	} {
		body := []byte(tt.body)
		r := ParseJSON(body, nil)
		if r.StreamUsage != tt.asks || r.CanAskUsage() != (tt.want != "") {
			t.Errorf("%s: asks %t and can ask %t", body, r.StreamUsage, r.CanAskUsage())
		}
		want, model := tt.want, ""
		if bytes.Contains(body, []byte(`"model"`)) {
			model = "new"
		}
		if want == "" {
			want = tt.body
		}
		if got := string(bytes.Join(r.With(body, Changes{Model: model, AskUsage: true}), nil)); got != want {
			t.Errorf("%s: got %s, want %s", body, got, want)
		}
		if pieces := r.With(body, Changes{}); len(pieces) != 1 || string(pieces[0]) != tt.body {
			t.Errorf("%s became %q", body, pieces)
		}
	}
}

func FuzzAskUsage(f *testing.F) {
	f.Add([]byte(`{"stream":true,"stream_options":{"include_usage":false},"model":"a"}`), "gpt-4o")
	f.Add([]byte(`{"model":"a", "stream_options" : { "a" : {} } }`), "")
	f.Add([]byte(`{"stream_options":null}`), "gpt-4o")
	f.Fuzz(func(t *testing.T, body []byte, model string) {
		r := ParseJSON(body, nil)
		result := bytes.Join(r.With(body, Changes{Model: model, AskUsage: true}), nil)
		if first := bytes.TrimLeft(body, " \r\n\t"); !json.Valid(body) || first[0] != '{' {
			return
		}
		want, got := decode(t, bytes.Join(r.With(body, Changes{Model: model}), nil)), decode(t, result)
		options, isObject := want["stream_options"].(map[string]any)
		if asks, _ := options["include_usage"].(bool); asks != r.StreamUsage {
			t.Errorf("%q: asks %t", body, r.StreamUsage)
		}
		if r.CanAskUsage() {
			if !isObject {
				options = make(map[string]any)
				want["stream_options"] = options
			}
			options["include_usage"] = true
			if !ParseJSON(result, nil).StreamUsage {
				t.Errorf("%q does not ask", result)
			}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%q became %q", body, result)
		}
	})
}
