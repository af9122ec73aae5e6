package affinity

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/filestorage"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/pools"
)

// storage is a config of Caddy's with its storage in a folder.
func storage(t *testing.T, folder string) caddy.Context {
	t.Helper()
	raw, _ := json.Marshal(map[string]string{"module": "file_system", "root": folder})
	ctx, err := caddy.ProvisionContext(&caddy.Config{StorageRaw: raw, Logging: &caddy.Logging{Logs: map[string]*caddy.CustomLog{
		"default": {BaseLog: caddy.BaseLog{WriterRaw: json.RawMessage(`{"output":"discard"}`)}},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	return ctx
}

func open(t *testing.T, ctx caddy.Context, logger *zap.Logger) *Affinity {
	t.Helper()
	a, err := New(ctx, Config{Pool: "a pool", Accounts: []string{"a", "b", "a"}, Logger: logger})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// owns reports whether an id has an owner.
func (p *Placement) owns() bool { return p.basis == owned }

func (a *Affinity) of(t *testing.T, caller, id string) *Placement {
	t.Helper()
	h, refusal, refused := a.Place(&Query{Method: "GET", Operation: "/responses/" + id, Body: new(openaiapi.Body), Caller: caller})
	if refused {
		t.Fatalf("%s may not have %s: %+v", caller, id, refusal)
	}
	return h
}

// learn has the caller make these ids at the account.
func (a *Affinity) learn(account, caller string, ids ...string) {
	h, _, _ := a.Place(&Query{Method: "POST", Operation: "/responses", Body: new(openaiapi.Body), Caller: caller})
	for _, id := range ids {
		h.learn(account, openaiapi.ObjectID, []byte(id))
	}
}

func TestIDsOutliveARestart(t *testing.T) {
	folder := t.TempDir()
	a := open(t, storage(t, folder), zap.NewNop())
	a.learn("b", "alice", "resp_12345678", "resp_23456789")
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	a = open(t, storage(t, folder), zap.NewNop())
	if h := a.of(t, "alice", "resp_12345678"); !h.owns() || h.Allows("a") || !h.Allows("b") || h.Asks() {
		t.Errorf("got %+v", h)
	}
	if _, _, refused := a.Place(&Query{Method: "GET", Operation: "/responses/resp_12345678", Body: new(openaiapi.Body), Caller: "bob"}); !refused {
		t.Error("another caller is not refused")
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	found := 0
	_ = filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			found++
			text, _ := os.ReadFile(path)
			if bytes.Contains(text, []byte("resp_")) || bytes.Contains(text, []byte("alice")) {
				t.Errorf("%s holds an id or a caller", path)
			}
			if info, _ := d.Info(); info.Mode().Perm() != 0o600 {
				t.Errorf("%s has mode %v", path, info.Mode())
			}
		}
		return err
	})
	if found != 1 {
		t.Errorf("%d files were saved", found)
	}
}

func TestAReloadKeepsWhatIsKnown(t *testing.T) {
	ctx := storage(t, t.TempDir())
	a := open(t, ctx, zap.NewNop())
	a.learn("b", "", "resp_12345678")
	next := open(t, ctx, zap.NewNop())
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if h := next.of(t, "", "resp_12345678"); !h.owns() {
		t.Errorf("it is forgotten: %+v", h)
	}
	if err := next.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestNothingIsReadOrWrittenUntilARequestComes because caddy validate does the
// same up to there.
func TestNothingIsReadOrWrittenUntilARequestComes(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "not made yet")
	core, logs := observer.New(zapcore.DebugLevel)
	if err := open(t, storage(t, folder), zap.New(core)).Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(folder); !os.IsNotExist(err) || logs.Len() > 0 {
		t.Errorf("there is a folder (%v) and a log %v", err, logs.All())
	}
}

func TestIDsAreSavedEveryFewMinutes(t *testing.T) {
	folder := t.TempDir()
	ctx := storage(t, folder)
	bubble.Test(t, func(t *testing.T) {
		a := open(t, ctx, zap.NewNop())
		saved := func() int64 {
			synctest.Wait()
			info, err := os.Stat(filepath.Join(folder, "openai_lb", "ids_a%20pool"))
			if err != nil {
				return 0
			}
			return info.Size()
		}
		a.learn("a", "", "resp_00000000")
		if n := saved(); n > 0 {
			t.Errorf("%d bytes were saved at once", n)
		}
		time.Sleep(saveInterval)
		a.learn("a", "", "resp_11111111", "resp_22222222")
		time.Sleep(pools.SaveInterval)
		first := saved()
		a.learn("a", "", "resp_33333333")
		if second := saved(); first == 0 || second != first {
			t.Errorf("%d bytes were saved, then %d", first, second)
		}
		if err := a.Close(); err != nil || saved() <= first {
			t.Errorf("%d bytes were saved at the end, %v", saved(), err)
		}
	})
}

func TestDamagedIDsAreLoggedAndLeftBehind(t *testing.T) {
	folder := t.TempDir()
	ctx := storage(t, folder)
	if err := ctx.Storage().Store(ctx, "openai_lb/ids_a%20pool", []byte("what is this?")); err != nil {
		t.Fatal(err)
	}
	core, logs := observer.New(zapcore.ErrorLevel)
	a := open(t, ctx, zap.New(core))
	a.learn("a", "", "resp_12345678")
	if h := a.of(t, "", "resp_12345678"); !h.owns() || logs.FilterMessage("could not read saved ids").Len() != 1 {
		t.Errorf("%+v, %v", h, logs.All())
	}
	_ = a.Close()
	a = open(t, ctx, zap.New(core))
	defer a.Close()
	if h := a.of(t, "", "resp_12345678"); !h.owns() || logs.Len() != 1 {
		t.Errorf("%+v, %v", h, logs.All())
	}
}

func TestOptions(t *testing.T) {
	for text, want := range map[string]string{
		"affinity":                                  "",
		"affinity {\ncallers strict\n}":             "",
		"affinity {\ncallers lax\n}":                "callers 'lax' is not one of strict",
		"affinity {\ncallers strict yes\n}":         "unexpected argument 'yes'",
		"affinity {\nsticky\n}":                     "unrecognized option 'sticky': expected one of callers, prompt_cache",
		"affinity on":                               "unexpected argument",
		"affinity {\nprompt_cache\nprompt_cache\n}": "prompt_cache is given twice",
		"affinity {\ncallers strict {\nx\n}\n}":     "does not take a block",
	} {
		d := caddyfile.NewTestDispenser(text)
		d.Next()
		var o Options
		err := o.UnmarshalCaddyfile(d)
		if err == nil && d.NextArg() {
			err = fmt.Errorf("unexpected argument %s", d.Val())
		}
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	if _, err := New(caddy.Context{}, Config{Options: &Options{Callers: "lax"}}); err == nil || err.Error() != "affinity: callers 'lax' is not strict" {
		t.Errorf("got %v", err)
	}
}

func TestAReplyTeachesAThousandIDs(t *testing.T) {
	var list, stream strings.Builder
	for i := range 1500 {
		fmt.Fprintf(&list, `,{"id":"file-%08d"}`, i)
		fmt.Fprintf(&stream, "data: {\"type\":\"response.output_item.done\",\"item\":{\"id\":\"file-%08d\"}}\n\n", i)
	}
	for kind, text := range map[string]string{
		"application/json":  `{"data":[` + list.String()[1:] + `]}`,
		"text/event-stream": stream.String(),
	} {
		a := open(t, storage(t, t.TempDir()), zap.NewNop())
		h, _, _ := a.Place(&Query{Method: "POST", Operation: "/responses", Body: new(openaiapi.Body)})
		l := h.IDReader("a", &http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {kind}}, ContentLength: -1})
		l.Watch([]byte(text), true)
		for id, want := range map[string]bool{"file-00000000": true, "file-00000999": true, "file-00001000": false, "file-00001499": false} {
			if h := a.of(t, "", id); h.owns() != want {
				t.Errorf("%s: the owner of %s is known: %t", kind, id, h.owns())
			}
		}
		a.Close()
	}
}

// Codex sends the ids of its own messages along with them, which no account is
// asked for.
func TestAnItemIsAskedForOnlyWhenAnAccountLacksIt(t *testing.T) {
	a := open(t, storage(t, t.TempDir()), zap.NewNop())
	defer a.Close()
	for id, asks := range map[string]bool{`"input":[{"id":"msg_12345"}]`: false, `"conversation":"conv_12345"`: true, `"input":[{"id":"msg_12345"}],"conversation":"conv_12345"`: true} {
		text := []byte("{" + id + "}")
		body := openaiapi.ParseJSON(text, nil)
		h, _, _ := a.Place(&Query{Method: "POST", Operation: "/responses", Body: &body, Text: text})
		why, result := None, ""
		if asks {
			why, result = Asked, "miss"
		}
		if _, got := h.Result(); h.Why(pool.Affinity{}) != why || got != result || !h.Asks() {
			t.Errorf("%s: %s, %q", id, h.Why(pool.Affinity{}), got)
		}
		if h.Exclude("a"); h.Why(pool.Affinity{}) != Asked {
			t.Errorf("%s is not asked for after an account lacks it", id)
		}
	}
}

// TestARequestWithoutIDsCostsNothing but a look at its path.
func TestARequestWithoutIDsCostsNothing(t *testing.T) {
	a := open(t, storage(t, t.TempDir()), zap.NewNop())
	defer a.Close()
	body := openaiapi.ParseJSON([]byte(`{"model":"gpt-4o","messages":[{"role":"user","content":"hi"}]}`), nil)
	res := new(http.Response)
	var h *Placement
	if n := testing.AllocsPerRun(100, func() {
		h, _, _ = a.Place(&Query{Method: "POST", Operation: "/chat/completions", Body: &body, Caller: "alice"})
		if !h.Allows("a") || h.Asks() || h.IDReader("a", res) != nil {
			t.Error("it has a placement")
		}
	}); n != 0 {
		t.Errorf("it allocates %v times", n)
	}
}

func BenchmarkPlace(b *testing.B) {
	ctx, err := caddy.ProvisionContext(&caddy.Config{})
	if err != nil {
		b.Fatal(err)
	}
	a, err := New(ctx, Config{Pool: "benchmark", Accounts: []string{"a", "b"}, Logger: zap.NewNop()})
	if err != nil {
		b.Fatal(err)
	}
	defer a.Close()
	a.learn("a", "alice", "resp_0123456789abcdef0123456789abcdef0123456789abcdef")
	for name, text := range map[string]string{
		"without an id": `{"model":"gpt-4o","messages":[{"role":"user","content":"hi"}]}`,
		"with one":      `{"model":"gpt-4o","previous_response_id":"resp_0123456789abcdef0123456789abcdef0123456789abcdef"}`,
	} {
		body := openaiapi.ParseJSON([]byte(text), nil)
		operation := map[bool]string{true: "/responses", false: "/chat/completions"}[body.HasIDs()]
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				a.Place(&Query{Method: "POST", Operation: operation, Body: &body, Text: []byte(text), Caller: "alice"})
			}
		})
	}
}
