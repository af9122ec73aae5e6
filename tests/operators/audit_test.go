package operators

import (
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// audited returns the lines of an audit log, with their fields in order.
func audited(t *testing.T, file string) (lines []string) {
	t.Helper()
	for line := range strings.Lines(string(lbtest.ReadFile(t, file))) {
		var entry map[string]any
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			t.Fatal(err)
		}
		if entry["logger"] != "http.handlers.openai_lb.audit" || entry["level"] != "info" || entry["pool"] != "audited" || entry["ts"] == nil {
			t.Errorf("a line is %s", line)
		}
		what := entry["msg"]
		for _, name := range []string{"logger", "level", "pool", "ts", "msg"} {
			delete(entry, name)
		}
		lines = append(lines, fmt.Sprint(what, strings.TrimPrefix(fmt.Sprint(entry), "map")))
	}
	return lines
}

// TestTheAuditLogSaysWhoChangedWhat has a log of Caddy with the audit lines
// alone.
func TestTheAuditLogSaysWhoChangedWhat(t *testing.T) {
	o := newOperated(t)
	a, serverA := lbtest.Listen(t, "a")
	folder := t.TempDir()
	log, keys := filepath.Join(folder, "audit.log"), filepath.Join(folder, "keys")
	port := lbtest.FreePort(t)
	apiKey := "sk-of-a-1"
	config := func(options string) string {
		return fmt.Sprintf("{\nadmin %s\ndefault_bind 127.0.0.1\nlog audit {\noutput file %s\ninclude http.handlers.openai_lb.audit\n}\n}\n:%d {\nopenai_lb {\npool audited\nbackend %s {\nname a\napi_key %s\n}\n%s\n}\n}",
			o.admin, log, port, serverA.URL, apiKey, options)
	}
	ask := func(key string, status int) {
		t.Helper()
		lbtest.WaitFor(t, func() bool {
			return lbtest.Ask(lbtest.NewClient(t), fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", port), "Api-Key", key).Status == status
		})
	}
	run := func(args ...string) {
		t.Helper()
		if _, err := o.command(args...); err != nil {
			t.Error(err)
		}
	}
	next := 0
	want := func(when string, want ...string) {
		t.Helper()
		lines := audited(t, log)
		if got := lines[next:]; !slices.Equal(got, want) {
			t.Errorf("%s:\n got %q\nwant %q", when, got, want)
		}
		next = len(lines)
	}

	const limits = "caller * {\nrequests 100/day\n}\n"
	lbtest.WriteFile(t, keys, "alice client-key-of-alice\nbob client-key-of-bob-1\n")
	file := "client_keys_file " + keys + "\n"
	lbtest.Reload(t, config(limits+file+"client_key carol client-key-of-carol"))
	digest := func(when string) (before, after string) {
		t.Helper()
		line := audited(t, log)[next]
		if _, err := fmt.Sscanf(line, "config loaded[after:%s before:%s", &after, &before); err != nil {
			_, err = fmt.Sscanf(line, "config loaded[after:%s", &after)
			if err != nil {
				t.Fatalf("%s: %q", when, line)
			}
		}
		next++
		return strings.TrimSuffix(before, "]"), after
	}
	if before, after := digest("a start"); before != "" || len(after) != 12 {
		t.Errorf("a start is from %q to %q", before, after)
	}
	want("a start")
	ask("client-key-of-alice", 200)
	a.Replies(lbtest.Throttled("9"))
	ask("client-key-of-alice", 429)
	want("requests, and a cooldown")

	lbtest.WriteFile(t, keys, "bob client-key-of-bob-2\ndave client-key-of-dave expires=2001-01-31\n")
	ask("client-key-of-alice", 401)
	want("the file has changed", "client key removed[by:file caller:alice]", "client key changed[by:file caller:bob]",
		"client key added[by:file caller:dave expires:2001-02-01T00:00:00Z]", "client key expired[by:file caller:dave expires:2001-02-01T00:00:00Z]")

	run("drain", "a", "--by", "op@host", "--reason", "repairs")
	run("resume", "a", "--by", "op@host")
	run("reset", "a", "--by", "op@host", "--reason", "it works")
	run("callers", "reset", "alice", "--by", "op@host", "--reason", "a wrong report")
	want("orders", "backend drained[backend:a by:op@host reason:repairs]", "backend resumed[backend:a by:op@host]",
		"backend reset[backend:a by:op@host reason:it works]", "caller reset[by:op@host caller:alice reason:a wrong report]")
	if got := o.call(http.MethodPost, "/openai_lb/backends/a/reset"); got.Status != 200 {
		t.Errorf("a reset without a name gets %d %s", got.Status, got.Body)
	}
	want("an order by nobody", "backend reset[backend:a]")

	apiKey = "sk-of-a-2"
	lbtest.Reload(t, config(limits+file+"lb_retries 3\nclient_key erin client-key-of-erin"))
	before, after := digest("a reload")
	if before == after || len(before) != 12 || len(after) != 12 {
		t.Errorf("a reload is from %q to %q", before, after)
	}
	want("a reload", "client key removed[by:config caller:carol]", "client key added[by:config caller:erin]",
		"api_key changed[backend:a by:config]")
	lbtest.Reload(t, config("lb_retries 3"))
	if again, _ := digest("a reload without keys"); again != after {
		t.Errorf("a reload begins with %q, and the one before ended with %q", again, after)
	}
	want("a reload without keys", "client key removed[by:file caller:bob]", "client key removed[by:file caller:dave expires:2001-02-01T00:00:00Z]",
		"client key removed[by:config caller:erin]")
	lbtest.Reload(t, strings.Replace(o.caddyfile, "auto_https off", "auto_https off\nlog audit {\noutput file "+log+"\ninclude http.handlers.openai_lb.audit\n}", 1))
	if text := string(lbtest.ReadFile(t, log)); !strings.Contains(text, `"msg":"config removed","pool":"audited"`) {
		t.Errorf("after a reload without the pool, the log is\n%s", text)
	}
	if text := string(lbtest.ReadFile(t, log)); strings.Contains(text, "client-key-of") || strings.Contains(text, "sk-of") {
		t.Errorf("the log has a key:\n%s", text)
	}
}
