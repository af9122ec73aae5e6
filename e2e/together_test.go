package e2e

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
)

// account is a backend that stores what it makes, and rejects a request that
// names anything else.
type account struct {
	name string

	mu   sync.Mutex
	made map[string]bool
}

var idsInRequests = regexp.MustCompile(`[a-z]+[-_][a-z]+_[0-9]{6}`)

// kindsOf are the prefixes of the ids in each collection.
var kindsOf = map[string]string{
	"files": "file", "vector_stores": "vs", "file_batches": "vsfb", "assistants": "asst", "threads": "thread", "messages": "msg",
	"runs": "run", "conversations": "conv", "responses": "resp", "containers": "cntr",
}

func (a *account) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	a.mu.Lock()
	defer a.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	for _, id := range idsInRequests.FindAllString(r.URL.Path+string(body), -1) {
		if !a.made[id] {
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprintf(w, `{"error":{"message":"No such object: %s","type":"invalid_request_error","param":"id","code":null}}`, id)
			return
		}
	}
	segments := strings.Split(strings.TrimPrefix(r.URL.Path, "/v1/"), "/")
	last := segments[len(segments)-1]
	id := last
	if kind, ok := kindsOf[last]; ok && r.Method == http.MethodPost {
		if id = fmt.Sprintf("%s_%s_%06d", kind, a.name, len(a.made)); strings.Contains(kind, "file") {
			id = strings.Replace(id, "_", "-", 1)
		}
		a.made[id] = true
	}
	if last == "responses" {
		fmt.Fprintf(w, `{"id":%q,"object":"response","status":"completed","output":[]}`, id)
		return
	}
	fmt.Fprintf(w, `{"id":%q,"object":%q,"status":"completed","file_counts":{"in_progress":0}}`, id, last)
}

// listenAt runs a Caddy with these sites until the test ends. It has started
// when it listens at the address.
func listenAt(t *testing.T, address, sites string, env ...string) {
	t.Helper()
	home := t.TempDir()
	config := filepath.Join(home, "Caddyfile")
	if err := os.WriteFile(config, []byte("{\n admin off\n persist_config off\n}\n"+sites), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := launch(t, config, append(env, "HOME="+home, "XDG_DATA_HOME="+home, "XDG_CONFIG_HOME="+home)...)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.await(func() error {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			err = conn.Close()
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// startTogether runs three equal accounts, and a balancer in front of them. It
// returns the balancer's base URL.
func startTogether(t *testing.T, options string) (url string) {
	t.Helper()
	var backends strings.Builder
	for _, name := range names[:3] {
		server := httptest.NewServer(&account{name: name, made: make(map[string]bool)})
		t.Cleanup(server.Close)
		fmt.Fprintf(&backends, "backend %s/v1 {\n name %s\n account %s\n api_key right\n}\n", server.URL, name, name)
	}
	addresses, err := freeAddresses(1)
	if err != nil {
		t.Fatal(err)
	}
	listenAt(t, addresses[0], "http://"+addresses[0]+" {\n openai_lb {\n"+backends.String()+options+"\n}\n}\n")
	return "http://" + addresses[0] + "/v1"
}

// TestWhatACallerMakesOneAfterTheOtherIsUsedTogether has the helpers of the
// official SDK make objects in several requests, and name them in one. E2E_RUNS
// is how often.
func TestWhatACallerMakesOneAfterTheOtherIsUsedTogether(t *testing.T) {
	lookPath(t, "python3")
	if err := installPython(); err != nil {
		t.Fatal(err)
	}
	runs := cmp.Or(os.Getenv("E2E_RUNS"), "5")
	for name, options := range map[string]string{"callers without keys": "", "a caller with a key": "client_key alice right-key-of-alice"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := startTogether(t, options)
			out, err := exec.Command("python/.venv/bin/python", "python/together.py", url, runs).Output()
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			var uses map[string]struct {
				Worked int
				Error  string
			}
			if err := json.Unmarshal(out, &uses); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			for use, got := range uses {
				t.Logf("%s worked %d times", use, got.Worked)
				if fmt.Sprint(got.Worked) != runs {
					t.Errorf("%s worked %d of %s times: %s", use, got.Worked, runs, got.Error)
				}
			}
		})
	}
}
