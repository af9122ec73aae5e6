package redis

import (
	"cmp"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	client "github.com/redis/go-redis/v9"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestASentinelGetsThePasswordThatIsInTheFileNow(t *testing.T) {
	for _, user := range []string{"", "watcher"} {
		t.Run("user "+cmp.Or(user, "default"), func(t *testing.T) {
			master := startServer(t)
			sentinel := startSentinel(t, master)
			c := client.NewClient(&client.Options{Addr: sentinel.address, Protocol: 2, DisableIdentity: true})
			t.Cleanup(func() { c.Close() })
			admin := c.Conn() // it stays logged in
			t.Cleanup(func() { admin.Close() })
			file := filepath.Join(t.TempDir(), "password")
			setPassword := func(password string) {
				t.Helper()
				lbtest.WriteFile(t, file, password+"\n")
				for name, rules := range map[string]string{"default": "+@all", "watcher": documented(t, sentinelRule)} {
					command := []any{"acl", "setuser", name, "on", "resetpass", ">s3cret-of-nobody"}
					if name == cmp.Or(user, "default") {
						command[5] = ">" + password
					}
					for _, rule := range strings.Fields(rules) {
						command = append(command, rule)
					}
					if err := admin.Do(t.Context(), command...).Err(); err != nil {
						t.Fatal(err)
					}
				}
			}
			setPassword("s3cret-one")
			e := &Engine{Address: []string{sentinel.address}, Sentinel: "mymaster", SentinelUsername: user, SentinelPassword: "{file." + file + "}"}
			st := open(t, e)
			wantUsable(t, st)
			setPassword("s3cret-two")
			for _, kind := range []string{"normal", "pubsub"} {
				admin.Do(t.Context(), "client", "kill", "type", kind)
				master.do("client", "kill", "type", kind)
			}
			lbtest.WaitFor(t, func() bool {
				_, _, err := st.Load(t.Context(), []string{"g"})
				return err == nil
			})
			refused, err := admin.Do(t.Context(), "acl", "log").Slice()
			if err != nil {
				t.Error(err)
			}
			for _, entry := range refused {
				if !strings.Contains(fmt.Sprint(entry), "reason auth") { // the other password, while it changes
					t.Errorf("this was refused: %v", entry)
				}
			}
			e.SentinelPassword = "s3cret-two"
			wantUsable(t, open(t, e))
			e.SentinelPassword = "s3cret-one"
			if _, _, err := open(t, e).Load(t.Context(), []string{"g"}); err == nil {
				t.Error("a sentinel lets in who has a wrong password")
			}
		})
	}
}
