package openailb

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// handlerJSON is a config with this handler in it.
func handlerJSON(handler string) string {
	return `{"apps":{"http":{"servers":{"x":{"listen":[":0"],"routes":[{"handle":[` + handler + `]}]}}}}}`
}

func TestKeysThatArePresentAndEmptyAreRefused(t *testing.T) {
	t.Setenv("OPENAI_LB_TEST_EMPTY", "")
	t.Setenv("OPENAI_LB_TEST_BLANK", " \t ")
	for _, argument := range []string{`""`, "``", `" "`, `"{$OPENAI_LB_TEST_UNSET}"`, `"{$OPENAI_LB_TEST_EMPTY}"`, "{env.OPENAI_LB_TEST_UNSET}", "{env.OPENAI_LB_TEST_EMPTY}", "{env.OPENAI_LB_TEST_BLANK}"} {
		config, err := adapt(":0 {\nopenai_lb {\nbackend http://a\nclient_keys_file " + argument + "\n}\n}\n")
		if err == nil {
			err = validate(t, config)
		}
		if err == nil || !strings.Contains(err.Error(), "client_keys_file") {
			t.Errorf("client_keys_file %s gives %v", argument, err)
		}
	}
	for _, fields := range []string{`"client_keys":[]`, `"client_keys_file":""`, `"client_keys":[],"client_keys_file":""`} {
		err := validate(t, handlerJSON(`{"handler":"openai_lb","backends":[{"url":"http://a"}],`+fields+`}`))
		if err == nil || !strings.Contains(err.Error(), "client_keys") {
			t.Errorf("%s gives %v", fields, err)
		}
	}
	if err := validate(t, handlerJSON(`{"handler":"openai_lb","backends":[{"url":"http://a"}]}`)); err != nil {
		t.Errorf("without client keys: %v", err)
	}
}

// inLoggingBubble is inBubble with what Caddy's own logger writes, in lines.
func inLoggingBubble(t *testing.T, config string, test func(t *testing.T, w *world, lines func() []map[string]any)) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "log")
	ctx, err := caddy.ProvisionContext(&caddy.Config{Logging: &caddy.Logging{Logs: map[string]*caddy.CustomLog{
		"default": {BaseLog: caddy.BaseLog{WriterRaw: json.RawMessage(fmt.Sprintf(`{"output":"file","roll":false,"filename":%q}`, file)), Level: "DEBUG"}},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		test(t, newWorld(t, ctx, config), func() (lines []map[string]any) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(string(text)) {
				var entry map[string]any
				if json.Unmarshal([]byte(line), &entry) == nil {
					lines = append(lines, entry)
				}
			}
			return lines
		})
	})
}

// errorsOfKeys are the lines in which an error about the keys is told.
func errorsOfKeys(lines []map[string]any) (n int) {
	for _, entry := range lines {
		if level := entry["level"]; level == "error" && strings.Contains(fmt.Sprint(entry), "key") {
			n++
		}
	}
	return n
}

// look waits until the file is looked at, and asks with a key.
func (w *world) look(key string) clientReply {
	time.Sleep(time.Second)
	return w.send(w.requestWithKey(key))
}

func TestAFileOfCommentsLetsNobodyIn(t *testing.T) {
	const comments = "# alice key-of-alice\n\n   # nobody\n"
	file := filepath.Join(t.TempDir(), "keys")
	t.Run("from the start", func(t *testing.T) {
		writeFile(t, file, comments)
		inBubble(t, "openai_lb {\nbackend http://a\nclient_keys_file "+file+"\n}", func(t *testing.T, w *world) {
			w.post(`{}`).wantError(t, 401, "invalid_api_key")
			w.send(w.requestWithKey("key-of-alice")).wantError(t, 401, "invalid_api_key")
			w.send(w.requestWithKey("#")).wantError(t, 401, "invalid_api_key")
			w.wantCalls(map[string]int{"a": 0})
			writeFile(t, file, "alice key-of-alice\n")
			w.look("key-of-alice").wantServed(t, "a")
		})
	})
	t.Run("after a change", func(t *testing.T) {
		writeFile(t, file, "alice key-of-alice\n")
		inBubble(t, "openai_lb {\nbackend http://a\nclient_keys_file "+file+"\n}", func(t *testing.T, w *world) {
			w.look("key-of-alice").wantServed(t, "a")
			writeFile(t, file, comments)
			w.look("key-of-alice").wantError(t, 401, "invalid_api_key")
			w.post(`{}`).wantError(t, 401, "invalid_api_key")
			writeFile(t, file, "alice key-of-alice\n")
			w.look("key-of-alice").wantServed(t, "a")
		})
	})
	t.Run("beside a key of the config", func(t *testing.T) {
		writeFile(t, file, "alice key-of-alice\n")
		inBubble(t, "openai_lb {\nbackend http://a\nclient_key bob key-of-bob\nclient_keys_file "+file+"\n}", func(t *testing.T, w *world) {
			w.look("key-of-alice").wantServed(t, "a")
			writeFile(t, file, comments)
			w.look("key-of-alice").wantError(t, 401, "invalid_api_key")
			w.look("key-of-bob").wantServed(t, "a")
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
		"malformed": func(t *testing.T, file string, _ int) { writeFile(t, file, "one-word\n") },
		"malformed in ever another way": func(t *testing.T, file string, i int) {
			writeFile(t, file, strings.Repeat("\n", i)+strings.Repeat("word ", 3+i)+"\n")
		},
		"gone and malformed by turns": func(t *testing.T, file string, i int) {
			if os.RemoveAll(file); i%2 == 0 {
				writeFile(t, file, "one-word\n")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "keys")
			writeFile(t, file, "alice key-of-alice\n")
			inLoggingBubble(t, "openai_lb {\nbackend http://a\nclient_keys_file "+file+"\n}", func(t *testing.T, w *world, lines func() []map[string]any) {
				w.look("key-of-alice").wantServed(t, "a")
				for i := range 305 {
					if i%10 > 0 {
						time.Sleep(time.Second)
						continue
					}
					spoil(t, file, i/10)
					w.look("key-of-alice").wantServed(t, "a")
				}
				w.look("key-of-mallory").wantError(t, 401, "invalid_api_key")
				if n := errorsOfKeys(lines()); n != 6 {
					t.Errorf("%d errors are logged in 305 seconds, want 6: at once, and each minute", n)
				}
				os.RemoveAll(file)
				writeFile(t, file, "alice new-key-of-alice\n")
				w.look("new-key-of-alice").wantServed(t, "a")
				w.look("key-of-alice").wantError(t, 401, "invalid_api_key")
				before := errorsOfKeys(lines())
				for range 130 {
					w.look("new-key-of-alice").wantServed(t, "a")
				}
				if n := errorsOfKeys(lines()); n != before {
					t.Errorf("%d errors are logged after the file was mended", n-before)
				}
				for _, entry := range lines() {
					if strings.Contains(fmt.Sprint(entry), "key-of-alice") {
						t.Errorf("a key is logged: %v", entry)
					}
				}
			})
		})
	}
}
