package simulator

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
)

func TestTheStatusCountsWithoutAKeyAndNamesNoSecret(t *testing.T) {
	srv := listen(t, &Handler{Name: "eus", APIKey: []string{"sesame"}, OutputTokens: 5, RequestsPerMinute: 12})
	for range 3 {
		call(t, srv, "POST", chatPath+"&api-key=sesame", chatBody, "api-key", "sesame")
	}
	call(t, srv, "POST", chatPath, chatBody, "api-key", "open-sesame")

	resp, body := call(t, srv, "GET", "/_simulator/status", "")
	if strings.Contains(body, "sesame") {
		t.Errorf("the status shows a key: %s", body)
	}
	if resp.Header.Get("x-simulator") != "eus" {
		t.Error("the status does not say whose it is")
	}
	got := status(t, srv)
	last := got.Last
	got.Last = nil
	want := Status{
		Name: "eus", Requests: 4, Admitted: 2, Throttled: Throttled{Requests: 1}, Unauthorized: 1,
		Tokens: Tokens{Estimated: 2 * (3 + 16), Input: 6, Output: 10},
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	var codes []int
	for _, r := range last {
		codes = append(codes, r.Status)
	}
	if !slices.Equal(codes, []int{200, 200, 429, 401}) {
		t.Errorf("got %v, the oldest is to come first", codes)
	}
	first := last[0]
	if first.Method != "POST" || first.Path != "/openai/deployments/gpt-4o/chat/completions" || first.Deployment != "gpt-4o" ||
		first.BodyBytes != int64(len(chatBody)) || len(first.BodySHA256) != 64 || first.Cancelled || first.Time.IsZero() ||
		!slices.Contains(first.Headers, "Api-Key") {
		t.Errorf("got %+v", first)
	}
}

func TestTheStatusResetsCountersAndLimits(t *testing.T) {
	for _, method := range []string{http.MethodDelete, http.MethodPost} {
		srv := listen(t, &Handler{RequestsPerMinute: 6})
		call(t, srv, "POST", chatPath, chatBody)
		call(t, srv, "POST", chatPath, chatBody)
		if resp, _ := call(t, srv, method, "/_simulator/status", ""); resp.StatusCode != 204 {
			t.Fatalf("%s: got %d", method, resp.StatusCode)
		}
		if got := status(t, srv); got.Requests != 0 || got.Throttled.Requests != 0 || len(got.Last) != 0 || got.InFlight != 0 {
			t.Errorf("%s: got %+v", method, got)
		}
		if resp, _ := call(t, srv, "POST", chatPath, chatBody); resp.StatusCode != 200 {
			t.Errorf("%s: the limit is still reached", method)
		}
	}
}

func TestTheStatusTakesNoOtherMethod(t *testing.T) {
	srv := listen(t, &Handler{})
	if resp, _ := call(t, srv, "PUT", "/_simulator/status", ""); resp.StatusCode != 405 || resp.Header.Get("Allow") == "" {
		t.Errorf("got %d", resp.StatusCode)
	}
}

func TestTheStatusShowsTheLastHundredRequests(t *testing.T) {
	srv := listen(t, &Handler{})
	for i := range keptRequests + 5 {
		call(t, srv, "GET", fmt.Sprintf("/v1/%d", i), "")
	}
	last := status(t, srv).Last
	if len(last) != keptRequests || last[0].Path != "/v1/5" || last[99].Path != "/v1/104" {
		t.Errorf("%d from %s to %s", len(last), last[0].Path, last[len(last)-1].Path)
	}
}

func TestManyAtOnceAreCountedOnce(t *testing.T) {
	srv := listen(t, &Handler{TokensPerMinute: 30 * (3 + 16)})
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			for method, path := range map[string]string{"POST": chatPath, "GET": "/_simulator/status"} {
				resp, err := roundTrip(srv, method, path, chatBody)
				if err != nil {
					t.Error(err)
					return
				}
				resp.Body.Close()
			}
		})
	}
	wg.Wait()
	if got := status(t, srv); got.Requests != 50 || got.Admitted != 30 || got.Throttled.Tokens != 20 || got.InFlight != 0 {
		t.Errorf("got %+v", got)
	}
}
