package simulator

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"mime/multipart"
	"slices"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/simulator/internal/limits"
)

// response is what the tests read of a response.
type response struct {
	ID     string `json:"id"`
	Status string `json:"status"`
	Output []struct {
		ID        string  `json:"id"`
		Type      string  `json:"type"`
		CallID    string  `json:"call_id"`
		Name      string  `json:"name"`
		Arguments *string `json:"arguments"`
	} `json:"output"`
}

func TestEmbeddingsAreTheSameInBothEncodings(t *testing.T) {
	srv := listen(t, &Handler{})
	var floats struct {
		Data  []struct{ Embedding []float32 }
		Usage struct {
			Prompt int64 `json:"prompt_tokens"`
			Total  int64 `json:"total_tokens"`
		}
	}
	var encoded struct {
		Data []struct{ Embedding string }
	}
	_, body := call(t, srv, "POST", "/v1/embeddings", `{"model":"e","input":["hello","world"]}`)
	if err := json.Unmarshal([]byte(body), &floats); err != nil {
		t.Fatal(err)
	}
	_, body = call(t, srv, "POST", "/v1/embeddings", `{"model":"e","input":["hello","world"],"encoding_format":"base64"}`)
	if err := json.Unmarshal([]byte(body), &encoded); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		raw, err := base64.StdEncoding.DecodeString(encoded.Data[i].Embedding)
		if err != nil || len(raw) != 32 {
			t.Fatalf("%d bytes, %v", len(raw), err)
		}
		var square float64
		for j, want := range floats.Data[i].Embedding {
			if got := math.Float32frombits(binary.LittleEndian.Uint32(raw[4*j:])); got != want {
				t.Errorf("dimension %d: got %v in base64 and %v in JSON", j, got, want)
			}
			square += float64(want) * float64(want)
		}
		if math.Abs(square-1) > 1e-6 {
			t.Errorf("length %v, want 1", square)
		}
	}
	if slices.Equal(floats.Data[0].Embedding, floats.Data[1].Embedding) {
		t.Error("two inputs have one vector")
	}
	if floats.Usage.Prompt != 3 || floats.Usage.Total != 3 {
		t.Errorf("got usage %+v, want 3 tokens", floats.Usage)
	}
}

func TestAnEmbeddingHasAsManyDimensionsAsTheRequestAsksFor(t *testing.T) {
	srv := listen(t, &Handler{})
	for options, want := range map[string]int{"": 8, `,"dimensions":1`: 1, `,"dimensions":256`: 256, `,"dimensions":3072`: 3072} {
		var floats struct {
			Data []struct{ Embedding []float32 }
		}
		var encoded struct{ Data []struct{ Embedding []byte } }
		_, body := call(t, srv, "POST", "/v1/embeddings", `{"model":"e","input":"x"`+options+`}`)
		_, inBase64 := call(t, srv, "POST", "/v1/embeddings", `{"model":"e","input":"x","encoding_format":"base64"`+options+`}`)
		if json.Unmarshal([]byte(body), &floats) != nil || json.Unmarshal([]byte(inBase64), &encoded) != nil ||
			len(floats.Data[0].Embedding) != want || len(encoded.Data[0].Embedding) != 4*want {
			t.Errorf("%s: got %s and %s", options, body, inBase64)
		}
	}
	for _, wrong := range []string{"0", "-1", "1000000000", `"8"`} {
		resp, body := call(t, srv, "POST", "/v1/embeddings", `{"model":"e","input":"x","dimensions":`+wrong+`}`)
		if resp.StatusCode != 400 || !strings.Contains(body, "'dimensions'") {
			t.Errorf("%s: got %d %s", wrong, resp.StatusCode, body)
		}
	}
}

func TestATranscriptionFindsItsModelBehindTheFile(t *testing.T) {
	srv := listen(t, &Handler{OutputTokens: 3, Deployments: []string{"whisper"}})
	var form bytes.Buffer
	w := multipart.NewWriter(&form)
	file, _ := w.CreateFormFile("file", "speech.wav")
	_, _ = file.Write(bytes.Repeat([]byte("sound"), 1000))
	_ = w.WriteField("model", "whisper")
	_ = w.Close()
	for _, path := range []string{"/v1/audio/transcriptions", "/openai/v1/audio/transcriptions", "/openai/deployments/whisper/audio/transcriptions?api-version=1"} {
		resp, body := call(t, srv, "POST", path, form.String(), "Content-Type", w.FormDataContentType())
		if resp.StatusCode != 200 || body != `{"text":"This reply comes"}` {
			t.Errorf("%s: got %d %s", path, resp.StatusCode, body)
		}
	}
}

func TestAStoredResponseCanBeReadContinuedAndDeleted(t *testing.T) {
	srv := listen(t, &Handler{})
	_, created := call(t, srv, "POST", "/v1/responses", `{"model":"m","input":"x"}`)
	var resp response
	if err := json.Unmarshal([]byte(created), &resp); err != nil {
		t.Fatal(err)
	}
	if _, read := call(t, srv, "GET", "/openai/v1/responses/"+resp.ID, ""); read != created {
		t.Errorf("got  %s\nwant %s", read, created)
	}
	next := `{"model":"m","input":"y","store":false,"previous_response_id":"` + resp.ID + `"}`
	got, unstored := call(t, srv, "POST", "/v1/responses", next)
	if got.StatusCode != 200 {
		t.Errorf("got %d %s for a continuation", got.StatusCode, unstored)
	}
	var second response
	_ = json.Unmarshal([]byte(unstored), &second)
	if got, body := call(t, srv, "GET", "/v1/responses/"+second.ID, ""); got.StatusCode != 404 {
		t.Errorf("got %d %s for what was not to be stored", got.StatusCode, body)
	}
	if _, body := call(t, srv, "DELETE", "/v1/responses/"+resp.ID, ""); body != `{"deleted":true,"id":"`+resp.ID+`","object":"response"}` {
		t.Errorf("got %s", body)
	}
	if got, body := call(t, srv, "POST", "/v1/responses", next); got.StatusCode != 400 || !strings.Contains(body, `"code":"previous_response_not_found"`) {
		t.Errorf("got %d %s after it was deleted", got.StatusCode, body)
	}
}

func TestTheOldestResponsesAreForgotten(t *testing.T) {
	s := newState(limits.Rules{})
	for i := range keptResponses + 1 {
		s.store(fmt.Sprint(i), []byte("{}"))
	}
	if s.stored("0") != nil || s.stored("1") == nil || len(s.responses) != keptResponses {
		t.Errorf("%d are kept, the oldest: %t", len(s.responses), s.stored("0") != nil)
	}
}

func TestModelsAreTheDeployments(t *testing.T) {
	srv := listen(t, &Handler{Name: "eus", Deployments: []string{"a", "b"}})
	_, body := call(t, srv, "GET", "/v1/models", "")
	want := `{"data":[{"created":0,"id":"a","object":"model","owned_by":"eus"},{"created":0,"id":"b","object":"model","owned_by":"eus"}],"object":"list"}`
	if body != want {
		t.Errorf("got %s, want %s", body, want)
	}
}
