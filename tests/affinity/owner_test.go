package affinity

import (
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

const threeAccounts = `openai_lb {
	client_key alice client-key-of-alice
	client_key bob client-key-of-bob
	backend http://a
	backend http://b
	backend http://c
}`

const alice, bob = "client-key-of-alice", "client-key-of-bob"

var idInJSON = regexp.MustCompile(`"(id|encrypted_content)":"([^"]+)"`)

// TestWhatBelongsTogetherStaysTogether has conversations begin at any of three
// accounts, and go on there, whatever names what is there.
func TestWhatBelongsTogetherStaysTogether(t *testing.T) {
	for _, begins := range []struct{ name, body string }{
		{"a response", `{"model":"gpt-4o","input":"hi"}`},
		{"a streamed response", `{"model":"gpt-4o","input":"hi","stream":true}`},
	} {
		t.Run(begins.name, func(t *testing.T) {
			inBubble(t, threeAccounts, func(t *testing.T, w *world) {
				all := w.accounts("a", "b", "c")
				home := make(map[string]bool)
				for range 10 {
					reply := w.call(alice, "POST", "/v1/responses", begins.body)
					reply.WantServed(t, "a", "b", "c")
					home[reply.Backend] = true
					found := make(map[string]string)
					for _, m := range idInJSON.FindAllStringSubmatch(reply.Body, -1) {
						kind, _, _ := strings.Cut(m[2], "_")
						found[kind] = m[2]
					}
					for name, follow := range map[string][3]string{
						"a response before":    {"POST", "/v1/responses", `{"previous_response_id":"RESP"}`},
						"a stream after it":    {"POST", "/v1/responses", `{"stream":true,"previous_response_id":"RESP"}`},
						"an item":              {"POST", "/v1/responses", `{"input":[{"type":"item_reference","id":"RS"}]}`},
						"an encrypted content": {"POST", "/openai/v1/responses", `{"input":[{"type":"reasoning","encrypted_content":"CONTENT","summary":[]}]}`},
						"all of them":          {"POST", "/v1/responses", `{"previous_response_id":"RESP","input":[{"id":"RS","encrypted_content":"CONTENT"}]}`},
						"it is read":           {"GET", "/v1/responses/RESP", ""},
						"it is read at Azure":  {"GET", "/openai/responses/RESP?api-version=1", ""},
						"it is cancelled":      {"POST", "/v1/responses/RESP/cancel", ""},
						"its input is listed":  {"GET", "/v1/responses/RESP/input_items?after=RS", ""},
						"its stream goes on":   {"GET", "/v1/responses/RESP?stream=true&starting_after=3", ""},
						"it is deleted":        {"DELETE", "/v1/responses/RESP", ""},
					} {
						put := strings.NewReplacer("RESP", found["resp"], "RS", found["rs"], "CONTENT", found["gAAAA"])
						if got := w.call(alice, follow[0], put.Replace(follow[1]), put.Replace(follow[2])); got.Status != 200 || got.Backend != reply.Backend {
							t.Errorf("%s began at %s, and %s at %s: %d %s", begins.name, reply.Backend, name, got.Backend, got.Status, got.Body)
						}
					}
				}
				asked := 0
				for _, a := range all {
					asked += len(a.requests())
				}
				if len(home) < 2 || asked != 120 {
					t.Errorf("%d requests reached the accounts, and began at %v", asked, home)
				}
			})
		})
	}
}

func TestFilesAndWhatUsesThemStayTogether(t *testing.T) {
	inBubble(t, threeAccounts, func(t *testing.T, w *world) {
		all := w.accounts("a", "b", "c")
		for range 5 {
			file, home := w.make(alice, "/v1/files", "{}")
			all[home].inserts = fmt.Sprintf(`"output_file_id":%q,`, all[home].put("file"))
			batch, at := w.make(alice, "/v1/batches", fmt.Sprintf(`{"input_file_id":%q}`, file))
			all[home].inserts = ""
			output := fmt.Sprintf("file_%s_%08d", all[home].base, all[home].made-1)
			if at != home {
				t.Errorf("the file is at %s, the batch at %s", home, at)
			}
			for _, get := range []string{"/v1/files/" + file, "/v1/files/" + file + "/content", "/v1/batches/" + batch, "/v1/files/" + output + "/content", "/v1/files?after=" + file} {
				w.call(alice, "GET", get, "").WantServed(t, home)
			}
			w.call(alice, "POST", "/v1/chat/completions", fmt.Sprintf(`{"messages":[{"content":[{"type":"file","file":{"file_id":%q}}]}]}`, file)).WantServed(t, home)
			w.call(alice, "DELETE", "/v1/files/"+file, "").WantServed(t, home)
			for name, a := range all {
				if asked := a.requests(); name != home && len(asked) > 0 {
					t.Errorf("%s was asked %q", name, asked)
				}
			}
		}
	})
}

func TestTheOwnerIsNeverReplaced(t *testing.T) {
	for _, tt := range []struct {
		name   string
		fails  http.HandlerFunc
		status int
		calls  int // of the owner, for two requests
	}{
		{"throttled for 20 s", lbtest.Throttled("20"), 429, 1},
		{"out of budget", lbtest.Says(429, `{"error":{"code":"insufficient_quota"}}`), 429, 1},
		{"failing", lbtest.Status(500), 500, 2},
		{"hanging up", lbtest.Aborts, 502, 3}, // the first connection was used before, so it is tried on a new one
		{"not knowing its own yet", lbtest.Says(404, `{"error":{"message":"Response with id 'x' not found."}}`), 404, 2},
		{"refusing", lbtest.Status(400), 400, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, threeAccounts, func(t *testing.T, w *world) {
				all := w.accounts("a", "b", "c")
				id, home := w.make(alice, "/v1/responses", `{"model":"gpt-4o"}`)
				wantAsked(t, all, map[string]int{home: 1})
				all[home].does(tt.fails)
				for range 2 {
					reply := w.call(alice, "POST", "/v1/responses", fmt.Sprintf(`{"model":"gpt-4o","previous_response_id":%q}`, id))
					if reply.Status != tt.status {
						t.Errorf("client got %d %s", reply.Status, reply.Body)
					}
					if got := reply.Header.Get("Retry-After"); tt.name == "throttled for 20 s" && got != "20" {
						t.Errorf("Retry-After is %q", got)
					}
				}
				wantAsked(t, all, map[string]int{home: tt.calls})
				all[home].does(nil)
				time.Sleep(10 * time.Minute)
				w.call(alice, "GET", "/v1/responses/"+id, "").WantServed(t, home)
			})
		})
	}
}

func TestADrainedAccountServesWhatItOwns(t *testing.T) {
	inBubble(t, "openai_lb {\nbackend http://a\nbackend http://b {\nweight 0\n}\n}", func(t *testing.T, w *world) {
		all := w.accounts("a", "b")
		id := all["b"].put("file")
		w.call("", "GET", "/v1/files/"+id, "").WantServed(t, "b")
		wantAsked(t, all, map[string]int{"a": 1, "b": 1})
		for range 3 {
			w.call("", "GET", "/v1/files/"+id, "").WantServed(t, "b")
			w.call("", "POST", "/v1/responses", "{}").WantServed(t, "a")
		}
		wantAsked(t, all, map[string]int{"a": 3, "b": 3})
	})
}

// TestAnothersIDIsNotFound has callers name what is not theirs.
func TestAnothersIDIsNotFound(t *testing.T) {
	inBubble(t, threeAccounts, func(t *testing.T, w *world) {
		all := w.accounts("a", "b", "c")
		response, home := w.make(alice, "/v1/responses", "{}")
		file, _ := w.make(alice, "/v1/files", "{}")
		for _, a := range all {
			a.requests()
		}
		for _, c := range []struct{ method, path, body, code string }{
			{"GET", "/v1/responses/" + response, "", "not_found"},
			{"DELETE", "/v1/files/" + file, "", "not_found"},
			{"GET", "/v1/files?after=" + file, "", "not_found"},
			{"POST", "/v1/responses", fmt.Sprintf(`{"previous_response_id":%q}`, response), "previous_response_not_found"},
			{"POST", "/v1/batches", fmt.Sprintf(`{"input_file_id":%q}`, file), "not_found"},
			{"POST", "/v1/responses", fmt.Sprintf(`{"input":[{"type":"item_reference","id":%q}]}`, strings.Replace(response[:len(response)-1]+"2", "resp", "rs", 1)), "not_found"},
			{"POST", "/v1/responses", fmt.Sprintf(`{"input":[{"encrypted_content":%q}]}`, strings.Replace(response[:len(response)-1]+"3", "resp", "gAAAA", 1)), "invalid_encrypted_content"},
		} {
			w.call(bob, c.method, c.path, c.body).WantError(t, 404, c.code)
		}
		wantAsked(t, all, nil)
		w.call(alice, "GET", "/v1/responses/"+response, "").WantServed(t, home)
		// what bob makes of what nobody claims is bob's, and what nobody made
		// stays everybody's
		shared := all["b"].put("file")
		batch, _ := w.make(bob, "/v1/batches", fmt.Sprintf(`{"input_file_id":%q}`, shared))
		w.call(alice, "GET", "/v1/files/"+shared, "").WantServed(t, "b")
		w.call(alice, "GET", "/v1/batches/"+batch, "").WantError(t, 404, "not_found")
		w.call(bob, "GET", "/v1/batches/"+batch, "").WantServed(t, "b")
	})
}

func TestAListDoesNotTakeIDsFromTheirCallers(t *testing.T) {
	inBubble(t, threeAccounts, func(t *testing.T, w *world) {
		all := w.accounts("a", "b", "c")
		id := all["a"].put("file")
		w.call(bob, "GET", "/v1/files", "").WantServed(t, "a")
		w.call(alice, "GET", "/v1/files/"+id, "").WantServed(t, "a")
		wantAsked(t, all, map[string]int{"a": 2})
	})
}

func TestObjectsOfDifferentAccountsAreRefusedTogether(t *testing.T) {
	inBubble(t, threeAccounts, func(t *testing.T, w *world) {
		all := w.accounts("a", "b", "c")
		one, at := w.make(alice, "/v1/files", "{}")
		elsewhere := map[string]string{"a": "b", "b": "c", "c": "a"}[at]
		other := all[elsewhere].put("resp")
		w.call(alice, "GET", "/v1/responses/"+other, "").WantServed(t, elsewhere)
		for _, a := range all {
			a.requests()
		}
		reply := w.call(alice, "POST", "/v1/responses", fmt.Sprintf(`{"previous_response_id":%q,"input":[{"content":[{"file_id":%q}]}]}`, other, one))
		reply.WantError(t, 400, "objects_in_different_accounts")
		if !strings.Contains(reply.Body, one) || !strings.Contains(reply.Body, other) {
			t.Errorf("client got %s", reply.Body)
		}
		wantAsked(t, all, nil)
	})
}

func TestAnAccountMayHaveSeveralBackends(t *testing.T) {
	inBubble(t, `openai_lb {
		backend http://a {
			account one
		}
		backend http://b {
			account one
		}
		backend http://c
	}`, func(t *testing.T, w *world) {
		all := w.accounts("a", "b", "c")
		all["b"].stored = all["a"].stored
		id := all["a"].put("resp")
		w.call("", "GET", "/v1/responses/"+id, "").WantServed(t, "a", "b")
		all["c"].requests()
		for range 10 {
			w.call("", "GET", "/v1/responses/"+id, "").WantServed(t, "a", "b")
		}
		all["a"].does(lbtest.Throttled("20"))
		w.call("", "GET", "/v1/responses/"+id, "").WantServed(t, "b")
		wantAsked(t, map[string]*fakeAccount{"c": all["c"]}, nil)
	})
}

// TestAnAccountThatGetsANameLosesNoObject has configs name the account that has
// an object, name it otherwise, and leave it out.
func TestAnAccountThatGetsANameLosesNoObject(t *testing.T) {
	a, serverA := lbtest.Listen(t, "a")
	b, serverB := lbtest.Listen(t, "b")
	a.Replies(lbtest.Says(404, `{"error":{"message":"Response with id 'resp_of_alice' not found."}}`))
	b.Replies(lbtest.Says(200, `{"id":"resp_of_alice"}`))
	port := lbtest.FreePort(t)
	site := func(n int, backends string) string {
		return fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\n}\nhttp://:%d {\nheader X-Config %d\nopenai_lb {\n"+
			"client_key alice key-of-alice-1234\nclient_key bob key-of-bob-123456\n%s\n}\n}", port, n, backends)
	}
	first := "backend " + serverA.URL + "\n"
	second := func(account string) string {
		return "backend " + serverB.URL + " {\npriority 2\naccount " + account + "\n}\n"
	}
	url := fmt.Sprintf("http://127.0.0.1:%d/v1/responses", port)
	lbtest.Run(t, site(0, "backend "+serverB.URL))
	lbtest.Post(lbtest.NewClient(t), url, "{}", "Authorization", "Bearer key-of-alice-1234").WantServed(t, "b")
	for i, c := range []struct {
		backends string
		asked    int // how often a is asked
		status   int
	}{
		{first + second("two"), 1, 200},
		{first + second("three"), 1, 200},
		{first, 2, 404},
		{first + second("three"), 0, 200}, // which is still known
	} {
		lbtest.Reload(t, site(i+1, c.backends))
		client := lbtest.ClientOf(t, fmt.Sprint(i+1), url)
		a.Forget()
		for range 2 {
			lbtest.Get(client, url+"/resp_of_alice", "Authorization", "Bearer key-of-bob-123456").WantError(t, 404, "not_found")
			if got := lbtest.Get(client, url+"/resp_of_alice", "Authorization", "Bearer key-of-alice-1234"); got.Status != c.status {
				t.Errorf("config %d: alice got %d %s", i+1, got.Status, got.Body)
			}
		}
		if got := len(a.Received()); got != c.asked {
			t.Errorf("config %d: a was asked %d times, want %d", i+1, got, c.asked)
		}
	}
}

func TestAnIDIsForgottenThirtyDaysAfterAReplyNamedIt(t *testing.T) {
	inBubble(t, lbtest.PoolOf("a b", ""), func(t *testing.T, w *world) {
		all := w.accounts("a", "b")
		id, home := w.make("", "/v1/files", "{}")
		for range 3 {
			time.Sleep(29 * 24 * time.Hour)
			w.call("", "GET", "/v1/files/"+id, "").WantServed(t, home) // which names it again
		}
		all["a"].requests()
		all["b"].requests()
		time.Sleep(31 * 24 * time.Hour)
		for range 4 {
			w.call("", "GET", "/v1/files/"+id, "").WantServed(t, home)
		}
		if asked := len(all["a"].requests()) + len(all["b"].requests()); asked > 5 {
			t.Errorf("%d requests reached the accounts", asked)
		}
	})
}
