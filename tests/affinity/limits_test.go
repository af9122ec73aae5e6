package affinity

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// twoOwners has two accounts, of which the second one owns what ownedBy makes
// there, and shows class and backend of a reply to its client. withTwoOwners
// runs a test with two accounts, one after the other in priority, and replies
// that show their class and the backend that they are about.
func withTwoOwners(t *testing.T, pool, options string, test func(*testing.T, *world)) {
	t.Helper()
	config := `openai_lb {
		pool ` + pool + `
		backend http://a {
			` + options + `
		}
		backend http://b {
			priority 2
			` + options + `
		}
	}`
	inBubble(t, config, func(t *testing.T, w *world) {
		w.Shows = map[string]string{"X-Class": "{http.openai_lb.class}", "X-Backend-Shown": "{http.openai_lb.backend}"}
		test(t, w)
	})
}

// ownedByB has the backend b own an object of this id.
func (w *world) ownedByB(t *testing.T, id string) {
	t.Helper()
	w.Backends["a"].Replies(lbtest.Throttled("1"))
	w.Backends["b"].Replies(lbtest.Says(200, `{"id":"`+id+`"}`))
	w.call("", "POST", "/v1/files", `{}`).WantServed(t, "b")
	w.Backends["a"].Recovers()
	time.Sleep(2 * time.Second)
}

// TestAnOwnerThatThrottlesIsNotThePool has requests that only the second
// account can serve, while the first one is free.
func TestAnOwnerThatThrottlesIsNotThePool(t *testing.T) {
	for _, c := range []struct{ id, request, object string }{
		{"resp_12345678", `POST /v1/responses {"model":"m","previous_response_id":"resp_12345678"}`, "the response 'resp_12345678'"},
		{"resp_12345678", `GET /v1/responses/resp_12345678`, "the response 'resp_12345678'"},
		{"conv_12345678", `POST /v1/responses {"model":"m","conversation":"conv_12345678"}`, "the conversation 'conv_12345678'"},
		{"rs_12345678", `POST /v1/responses {"model":"m","input":[{"type":"item_reference","id":"rs_12345678"}]}`, "the item 'rs_12345678'"},
		{"gAAAAAB_encrypted", `POST /v1/responses {"input":[{"type":"reasoning","summary":[],"encrypted_content":"gAAAAAB_encrypted"}]}`, "the encrypted content 'gAAAAAB_encrypted'"},
		{"file-12345678", `GET /v1/files/file-12345678/content`, "the file 'file-12345678'"},
		{"assistant-12345678", `GET /v1/files/assistant-12345678`, "the object 'assistant-12345678'"},
		{"vs_12345678", `POST /v1/vector_stores/vs_12345678/search {}`, "the vector store 'vs_12345678'"},
		{"batch_12345678", `GET /v1/batches/batch_12345678`, "the batch 'batch_12345678'"},
	} {
		t.Run(c.request, func(t *testing.T) {
			pool := lbtest.Unique("owner-throttles")
			withTwoOwners(t, pool, "", func(t *testing.T, w *world) {
				w.ownedByB(t, c.id)
				w.Backends["b"].Replies(lbtest.Throttled("9"))
				method, rest, _ := strings.Cut(c.request, " ")
				path, body, _ := strings.Cut(rest, " ")
				for i := range 2 { // the second time, b is not asked because of its cooldown
					reply := w.call("", method, path, body)
					reply.WantError(t, 429, "rate_limit_exceeded")
					if want := fmt.Sprintf(`"The account that stores %s is rate limited. Please retry after 9 seconds."`, c.object); !strings.Contains(reply.Body, want) {
						t.Errorf("client got %s, want %s", reply.Body, want)
					}
					if class, backend := reply.Header.Get("X-Class"), reply.Header.Get("X-Backend-Shown"); class != "owner_throttled" || backend != "b" || reply.Header.Get("Retry-After") != "9" {
						t.Errorf("answer %d has class %q, backend %q and %v", i, class, backend, reply.Header)
					}
				}
				w.WantCalls(map[string]int{"a": 1, "b": 2})
				lbtest.WantSums(t, pool, "owner_throttled_total backend=b 2", "owner_throttled_total 2", "all_throttled_total 0",
					"requests_total class=owner_throttled backend= code=429 2", "requests_total backend=b 1")
			})
		})
	}
}

// TestAListOfAThrottledAccountIsNotThePool has a list, which always comes from
// the first account.
func TestAListOfAThrottledAccountIsNotThePool(t *testing.T) {
	pool := lbtest.Unique("list-throttled")
	withTwoOwners(t, pool, "", func(t *testing.T, w *world) {
		w.Backends["a"].Replies(lbtest.Throttled("9"))
		reply := w.call("", "GET", "/v1/files", "")
		reply.WantError(t, 429, "rate_limit_exceeded")
		if want := "The account that stores this list is rate limited."; !strings.Contains(reply.Body, want) || reply.Header.Get("X-Backend-Shown") != "a" {
			t.Errorf("client got %s from %s, want %s", reply.Body, reply.Header.Get("X-Backend-Shown"), want)
		}
		w.WantCalls(map[string]int{"a": 1, "b": 0})
		lbtest.WantSums(t, pool, "owner_throttled_total backend=a 1", "all_throttled_total 0")
	})
}

func TestAnOwnerThatIsBusyIsNotThePool(t *testing.T) {
	withTwoOwners(t, lbtest.Unique("owner-busy"), "max_requests 1", func(t *testing.T, w *world) {
		w.ownedByB(t, "resp_12345678")
		w.Backends["b"].Replies(lbtest.Hangs)
		done := make(chan struct{})
		go func() {
			w.call("", "GET", "/v1/responses/resp_12345678", "")
			close(done)
		}()
		synctest.Wait()
		reply := w.call("", "GET", "/v1/responses/resp_12345678", "")
		reply.WantError(t, 429, "rate_limit_exceeded")
		if want := "The account that stores the response 'resp_12345678' is busy."; !strings.Contains(reply.Body, want) || reply.Header.Get("X-Class") != "retry_later" {
			t.Errorf("client got %s of class %q, want %s", reply.Body, reply.Header.Get("X-Class"), want)
		}
		<-done
	})
}

// TestAnAccountThatLacksTheObjectIsNotRateLimited asks two accounts for what no
// account is known to have. The first lacks it, and the second throttles.
func TestAnAccountThatLacksTheObjectIsNotRateLimited(t *testing.T) {
	pool := lbtest.Unique("asked-throttles")
	withTwoOwners(t, pool, "", func(t *testing.T, w *world) {
		w.Backends["a"].Replies(lbtest.Says(404, `{"error":{"message":"No such object"}}`))
		w.Backends["b"].Replies(lbtest.Throttled("9"))
		reply := w.call("", "GET", "/v1/responses/resp_12345678", "")
		reply.WantError(t, 429, "rate_limit_exceeded")
		if !strings.Contains(reply.Body, "Some backends are rate limited") || reply.Header.Get("X-Class") != "retry_later" {
			t.Errorf("client got %s of class %q", reply.Body, reply.Header.Get("X-Class"))
		}
		lbtest.WantSums(t, pool, "all_throttled_total 0", "owner_throttled_total 0")
	})
}

// TestOneAccountThatThrottlesIsThePool has two keys of one account.
func TestOneAccountThatThrottlesIsThePool(t *testing.T) {
	pool := lbtest.Unique("one-account")
	withTwoOwners(t, pool, "account one", func(t *testing.T, w *world) {
		w.ownedByB(t, "resp_12345678")
		w.AllReply(lbtest.Throttled("9"))
		reply := w.call("", "GET", "/v1/responses/resp_12345678", "")
		if !strings.Contains(reply.Body, "All backends are rate limited") || reply.Header.Get("X-Class") != "all_throttled" {
			t.Errorf("client got %s of class %q", reply.Body, reply.Header.Get("X-Class"))
		}
		lbtest.WantSums(t, pool, "all_throttled_total 1", "owner_throttled_total 0")
	})
}
