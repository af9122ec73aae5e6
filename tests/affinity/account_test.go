package affinity

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

// fakeAccount is a backend that stores what it makes, and knows of nothing
// else.
type fakeAccount struct {
	*lbtest.Backend
	t    *testing.T
	base string // what its ids have in common

	mu     sync.Mutex
	stored map[string]bool
	made   int
	asked  []string // the requests that it got
	// fails is what it answers in place of serving.
	fails http.HandlerFunc
	// inserts is put before the fields of a response's JSON.
	inserts string
	// headers are added to replies.
	headers map[string]string
	// changes changes a reply's JSON.
	changes func(string) string
}

// accounts makes backends of the world into accounts.
func (w *world) accounts(names ...string) map[string]*fakeAccount {
	all := make(map[string]*fakeAccount)
	for _, name := range names {
		a := &fakeAccount{Backend: w.Backends[name], t: w.T, base: strings.NewReplacer("/", "", " ", "", "#", "").Replace(w.T.Name()) + name, stored: make(map[string]bool)}
		w.Serve(name+":80", a)
		all[name] = a
	}
	return all
}

var idsInRequests = regexp.MustCompile(`"(?:previous_response_id|file_id|input_file_id|conversation|id|encrypted_content)":"([^"]+)"`)

func (a *fakeAccount) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.asked = append(a.asked, r.Method+" "+r.URL.Path)
	rw.Header().Set("X-Backend", a.Name)
	if a.fails != nil {
		a.fails(rw, r)
		return
	}
	for _, m := range idsInRequests.FindAllStringSubmatch(string(body), -1) {
		if !a.stored[m[1]] {
			a.refuse(rw, m[0], m[1])
			return
		}
	}
	segments := strings.Split(strings.Trim(strings.NewReplacer("chat/", "chat_", "fine_tuning/", "").Replace(r.URL.Path), "/"), "/")[1:]
	for i := 1; i < len(segments); i += 2 {
		if id := segments[i]; !a.stored[id] {
			lbtest.Says(404, fmt.Sprintf(`{"error":{"message":"No such object: %s","type":"invalid_request_error","param":"id","code":null}}`, id))(rw, r)
			return
		}
	}
	for name, value := range a.headers {
		rw.Header().Set(name, value)
	}
	switch {
	case r.Method == http.MethodGet && len(segments) == 1:
		lbtest.Says(200, `{"object":"list","data":[`+strings.Join(a.all(), ",")+`]}`)(rw, r)
	case r.Method != http.MethodPost, len(segments) > 1:
		lbtest.Says(200, fmt.Sprintf(`{"id":%q,"object":"stored"}`, segments[1]))(rw, r)
	case segments[0] == "responses" && strings.Contains(string(body), `"stream":true`):
		a.stream(rw, r, strings.Contains(string(body), `"store":false`))
	default:
		text := a.response(segments[0])
		if a.changes != nil {
			text = a.changes(text)
		}
		lbtest.Says(200, text)(rw, r)
	}
}

func (a *fakeAccount) all() (ids []string) {
	for id := range a.stored {
		ids = append(ids, fmt.Sprintf(`{"id":%q}`, id))
	}
	slices.Sort(ids)
	return ids
}

func (a *fakeAccount) refuse(rw http.ResponseWriter, place, id string) {
	code, text := 404, `{"error":{"message":"Item with id '%s' not found.","type":"invalid_request_error","param":"input","code":null}}`
	switch {
	case strings.Contains(place, "previous"):
		code, text = 400, `{"error":{"message":"Previous response with id '%s' not found.","type":"invalid_request_error","param":"previous_response_id","code":"previous_response_not_found"}}`
	case strings.Contains(place, "encrypted"):
		code, text = 400, `{"error":{"message":"The encrypted content %s could not be verified.","type":"invalid_request_error","param":null,"code":"invalid_encrypted_content"}}`
	}
	lbtest.Says(code, fmt.Sprintf(text, id))(rw, nil)
}

// store makes an id.
func (a *fakeAccount) store(kind string) string {
	a.made++
	id := fmt.Sprintf("%s_%s_%08d", kind, a.base, a.made)
	a.stored[id] = true
	return id
}

func (a *fakeAccount) item() string {
	return fmt.Sprintf(`{"id":%q,"type":"reasoning","summary":[],"encrypted_content":%q}`, a.store("rs"), a.store("gAAAA"))
}

func (a *fakeAccount) response(collection string) string {
	kind := map[string]string{"responses": "resp", "files": "file", "batches": "batch", "conversations": "conv", "chat_completions": "chatcmpl"}[collection]
	if collection != "responses" {
		return fmt.Sprintf(`{%s"id":%q,"object":"stored"}`, a.inserts, a.store(kind))
	}
	return fmt.Sprintf(`{%s"id":%q,"object":"response","output":[%s],"store":true}`, a.inserts, a.store(kind), a.item())
}

func (a *fakeAccount) stream(rw http.ResponseWriter, r *http.Request, unstored bool) {
	id, item := a.store("resp"), a.item()
	response := fmt.Sprintf(`{"id":%q,"object":"response","output":[OUTPUT],"store":%v}`, id, !unstored)
	event := func(name, data string) string {
		return fmt.Sprintf("event: %s\ndata: {\"type\":%q,%s}\n\n", name, name, data)
	}
	empty, full := strings.Replace(response, "OUTPUT", "", 1), strings.Replace(response, "OUTPUT", item, 1)
	lbtest.Streams(event("response.created", `"response":`+empty), event("response.output_text.delta", `"delta":"hi"`),
		event("response.output_item.done", `"item":`+item), event("response.completed", `"response":`+full))(rw, r)
}

// requests returns what the account was asked, and forgets it.
func (a *fakeAccount) requests() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	asked := a.asked
	a.asked = nil
	return asked
}

// put makes an object of which the balancer knows nothing.
func (a *fakeAccount) put(kind string) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.store(kind)
}

func (a *fakeAccount) does(fails http.HandlerFunc) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fails = fails
}

// call sends a request to the balancer as the caller of that key.
func (w *world) call(key, method, path, body string) reply {
	r := w.Request(method, path, strings.NewReader(body))
	if key != "" {
		r.Header.Set("Authorization", "Bearer "+key)
	}
	return reply{w.Send(r)}
}

// make has some backend make an object, and returns its id and who made it.
func (w *world) make(key, path, body string) (id, backend string) {
	w.T.Helper()
	reply := w.call(key, http.MethodPost, path, body)
	var made struct{ ID string }
	if reply.Status != 200 || json.Unmarshal([]byte(reply.Body), &made) != nil || made.ID == "" {
		w.T.Fatalf("nothing was made: %d %s %v", reply.Status, reply.Body, reply.Err)
	}
	return made.ID, reply.Backend
}

// wantAsked checks which requests each account got since it was last asked.
func wantAsked(t *testing.T, all map[string]*fakeAccount, want map[string]int) {
	t.Helper()
	for name, a := range all {
		if got := a.requests(); len(got) != want[name] {
			t.Errorf("%s was asked %q, want %d requests", name, got, want[name])
		}
	}
}
