package openaiapi

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"math/big"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// In the bodies below, what WithModel replaces stands between « and »; a ¦ is
// where it adds a member, the comma after it included.
var bodies = []struct {
	name     string
	body     string
	model    string
	hasModel bool
	stream   bool
}{
	{"a chat", `{"model":«"gpt-4o"»,"messages":[{"role":"user","content":"hi"}]}`, "gpt-4o", true, false},
	{"a streamed chat with the model last", `{"stream":true,"messages":[{"role":"user","content":"hi"}],"model":«"gpt-4o"»}`, "gpt-4o", true, true},
	{"white space wherever JSON allows it", " \r\n\t{ \n\"model\"\t:\r«\"gpt-4o\"» , \"stream\" : true } \n", "gpt-4o", true, true},
	{"a byte order mark", string(bom) + `{"model":«"gpt-4o"»}`, "gpt-4o", true, false},
	{"a model further down is another's", `{"metadata":{"model":"x","stream":true},"tools":[{"model":"y"}],"model":«"gpt-4o"»}`, "gpt-4o", true, false},
	{"a model in a prompt is text", `{"messages":[{"content":"{\"model\":\"x\",\"stream\":true}"}],"model":«"gpt-4o"»}`, "gpt-4o", true, false},
	{"braces in a prompt are text", `{"prompt":"}]{[\\\"}","model":«"gpt-4o"»}`, "gpt-4o", true, false},
	{"a prompt that ends in a backslash", `{"prompt":"C:\\","model":«"gpt-4o"»}`, "gpt-4o", true, false},
	{"a prompt that ends in an escaped quote", `{"prompt":"say \"","model":«"gpt-4o"»}`, "gpt-4o", true, false},
	{"a value that is the word model", `{"user":"model","model":«"gpt-4o"»}`, "gpt-4o", true, false},
	{"an escaped key", `{"mod\u0065l":«"gpt-4o"»,"\u0073trea\u006D":true}`, "gpt-4o", true, true},
	{"a key escaped from end to end", `{"\u006d\u006F\u0064\u0065\u006c":«"gpt-4o"»}`, "gpt-4o", true, false},
	{"keys that only look alike", `{¦,"models":"a","mode":"b","Model":"c","model ":"d","mod\u0165l":"e","mod\\u0065l":"f","m\u006":"g","":"h"}`, "", false, false},
	{"an escaped name", `{"model":«"gpt\u002d4o \"mini\" \ud83d\ude00 \/\\"»}`, `gpt-4o "mini" 😀 /\`, true, false},
	{"half a surrogate pair", `{"model":«"a\ud83d"»}`, "a\uFFFD", true, false},
	{"a name with a slash", `{"model":«"meta-llama/Llama-3-8b"»}`, "meta-llama/Llama-3-8b", true, false},
	{"an empty name is a name", `{"model":«""»}`, "", true, false},
	{"no model", `{¦,"input":"hi","stream":true}`, "", false, true},
	{"an empty object", `{¦}`, "", false, false},
	{"an empty object with white space", string(bom) + " {¦\n} ", "", false, false},
	{"null is no model, and is replaced", `{"model":«null»,"stream":true}`, "", false, true},
	{"neither is a number", `{"model":4,"stream":false}`, "", false, false},
	{"nor an object", `{"model":{"model":"x"}}`, "", false, false},
	{"the last of two models holds, and both are replaced", `{"model":«"a"»,"n":1,"model":«"b"»}`, "b", true, false},
	{"the last one holds even if it is null", `{"model":«"a"»,"model":«null»}`, "", false, false},
	{"or a number, which is not replaced", `{"model":«"a"»,"model":4}`, "", false, false},
	{"and the last one is found even if the first is none", `{"model":«null»,"model":«"b"»}`, "b", true, false},
	{"the last of two streams holds", `{¦,"stream":true,"stream":false}`, "", false, false},
	{"a stream in quotes is not true", `{¦,"stream":"true"}`, "", false, false},
	{"numbers of every kind", `{"seed":9007199254740993,"temperature":1.0e-7,"top_p":-0,"model":«"m"»}`, "m", true, false},
	{"empty containers", `{"a":[],"b":{},"c":[[],{}],"model":«"m"»}`, "m", true, false},
	{"invalid UTF-8 in a prompt", "{\"prompt\":\"\xff\xfe\",\"model\":«\"m\"»}", "m", true, false},
	{"invalid UTF-8 in a name", "{\"model\":«\"m\xff\"»}", "m\uFFFD", true, false},
	{"a line break in a prompt, which JSON forbids", "{\"prompt\":\"a\nb\",\"model\":«\"m\"»}", "m", true, false},
	{"an escape that JSON does not know, in a prompt", `{"prompt":"\x","model":«"m"»}`, "m", true, false},
	{"an escape that JSON does not know, in a name", `{"model":«"\x"»}`, "", false, false},
	{"a trailing comma", `{"model":«"m"»,}`, "m", true, false},
	{"text after the object", `{"model":«"m"»} {"model":"n"}`, "m", true, false},

	// The beginning of a body that is too large to be held as a whole.
	{"cut off in the prompt", `{"model":«"m"»,"stream":true,"messages":[{"content":"Once upon`, "m", true, true},
	{"cut off between members", `{"model":«"m"»,`, "m", true, false},
	{"cut off before a model", "{¦,\n\"messages\":[{\"content\":\"Once upon", "", false, false},
	{"cut off in the first key", `{¦,"mod`, "", false, false},
	{"cut off in a key", `{"model":«"m"»,"mod`, "m", true, false},
	{"cut off after a key", `{"stream":true,"model"`, "", false, true},
	{"cut off before a value", `{"stream":true,"model":`, "", false, true},
	{"cut off in the name", `{"stream":true,"model":"gpt-4`, "", false, true},
	{"cut off in the name's escape", `{"model":"gpt-4\`, "", false, false},
	{"cut off before an escaped quote", `{"model":"gpt-4\"`, "", false, false},
	{"cut off after the brace", `{ `, "", false, false},
	{"cut off in null", `{"model":nul`, "", false, false},
	{"cut off in true", `{"model":«"m"»,"stream":tru`, "m", true, false},

	// What is not a JSON object.
	{"nothing", ``, "", false, false},
	{"white space", " \n", "", false, false},
	{"a byte order mark alone", string(bom), "", false, false},
	{"an array", `[{"model":"m"}]`, "", false, false},
	{"a string", `"model"`, "", false, false},
	{"a form", `model=gpt-4o&stream=true`, "", false, false},
	{"a key without quotes", `{model:"m"}`, "", false, false},
	{"a key without a colon", `{"model" "m"}`, "", false, false},
	{"a member without a value", `{"model":,"stream":true}`, "", false, false},
	{"a bracket too many", `{¦,"a":1],"model":"m"}`, "", false, false},
}

func TestModelInJSON(t *testing.T) {
	for _, tt := range bodies {
		t.Run(tt.name, func(t *testing.T) {
			body, spans := unmark(tt.body)
			got := ParseJSON(body, nil)
			if got.Model != tt.model || got.HasModel != tt.hasModel || got.Stream != tt.stream || !slices.Equal(placesOf(got), spans) {
				t.Fatalf("got %+v, want %+v with spans %v", got, tt, spans)
			}
			result := string(bytes.Join(got.With(body, Changes{Model: "ü<&>"}), nil))
			want := replaceMarked(strings.ReplaceAll(tt.body, "¦", `"model":"ü<&>"`), `"ü<&>"`)
			if result != want {
				t.Errorf("got %s, want %s", result, want)
			}
		})
	}
}

// placesOf returns where a body names the model, in order.
func placesOf(r Body) (spans []span) {
	if r.models.first.end > 0 {
		spans = append(spans, r.models.first)
	}
	return append(spans, r.models.others...)
}

// unmark removes the marks and says what was between « and ».
func unmark(marked string) (body []byte, spans []span) {
	marked = strings.NewReplacer("¦,", "", "¦", "").Replace(marked)
	for {
		before, rest, found := strings.Cut(marked, "«")
		body = append(body, before...)
		if !found {
			return body, spans
		}
		value, after, _ := strings.Cut(rest, "»")
		spans = append(spans, span{len(body), len(body) + len(value)})
		body = append(body, value...)
		marked = after
	}
}

func replaceMarked(marked, value string) string {
	for {
		before, rest, found := strings.Cut(marked, "«")
		if !found {
			return marked
		}
		_, after, _ := strings.Cut(rest, "»")
		marked = before + value + after
	}
}

func TestWithModelEscapesTheModel(t *testing.T) {
	body := []byte(`{"model":"a"}`)
	for model, want := range map[string]string{
		`plain`:            `{"model":"plain"}`,
		``:                 `{"model":"a"}`,
		`"quoted"`:         `{"model":"\"quoted\""}`,
		`back\slash`:       `{"model":"back\\slash"}`,
		"new\nline\x00":    `{"model":"new\nline\u0000"}`,
		"</script>&":       `{"model":"</script>&"}`,
		"broken \xff here": `{"model":"broken \ufffd here"}`,
	} {
		got := string(bytes.Join(ParseJSON(body, nil).With(body, Changes{Model: model}), nil))
		if got != want {
			t.Errorf("%q: got %s, want %s", model, got, want)
		}
	}
}

func TestABodyThatAlreadySaysSoStaysWhole(t *testing.T) {
	for _, tt := range []struct {
		name, body string
		pieces     int
	}{
		{"the model it names", `{"model":"a"}`, 1},
		{"twice", `{"model":"a","model":"a"}`, 1},
		{"one of two", `{"model":"b","model":"a"}`, 5},
		{"spelled another way", `{"model":"\u0061"}`, 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			body := []byte(tt.body)
			if pieces := ParseJSON(body, nil).With(body, Changes{Model: "a"}); len(pieces) != tt.pieces {
				t.Errorf("got %q, want %d pieces", pieces, tt.pieces)
			}
		})
	}
}

func TestWithModelSharesTheBodysMemoryAndGuardsIt(t *testing.T) {
	parseJSON := func(body []byte) Body { return ParseJSON(body, nil) }
	asForm := func(body []byte) Body { return parseForm(body, "XX") }
	for _, tt := range []struct {
		name, body string
		parse      func([]byte) Body
	}{
		{"replaced in an object", `{"prompt":"long","model":"a","n":1}`, parseJSON},
		{"added to an object", `{"prompt":"long"}`, parseJSON},
		{"replaced in a form", "--XX\r\n" + modelField + "a\r\n--XX--", asForm},
		{"added to a form", "MIME\r\n--XX\r\n" + textField + "a\r\n--XX--", asForm},
	} {
		t.Run(tt.name, func(t *testing.T) {
			body := []byte(tt.body)
			pieces := tt.parse(body).With(body, Changes{Model: "new"})
			if len(pieces) != 3 {
				t.Fatalf("got %q", pieces)
			}
			first, last := pieces[0], pieces[2]
			if &first[0] != &body[0] || &last[len(last)-1] != &body[len(body)-1] {
				t.Error("a piece was copied")
			}
			for _, p := range pieces {
				_ = append(p, "overwritten"...)
			}
			if string(body) != tt.body {
				t.Errorf("appending to a piece wrote into the body: %q", body)
			}
		})
	}
}

func TestARequestThatWasNotParsedChangesNothing(t *testing.T) {
	if pieces := (Body{}).With([]byte("{}"), Changes{Model: "a"}); len(pieces) != 1 || string(pieces[0]) != "{}" {
		t.Errorf("got %q", pieces)
	}
}

func TestNestingCostsNoStack(t *testing.T) {
	deep := strings.Repeat(`[{"a":`, 250_000)
	if got := ParseJSON([]byte(`{"a":`+deep), nil); got.HasModel {
		t.Errorf("got %+v", got)
	}
	if got := ParseJSON([]byte(`{"a":`+deep+"1"+strings.Repeat("}]", 250_000)+`,"model":"m"}`), nil); got.Model != "m" {
		t.Errorf("got %+v", got)
	}
}

// reference says with encoding/json what ParseJSON says without.
func reference(t *testing.T, body []byte) (want Body, ok bool) {
	if !json.Valid(body) {
		return want, false
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.UseNumber()
	next := func() json.Token {
		token, err := dec.Token()
		if err != nil {
			t.Fatal(err)
		}
		return token
	}
	want.N, want.Whole = 1, true
	if next() != json.Delim('{') {
		return want, true
	}
	for dec.More() {
		key := next()
		var raw json.RawMessage
		if err := dec.Decode(&raw); err != nil {
			t.Fatal(err)
		}
		switch key {
		case "model":
			want.Model, want.HasModel = "", raw[0] == '"'
			if err := json.Unmarshal(raw, &want.Model); err != nil && want.HasModel {
				t.Fatal(err)
			}
			if want.HasModel || string(raw) == "null" {
				end := int(dec.InputOffset())
				want.addModel(span{end - len(raw), end})
			}
		case "stream":
			want.Stream = string(raw) == "true"
		case "max_tokens", "max_completion_tokens", "max_output_tokens":
			if n, ok := number(raw); ok && n.Sign() >= 0 {
				most := map[string]*int64{"max_tokens": &want.MaxOutput.Tokens, "max_completion_tokens": &want.MaxOutput.Completion, "max_output_tokens": &want.MaxOutput.Output}[key.(string)]
				*most = max(*most, toInt64(n))
			}
		case "n":
			want.N = 1
			if n, ok := number(raw); ok && n.Sign() > 0 && n.IsInt() {
				want.N = toInt64(n)
			}
		}
	}
	return want, true
}

// number reads a number to the precision of a float64, which is that of most
// parsers.
func number(raw json.RawMessage) (*big.Float, bool) {
	if len(raw) > longestNumber || raw[0] != '-' && (raw[0] < '0' || raw[0] > '9') {
		return nil, false
	}
	n, _, err := big.ParseFloat(string(raw), 10, 53, big.ToNearestEven)
	return n, err == nil
}

// toInt64 cuts off the fraction; big.Float saturates by itself.
func toInt64(n *big.Float) int64 {
	i, _ := n.Int64()
	return i
}

func FuzzParseJSON(f *testing.F) {
	for _, tt := range bodies {
		body, _ := unmark(tt.body)
		f.Add(body)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		got := ParseJSON(body, nil)
		want, ok := reference(t, body)
		if ok && (got.Model != want.Model || got.HasModel != want.HasModel || got.Stream != want.Stream ||
			got.MaxOutput != want.MaxOutput || got.N != want.N || got.Whole != want.Whole || !slices.Equal(placesOf(got), placesOf(want))) {
			t.Errorf("%q: got %+v, want %+v", body, got, want)
		}
		checkPlaces(t, got, body)
		checkCost(t, got, body)
		for _, s := range placesOf(got) {
			if value := body[s.start:s.end]; string(value) != "null" && (len(value) < 2 || value[0] != '"' || value[len(value)-1] != '"') {
				t.Errorf("%q: neither a string nor null at %v", body, s)
			}
		}
	})
}

// checkPlaces fails unless what a Body says fits together.
func checkPlaces(t *testing.T, r Body, body []byte) {
	t.Helper()
	if r.HasModel && len(placesOf(r)) == 0 || !r.HasModel && r.Model != "" || r.HasModel && r.models.before != "" {
		t.Errorf("%q: a contradiction: %+v", body, r)
	}
	at := 0
	for _, s := range placesOf(r) {
		if s.start < at || s.end < s.start || s.end > len(body) {
			t.Errorf("%q: no place %v", body, s)
		}
		at = s.end
	}
	if r.models.addAt < 0 || r.models.addAt > len(body) {
		t.Errorf("%q: nothing can be added at %d", body, r.models.addAt)
	}
}

// withModel returns the body that WithModel makes. It fails unless that differs
// from the original in the model's places alone, where value has to be, and the
// original is untouched.
func withModel(t *testing.T, r Body, body []byte, model, value string) []byte {
	t.Helper()
	before := bytes.Clone(body)
	got := bytes.Join(r.With(body, Changes{Model: model}), nil)
	if !bytes.Equal(body, before) {
		t.Fatalf("%q: the body itself was changed to %q", before, body)
	}
	var want []byte
	at := 0
	for _, s := range placesOf(r) {
		want = append(append(want, body[at:s.start]...), value...)
		at = s.end
	}
	if r.models.before != "" {
		want = append(append(want, body[:r.models.addAt]...), r.models.before+value+r.models.after...)
		at = r.models.addAt
	}
	if want = append(want, body[at:]...); !bytes.Equal(got, want) {
		t.Fatalf("%q: got %q, want %q", body, got, want)
	}
	return got
}

func FuzzWithModelJSON(f *testing.F) {
	for _, tt := range bodies {
		body, _ := unmark(tt.body)
		f.Add(body, "gpt-4o")
	}
	f.Add([]byte(`{"model":"a","model":"b"}`), "\"\\\n\u2028\xff<&>")
	f.Fuzz(func(t *testing.T, body []byte, model string) {
		if model == "" {
			return // it changes nothing
		}
		r := ParseJSON(body, nil)
		result := withModel(t, r, body, model, string(quote(model)))

		// For a parser, nothing but the model differs.
		if first := bytes.TrimLeft(body, " \r\n\t"); !json.Valid(body) || first[0] != '{' {
			return
		}
		want, got := decode(t, body), decode(t, result)
		if named, ok := want["model"]; r.HasModel || !ok || named == nil {
			model = string([]rune(model)) // as JSON has it: no invalid UTF-8
			want["model"] = model
			if again := ParseJSON(result, nil); again.Model != model || again.Stream != r.Stream {
				t.Errorf("%q: got %+v, want %q", result, again, model)
			}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%q became %q", body, result)
		}
	})
}

func decode(t *testing.T, body []byte) (m map[string]any) {
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.UseNumber()
	if err := dec.Decode(&m); err != nil {
		t.Fatalf("%q: %v", body, err)
	}
	return m
}

func checkCost(t *testing.T, r Body, body []byte) {
	t.Helper()
	cost := r.Cost(int64(len(body)))
	if r.MaxOutput.Largest() < 0 || r.N < 1 || cost < r.MaxOutput.Largest() || cost < int64(len(body)/charsPerToken) {
		t.Errorf("%q: it costs %d: %+v", body, cost, r)
	}
}

func TestTheOutputThatIsAskedFor(t *testing.T) {
	for _, tt := range []struct {
		body   string
		max, n int64
	}{
		{`{"messages":[]}`, 0, 1},
		{`{"max_tokens":100}`, 100, 1},
		{`{"max_completion_tokens":100,"n":3}`, 100, 3},
		{`{"max_output_tokens":100}`, 100, 1},
		{`{"max_tokens":7,"max_completion_tokens":900,"max_output_tokens":8}`, 900, 1},
		{`{"max\u005ftokens":5,"\u006e":2}`, 5, 2},
		{`{"max_tokens":1e3,"n":2.0}`, 1000, 2},
		{`{"max_tokens":100.9}`, 100, 1},
		{`{"max_tokens":1000000000000000}`, 1e15, 1},
		{`{"max_tokens":1000000000000000000000000000000}`, math.MaxInt64, 1},
		{`{"max_tokens":1e999,"n":1e999}`, math.MaxInt64, math.MaxInt64},
		{`{"max_tokens":9223372036854775807}`, math.MaxInt64, 1},
		{`{"max_tokens":0,"n":0}`, 0, 1},
		{`{"max_tokens":-5,"n":-5}`, 0, 1},
		{`{"max_tokens":-0.0,"n":1.5}`, 0, 1},
		{`{"max_tokens":null,"n":null}`, 0, 1},
		{`{"max_tokens":"100","n":"2"}`, 0, 1},
		{`{"max_tokens":[100],"n":{"n":2}}`, 0, 1},
		{`{"max_tokens":true,"n":inf}`, 0, 1},
		{`{"max_tokens":0x10,"n":1_0}`, 0, 1},
		{`{"n":4,"n":2}`, 0, 2},
		{`{"n":4,"n":null}`, 0, 1},
		{`{"metadata":{"max_tokens":5,"n":2},"prompt":"\"max_tokens\":5"}`, 0, 1},
		{`{"Max_tokens":5,"max_tokens ":5,"N":2}`, 0, 1},
		{`{"max_tokens":` + strings.Repeat("9", longestNumber+1) + `}`, 0, 1},
		{`{"max_tokens":12`, 0, 1}, // more digits may follow
		{`{"max_tokens":12,`, 12, 1},
		{`[{"max_tokens":12}]`, 0, 1},
		{``, 0, 1},
	} {
		if r := ParseJSON([]byte(tt.body), nil); r.MaxOutput.Largest() != tt.max || r.N != tt.n {
			t.Errorf("%.60s: got %d times %d, want %d times %d", tt.body, r.N, r.MaxOutput.Largest(), tt.n, tt.max)
		}
	}
}

func TestCost(t *testing.T) {
	for _, tt := range []struct {
		name         string
		request      Body
		length, want int64
	}{
		{"the prompt alone", Body{N: 1}, 4000, 1000},
		{"the prompt and the output", Body{N: 1, MaxOutput: MaxOutput{Tokens: 500}}, 4000, 1500},
		{"several outputs", Body{N: 3, MaxOutput: MaxOutput{Tokens: 500}}, 4000, 2500},
		{"a body that was not read", Body{}, 4000, 1000},
		{"a body of unknown length", Body{N: 1, MaxOutput: MaxOutput{Tokens: 500}}, -1, 500},
		{"nothing", Body{N: 1}, 0, 0},
		{"an absurd output", Body{N: 1, MaxOutput: MaxOutput{Tokens: math.MaxInt64}}, 4, math.MaxInt64},
		{"an absurd number of outputs", Body{N: math.MaxInt64, MaxOutput: MaxOutput{Tokens: 2}}, 0, math.MaxInt64},
		{"an absurd length", Body{N: 1, MaxOutput: MaxOutput{Tokens: math.MaxInt64}}, math.MaxInt64, math.MaxInt64},
		{"many times nothing", Body{N: math.MaxInt64}, 8, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.request.Cost(tt.length); got != tt.want {
				t.Errorf("got %d, want %d", got, tt.want)
			}
		})
	}
}

func TestWhetherMoreMayFollowAnObject(t *testing.T) {
	for body, want := range map[string]bool{
		`{}`:                     true,
		` { } `:                  true,
		`{"a":1}`:                true,
		`{"a":1,}`:               true,
		`{"a":1} and more`:       true,
		string(bom) + `{"a":[]}`: true,
		`[1,2`:                   true, // an array has no model, however long it gets
		`"model`:                 true,
		"\x89PNG\r\n":            true,
		`model=a`:                true,
		``:                       false,
		" \n":                    false,
		string(bom):              false,
		"\xef\xbb":               false,
		"\xef\xbc":               true,
		`{`:                      false,
		`{"a"`:                   false,
		`{"a":`:                  false,
		`{"a":1`:                 false,
		`{"a":1,`:                false,
		`{"a":{"b":1}`:           false,
		`{"a":"}`:                false,
		`{"a" 1}`:                false,
		`{a:1}`:                  false,
		`{"a":1]}`:               false,
	} {
		if r := ParseJSON([]byte(body), nil); r.Whole != want {
			t.Errorf("%q: got %v, want %v", body, r.Whole, want)
		}
	}
	if (Body{}).Whole {
		t.Error("what nobody read is whole")
	}
}

// Of a plain chat body nothing is allocated, and of a replacement nothing but
// the new name and the list of pieces.
func TestAPlainBodyAllocatesHardlyAnything(t *testing.T) {
	body := []byte(`{"model":"gpt-4o","max_tokens":1000,"n":2,"stream":true,"messages":[{"role":"user","content":"hi"}]}`)
	if n := testing.AllocsPerRun(100, func() { ParseJSON(body, nil) }); n > 0 {
		t.Errorf("parsing took %v allocations", n)
	}
	r := ParseJSON(body, nil)
	for model, want := range map[string]float64{"gpt-4o": 1, "my-deployment": 2} {
		if n := testing.AllocsPerRun(100, func() { r.With(body, Changes{Model: model}) }); n > want {
			t.Errorf("%s: %v allocations, want %v", model, n, want)
		}
	}
}

// chat is a conversation about code of some 100 KiB, as editors send it: many
// turns, and in JSON an escape in every line.
func chat(modelFirst bool) []byte {
	var b strings.Builder
	b.WriteString("{")
	if modelFirst {
		b.WriteString(`"model":"gpt-4o","stream":true,`)
	}
	b.WriteString(`"messages":[`)
	for i := 0; b.Len() < 100<<10; i++ {
		if i > 0 {
			b.WriteString(",")
		}
		fmt.Fprintf(&b, `{"role":"user","content":%q}`, strings.Repeat("\tif name != \"model\" {\n\t\treturn fmt.Errorf(\"line %d\")\n\t}\n", 20))
	}
	b.WriteString(`],"temperature":0.7`)
	if !modelFirst {
		b.WriteString(`,"stream":true,"model":"gpt-4o"`)
	}
	b.WriteString("}")
	return []byte(b.String())
}

func BenchmarkParseJSON(b *testing.B) {
	image := []byte(`{"messages":[{"content":[{"image_url":"data:image/png;base64,` + strings.Repeat("iVBORw0KGgo", 10<<10) + `"}]}],"model":"gpt-4o"}`)
	embedding := []byte(`{"input":[` + strings.Repeat("[1234,56,789],", 8<<10) + `[]],"model":"gpt-4o"}`)
	for _, bb := range []struct {
		name string
		body []byte
	}{
		{"small", []byte(`{"model":"gpt-4o","messages":[{"role":"user","content":"hi"}],"max_tokens":1000,"temperature":0.7,"n":1,"stream":true}`)},
		{"model first", chat(true)},
		{"model last", chat(false)},
		{"image", image},
		{"token ids", embedding},
	} {
		b.Run(bb.name, func(b *testing.B) {
			b.SetBytes(int64(len(bb.body)))
			b.ReportAllocs()
			for b.Loop() {
				ParseJSON(bb.body, nil)
			}
		})
	}
}

func BenchmarkWithModel(b *testing.B) {
	body := chat(true)
	r := ParseJSON(body, nil)
	for _, model := range []string{"my-deployment", "gpt-4o"} {
		b.Run(model, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				r.With(body, Changes{Model: model})
			}
		})
	}
}
