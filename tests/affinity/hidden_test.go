package affinity

import (
	"strings"
	"testing"
)

// TestNoHeaderHidesTheIDsOfABody has bob send a plain body with a header that says otherwise, but that no backend
// would get: it is named as one between two hops, or its value is a key.
func TestNoHeaderHidesTheIDsOfABody(t *testing.T) {
	const body = `{"previous_response_id":"resp_of_alice"}`
	for name, c := range map[string]struct {
		headers []string
		code    string
	}{
		"a coding for one hop":             {[]string{"Content-Encoding", "gzip", "Connection", "content-encoding"}, "invalid_headers"},
		"among other names":                {[]string{"Content-Encoding", "gzip", "Connection", "keep-alive, X-A ,\tContent-Encoding"}, "invalid_headers"},
		"in a second line":                 {[]string{"Content-Encoding", "gzip", "Connection", "close", "Connection", "Content-Encoding"}, "invalid_headers"},
		"a type for one hop":               {[]string{"Content-Type", "multipart/form-data; boundary=x", "Connection", "Content-Type"}, "invalid_headers"},
		"a type that stays":                {[]string{"Content-Type", "application/json", "Connection", "content-type"}, "invalid_headers"},
		"a coding that is a key":           {[]string{"Content-Encoding", "gzip, identity", "X-Other-Key", "identity"}, "invalid_headers"},
		"a type that is a key":             {[]string{"Content-Type", "multipart/form-data; boundary=x", "X-Other-Key", "boundary=x"}, "invalid_headers"},
		"a header for one hop and no body": {[]string{"Connection", "X-Trace"}, "previous_response_not_found"},
		"nothing":                          {nil, "previous_response_not_found"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, oneAccount, func(t *testing.T, w *world) {
				w.do(alice, exchanged{"POST /v1/responses {}", `{"id":"resp_of_alice"}`})
				w.Backends["a"].Forget()
				r := w.Request("POST", "/v1/responses", strings.NewReader(body))
				r.Header.Set("Authorization", "Bearer "+bob)
				for i := 0; i+1 < len(c.headers); i += 2 {
					if strings.HasPrefix(c.headers[i], "Content-") {
						r.Header.Del(c.headers[i])
					}
					r.Header.Add(c.headers[i], c.headers[i+1])
				}
				reply := w.Send(r)
				if n := w.TotalCalls(); n > 0 || !strings.Contains(reply.Body, `"code":"`+c.code+`"`) {
					t.Errorf("client got %d %s, and %d backends were asked", reply.Status, reply.Body, n)
				}
			})
		})
	}
}
