package streams

import (
	"bytes"
	"compress/gzip"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// TestALongJSONReplyThatIsCutIsCutForItsClient although its chunks or its
// connection end as if it were whole.
func TestALongJSONReplyThatIsCutIsCutForItsClient(t *testing.T) {
	whole := `{"id":"chatcmpl-1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"` +
		lbtest.Noise(200<<10) + `"}}],"usage":{"prompt_tokens":1,"completion_tokens":2}}`
	var compressed bytes.Buffer
	z := gzip.NewWriter(&compressed)
	io.WriteString(z, whole)
	z.Close()
	inChunks := func(body string, header ...string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			for i := 0; i < len(header); i += 2 {
				w.Header().Set(header[i], header[i+1])
			}
			io.WriteString(w, body)
		}
	}
	closed := func(body string) http.HandlerFunc {
		return lbtest.Raw("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" + body)
	}
	for name, c := range map[string]struct {
		reply http.HandlerFunc
		cut   bool
	}{
		"its chunks end":          {inChunks(whole[:len(whole)/2]), true},
		"its connection is close": {closed(whole[:len(whole)/2]), true},
		"within its last object":  {inChunks(whole[:len(whole)-1]), true},
		"its gzip is cut":         {inChunks(compressed.String()[:compressed.Len()/2], "Content-Encoding", "gzip"), true},
		"whole":                   {inChunks(whole), false},
		"whole, and closed":       {closed(whole + "\n"), false},
		"whole, and compressed":   {inChunks(compressed.String(), "Content-Encoding", "gzip"), false},
		"a list":                  {inChunks("[" + whole + "," + whole + "]"), false},
		"half a list":             {inChunks("[" + whole + "," + whole), false}, // nobody knows that the backend speaks no other format
	} {
		t.Run(name, func(t *testing.T) {
			lbtest.InBubble(t, "openai_lb {\nbackend http://a\n}", func(t *testing.T, w *lbtest.World) {
				w.Backends["a"].Replies(c.reply)
				r := w.Request(http.MethodPost, "/v1/chat/completions", strings.NewReader(`{"model":"m"}`))
				r.Header.Set("Accept-Encoding", "gzip")
				reply := w.Send(r)
				if (reply.Err != nil) != c.cut || reply.Status != 200 {
					t.Errorf("the client got %d, %v", reply.Status, reply.Err)
				}
				if broken := w.Logged("reply broken"); (len(broken) == 1) != c.cut {
					t.Errorf("logged %v", broken)
				}
			})
		})
	}
}
