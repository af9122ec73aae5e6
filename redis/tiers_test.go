package redis

import (
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

const teamKey, otherKey = "0123456789abcdef-team", "0123456789abcdef-other"

// ask sends a chat with a key, and returns the status.
func (r *replica) ask(key, model string) int {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), http.MethodPost, r.address+"/v1/chat/completions", strings.NewReader(`{"model":"`+model+`"}`))
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+key)
	res, err := r.client.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	res.Body.Close()
	return res.StatusCode
}

func TestTheLimitsOfATierHoldAtThreeReplicasAndFollowTheFileOfKeys(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys")
	lbtest.WriteFile(t, file, "team "+teamKey+" tier=bronze\nother "+otherKey+"\n")
	options := newAccount(t).backends(1) + "client_keys_file " + file + "\ntier gold default {\nrequests 4/month\n}\ntier bronze {\nrequests 3/month\n}\n" + startServer(t).option()
	all := startReplicas(t, 3, options)
	inTouch(t, all)
	served := func(r *replica) {
		t.Helper()
		if status := r.ask(teamKey, "r0"); status != 200 {
			t.Errorf("got %d within the limit", status)
		}
	}
	wait := func(ratio float64) {
		t.Helper()
		for _, r := range all {
			lbtest.WaitFor(t, func() bool {
				r.ask("no key", "r0") // it looks at the file with a request
				return r.metricLike("caller_limit_used_ratio", `caller="team"`, `window="month"`) == ratio
			})
		}
	}
	refused := func() {
		t.Helper()
		wait(1)
		for i, r := range all {
			if status := r.ask(teamKey, "r0"); status != 429 {
				t.Errorf("replica %d answers %d over the limit", i, status)
			}
		}
	}
	for _, r := range all {
		served(r)
	}
	refused()
	lbtest.WriteFile(t, file, "team "+teamKey+" tier=gold\nother "+otherKey+"\n")
	wait(.75)
	served(all[1])
	refused()
	for i, r := range all[:2] { // the default, counted separately
		if status := r.ask(otherKey, "r0"); status != 200 {
			t.Errorf("replica %d answers %d to another caller", i, status)
		}
	}
}

func TestACooldownOfAnotherReplicaSendsNoCallerToABackendThatItMayNotUse(t *testing.T) {
	a := newAccount(t)
	options := a.backends(1) + "client_key team " + teamKey + "\nclient_key other " + otherKey + "\ncaller team {\nbackends r*\n}\ncaller other {\nmax_requests 9\n}\n" + startServer(t).option()
	all := startReplicas(t, 3, options)
	inTouch(t, all)
	a.throttle("r0", true)
	if status := all[0].ask(teamKey, "r0"); status != 429 {
		t.Errorf("got %d", status)
	}
	for i, r := range all {
		lbtest.WaitFor(t, func() bool { return len(r.logged("cooldown started", "r0")) == 1 })
		if status := r.ask(teamKey, "r0"); status != 429 {
			t.Errorf("replica %d answers %d, from a backend that the caller may not use", i, status)
		}
		if status := r.ask(otherKey, "r0"); status != 200 {
			t.Errorf("replica %d answers %d to another caller", i, status)
		}
	}
	if n := len(a.refusals("r0")); n != 1 {
		t.Errorf("r0 was called %d times while it throttled, want once", n)
	}
}
