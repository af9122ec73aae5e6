package affinity

import (
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// fewModelsFirst is a pool whose first account has few models, like a
// deployment that was paid for in advance.
const fewModelsFirst = `openai_lb {
	backend http://a {
		model gpt-4o
	}
	backend http://b {
		priority 2
		model gpt-4o
		model gpt-4o-mini
	}
	backend http://c {
		priority 3
		model gpt-4o-mini
		model gpt-4o
	}
}`

func TestWhatIsMadeWithoutAModelIsMadeWhereAllModelsAre(t *testing.T) {
	inBubble(t, fewModelsFirst, func(t *testing.T, w *world) {
		for _, path := range []string{"/v1/conversations", "/v1/files", "/v1/vector_stores", "/v1/batches", "/v1/uploads", "/openai/v1/conversations", "/openai/files?api-version=1"} {
			w.call(alice, "POST", path, `{"metadata":{}}`).WantServed(t, "b")
		}
		w.call(alice, "GET", "/v1/files", "").WantServed(t, "b") // so a list has what was made
		w.call(alice, "POST", "/v1/fine_tuning/jobs", `{"model":"gpt-4o"}`).WantServed(t, "a")
		w.call(alice, "POST", "/v1/responses", `{"model":"gpt-4o","input":"x"}`).WantServed(t, "a")

		w.Backends["b"].Replies(lbtest.Says(200, `{"id":"conv_12345678","object":"conversation"}`))
		w.call(alice, "POST", "/v1/conversations", `{}`).WantServed(t, "b")
		w.Backends["b"].Recovers()
		w.call(alice, "POST", "/v1/responses", `{"model":"gpt-4o-mini","conversation":"conv_12345678"}`).WantServed(t, "b")
		w.call(alice, "POST", "/v1/conversations/conv_12345678/items", `{}`).WantServed(t, "b")
	})
}

func TestWhileNoAccountWithAllModelsCanBeCalledAnotherMakesIt(t *testing.T) {
	inBubble(t, fewModelsFirst, func(t *testing.T, w *world) {
		create := func() reply { return w.call(alice, "POST", "/v1/conversations", `{}`) }
		w.Backends["b"].Replies(lbtest.Throttled("5"))
		create().WantServed(t, "c")
		w.Backends["c"].Replies(lbtest.Throttled("5"))
		create().WantServed(t, "a")
		w.Backends["a"].Replies(lbtest.Throttled("5"))
		create().WantStatus(t, 429)
		time.Sleep(6 * time.Second)
		w.AllReply(nil)
		create().WantServed(t, "b")

		// a suspect may be called
		w.Backends["b"].Replies(lbtest.Status(503))
		w.Backends["c"].Replies(lbtest.Status(503))
		create().WantServed(t, "a")
		w.AllReply(nil)
		create().WantServed(t, "b")

		// an unreachable one may not
		time.Sleep(11 * time.Second)
		w.Stop("b")
		w.call(alice, "GET", "/v1/files", "") // finds that out
		create().WantServed(t, "c")
		w.Backends["c"].Replies(lbtest.Throttled("5"))
		create().WantServed(t, "a")
		before := len(w.Logged("attempt"))
		create().WantServed(t, "a")
		if n := len(w.Logged("attempt")) - before; n != 1 {
			t.Errorf("%d attempts were made, want one", n)
		}
	})
}

func TestAccountsWithAllModelsAreFoundByAllTheirBackends(t *testing.T) {
	for about, c := range map[string]struct{ backends, want string }{
		"no account lists its models": {"backend http://a\nbackend http://b {\npriority 2\n}", "a"},
		"one serves any model":        {"backend http://a {\nmodel m\n}\nbackend http://b {\npriority 2\n}", "b"},
		"none has all":                {"backend http://a {\nmodel m\n}\nbackend http://b {\npriority 2\nmodel n\n}", "a"},
		"all have all":                {"backend http://a {\nmodel m\n}\nbackend http://b {\npriority 2\nmodel m\n}", "a"},
		"two backends have all together": {"backend http://a {\nmodel m\n}\n" +
			"backend http://b {\npriority 2\naccount one\nmodel n\n}\nbackend http://c {\npriority 3\naccount one\nmodel m\n}", "b"},
		"who has all is drained": {"backend http://a {\nmodel m\n}\nbackend http://b {\npriority 2\nweight 0\n}", "a"},
	} {
		inBubble(t, "openai_lb {\n"+c.backends+"\n}", func(t *testing.T, w *world) {
			if reply := w.call(alice, "POST", "/v1/conversations", `{}`); reply.Backend != c.want {
				t.Errorf("%s: %s makes it, want %s", about, reply.Backend, c.want)
			}
		})
	}
}
