package affinity

import (
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestAConfigThatFailsForgetsNoIDs(t *testing.T) {
	a, first := lbtest.Listen(t, "a")
	b, second := lbtest.Listen(t, "b")
	a.Replies(lbtest.Says(404, `{"error":{"message":"No such File object","type":"invalid_request_error","param":"id","code":null}}`))
	b.Replies(func(w http.ResponseWriter, r *http.Request) {
		id := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
		lbtest.Says(200, fmt.Sprintf(`{"id":%q,"object":"file"}`, id))(w, r)
	})
	pool, address := lbtest.Unique("affinity"), fmt.Sprintf("127.0.0.1:%d", lbtest.FreePort(t))
	saved := filepath.Join(t.TempDir(), "saved")
	config := func(version int) string {
		return fmt.Sprintf(`{
			admin off
			default_bind 127.0.0.1
			storage file_system %s
		}
		http://%s {
			header X-Config %d
			openai_lb {
				pool %s
				backend %s
				backend %s {
					priority 2
				}
				stream_idle_timeout %dm
			}
		}`, saved, address, version, pool, first.URL, second.URL, version)
	}
	url := "http://" + address + "/v1/files"
	const files = 200
	// asked is how many of the files a was asked for.
	asked := func(client *http.Client) int {
		a.Forget()
		for n := range files {
			lbtest.Get(client, fmt.Sprintf("%s/file-%08d", url, n)).WantServed(t, "b")
		}
		return len(a.Received())
	}

	lbtest.Run(t, config(1))
	client := lbtest.NewClient(t)
	if got := asked(client); got != files {
		t.Fatalf("of files that nobody knows, %d were asked for, want %d", got, files)
	}
	broken, err := lbtest.Adapt(config(2) + "\nhttp://:1 {\nbind 203.0.113.1\n}")
	if err != nil {
		t.Fatal(err)
	}
	if caddy.Load([]byte(broken), true) == nil {
		t.Fatal("a config was loaded that cannot start")
	}
	if got := asked(client); got != 0 {
		t.Errorf("after a config that failed, the owners of %d ids were not known", got)
	}
	if err := caddy.Stop(); err != nil {
		t.Fatal(err)
	}
	lbtest.Reload(t, config(3))
	if got := asked(lbtest.ClientOf(t, "3", url)); got != 0 {
		t.Errorf("after a restart, the owners of %d ids were not known", got)
	}
}
