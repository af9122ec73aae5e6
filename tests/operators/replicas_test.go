package operators

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/modules/status"
)

// configured returns the digests that GET /openai_lb/replicas shows of a pool,
// and its answer.
func configured(t *testing.T, pool string) (digests []string, answer string) {
	t.Helper()
	for _, route := range (status.API{}).Routes() {
		if route.Pattern != "/openai_lb/replicas" {
			continue
		}
		got := httptest.NewRecorder()
		if err := route.Handler.ServeHTTP(got, httptest.NewRequestWithContext(t.Context(), http.MethodGet, route.Pattern, nil)); err != nil {
			t.Fatal(err)
		}
		answer = got.Body.String()
	}
	var statuses []seam.EngineStatus
	if err := json.Unmarshal([]byte(answer), &statuses); err != nil {
		t.Fatalf("%s: %v", answer, err)
	}
	for _, s := range statuses {
		for _, p := range s.Peers {
			for _, c := range p.Configs {
				if c.Pool == pool {
					digests = append(digests, c.Digest)
				}
			}
		}
	}
	return digests, answer
}

// TestReplicasShowWhatTheyHaveConfigured has one replica after the other, with
// keys of their own.
func TestReplicasShowWhatTheyHaveConfigured(t *testing.T) {
	name, shown := lbtest.Unique("configured"), make(map[string]string)
	for what, options := range map[string]string{
		"as it was":         "backend http://a {\napi_key key-of-one\n}\nclient_key alice client-key-of-alice",
		"with other keys":   "client_key alice another-client-key\nbackend http://a {\napi_key key-of-two\n}",
		"with an option":    "backend http://a {\napi_key key-of-one\nmax_requests 7\n}\nclient_key alice client-key-of-alice",
		"with another name": "backend http://a {\napi_key key-of-one\n}\nclient_key bob client-key-of-alice",
	} {
		hub := lbtest.Unique("hub")
		lbtest.InBubble(t, "openai_lb {\npool "+name+"\n"+options+"\nstate hub "+hub+"\n}", func(t *testing.T, _ *lbtest.World) {
			lbtest.Connect(t, hub)
			time.Sleep(3 * time.Second)
			digests, answer := configured(t, name)
			if len(digests) != 1 || strings.Contains(answer, "key") {
				t.Fatalf("%s: the admin API answers %s", what, answer)
			}
			shown[what] = digests[0]
		})
	}
	if was := shown["as it was"]; shown["with other keys"] != was || shown["with an option"] == was || shown["with another name"] == was {
		t.Errorf("the digests are %v: keys change it, or other options do not", shown)
	}
}
