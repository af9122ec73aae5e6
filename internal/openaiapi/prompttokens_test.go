package openaiapi

import (
	"strings"
	"testing"
)

func TestMediaCountByTheirNumberAndNotByTheirBytes(t *testing.T) {
	data := strings.Repeat("QUJD", 250_000)
	for name, c := range map[string]struct {
		body string
		want int64
	}{
		"a text":                     {`{"messages":[{"role":"user","content":"` + strings.Repeat("word ", 2000) + `"}]}`, 2510},
		"a picture of 1 MB":          {`{"messages":[{"content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,` + data + `"}}]}]}`, 1023},
		"a picture of a response":    {`{"input":[{"content":[{"type":"input_image","image_url":"data:image/png;base64,` + data + `"}]}]}`, 1021},
		"two pictures":               {`["data:image/png;base64,` + data + `","data:image/png;base64,` + data + `"]`, 2012},
		"a short picture":            {`["data:image/png;base64,QUJD"]`, 1006},
		"a recording":                {`{"input_audio":{"data":"` + data + `","format":"wav"}}`, 1010},
		"a recording after a space":  {`{"input_audio":{"format":"wav", "data" : "` + data + `"}}`, 1011},
		"a picture of Anthropic":     {`{"source":{"type":"base64","media_type":"image/png","data":"` + data + `"}}`, 1015},
		"a file":                     {`{"file":{"file_data":"data:application/pdf;base64,` + data + `"}}`, 1013},
		"a picture that is cut off":  {`["data:image/png;base64,` + data, 1006},
		"data that are a text":       {`{"data":"` + strings.Repeat("word ", 2000) + `"}`, 2502},
		"data that are an object":    {`{"data":{"x":"` + strings.Repeat("word ", 2000) + `"}}`, 2504},
		"a picture after a space":    {`{"image_url" : {"url" : "data:image/png;base64,` + data + `"}}`, 1012},
		"a video":                    {`{"video_url":{"url":"data:video/mp4;base64,` + data + `"}}`, 1011},
		"a picture to embed":         {`{"input":[{"image":"data:image/png;base64,` + data + `"}]}`, 1011},
		"a URL in a text":            {`{"content":"as in \"data:image/png;base64,` + data + `\", say"}`, 250_012},
		"a text like a URL":          {`{"messages":[{"role":"user","content":"data:;base64,` + strings.Repeat("word ", 2000) + `"}]}`, 2514},
		"a part like a URL":          {`{"content":[{"type":"text","text":"data:;base64,` + strings.Repeat("word ", 2000) + `"}]}`, 2513},
		"an input like a URL":        {`{"input" : "data:;base64,` + strings.Repeat("word ", 2000) + `"}`, 2506},
		"a word that is not a URL":   {`{"content":"the mark ;base64,` + strings.Repeat("word ", 2000) + `"}`, 2507},
		"a long text before a mark":  {`{"content":"data:` + strings.Repeat("word ", 2000) + `;base64,"}`, 2506},
		"nothing":                    {"", 0},
		"a body that ends too early": {`{"data":`, 2},
	} {
		if got := promptTokens([]byte(c.body), -1); got != c.want {
			t.Errorf("%s: got %d, want %d", name, got, c.want)
		}
	}
	if got := promptTokens([]byte(`["data:image/png;base64,QUJD`), 4028); got != 2006 {
		t.Errorf("a body of which only the beginning came: got %d", got)
	}
}

func BenchmarkPromptTokens(b *testing.B) {
	body := []byte(`{"model":"gpt-4o","messages":[` + strings.Repeat(`{"role":"user","content":"How many people live in the city of Paris, and how many in Lyon?"},`, 40) + `{}]}`)
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		promptTokens(body, int64(len(body)))
	}
}
