package operators

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
)

// newLimited is newOperated with callers in both pools. Each has sent the one
// request that it may send in a month.
func newLimited(t *testing.T) *operated {
	t.Helper()
	o := newOperated(t)
	const options = "client_key \"team/a b\" client-key-of-a-b\nclient_key bob client-key-of-bob-\ncaller * {\nrequests 1/month\n}\n"
	lbtest.Reload(t, strings.NewReplacer("X-Config 1", "X-Config 2", "openai_lb /v1/* {\n", "openai_lb /v1/* {\npool "+lbtest.Unique("limited")+"\n"+options,
		"openai_lb /other/* {\n", "openai_lb /other/* {\n"+options).Replace(o.caddyfile))
	o.client = lbtest.ClientOf(t, "2", o.address+"/v1/none")
	for _, key := range []string{"client-key-of-a-b", "client-key-of-bob-"} {
		o.ask(key).WantServed(t, "b")
		o.ask(key).WantError(t, http.StatusTooManyRequests, "insufficient_quota")
	}
	return o
}

func (o *operated) ask(key string) lbtest.Reply {
	return lbtest.Ask(o.client, o.address+"/v1/chat/completions", "Api-Key", key)
}

func TestAnOperatorGivesACallerItsUseBack(t *testing.T) {
	o := newLimited(t)
	got := o.call(http.MethodPost, "/openai_lb/callers/team%2Fa%20b/reset?by=alice&reason=a+wrong+report")
	var all []status.Caller
	if err := json.Unmarshal([]byte(got.Body), &all); err != nil || got.Status != http.StatusOK || len(all) != 1 || all[0].Name != "team/a b" || all[0].Limits[0].Used != 0 {
		t.Fatalf("got %d %s (%v)", got.Status, got.Body, err)
	}
	o.ask("client-key-of-a-b").WantServed(t, "b")
	o.ask("client-key-of-bob-").WantError(t, http.StatusTooManyRequests, "insufficient_quota")

	output, err := o.command("callers", "reset", "bob", "--reason", "a wrong report")
	if lines := strings.Split(output, "\n"); err != nil || len(lines) != 3 || !strings.HasPrefix(lines[0], "POOL ") || !strings.Contains(strings.Join(strings.Fields(lines[1]), " "), " bob - 1 requests/month 0 (0%) ") {
		t.Errorf("%v\n%s", err, output)
	}
	o.ask("client-key-of-bob-").WantServed(t, "b")
	output, err = o.command("callers", "reset", "bob", "--json")
	if err != nil || json.Unmarshal([]byte(output), &all) != nil || len(all) != 1 || all[0].Name != "bob" {
		t.Errorf("%v\n%s", err, output)
	}
}

func TestTheAdminAPIResetsOnlyCallersThatItKnows(t *testing.T) {
	o := newLimited(t)
	for _, c := range []struct {
		method, path string
		status       int
		says         string
	}{
		{"POST", "/carol/reset", 404, "no caller called 'carol' has sent a request"},
		{"POST", "/bob/reset?pool=other", 404, "no caller called 'bob' has sent a request to the pool 'other'"},
		{"POST", "/bob/reset?pool=third", 404, "no pool is called 'third'"},
		{"POST", "/bob/drain", 404, "'drain' is not reset"},
		{"GET", "/bob/reset", 405, "method GET is not allowed here, only POST"},
		{"POST", "/bob/reset?by=a%0Ab", 400, "query parameter by must contain only printable characters"},
		{"POST", "/bob/reset?force=1", 400, "query parameter 'force': expected at most one of each of pool, by, reason"},
	} {
		got := o.call(c.method, "/openai_lb/callers"+c.path)
		var said struct{ Error string }
		if err := json.Unmarshal([]byte(got.Body), &said); err != nil || got.Status != c.status || !strings.HasPrefix(said.Error, c.says) {
			t.Errorf("%s %s: got %d %s", c.method, c.path, got.Status, got.Body)
		}
	}
	if output, err := o.command("callers", "reset"); err == nil || !strings.Contains(output, "accepts 1 arg(s), received 0") {
		t.Errorf("%v\n%s", err, output)
	}
	o.ask("client-key-of-bob-").WantError(t, http.StatusTooManyRequests, "insufficient_quota")
}
