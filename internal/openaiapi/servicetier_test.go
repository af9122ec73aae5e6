package openaiapi

import (
	"bytes"
	"net/http"
	"strings"
	"testing"
)

func TestABodyNamesItsServiceTier(t *testing.T) {
	for body, want := range map[string]struct {
		tier    string
		several bool
		changed string // to priority
	}{
		`{"model":"m"}`:                                         {"", false, `{"service_tier":"priority","model":"m"}`},
		`{"model":"m","service_tier":"flex"}`:                   {"flex", false, `{"model":"m","service_tier":"priority"}`},
		`{"service_tier" : null , "model":"m"}`:                 {"", false, `{"service_tier" : "priority" , "model":"m"}`},
		`{"service_tier":7}`:                                    {"other", false, `{"service_tier":"priority"}`},
		`{"service_tier":{"a":["b"]}}`:                          {"other", false, `{"service_tier":"priority"}`},
		`{"service\u005ftier":"flex"}`:                          {"flex", false, `{"service\u005ftier":"priority"}`},
		`{"service_tier":"f\u006cex"}`:                          {"flex", false, `{"service_tier":"priority"}`},
		`{"service_tier":"priority"}`:                           {"priority", false, `{"service_tier":"priority"}`},
		`{"metadata":{"service_tier":"flex"}}`:                  {"", false, `{"service_tier":"priority","metadata":{"service_tier":"flex"}}`},
		`{"service_tier":"flex","service_tier":"default"}`:      {"other", true, `{"service_tier":"priority","service_tier":"priority"}`},
		`{"Service_Tier ":"flex"}`:                              {"other", true, `{"service_tier":"priority","Service_Tier ":"flex"}`},
		`{"service_tier":"made up"}`:                            {"other", false, `{"service_tier":"priority"}`},
		`{"service_tier":""}`:                                   {"other", false, `{"service_tier":"priority"}`},
		`{"service_tier":"ultrafast","service_tier":"default"}`: {"other", true, `{"service_tier":"priority","service_tier":"priority"}`},
		`{"Service_Tier":"ultrafast","service_tier":"default"}`: {"other", true, `{"Service_Tier":"ultrafast","service_tier":"priority"}`},
		`{"service_tier":"flex","a":1,"service_tier":7}`:        {"other", true, `{"service_tier":"priority","a":1,"service_tier":"priority"}`},
		`{"service_tier":"priority","service_tier":"priority"}`: {"priority", true, `{"service_tier":"priority","service_tier":"priority"}`},
		`{}`:                          {"", false, `{}`},
		`["service_tier","flex"]`:     {"", false, `["service_tier","flex"]`},
		`{"service_tier":"fl`:         {"", false, `{"service_tier":"priority","service_tier":"fl`},
		`{"a":1,"service_tier":"flex`: {"", false, `{"service_tier":"priority","a":1,"service_tier":"flex`},
	} {
		b := ParseJSON([]byte(body), nil)
		if b.ServiceTier != want.tier || b.OddTier != want.several {
			t.Errorf("%s: service tier %q, several: %v", body, b.ServiceTier, b.OddTier)
		}
		if got := string(bytes.Join(b.With([]byte(body), Changes{ServiceTier: "priority"}), nil)); got != want.changed {
			t.Errorf("%s with another service tier is %s, want %s", body, got, want.changed)
		}
	}
}

func TestTheServiceTierIsReplacedBesideOtherChanges(t *testing.T) {
	for body, want := range map[string]string{
		`{"messages":[],"stream":true}`:                                           `{"stream_options":{"include_usage":true},"service_tier":"flex","model":"new","messages":[],"stream":true}`,
		`{"service_tier":"auto","stream_options":{},"stream":true,"model":"old"}`: `{"service_tier":"flex","stream_options":{"include_usage":true},"stream":true,"model":"new"}`,
		`{"model":"old","service_tier":null,"model":"older"}`:                     `{"model":"new","service_tier":"flex","model":"new"}`,
	} {
		b := ParseJSON([]byte(body), nil)
		got := string(bytes.Join(b.With([]byte(body), Changes{Model: "new", ServiceTier: "flex", AskUsage: strings.Contains(body, "stream\"")}), nil))
		if got != want {
			t.Errorf("%s becomes %s, want %s", body, got, want)
		}
	}
}

func TestChatsAndResponsesTakeAServiceTier(t *testing.T) {
	for path, want := range map[string]bool{
		"/v1/chat/completions": true, "/openai/deployments/d/chat/completions": true, "/v1/responses": true, "/openai/v1/responses/": true,
		"/v1/embeddings": false, "/v1/completions": false, "/v1/messages": false, "/v1/responses/resp_1": false, "/v1/batches": false,
	} {
		r, _ := http.NewRequest(http.MethodPost, "http://a"+path, nil)
		q := Parse(r, ParsePath(path), Received{Whole: true}, nil)
		if got := q.TakesServiceTier(); got != want {
			t.Errorf("%s takes a service tier: %v, want %v", path, got, want)
		}
	}
	r, _ := http.NewRequest(http.MethodGet, "http://a/v1/responses", nil)
	if q := Parse(r, ParsePath("/v1/responses"), Received{Whole: true}, nil); q.TakesServiceTier() {
		t.Error("a list of responses takes a service tier")
	}
}
