package redis

import (
	"cmp"
	"path/filepath"
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
				for _, name := range []string{"default", "watcher"} {
					its := "s3cret-of-nobody"
					if name == cmp.Or(user, "default") {
						its = password
					}
					if err := admin.Do(t.Context(), "acl", "setuser", name, "on", "resetpass", ">"+its, "&*", "+@all").Err(); err != nil {
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
			e.SentinelPassword = "s3cret-two"
			wantUsable(t, open(t, e))
			e.SentinelPassword = "s3cret-one"
			if _, _, err := open(t, e).Load(t.Context(), []string{"g"}); err == nil {
				t.Error("a sentinel lets in who has a wrong password")
			}
		})
	}
}
