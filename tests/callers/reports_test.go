package callers

import (
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/ratelimit"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
	"github.com/openai-lb/caddy-openai-lb/modules/status/statuspage"
)

// get asks the admin API.
func get(t *testing.T, path string) *httptest.ResponseRecorder {
	t.Helper()
	w := httptest.NewRecorder()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
	for _, route := range (status.API{}).Routes() {
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
		var got []status.Caller
		answer := get(t, "/openai_lb/callers?pool="+w.Handler.Pool)
		if err := json.Unmarshal(answer.Body.Bytes(), &got); err != nil || len(got) != 2 {
			t.Fatalf("got %v\n%s", err, answer.Body)
		}
		now := time.Now()
		day, minute := now.Truncate(24*time.Hour).AddDate(0, 0, 1).UTC(), now.Truncate(time.Minute).Add(time.Minute).UTC()
		want := []status.Caller{{
			Pool: w.Handler.Pool, Name: "alice", Tier: "batch", MaxRequests: 7, Refused: 1, TokensToday: 200, TokensMonth: 200,
			Limits: []status.CallerLimit{
				{Kind: "requests", Window: "minute", Limit: 2, Used: 2, Refused: 1, Ends: minute},
				{Kind: "tokens", Window: "day", Limit: 1000, Used: 200, Left: 800, Then: "batch", Ends: day},
			},
		}, {
			Pool: w.Handler.Pool, Name: "bob", Tier: "batch", TokensToday: 100, TokensMonth: 100,
			Limits: []status.CallerLimit{{Kind: "tokens", Window: "minute", Limit: 100, Used: 100, Ends: minute}},
		}}
		want[0].LastHour = ratelimit.LastHour{Requests: 2, Tokens: 200, Refused: map[string]uint64{"requests/minute": 1}}
		want[1].LastHour = ratelimit.LastHour{Requests: 1, Tokens: 100, Refused: map[string]uint64{}}
		for i := range want {
			for j, l := range got[i].Limits {
				if l.Resets == nil || !l.Resets.After(now) || l.Window == "day" && !l.Resets.Equal(day) {
					t.Errorf("the limit %+v has a wrong reset", l)
				}
				got[i].Limits[j].Resets = nil
			}
			a, _ := json.Marshal(got[i])
			b, _ := json.Marshal(want[i])
			if string(a) != string(b) {
				t.Errorf("got  %s\nwant %s", a, b)
			}
		}
	})
}

func TestTheStatusPageShowsTheBusiestCallers(t *testing.T) {
	inBubble(t, "caller * {\ntokens 1M/day\ntokens 3M/day gpt-4o\n}", func(t *testing.T, w *world) {
		limiters := lbtest.LimitersOf(w.Handler.Pool)
		limiters.Get(time.Now(), "<b>hog</b>")
		for i := range 1000 {
			limiters.Get(time.Now(), "team-"+strconv.Itoa(i))
		}
		w.AllReply(used(500_000, 250_000))
		w.chat(prompt(20, `"max_tokens":1,`)).WantServed(t, "a")
		synctest.Wait()
		for range 3 {
			w.chat(prompt(260_000, `"max_tokens":1,`)).WantError(t, http.StatusTooManyRequests, "insufficient_quota")
		}
		h := new(statuspage.Handler)
		wants := func(query string, callers int, texts ...string) {
			t.Helper()
			answer := httptest.NewRecorder()
			if err := h.ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/status"+query, nil), nil); err != nil {
				t.Fatal(err)
			}
			page := answer.Body.String()
			for _, want := range texts {
				if !strings.Contains(page, want) {
					t.Errorf("%s does not show %s", query, want)
				}
			}
			if shown := strings.Count(page, "data-caller="); shown != callers || len(page) > 200_000 || strings.Contains(page, "<b>hog") {
				t.Errorf("%s shows %d callers, want %d, in %d bytes", query, shown, callers, len(page))
			}
		}
		const alice = `<th role="rowheader" scope="row">alice</th>`
		used := "75 % <small>750 k of 1 M tokens/day, resets at " + time.Now().UTC().AddDate(0, 0, 1).Format("2 Jan") + " 00:00</small>"
		wants("", 10, alice, used, "<small>750 k of 3 M tokens/day of gpt-4o, resets at ", `<a href="?callers">All 1002 callers</a>`, `<b>3</b> <small>3 tokens/day</small>`)
		wants("?callers", 100, alice, used, "And 902 more", "1002 callers. In the last hour, 3 requests of 1 of them were refused.", "&lt;b&gt;hog&lt;/b&gt;", ` id="search" name="search"`)
		wants("?callers&search=TEAM-99", 11, "11 found of 1002 callers.", `data-caller="team-990"`, `value="TEAM-99"`)
		wants("?callers&search=%3Cb%3Ehog", 1, `value="&lt;b&gt;hog"`, "&lt;b&gt;hog&lt;/b&gt;")
		wants("?callers&search=nobody", 0, "0 found of 1002 callers.")
		wants("?callers&search="+strings.Repeat("%C3%A4%FF", 100), 0, `value="`+strings.Repeat("ä", 64)+`"`)
		var page struct {
			Pools []struct {
				Pool    string
				Callers []status.Caller
				More    int `json:"more_callers"`
			}
		}
		answer := httptest.NewRecorder()
		if err := h.ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/status?json&search=team", nil), nil); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(answer.Body.Bytes(), &page); err != nil {
			t.Fatal(err)
		}
		for _, p := range page.Pools {
			if p.Pool == w.Handler.Pool && (len(p.Callers) != 100 || p.More != 900) {
				t.Errorf("as JSON, there are %d callers and %d more", len(p.Callers), p.More)
			}
		}
	})
}

func TestThePageShowsWhyACallerIsRefused(t *testing.T) {
	inBubble(t, "caller alice {\nrequests 2/minute\nmodels gpt-4o\nservice_tiers default\nmax_requests 7\n}\ncaller * deny", func(t *testing.T, w *world) {
		w.AllReply(used(60, 40))
		w.post(aliceKey, "/v1/chat/completions", `{"model":"gpt-9"}`)
		w.post(aliceKey, "/v1/chat/completions", `{"model":"gpt-4o","service_tier":"priority"}`)
		for range 4 {
			w.chat(prompt(20, ``))
			synctest.Wait()
		}
		w.post(bobKey, "/v1/chat/completions", prompt(20, ``)).WantError(t, http.StatusForbidden, "permission_denied")
		var got []status.Caller
		if err := json.Unmarshal(get(t, "/openai_lb/callers?pool="+w.Handler.Pool).Body.Bytes(), &got); err != nil || len(got) != 2 {
			t.Fatalf("got %+v, %v", got, err)
		}
		for _, c := range got {
			want := map[string]map[string]uint64{"alice": {"requests/minute": 2, "model": 1, "service_tier": 1}, "bob": {"deny": 1}}[c.Name]
			if !maps.Equal(c.LastHour.Refused, want) {
				t.Errorf("%s was refused %v, want %v", c.Name, c.LastHour.Refused, want)
			}
		}
	})
}
