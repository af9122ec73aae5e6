package callers

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/admin"
	limits "github.com/openai-lb/caddy-openai-lb/internal/callers"
	"github.com/openai-lb/caddy-openai-lb/internal/statuspage"
)

// get asks the admin API.
func get(t *testing.T, path string) *httptest.ResponseRecorder {
	t.Helper()
	w := httptest.NewRecorder()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
	for _, route := range (admin.API{}).Routes() {
		if route.Pattern == r.URL.Path {
			if err := route.Handler.ServeHTTP(w, r); err != nil {
				t.Fatal(err)
			}
			return w
		}
	}
	t.Fatalf("the admin API has no %s", path)
	return w
}

func TestOperatorsSeeWhatCallersHaveUsed(t *testing.T) {
	inBubble(t, "caller alice {\ntier batch\ntokens 1k/day then batch\nrequests 2/minute\nmax_requests 7\n}\ncaller * {\ntokens 100/minute\n}\ntier batch", func(t *testing.T, w *world) {
		w.AllReply(used(60, 40))
		for range 3 {
			w.chat(prompt(20, `"max_tokens":1,`))
			synctest.Wait()
		}
		w.post(bobKey, "/v1/chat/completions", prompt(20, `"max_tokens":1,`)).WantServed(t, "a")
		synctest.Wait()
		var got []admin.Caller
		answer := get(t, "/openai_lb/callers?pool="+w.Handler.Pool)
		if err := json.Unmarshal(answer.Body.Bytes(), &got); err != nil || len(got) != 2 {
			t.Fatalf("got %v\n%s", err, answer.Body)
		}
		now := time.Now()
		day, minute := now.Truncate(24*time.Hour).AddDate(0, 0, 1).UTC(), now.Truncate(time.Minute).Add(time.Minute).UTC()
		want := []admin.Caller{{
			Pool: w.Handler.Pool, Name: "alice", Tier: "batch", MaxRequests: 7, Refused: 1, TokensToday: 200, TokensMonth: 200,
			Limits: []admin.CallerLimit{
				{Kind: "requests", Window: "minute", Limit: 2, Used: 2, Refused: 1, Ends: minute},
				{Kind: "tokens", Window: "day", Limit: 1000, Used: 200, Left: 800, Then: "batch", Ends: day},
			},
		}, {
			Pool: w.Handler.Pool, Name: "bob", Tier: "batch", TokensToday: 100, TokensMonth: 100,
			Limits: []admin.CallerLimit{{Kind: "tokens", Window: "minute", Limit: 100, Used: 100, Ends: minute}},
		}}
		for i := range want {
			a, _ := json.Marshal(got[i])
			b, _ := json.Marshal(want[i])
			if string(a) != string(b) {
				t.Errorf("got  %s\nwant %s", a, b)
			}
		}
	})
}

func TestTheStatusPageShowsTheBusiestCallers(t *testing.T) {
	inBubble(t, "caller * {\ntokens 1M/day\n}", func(t *testing.T, w *world) {
		meters := limits.MetersOf(w.Handler.Pool)
		meters.Get(time.Now(), "<b>hog</b>")
		for i := range 1000 {
			meters.Get(time.Now(), "team-"+strconv.Itoa(i))
		}
		w.AllReply(used(500_000, 250_000))
		w.chat(prompt(20, `"max_tokens":1,`)).WantServed(t, "a")
		synctest.Wait()
		answer := httptest.NewRecorder()
		if err := new(statuspage.Handler).ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/status", nil), nil); err != nil {
			t.Fatal(err)
		}
		page := answer.Body.String()
		_, table, _ := strings.Cut(page, `<table role="table" class="callers">`)
		table, _, _ = strings.Cut(table, `<div class="charts">`)
		for _, want := range []string{"75 % <small>750 k of 1 M tokens/day</small>", "And 952 more callers", "&lt;b&gt;hog&lt;/b&gt;", `data-label="Refused since start"`} {
			if !strings.Contains(table, want) {
				t.Errorf("the page does not show %s", want)
			}
		}
		if shown := strings.Count(table, "data-caller="); shown != 50 || strings.Index(table, `data-caller="alice"`) > strings.Index(table, "data-caller=\"&lt;") || len(page) > 150_000 {
			t.Errorf("%d callers are shown, in %d bytes", shown, len(page))
		}
	})
}
