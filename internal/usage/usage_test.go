package usage

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

const (
	jsonType   = "application/json"
	streamType = "text/event-stream; charset=utf-8"
)

// read reads a reply in pieces of the size, or as a whole if that is its size.
func read(contentType, encoding, body string, size int) Tokens {
	return readAll(contentType, encoding, body, size).Tokens()
}

func readAll(contentType, encoding, body string, size int) *Reader {
	header := http.Header{"Content-Type": {contentType}}
	if encoding != "" {
		header.Set("Content-Encoding", encoding)
	}
	r := new(Reader).Begin(header)
	if size == len(body) {
		r.Whole([]byte(body))
	} else {
		for piece := range slices.Chunk([]byte(body), size) {
			r.Write(piece)
			clear(piece)
		}
	}
	r.Close()
	return r
}

var unknown = Tokens{}

func known(input, cached, output, reasoning int64) Tokens {
	return Tokens{input, cached, output, reasoning, true}
}

const chatUsage = `"usage":{"prompt_tokens":2006,"completion_tokens":300,"total_tokens":2306,"prompt_tokens_details":{"cached_tokens":1920,"audio_tokens":0},"completion_tokens_details":{"reasoning_tokens":256,"audio_tokens":0,"accepted_prediction_tokens":0,"rejected_prediction_tokens":0}}`

const responseUsage = `"usage":{"input_tokens":36,"input_tokens_details":{"cached_tokens":7},"output_tokens":87,"output_tokens_details":{"reasoning_tokens":64},"total_tokens":123}`

var replies = []struct {
	name        string
	contentType string
	body        string
	want        Tokens
}{
	{"chat", jsonType, `{"id":"chatcmpl-1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"Hi"},"finish_reason":"stop"}],` + chatUsage + `,"system_fingerprint":null}`, known(2006, 1920, 300, 256)},
	{"completion", "application/json; charset=utf-8", "\xef\xbb\xbf {\n  \"usage\" : {\n    \"prompt_tokens\" : 5 ,\n \"completion_tokens\":\t7\n}\n}\n", known(5, 0, 7, 0)},
	{"embeddings", jsonType, `{"object":"list","data":[{"object":"embedding","index":0,"embedding":[-0.0123,1e-05,0.5,0.25,0.125,1,2,3,4,5,6,7,8]}],"model":"m","usage":{"prompt_tokens":8,"total_tokens":8}}`, known(8, 0, 0, 0)},
	{"response", jsonType, `{"id":"resp_1","object":"response","error":null,"output":[{"type":"message","content":[{"type":"output_text","text":"\"usage\":{\"input_tokens\":99}"}]}],` + responseUsage + `,"metadata":{"usage":{"input_tokens":99}}}`, known(36, 7, 87, 64)},
	{"a text that ends like its name", jsonType, `{"a":"of usage","b":"\"usage","c":"usage","d":["usage"],` + chatUsage + `}`, known(2006, 1920, 300, 256)},
	{"others before", jsonType, `{"metadata":{"usage":{"input_tokens":99}},` + responseUsage + `}`, known(36, 7, 87, 64)},
	{"only another's", jsonType, `{"data":[{"id":"1",` + responseUsage + `}]}`, unknown},
	{"two of them", jsonType, `{"usage":{"prompt_tokens":1,"completion_tokens":2},"usage":{"prompt_tokens":3}}`, known(3, 0, 2, 0)},
	{"transcription", jsonType, `{"text":"Hi","usage":{"type":"tokens","input_tokens":14,"input_token_details":{"text_tokens":0,"audio_tokens":14},"output_tokens":45,"total_tokens":59}}`, known(14, 0, 45, 0)},
	{"transcription by the second", jsonType, `{"text":"Hi","usage":{"type":"duration","seconds":9}}`, unknown},
	{"images", jsonType, `{"created":1,"data":[{"b64_json":"AAAA"}],"usage":{"total_tokens":100,"input_tokens":50,"output_tokens":50,"input_tokens_details":{"text_tokens":10,"image_tokens":40}}}`, known(50, 0, 50, 0)},
	{"message", jsonType, `{"id":"msg_1","type":"message","content":[{"type":"text","text":"Hi"}],"usage":{"input_tokens":10,"cache_creation_input_tokens":200,"cache_read_input_tokens":3000,"output_tokens":12}}`, known(3210, 3000, 12, 0)},
	{"chat with Anthropic's counts besides", jsonType, `{"usage":{"prompt_tokens":3210,"completion_tokens":12,"prompt_tokens_details":{"cached_tokens":3000},"cache_read_input_tokens":3000}}`, known(3210, 3000, 12, 0)},

	{"no usage", jsonType, `{"id":"chatcmpl-1","choices":[]}`, unknown},
	{"a null", jsonType, `{"usage":null}`, unknown},
	{"an empty one", jsonType, `{"usage":{}}`, unknown},
	{"nulls in it", jsonType, `{"usage":{"prompt_tokens":5,"completion_tokens":null,"prompt_tokens_details":null,"completion_tokens_details":{"reasoning_tokens":null}}}`, known(5, 0, 0, 0)},
	{"no whole numbers", jsonType, `{"usage":{"prompt_tokens":"5","completion_tokens":-1,"input_tokens":1.5,"output_tokens":1e3}}`, unknown},
	{"a number beyond belief", jsonType, `{"usage":{"prompt_tokens":99999999999999999999,"completion_tokens":1}}`, known(0, 0, 1, 0)},
	{"usage in other members", jsonType, `{"choices":[{"usage":{"prompt_tokens":1}}],"response":{"usage":{"input_tokens":1}},"message":{"usage":{"input_tokens":1}},"x":{"usage":{"prompt_tokens":1}}}`, unknown},
	{"usage as text", jsonType, `{"content":"\\\"usage\":{\"prompt_tokens\":1}","usage\"":{"prompt_tokens":1},"\\":"\\\\","x":"\\"}`, unknown},
	{"deeper than what matters", jsonType, `{"usage":{"prompt_tokens_details":{"cached_tokens":{"cached_tokens":9},"x":{"cached_tokens":9}},"x":[{"prompt_tokens":9}],"prompt_tokens":[9],"completion_tokens":3}}`, known(0, 0, 3, 0)},
	{"two, of which the last one counts", jsonType, `{"usage":{"prompt_tokens":1,"completion_tokens":1},"usage":{"prompt_tokens":2,"completion_tokens":3}}`, known(2, 0, 3, 0)},
	{"cut off within", jsonType, `{"usage":{"prompt_tokens":1,"completion_tokens":1`, unknown},
	{"cut off after it", jsonType, `{"usage":{"prompt_tokens":1,"completion_tokens":1},"x":"`, known(1, 0, 1, 0)},
	{"an array", jsonType, `[{"usage":{"prompt_tokens":1}}]`, unknown},
	{"not JSON", jsonType, `}]"{"usage":{"prompt_tokens":1}}`, unknown},
	{"a text", "text/plain", `{"usage":{"prompt_tokens":1}}`, unknown},

	{"a stream of chat", streamType, chunk("null") + chunk("null") + "data: {\"choices\":[]," + chatUsage + "}\n\ndata: [DONE]\n\n", known(2006, 1920, 300, 256)},
	{"a stream of chat that did not ask", streamType, chunk("") + chunk("") + "data: [DONE]\n\n", unknown},
	{"a running usage", streamType, chunk(`{"prompt_tokens":9,"completion_tokens":1}`) + chunk(`{"prompt_tokens":9,"completion_tokens":2}`) + "data: [DONE]\n\n", known(9, 0, 2, 0)},
	{"a running usage, cut off", streamType, chunk(`{"prompt_tokens":9,"completion_tokens":1}`) + `data: {"usage":{"prompt_tokens":9,"completion_tokens":2`, known(9, 0, 1, 0)},
	{"a word", streamType, "data: {\"choices\":[{\"delta\":{\"content\":\"usage\"}},{\"usage\":{\"prompt_tokens\":1}}]}\n\n", unknown},
	{"a stream of a response", streamType, "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"usage\":null}}\n\nevent: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"output\":[]," + responseUsage + "}}\n\n", known(36, 7, 87, 64)},
	{"a long response", streamType, "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"output\":\"" + strings.Repeat(`\"`, sse.MaxEvent) + "\"," + responseUsage + "}}\n\n", known(36, 7, 87, 64)},
	{"a long response, cut off", streamType, "data: {\"response\":{\"output\":\"" + strings.Repeat("x", 2*sse.MaxEvent) + "\",\"usage\":{\"input_tokens\":1", unknown},
	{"two long ones", streamType, strings.Repeat("data: {\"x\":\""+strings.Repeat("x", 2*sse.MaxEvent)+"\",\"usage\":{\"prompt_tokens\":1}\n\n", 2) + chunk(`{"prompt_tokens":2}`), known(2, 0, 0, 0)},
	{"a response in lines", streamType, "data: {\"response\":\r\ndata: {" + responseUsage + "\r\ndata: }}\r\n\r\n", known(36, 7, 87, 64)},
	{"a transcription", streamType, "data: {\"type\":\"transcript.text.done\",\"text\":\"Hi\",\"usage\":{\"type\":\"tokens\",\"input_tokens\":14,\"output_tokens\":3}}", known(14, 0, 3, 0)},
	{"a message", streamType, "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"msg_1\",\"usage\":{\"input_tokens\":25,\"cache_read_input_tokens\":5,\"output_tokens\":1}}}\n\nevent: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":15}}\n\n", known(30, 5, 15, 0)},
}

// chunk is a part of a stream of chat, with that usage.
func chunk(usage string) string {
	if usage != "" {
		usage = `,"usage":` + usage
	}
	return `data: {"id":"chatcmpl-9abcdefghijklmnop","object":"chat.completion.chunk","created":1700000000,"model":"gpt-4o-2024-11-20","system_fingerprint":"fp_1","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]` + usage + "}\n\n"
}

func TestTheTokensOfAReply(t *testing.T) {
	for _, c := range replies {
		for _, size := range []int{len(c.body), 1 << 30, 4096, 100, 3, 2, 1} {
			if got := read(c.contentType, "", c.body, size); got != c.want {
				t.Errorf("%s, %d bytes at a time: got %+v, want %+v", c.name, size, got, c.want)
			}
			if got := read(c.contentType, "gzip", compressed(c.body), size); got != c.want {
				t.Errorf("%s, compressed, %d bytes at a time: got %+v, want %+v", c.name, size, got, c.want)
			}
		}
	}
}

func TestTheServiceTierOfAReply(t *testing.T) {
	const usage = `"usage":{"prompt_tokens":5,"completion_tokens":7}`
	for _, c := range []struct{ name, contentType, body, want string }{
		{"after the usage", jsonType, `{"id":"x",` + usage + `,"service_tier":"priority","system_fingerprint":"fp"}`, "priority"},
		{"before it, in the order of letters", jsonType, `{"choices":[{"message":{"content":"a \"service_tier\":\"flex\""}}],"service_tier":"default","system_fingerprint":"fp",` + usage + `}`, "default"},
		{"long before it", jsonType, `{"output":[],"service_tier" : "flex","tools":["` + strings.Repeat("x", 9000) + `"],` + responseUsage + `,"user":null}`, "flex"},
		{"after another's", jsonType, `{"metadata":{"service_tier":"flex"},"service_tier":"priority",` + usage + `}`, "priority"},
		{"only another's", jsonType, `{"metadata":{"service_tier":"flex"},"usage":{"prompt_tokens":5,"service_tier":"standard"},"response":{"service_tier":"flex"}}`, ""},
		{"a text", jsonType, `{"x":"service_tier","y":"\"service_tier\":\"flex\"",` + usage + `}`, ""},
		{"none", jsonType, `{` + usage + `}`, ""},
		{"a null", jsonType, `{"service_tier":null,` + usage + `}`, ""},
		{"an empty one", jsonType, `{"service_tier":"",` + usage + `}`, ""},
		{"a number", jsonType, `{"service_tier":5,` + usage + `}`, ""},
		{"an object", jsonType, `{"service_tier":{"service_tier":"flex"},` + usage + `}`, ""},
		{"a list", jsonType, `{"service_tier":["flex"],` + usage + `}`, ""},
		{"one that no request may name", jsonType, `{"service_tier":"scale",` + usage + `}`, "other"},
		{"a long one", jsonType, `{"service_tier":"` + strings.Repeat("flex", 99) + `",` + usage + `}`, "other"},
		{"no usage", jsonType, `{"service_tier":"flex"}`, "flex"},
		{"its last chunk", streamType, chunk("null") + `data: {"choices":[],"service_tier":"flex",` + usage + "}\n\ndata: [DONE]\n\n", "flex"},
		{"a null after another", streamType, `data: {"service_tier":"flex",` + usage + "}\n\n" + `data: {"service_tier":null,` + usage + "}\n\n", "flex"},
		{"chunks without a usage", streamType, `data: {"choices":[],"service_tier":"flex"}` + "\n\ndata: [DONE]\n\n", ""},
		{"a response", streamType, `data: {"response":{"service_tier":"auto","usage":null}}` + "\n\n" + `data: {"response":{"output":[{"service_tier":"flex"}],"service_tier":"priority",` + responseUsage + "}}\n\n", "priority"},
		{"a long response", streamType, `data: {"response":{"service_tier":"priority","output":"` + strings.Repeat(`\"`, sse.MaxEvent) + `",` + responseUsage + "}}\n\n", "priority"},
		{"a message", streamType, `data: {"message":{"usage":{"input_tokens":25,"service_tier":"standard"}}}` + "\n\n", ""},
	} {
		for _, size := range []int{len(c.body), 1 << 30, 100, 3, 1} {
			if got := readAll(c.contentType, "", c.body, size).ServiceTier(); got != c.want {
				t.Errorf("%s, %d bytes at a time: got %q, want %q", c.name, size, got, c.want)
			}
		}
	}
	if got := new(Reader).Begin(http.Header{}).ServiceTier(); got != "" {
		t.Errorf("a reply of another type has the service tier %q", got)
	}
}

func compressed(text string) string {
	var b strings.Builder
	z := gzip.NewWriter(&b)
	io.WriteString(z, text)
	z.Close()
	return b.String()
}

func TestAWatcherShowsTheTokens(t *testing.T) {
	for _, c := range replies {
		if c.contentType != streamType {
			continue
		}
		for _, size := range []int{1 << 30, 100, 1} {
			r := new(Reader).Begin(http.Header{"Content-Type": {streamType}})
			var w sse.Watcher
			r.Watch(&w)
			for piece := range slices.Chunk([]byte(c.body), size) {
				w.Watch(piece)
			}
			w.Finish()
			r.Close()
			if got := r.Tokens(); got != c.want {
				t.Errorf("%s, %d bytes at a time: got %+v, want %+v", c.name, size, got, c.want)
			}
		}
	}
}

func TestWhatNobodyCanUndoIsUnknown(t *testing.T) {
	const body = `{"usage":{"prompt_tokens":1}}`
	for _, encoding := range []string{"br", "gzip, gzip", "gzip", "deflate", "zstd"} {
		if got := read(jsonType, encoding, body, 10); got.Known() {
			t.Errorf("%s: got %+v", encoding, got)
		}
	}
	if got := read(jsonType, "identity", body, 10); !got.Known() {
		t.Error("a body that is not compressed is unknown")
	}
	if half := compressed(body); read(jsonType, "gzip", half[:20], 10).Known() {
		t.Error("a body that is cut off is known")
	}
}

// plainly reads the tokens of a JSON text by encoding/json.
func plainly(text []byte, inEvent bool, found *counts, named *string) error {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	var value func(at node) error
	value = func(at node) error {
		token, err := decoder.Token()
		if err != nil {
			return err
		}
		if at == object {
			found = &counts{}
		}
		switch token := token.(type) {
		case string:
			if at == tier && token != "" {
				*named = openaiapi.TierName(token)
			}
		case json.Number:
			var n int64
			if _, err := fmt.Sscanf(token.String(), "%d", &n); err == nil && at >= firstCount && fmt.Sprint(n) == token.String() && n >= 0 && n < 1e15 {
				found.set(at, n)
			}
		case json.Delim:
			for decoder.More() {
				child := nowhere
				if token == '{' {
					name, err := decoder.Token()
					if err != nil {
						return err
					}
					child = at.child([]byte(name.(string)), inEvent)
				}
				total := found
				if err := value(child); err != nil {
					return err
				}
				if child == object {
					total.add(found)
					found = total
				}
			}
			_, err := decoder.Token()
			return err
		}
		return nil
	}
	if err := value(root); err != nil {
		return err
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more than one value")
	}
	return nil
}

func FuzzScan(f *testing.F) {
	for i, c := range replies {
		if len(c.body) < 4096 {
			f.Add([]byte(c.body), 1+i%5, i%2 == 0)
			f.Add([]byte(strings.TrimSuffix(strings.TrimPrefix(c.body, "data: "), "\n\n")), 1+i%5, true)
		}
	}
	f.Fuzz(func(t *testing.T, text []byte, size int, inEvent bool) {
		if size < 1 {
			return
		}
		whole, cut := scanner{inEvent: inEvent}, scanner{inEvent: inEvent}
		whole.scan(text)
		for piece := range slices.Chunk(text, size) {
			cut.scan(piece)
		}
		if cut.found != whole.found || cut.tier != whole.tier {
			t.Fatalf("%q, %d bytes at a time: %+v %s, and at once: %+v %s", text, size, cut.found, cut.tier, whole.found, whole.tier)
		}
		var want counts
		var named string
		if bytes.Contains(text, []byte(`\u`)) || bytes.HasPrefix(bytes.TrimLeft(text, whiteSpace), []byte("[")) || plainly(text, inEvent, &want, &named) != nil {
			return
		}
		if whole.found != want || whole.tier != named && !bytes.Contains(text, []byte("\\")) {
			t.Fatalf("%q: %+v %s, and by encoding/json: %+v %s", text, whole.found, whole.tier, want, named)
		}
		if want != (counts{}) && !mayHoldUsage(text) {
			t.Fatalf("%q is passed over", text)
		}
	})
}

func FuzzReader(f *testing.F) {
	for i, c := range replies {
		if len(c.body) < 4096 {
			f.Add(c.body, 1+i%5, c.contentType == streamType)
		}
	}
	f.Fuzz(func(t *testing.T, body string, size int, streams bool) {
		contentType := jsonType
		if streams {
			contentType = streamType
		}
		if size < 1 {
			return
		}
		type read struct {
			Tokens
			tier string
		}
		in := func(encoding, body string, size int) read {
			r := readAll(contentType, encoding, body, size)
			return read{r.Tokens(), r.ServiceTier()}
		}
		whole := in("", body, 1<<30)
		if at := in("", body, len(body)); at != whole && json.Valid([]byte(body)) {
			t.Errorf("%q, known to be whole: %+v, and not: %+v", body, at, whole)
		}
		if cut := in("", body, size); cut != whole {
			t.Errorf("%q, %d bytes at a time: %+v, and at once: %+v", body, size, cut, whole)
		}
		if packed := in("gzip", compressed(body), size); packed != whole {
			t.Errorf("%q, compressed: %+v, and not: %+v", body, packed, whole)
		}
		in("gzip", body, size)
		in("zstd", body, size)
	})
}

func TestAnObjectIsWholeAtItsEnd(t *testing.T) {
	const whole = `{"id":"x","choices":[{"text":"}\""}],` + chatUsage + `}`
	for text, want := range map[string]bool{
		whole: true, " " + whole + "\r\n": true, `{}`: true, `{"a":NaN}`: true, "\xef\xbb\xbf" + whole: true,
		"": false, "[]": false, `"{}"`: false, "null": false, "<p>": false, whole + "}": false, whole + whole: false, whole[:len(whole)-1]: false,
		`{"a":[}`: false, `{"a":"}`: false, `{'a':1}`: false,
	} {
		for size := 1; size <= len(text)+1; size += max(1, len(text)) {
			r := new(Reader).Begin(http.Header{"Content-Type": {jsonType}})
			if size > len(text) {
				r.Whole([]byte(text))
			} else {
				for piece := range slices.Chunk([]byte(text), size) {
					r.Write(piece)
				}
			}
			if got := r.IsObject(); got != want {
				t.Errorf("%q, %d bytes at a time: %v", text, size, got)
			}
		}
	}
	if new(Reader).Begin(http.Header{}).IsObject() {
		t.Error("a reply of another type is an object")
	}
}

func TestAStreamsEventsAllocateNothing(t *testing.T) {
	for name, stream := range map[string]string{
		"no usage":        chunk(""),
		"a null":          chunk("null"),
		"a running usage": chunk(`{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}`),
		"a service tier":  chunk(`{"prompt_tokens":9,"completion_tokens":1},"service_tier":"flex"`),
		"an unknown tier": chunk(`{"prompt_tokens":9,"completion_tokens":1},"service_tier":"a tier with a name of many letters"`),
	} {
		r := new(Reader).Begin(http.Header{"Content-Type": {streamType}})
		piece := []byte(stream)
		if n := testing.AllocsPerRun(100, func() { r.Write(piece) }); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func BenchmarkReader(b *testing.B) {
	chat := `{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"gpt-4o-2024-11-20","choices":[{"index":0,"message":{"role":"assistant","content":"` + strings.Repeat("A sentence of words. ", 20) + `","refusal":null,"annotations":[]},"logprobs":null,"finish_reason":"stop"}],` + chatUsage + `,"service_tier":"default","system_fingerprint":"fp_1"}`
	embedding := `{"object":"list","data":[{"object":"embedding","index":0,"embedding":[` + strings.Repeat("-0.012345678,", 1535) + `0.5]}],"usage":{"prompt_tokens":8,"total_tokens":8}}`
	for _, bb := range []struct{ name, contentType, encoding, piece string }{
		{"chat of 1 KB", jsonType, "", chat},
		{"chat of 1 KB, compressed", jsonType, "gzip", compressed(chat)},
		{"embedding of 1536 numbers", jsonType, "", embedding},
		{"embedding of 1536 numbers, compressed", jsonType, "gzip", compressed(embedding)},
		{"200 events", streamType, "", chunk("")},
		{"200 events with a null", streamType, "", chunk("null")},
		{"200 events with a running usage", streamType, "", chunk(`{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}`)},
	} {
		b.Run(bb.name, func(b *testing.B) {
			header := http.Header{"Content-Type": {bb.contentType}}
			if bb.encoding != "" {
				header.Set("Content-Encoding", bb.encoding)
			}
			piece, times := []byte(bb.piece), 1
			if bb.contentType == streamType {
				times = 200
			}
			b.SetBytes(int64(len(piece) * times))
			b.ReportAllocs()
			for b.Loop() {
				r := new(Reader).Begin(header)
				if times == 1 {
					r.Whole(piece)
				} else {
					for range times {
						r.Write(piece)
					}
				}
				r.Close()
			}
		})
	}
}
