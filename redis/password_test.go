package redis

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestAPasswordThatCannotBeReadStays(t *testing.T) {
	s := startServer(t)
	file := filepath.Join(t.TempDir(), "password")
	lbtest.WriteFile(t, file, "s3cret\n")
	e := s.as(s.engine(), documented(t, userRule))
	e.Password = "{file." + file + "}"
	wantUsable(t, open(t, e))
	read := e.Secrets()["password"]
	if read == nil || len(e.Secrets()) != 1 {
		t.Fatalf("the engine has the secrets %v", e.Secrets())
	}
	if err := read(); err != nil {
		t.Error(err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := read(); err == nil || !strings.Contains(err.Error(), file) || strings.Contains(err.Error(), "s3cret") {
		t.Errorf("a password that is gone gives %v", err)
	}
	again, err := e.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { again.Close() })
	wantUsable(t, again) // by new connections
	lbtest.WriteFile(t, file, "other-s3cret")
	if err := read(); err != nil || e.resolved.Server.password() != "other-s3cret" {
		t.Errorf("a new password gives %q, %v", e.resolved.Server.password(), err)
	}
}

func TestAPasswordThatCannotBeReadIsAMetricOfEachPool(t *testing.T) {
	s := startServer(t)
	s.do("config", "set", "requirepass", "s3cret")
	file := filepath.Join(t.TempDir(), "password")
	lbtest.WriteFile(t, file, "s3cret")
	pool := lbtest.Unique("password")
	port := lbtest.FreePort(t)
	lbtest.Run(t, strings.ReplaceAll(site(s, port, "pool "+pool+"\n"), s.option(), strings.TrimSuffix(strings.TrimSpace(s.option()), "}")+"password {file."+file+"}\n}\n"))
	stale := func() float64 {
		return lbtest.SumOf(t, "secret_stale", map[string]string{"pool": pool, "secret": "password of state redis"})
	}
	lbtest.WaitFor(t, inTouchHere)
	if got := stale(); got != 0 {
		t.Errorf("a password that was read gives %v", got)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	lbtest.WaitFor(t, func() bool { return stale() == 1 })
	lbtest.WriteFile(t, file, "s3cret")
	lbtest.WaitFor(t, func() bool { return stale() == 0 })
}
