package usage

import (
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/sse"
)

func TestContentIsCountedInPiecesOfAnySize(t *testing.T) {
	for text, want := range map[string]int64{
		`{"choices":[{"message":{"role":"assistant","content":"12345","refusal":null}}]}`:          5,
		`{"choices": [ {"delta" : { "content" : "1\"345\\", "role":"content"}}]}`:                  8,
		`{"content":[{"type":"text","text":"abc"},{"type":"thinking","thinking":"de"}]}`:           5,
		`{"output":[{"content":[{"type":"output_text","text":"abc"}]},{"arguments":"{\"a\":1}"}]}`: 12,
		`{"id":"text","model":"content","data":["text","delta"],"b64_json":"content:text"}`:        0,
		`{"a":["content"],"text":1,"delta":{"x":"y"},"` + strings.Repeat("content", 9) + `":"z"}`:  0,
		`{"content":"","text":"é"}`: 2,
	} {
		for size := 1; size <= len(text); size++ {
			c := new(content)
			for rest := text; rest != ""; {
				n := min(size, len(rest))
				c.count([]byte(rest[:n]))
				rest = rest[n:]
			}
			if c.length != want {
				t.Errorf("%s in pieces of %d: %d bytes of content, want %d", text, size, c.length, want)
				break
			}
		}
	}
}

// spends records what it is told.
type spends []int64

func (s *spends) Spend(output int64) { *s = append(*s, output) }

func TestASpenderIsToldOfAStreamsOutputOnceThereIsMoreThanItKnows(t *testing.T) {
	r := new(Reader).Begin(http.Header{"Content-Type": {streamType}})
	r.CountContent()
	told := new(spends)
	r.Write([]byte("data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n"))
	r.Follow(told, 100)
	for range 200 {
		r.Write([]byte("data: {\"choices\":[{\"delta\":{\"content\":\"12345678\"}}]}\n\n")) // two tokens
	}
	if len(*told) != 5 || (*told)[0] != 102 || (*told)[4] != 102+4*64 {
		t.Errorf("it was told %v", *told)
	}
	r.Write([]byte("data: {\"choices\":[],\"usage\":{\"completion_tokens\":1000}}\n\n"))
	if got := (*told)[len(*told)-1]; got != 1000 {
		t.Errorf("of the usage, it was told %d", got)
	}
}

func TestTheAudioOfASessionCountsByItsEventsAndItsTranscriptByItsBytes(t *testing.T) {
	for kind, want := range map[string]int64{
		"response.output_audio.delta": 2, "response.audio.delta": 2, "response.output_audio_transcript.delta": 200, "response.output_text.delta": 200,
	} {
		r, w := new(Reader).Begin(http.Header{"Content-Type": {streamType}}), new(sse.Watcher)
		r.CountContent()
		r.Watch(w)
		delta := `"delta":"` + strings.Repeat("x", 400) + `"`
		for _, data := range []string{`{"type":"` + kind + `","item_id":"item_1",` + delta + `}`, `{"content_index":0,` + delta + `,"type":"` + kind + `"}`} {
			w.Take(sse.Event{Data: []byte(data), Name: []byte(kind)})
		}
		if tokens, _ := r.Estimate(0); tokens.Output != want {
			t.Errorf("two events %s count as %d tokens, want %d", kind, tokens.Output, want)
		}
	}
}

// BenchmarkContent has the usual event of a chat, as OpenAI sends it.
func BenchmarkContent(b *testing.B) {
	event := []byte(`{"id":"chatcmpl-BQPeQXkgmVbhVUMhXcq5V2vPpkJyF","object":"chat.completion.chunk","created":1745613770,"model":"gpt-4o-2024-08-06","service_tier":"default","system_fingerprint":"fp_f5bdcc3276","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}],"usage":null}`)
	r := new(Reader)
	for b.Loop() {
		r.piece(event)
	}
}
