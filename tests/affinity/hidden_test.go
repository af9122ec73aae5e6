package affinity

import (
	"strings"
	"testing"
)

// TestNoHeaderHidesTheIDsOfABody has bob send a plain body with a header that
// says otherwise, but that no backend would get: it is named as one between two
// hops, or its value is a key.
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

// TestNoSpellingOfAnIDGetsPastItsOwner has bob name what is alice's in ways
// that a backend may read as hers.
func TestNoSpellingOfAnIDGetsPastItsOwner(t *testing.T) {
	inBubble(t, oneAccount, func(t *testing.T, w *world) {
		w.do(alice, exchanged{"POST /v1/responses {}", `{"id":"resp_of_alice"}`})
		w.do(bob, exchanged{"POST /v1/responses {}", `{"id":"resp_of_bob_1"}`})
		w.Backends["a"].Forget()
		form := func(value string) string {
			return "--x\r\nContent-Disposition: form-data; name=\"file_id\"\r\n\r\n" + value + "\r\n--x--\r\n"
		}
		for request, code := range map[string]string{
			"GET /v1/realtime?call_id=resp_of_bob_1&call_id=resp_of_alice":                  "not_found",
			"GET /v1/realtime?call_id=resp_of_alice&call_id=resp_of_bob_1":                  "not_found",
			"GET /v1/realtime?call_id=resp_of_bob_1&Call%5FID=resp_of_alice":                "not_found",
			"GET /v1/realtime?call_id=resp_of_bob_1;call_id=resp_of_alice":                  "not_found",
			"GET /v1/realtime?call_id=resp_of_bob_1%26call_id=x&call_id[]=%20resp_of_alice": "not_found",
			"GET /v1/realtime?call_id%20=resp_of_alice":                                     "not_found",
			"GET /v1/realtime?call_id=resp_of_alice%00":                                     "not_found",
			"GET /v1/files?after=resp_of_bob_1&after=resp_of_alice":                         "not_found",
			"GET /v1/files?after=+resp_of_alice":                                            "not_found",
			"GET /v1/files?before=resp_of_alice%0A":                                         "not_found",
			"GET /v1/responses/resp_of_alice%20":                                            "invalid_path",
			"GET /v1/responses/%09resp_of_alice":                                            "invalid_path",
			"GET /v1/responses/resp_of_alice%00":                                            "invalid_path",
			"GET /v1/responses/resp_of_alice%7F":                                            "invalid_path",
			"GET /v1/responses/resp_of_alice%C2%A0":                                         "invalid_path",
			"GET /v1/responses/resp_of_alice%C2%85/input_items":                             "invalid_path",
			"GET /v1/responses/resp_of_alice%E2%80%8B":                                      "invalid_path",
			"GET /v1/responses%20/resp_of_alice":                                            "invalid_path",
			`POST /v1/responses {"previous_response_id":" resp_of_alice"}`:                  "previous_response_not_found",
			`POST /v1/responses {"previous_response_id":"resp_of_alice\t"}`:                 "previous_response_not_found",
			`POST /v1/responses {"previous_response_id":"resp_of_alice\u0000"}`:             "previous_response_not_found",
			`POST /v1/responses {"previous_response_id":"resp_of_alice\u0000then"}`:         "previous_response_not_found",
			`POST /v1/responses {"previous_response_id":"\u00a0resp_of_alice"}`:             "previous_response_not_found",
			`POST /v1/responses {"previous_response_id":"\ufeffresp_of_alice"}`:             "previous_response_not_found",
			`POST /v1/responses {"conversation":{"id":"resp_of_\nalice"}}`:                  "not_found",
			`POST /v1/responses {"tools":[{"vector_store_ids":["resp_of_alice "]}]}`:        "not_found",
			"POST /v1/containers/resp_of_bob_1/files " + form(" resp_of_alice"):             "not_found",
			"POST /v1/containers/resp_of_bob_1/files " + form("resp_of_alice\r\n"):          "not_found",
		} {
			method, rest, _ := strings.Cut(request, " ")
			path, body, _ := strings.Cut(rest, " ")
			r := w.Request(method, path, strings.NewReader(body))
			r.Header.Set("Authorization", "Bearer "+bob)
			if strings.HasPrefix(body, "--x") {
				r.Header.Set("Content-Type", "multipart/form-data; boundary=x")
			}
			reply := w.Send(r)
			if n := w.TotalCalls(); n > 0 || !strings.Contains(reply.Body, `"code":"`+code+`"`) {
				t.Errorf("%s: client got %d %s, and %d backends were asked", request, reply.Status, reply.Body, n)
			}
			w.Backends["a"].Forget()
		}
		w.Backends["a"].Recovers()
		w.call(bob, "POST", "/v1/responses", `{"previous_response_id":" resp_of_bob_1 "}`).WantServed(t, "a")
	})
}
