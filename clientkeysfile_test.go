package openailb_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// handlerJSON is a config with this handler in it.
func handlerJSON(handler string) string {
	return `{"apps":{"http":{"servers":{"x":{"listen":[":0"],"routes":[{"handle":[` + handler + `]}]}}}}}`
}

func TestKeysThatArePresentAndEmptyAreRefused(t *testing.T) {
	t.Setenv("OPENAI_LB_TEST_EMPTY", "")
	t.Setenv("OPENAI_LB_TEST_BLANK", " \t ")
	for _, argument := range []string{`""`, "``", `" "`, `"{$OPENAI_LB_TEST_UNSET}"`, `"{$OPENAI_LB_TEST_EMPTY}"`, "{env.OPENAI_LB_TEST_UNSET}", "{env.OPENAI_LB_TEST_EMPTY}", "{env.OPENAI_LB_TEST_BLANK}"} {
		err := lbtest.ValidateCaddyfile(t, ":0 {\nopenai_lb {\nbackend http://a\nclient_keys_file "+argument+"\n}\n}\n")
		if err == nil || !strings.Contains(err.Error(), "client_keys_file") {
			t.Errorf("client_keys_file %s gives %v", argument, err)
		}
	}
	for _, fields := range []string{`"client_keys":[]`, `"client_keys_file":""`, `"client_keys":[],"client_keys_file":""`} {
		err := lbtest.Validate(t, handlerJSON(`{"handler":"openai_lb","backends":[{"url":"http://a"}],`+fields+`}`))
		if err == nil || !strings.Contains(err.Error(), "client_keys") {
			t.Errorf("%s gives %v", fields, err)
		}
	}
	if err := lbtest.Validate(t, handlerJSON(`{"handler":"openai_lb","backends":[{"url":"http://a"}]}`)); err != nil {
		t.Errorf("without client keys: %v", err)
	}
}

// errorsOfKeys counts the errors that tell of the keys.
func errorsOfKeys(w *lbtest.World) (n int) {
	for _, entry := range w.Logs.All() {
		if entry.Level == zap.ErrorLevel && strings.Contains(fmt.Sprint(entry.Message, entry.ContextMap()), "key") {
			n++
		}
	}
	return n
}

// look waits until the file is looked at, and asks with a key.
func look(w *lbtest.World, key string) lbtest.Reply {
	time.Sleep(time.Second)
	return w.Send(w.RequestWithKey(key))
}

func TestAFileOfCommentsLetsNobodyIn(t *testing.T) {
	const comments = "# alice client-key-of-alice\n\n   # nobody\n"
	file := filepath.Join(t.TempDir(), "keys")
	t.Run("from the start", func(t *testing.T) {
		lbtest.WriteFile(t, file, comments)
		lbtest.InBubble(t, "openai_lb {\nbackend http://a\nclient_keys_file "+file+"\n}", func(t *testing.T, w *lbtest.World) {
			w.Post(`{}`).WantError(t, 401, "invalid_api_key")
			w.Send(w.RequestWithKey("client-key-of-alice")).WantError(t, 401, "invalid_api_key")
			w.Send(w.RequestWithKey("#")).WantError(t, 401, "invalid_api_key")
			w.WantCalls(map[string]int{"a": 0})
			lbtest.WriteFile(t, file, "alice client-key-of-alice\n")
			look(w, "client-key-of-alice").WantServed(t, "a")
		})
	})
	t.Run("after a change", func(t *testing.T) {
		lbtest.WriteFile(t, file, "alice client-key-of-alice\n")
		lbtest.InBubble(t, "openai_lb {\nbackend http://a\nclient_keys_file "+file+"\n}", func(t *testing.T, w *lbtest.World) {
			look(w, "client-key-of-alice").WantServed(t, "a")
			lbtest.WriteFile(t, file, comments)
			look(w, "client-key-of-alice").WantError(t, 401, "invalid_api_key")
			w.Post(`{}`).WantError(t, 401, "invalid_api_key")
			lbtest.WriteFile(t, file, "alice client-key-of-alice\n")
			look(w, "client-key-of-alice").WantServed(t, "a")
		})
	})
	t.Run("beside a key of the config", func(t *testing.T) {
		lbtest.WriteFile(t, file, "alice client-key-of-alice\n")
		lbtest.InBubble(t, "openai_lb {\nbackend http://a\nclient_key bob client-key-of-bob\nclient_keys_file "+file+"\n}", func(t *testing.T, w *lbtest.World) {
			look(w, "client-key-of-alice").WantServed(t, "a")
			lbtest.WriteFile(t, file, comments)
			look(w, "client-key-of-alice").WantError(t, 401, "invalid_api_key")
			look(w, "client-key-of-bob").WantServed(t, "a")
		})
	})
}

func TestAFileOfKeysThatIsGoneOrMalformedIsAnErrorAMinute(t *testing.T) {
	for name, spoil := range map[string]func(t *testing.T, file string, i int){
		"gone": func(t *testing.T, file string, i int) {
			if err := os.RemoveAll(file); err != nil {
				t.Fatal(err)
			}
		},
		"malformed": func(t *testing.T, file string, _ int) {
			lbtest.WriteFile(t, file, "alice client-key-of-alice\none-word\n")
		},
		"malformed in ever another way": func(t *testing.T, file string, i int) {
			lbtest.WriteFile(t, file, strings.Repeat("\n", i)+strings.Repeat("word ", 3+i)+"\nalice client-key-of-alice\n")
		},
		"gone and malformed by turns": func(t *testing.T, file string, i int) {
			if os.RemoveAll(file); i%2 == 0 {
				lbtest.WriteFile(t, file, "one-word\nalice client-key-of-alice\n")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "keys")
			lbtest.WriteFile(t, file, "alice client-key-of-alice\n")
			lbtest.InBubble(t, "openai_lb {\nbackend http://a\nclient_keys_file "+file+"\n}", func(t *testing.T, w *lbtest.World) {
				look(w, "client-key-of-alice").WantServed(t, "a")
				for i := range 305 {
					if i%10 > 0 {
						time.Sleep(time.Second)
						continue
					}
					spoil(t, file, i/10)
					look(w, "client-key-of-alice").WantServed(t, "a")
				}
				look(w, "client-key-of-mallory").WantError(t, 401, "invalid_api_key")
				if n := errorsOfKeys(w); n != 6 {
					t.Errorf("%d errors are logged in 305 seconds, want 6: at once, and each minute", n)
				}
				os.RemoveAll(file)
				lbtest.WriteFile(t, file, "alice new-key-of-alice\n")
				look(w, "new-key-of-alice").WantServed(t, "a")
				look(w, "client-key-of-alice").WantError(t, 401, "invalid_api_key")
				before := errorsOfKeys(w)
				for range 130 {
					look(w, "new-key-of-alice").WantServed(t, "a")
				}
				if n := errorsOfKeys(w); n != before {
					t.Errorf("%d errors are logged after the file was mended", n-before)
				}
				for _, entry := range w.Logs.All() {
					if strings.Contains(fmt.Sprint(entry.Message, entry.ContextMap()), "client-key-of-alice") {
						t.Errorf("a key is logged: %s %v", entry.Message, entry.ContextMap())
					}
				}
			})
		})
	}
}

// TestAHalfWrittenFileOfKeysMakesNoBeginningOfAKeyAKey stops while a file is
// written: what is there of its last line may be the beginning of a key.
func TestAHalfWrittenFileOfKeysMakesNoBeginningOfAKeyAKey(t *testing.T) {
	const alice, bob, longer = "alice key-of-alice-0123456789\n", "bob key-of-bob-0123456789", "-and-some-more"
	file := filepath.Join(t.TempDir(), "keys")
	config := "openai_lb {\nbackend http://a\nclient_keys_file " + file + "\n}"
	wantIn := func(t *testing.T, w *lbtest.World, key string, in bool) {
		t.Helper()
		if reply := w.Send(w.RequestWithKey(key)); (reply.Status == 200) != in {
			t.Errorf("%s after %s: client got %d %s", key, time.Since(time.Unix(946684800, 0)), reply.Status, reply.Body)
		}
	}
	t.Run("cut", func(t *testing.T) {
		lbtest.WriteFile(t, file, alice+bob+"\n")
		lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
			for _, cut := range []string{"bob b", "bob", "bob key-of-bob-01234", alice + "b", alice + "bob key-of-bob-01", alice + "bob key-of-bob-012345678"} {
				lbtest.WriteFile(t, file, cut)
				time.Sleep(time.Second)
				for _, key := range []string{"b", "key-of-bob-01234", "key-of-bob-01", "key-of-bob-012345678"} {
					wantIn(t, w, key, false)
				}
				wantIn(t, w, "key-of-alice-0123456789", true)
				wantIn(t, w, "key-of-bob-0123456789", true)
			}
			if n := errorsOfKeys(w); n != 0 {
				t.Errorf("%d errors are logged while the file is written", n)
			}
		})
	})
	t.Run("that stays so", func(t *testing.T) {
		lbtest.WriteFile(t, file, alice)
		lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
			lbtest.WriteFile(t, file, alice+bob)
			time.Sleep(time.Second)
			wantIn(t, w, "key-of-bob-0123456789", false)
			lbtest.WriteFile(t, file, alice+bob+longer)
			time.Sleep(time.Second)
			wantIn(t, w, "key-of-bob-0123456789", false)
			wantIn(t, w, "key-of-bob-0123456789"+longer, false)
			time.Sleep(time.Second)
			wantIn(t, w, "key-of-bob-0123456789"+longer, true)
			wantIn(t, w, "key-of-bob-0123456789", false)
			wantIn(t, w, "key-of-alice-0123456789", true)
			lbtest.WriteFile(t, file, alice+bob+"\n") // with a line feed at once
			time.Sleep(time.Second)
			wantIn(t, w, "key-of-bob-0123456789", true)
		})
	})
	t.Run("short for a second", func(t *testing.T) {
		lbtest.WriteFile(t, file, alice)
		lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
			lbtest.WriteFile(t, file, "bob b")
			for i := range 3 {
				time.Sleep(time.Second)
				wantIn(t, w, "b", false)
				wantIn(t, w, "key-of-alice-0123456789", i == 0) // then the file is not being written
			}
			if n := errorsOfKeys(w); n != 1 {
				t.Errorf("%d errors are logged, want 1", n)
			}
		})
	})
	t.Run("from the start", func(t *testing.T) {
		lbtest.WriteFile(t, file, alice+bob)
		lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
			wantIn(t, w, "key-of-alice-0123456789", true)
			wantIn(t, w, "key-of-bob-0123456789", false)
			time.Sleep(time.Second)
			wantIn(t, w, "key-of-bob-0123456789", true)
		})
	})
	t.Run("long ago", func(t *testing.T) {
		lbtest.WriteFile(t, file, alice+bob)
		lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
			wantIn(t, w, "key-of-bob-0123456789", false)
		})
		if err := os.Chtimes(file, time.Time{}, time.Unix(900000000, 0)); err != nil {
			t.Fatal(err)
		}
		lbtest.InBubble(t, config, func(t *testing.T, w *lbtest.World) {
			wantIn(t, w, "key-of-bob-0123456789", true)
		})
	})
}

func TestAShortClientKeyIsRefusedAtLoad(t *testing.T) {
	t.Setenv("OPENAI_LB_TEST_SHORT", "short-of-x-1234")
	file := filepath.Join(t.TempDir(), "keys")
	lbtest.WriteFile(t, file, "# callers\nx short-of-x-1234\n")
	for line, where := range map[string]string{
		"client_key x short-of-x-1234":            `client_key "x"`,
		"client_key x {env.OPENAI_LB_TEST_SHORT}": `client_key "x"`,
		"client_keys_file " + file:                file + ": line 2",
	} {
		err := lbtest.ValidateCaddyfile(t, ":0 {\nopenai_lb {\nbackend http://a\n"+line+"\n}\n}\n")
		if err == nil || !strings.Contains(err.Error(), where+": a key must have at least 16 characters") || strings.Contains(err.Error(), "short-of") {
			t.Errorf("%s gives %v", line, err)
		}
	}
	for _, key := range []string{"long-enough-1234", "sha256:" + hexDigest("short")} {
		err := lbtest.ValidateCaddyfile(t, ":0 {\nopenai_lb {\nbackend http://a\nclient_key x "+key+"\n}\n}\n")
		if err != nil {
			t.Errorf("%s gives %v", key, err)
		}
	}
}
