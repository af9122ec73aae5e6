package openaiapi

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
)

// long is a text with which a body is long enough for a cache.
var long = strings.Repeat("lorem ipsum ", shortestPrompt/12)

func keyOf(body string) uint64 {
	var p Prompt
	ParseJSON([]byte(body), &p)
	return p.Key(int64(len(body)))
}

// turns are the bodies of a session with this many turns.
func turns(head, list, first string, n int) (bodies []string) {
	messages := fmt.Sprintf(`{"role":"user","content":%s}`, first)
	for i := range n {
		bodies = append(bodies, fmt.Sprintf(`{%s,"%s":[%s],"seed":%d}`, head, list, messages, i))
		messages += fmt.Sprintf(`,{"role":"assistant","content":"reply %d"}, {"role":"user","content":[{"type":"text","text":"and %d?"}]}`, i, i)
	}
	return bodies
}

func TestTheKeyIsThatOfTheSessionAndStaysFromTurnToTurn(t *testing.T) {
	text := func(s string) string { return fmt.Sprintf("%q", s+long) }
	sessions := map[string][]string{
		"chat":                   turns(`"model":"gpt-4o"`, "messages", text("a"), 10),
		"another first message":  turns(`"model":"gpt-4o"`, "messages", text("b"), 10),
		"parts":                  turns(`"model":"gpt-4o"`, "messages", `[{"type":"text","text":`+text("a")+`}]`, 10),
		"tools":                  turns(`"tools":[{"type":"function"}]`, "messages", text("a"), 10),
		"other tools":            turns(`"tools":[{"type":"function","function":{"name":"f"}}]`, "messages", text("a"), 10),
		"instructions":           turns(`"instructions":"Be brief."`, "input", text("a"), 10),
		"the same as tools":      turns(`"tools":"Be brief."`, "input", text("a"), 10),
		"other instructions":     turns(`"instructions":"Be kind."`, "input", text("a"), 10),
		"a prompt_cache_key":     turns(`"prompt_cache_key":"a"`, "input", `"hi"`, 10),
		"another one":            turns(`"prompt_cache_key":"b"`, "input", text("a"), 10),
		"a conversation":         {`{"conversation":"conv_1","input":"hi"}`, `{"input":"and?","conversation":"conv_1"}`},
		"a conversation by id":   {`{"conversation":{"id":"conv_2"},"input":"hi"}`, `{"input":"and?","conversation":{"id":"conv_2"}}`},
		"a conversation and key": {`{"prompt_cache_key":"c","conversation":"conv_1"}`, `{"conversation":"conv_1","prompt_cache_key":"c"}`},
		"a system message": {
			`{"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":` + text("a") + `}]}`,
			`{"messages":[{"content":"Be brief.","role":"system"},{"content":` + text("a") + `,"role":"user","name":"x"},{"role":"assistant"}]}`,
			"{ \"stream\": true,\n\"messages\" : [ { \"role\" : \"developer\", \"content\":\t\"Be brief.\" }\n, { \"role\":\"assistant\",\"content\":\"Hi\" },{\"role\":\"user\",\"content\":" + text("a") + "} , {} ] }",
		},
		"another system message": {`{"messages":[{"role":"system","content":"Be kind."},{"role":"user","content":` + text("a") + `}]}`},
	}
	sessions["completions"] = []string{`{"prompt":"p` + long + long + `"}`, `{"max_tokens":5,"prompt":"p` + long + long + ` and more","model":"m"}`}
	sessions["another prompt"] = []string{`{"prompt":` + text("q") + `}`}
	sessions["tokens"] = []string{`{"prompt":[` + strings.Repeat("17,", shortestPrompt) + `1]}`, `{"prompt":[` + strings.Repeat("17,", shortestPrompt) + `1,2,3]}`}
	sessions["other tokens"] = []string{`{"prompt":[` + strings.Repeat("18,", shortestPrompt) + `1]}`}
	// a text is the one message of the user's, and its own members are in any
	// order
	sessions["a text"] = []string{`{"input":` + text("t") + `}`, `{"max_output_tokens":5,"input":` + text("t") + `,"model":"m"}`}
	sessions["cut behind it"] = []string{`{"messages":[{"role":"user","content":` + text("cut") + `},{"role":"assi`, `{"messages":[{"role":"user","content":` + text("cut") + `}]}`}
	of := make(map[uint64]string)
	for name, bodies := range sessions {
		first := keyOf(bodies[0])
		if other, taken := of[first]; taken || first == 0 {
			t.Errorf("%s: the key is %d, as that of %q", name, first, other)
		}
		of[first] = name
		for i, body := range bodies {
			if got := keyOf(body); got != first {
				t.Errorf("%s: turn %d has the key %d, the first one %d", name, i+1, got, first)
			}
		}
	}
}

func TestWhatHasNoBeginningHasNoKey(t *testing.T) {
	for name, body := range map[string]string{
		"nothing":                   ``,
		"no object":                 `[` + long + `]`,
		"short":                     `{"messages":[{"role":"user","content":"hi"}]}`,
		"only system":               `{"messages":[{"role":"system","content":"` + long + `"}]}`,
		"no content":                `{"messages":[{"role":"user"}],"x":"` + long + `"}`,
		"role as content":           `{"messages":[{"content":"role","x":"user"}],"x":"` + long + `"}`,
		"role within":               `{"messages":[{"content":{"role":"user","content":"x"}}],"x":"` + long + `"}`,
		"texts to embed":            `{"input":["` + long + `","x"]}`,
		"an empty text":             `{"input":"","x":"` + long + `"}`,
		"cut before its end":        `{"messages":[{"role":"user","content":"` + long,
		"cut text":                  `{"input":"` + long,
		"goes on with a response":   `{"previous_response_id":"resp_1","input":"` + long + `"}`,
		"empty prompt_cache_key":    `{"prompt_cache_key":"","conversation":""}`,
		"null":                      `{"prompt_cache_key":null,"conversation":null,"messages":null}`,
		"numbers":                   `{"prompt_cache_key":5,"conversation":5,"input":5}`,
		"cut key":                   `{"prompt_cache_key":"abc`,
		"key within":                `{"metadata":{"prompt_cache_key":"a"}}`,
		"a response's prompt":       `{"prompt":{"id":"pmpt_1","variables":{"x":"` + long + `"}}}`,
		"an empty prompt":           `{"prompt":"","x":"` + long + `"}`,
		"no tokens":                 `{"prompt":[],"x":"` + long + `"}`,
		"the last list has no user": `{"input":"` + long + `","messages":[]}`,
	} {
		if key := keyOf(body); key != 0 {
			t.Errorf("%s: the key is %d, want none", name, key)
		}
	}
	if keyOf(`{"previous_response_id":null,"input":"`+long+`"}`) == 0 {
		t.Error("a previous_response_id of null counts")
	}
}

func TestALongPromptIsKnownByItsBeginningAndItsLength(t *testing.T) {
	body := func(text string) string { return `{"messages":[{"role":"user","content":"` + text + `"}]}` }
	beginning := strings.Repeat("lorem ipsum ", longestHashed/12+1)
	key := keyOf(body(beginning + "one"))
	if other := keyOf(body(beginning + "two")); other != key {
		t.Error("the end of a long prompt is read, too")
	}
	if other := keyOf(body(beginning + "three")); other == key {
		t.Error("a longer prompt has the same key")
	}
	if other := keyOf(body("x" + beginning + "on")); other == key {
		t.Error("a prompt that begins in another way has the same key")
	}
}

func TestTakingThePromptInAllocatesNothing(t *testing.T) {
	body := []byte(turns(`"stream":true,"tools":[{}]`, "messages", `"`+long+`"`, 10)[9])
	var p Prompt
	if n := testing.AllocsPerRun(100, func() { ParseJSON(body, &p) }); n != 0 {
		t.Errorf("it allocates %v times", n)
	}
}

func FuzzPrompt(f *testing.F) {
	for _, body := range turns(`"prompt_cache_key":"a","tools":[{}],"system":"x"`, "messages", `"hi"`, 3) {
		f.Add([]byte(body))
	}
	f.Add([]byte(`{"messages":[{"role":"system","content":[{}]},{"role":"user","content":"x"},`))
	f.Add([]byte(`{"messages":[{"role":"user","content":"x"}]],"input":[{]}`))
	f.Add([]byte(`{"conversation":{"id":"x"},"previous_response_id":"y","input":"z"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		var p, again Prompt
		got := ParseJSON(body, &p)
		if want := ParseJSON(body, nil); !reflect.DeepEqual(got, want) {
			t.Fatalf("with the prompt the request is %+v, without %+v", got, want)
		}
		ParseJSON(body, &again)
		if p != again {
			t.Fatalf("the prompt is %+v, then %+v", p, again)
		}
		// in a list of the user's, what follows its first message changes
		// nothing
		var fields map[string]json.RawMessage
		var messages []json.RawMessage
		if json.Unmarshal(body, &fields) != nil || json.Unmarshal(fields["messages"], &messages) != nil {
			return
		}
		head := fmt.Sprintf(`{"messages":[%s{"role":"user","content":"first"}`, rejoined(messages))
		if !json.Valid([]byte(head + `]}`)) {
			return
		}
		one, two := Prompt{}, Prompt{}
		ParseJSON([]byte(head+`]}`), &one)
		ParseJSON([]byte(head+`,{"role":"assistant","content":"x"},{"role":"user","content":"more"}]}`), &two)
		if !one.begins || one.Key(shortestPrompt) != two.Key(shortestPrompt) {
			t.Fatalf("one turn later the prompt is %+v, not %+v", two, one)
		}
	})
}

// rejoined writes messages that are objects, with a comma after each.
func rejoined(messages []json.RawMessage) string {
	var b strings.Builder
	for _, m := range messages {
		if strings.HasPrefix(string(m), "{") {
			b.Write(m)
			b.WriteByte(',')
		}
	}
	return b.String()
}

// chatOf is a chat of about so many bytes that names no object: questions and
// answers of a few paragraphs each.
func chatOf(size int) []byte {
	const paragraph = `The quick brown fox jumps over the lazy dog, and \"nobody\" minds.\nPack my box with five dozen liquor jugs; the rest is for tomorrow.\n\n`
	var b strings.Builder
	b.WriteString(`{"model":"gpt-4o","stream":true,"stream_options":{"include_usage":true},"temperature":0.7,"max_tokens":1000,"messages":[{"role":"system","content":"Be brief."}`)
	for turn := 0; b.Len() < size; turn++ {
		fmt.Fprintf(&b, `,{"role":"%s","content":"%s"}`, [2]string{"user", "assistant"}[turn%2], strings.Repeat(paragraph, 1+turn%8))
	}
	b.WriteString(`]}`)
	return []byte(b.String())
}

func BenchmarkParseChat(b *testing.B) {
	for _, size := range []int{300, 2 << 10, 8 << 10, 200 << 10} {
		body := chatOf(size)
		for _, with := range []string{"ids", "ids and prompt"} {
			b.Run(fmt.Sprintf("%d/%s", len(body), with), func(b *testing.B) {
				b.SetBytes(int64(len(body)))
				b.ReportAllocs()
				for b.Loop() {
					if with == "ids" {
						ParseJSON(body, nil)
					} else {
						ParseJSON(body, new(Prompt))
					}
				}
			})
		}
	}
}
