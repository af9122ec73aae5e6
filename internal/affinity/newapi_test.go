package affinity

import (
	"net/http"
	"testing"
	"testing/synctest"

	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
)

// asksNewAPI places a request to an API of which nothing is known.
func (a *Affinity) asksNewAPI(caller, method, operation, text string) (*Placement, bool) {
	body := openaiapi.ParseJSON([]byte(text), nil)
	p, _, refused := a.Place(&Query{Method: method, Operation: operation, Body: &body, Text: []byte(text), Caller: caller})
	return p, refused
}

// TestObjectsOfANewAPIAreKnownAtEachReplica and to no other caller there.
func TestObjectsOfANewAPIAreKnownAtEachReplica(t *testing.T) {
	for _, accounts := range [][]string{{"a", "b"}, {"b"}} {
		for _, id := range []string{"agent_68f0", "helper", "my-helper", "7"} {
			inTouch(t, func(s *shared) {
				one, other := s.replica(accounts...), s.replica(accounts...)
				made, _ := one.asksNewAPI("alice", http.MethodPost, "/agents", "{}")
				reply := `{"id":"` + id + `"}`
				res := &http.Response{StatusCode: 201, Header: http.Header{"Content-Type": {openaiapi.TypeJSON}}, ContentLength: int64(len(reply))}
				made.Served("b", res)
				made.IDReader("b", res).Watch([]byte(reply), true)
				synctest.Wait()
				for _, a := range []*Affinity{one, other} {
					for _, request := range [][2]string{{http.MethodGet, "/agents/" + id}, {http.MethodPost, "/agents/" + id + "/run"}, {http.MethodDelete, "/agents/" + id + "/parts"}} {
						if p, refused := a.asksNewAPI("alice", request[0], request[1], "{}"); refused || !p.owns() || p.Allows("a") {
							t.Errorf("%s %s of alice has the placement %+v", request[0], request[1], p)
						}
						if _, refused := a.asksNewAPI("bob", request[0], request[1], "{}"); !refused {
							t.Errorf("%s %s of bob passes", request[0], request[1])
						}
					}
				}
			})
		}
	}
}
