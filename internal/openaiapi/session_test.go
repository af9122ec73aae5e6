package openaiapi

import (
	"bytes"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestTheModelOfASessionIsThatOfItsRequest and is replaced where it stands.
func TestTheModelOfASessionIsThatOfItsRequest(t *testing.T) {
	const form = "--x\r\nContent-Disposition: form-data; name=\"sdp\"\r\n\r\nv=0\r\n--x\r\nContent-Disposition: form-data; name=\"session\"\r\nContent-Type: application/json\r\n\r\n{\"type\":\"realtime\",\"model\": \"gpt-realtime\"}\r\n--x--\r\n"
	for name, c := range map[string]struct{ path, kind, body, model, want string }{
		"a secret":         {"/realtime/client_secrets", TypeJSON, `{"session":{"type":"realtime","model":"gpt-realtime"}}`, "gpt-realtime", `{"session":{"type":"realtime","model":"at\"there"}}`},
		"a translation's":  {"/realtime/translations/client_secrets", TypeJSON, `{"expires_after":{},"session":{"model":"gpt-translate"}}`, "gpt-translate", `{"expires_after":{},"session":{"model":"at\"there"}}`},
		"a call":           {"/realtime/calls", "multipart/form-data; boundary=x", form, "gpt-realtime", strings.Replace(form, `"gpt-realtime"`, `"at\"there"`, 1)},
		"twice":            {"/realtime/client_secrets", TypeJSON, `{"session":{"model":"a","model":"b"}}`, "b", `{"session":{"model":"at\"there","model":"at\"there"}}`},
		"at the top, too":  {"/realtime/client_secrets", TypeJSON, `{"model":"m","session":{"model":"b"}}`, "m", `{"model":"at\"there","session":{"model":"b"}}`},
		"an offer":         {"/realtime/calls", "application/sdp", "v=0\r\n", "", "v=0\r\n"},
		"another API's":    {"/responses", TypeJSON, `{"session":{"model":"b"}}`, "", ""},
		"no model in it":   {"/realtime/client_secrets", TypeJSON, `{"session":{"type":"realtime"}}`, "", ""},
		"what is no model": {"/realtime/client_secrets", TypeJSON, `{"session":{"model":7}}`, "", ""},
	} {
		r := httptest.NewRequest("POST", "/v1"+c.path, nil)
		r.Header.Set("Content-Type", c.kind)
		q := Parse(r, ParsePath("/v1"+c.path), Received{Bytes: []byte(c.body), Whole: true, Length: int64(len(c.body))}, nil)
		if q.Model != c.model {
			t.Errorf("%s: the model is %q, want %q", name, q.Model, c.model)
		}
		if c.want == "" {
			continue
		}
		if c.model == "" {
			continue
		}
		if got := string(bytes.Join(q.Body.With([]byte(c.body), Changes{Model: `at"there`}), nil)); got != c.want {
			t.Errorf("%s: got %s, want %s", name, got, c.want)
		}
		if got := string(bytes.Join(q.Body.With([]byte(c.body), Changes{Model: c.model}), nil)); name != "twice" && got != c.body {
			t.Errorf("%s changes although it names the model: %s", name, got)
		}
	}
}
