package redis

import (
	"flag"
	"log"
	"os"
	"path/filepath"
	"testing"

	"github.com/caddyserver/caddy/v2"
)

// TestMain gives Caddy folders of its own, so that tests write nothing to the
// user's, and a file to log to.
func TestMain(m *testing.M) {
	flag.Parse() // while errors of usage are still seen
	if config := os.Getenv(replicaVariable); config != "" {
		runReplica(config)
		return
	}
	folder, err := os.MkdirTemp("", "openai-lb-test-")
	if err != nil {
		log.Fatal(err)
	}
	for _, name := range []string{"HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"} {
		os.Setenv(name, folder)
	}
	// Caddy set these when the program started
	caddy.ConfigAutosavePath = filepath.Join(caddy.AppConfigDir(), "autosave.json")
	caddy.DefaultStorage.Path = caddy.AppDataDir()

	stderr := os.Stderr
	file, err := os.CreateTemp(folder, "log-")
	if err != nil {
		log.Fatal(err)
	}
	os.Stderr = file    // what Caddy logs to, unless its config says otherwise,
	caddy.BufferedLog() // and what it would log before it has a config
	if err := caddy.Load([]byte(`{"admin":{"disabled":true}}`), true); err != nil {
		log.Fatal(err)
	}
	if err := caddy.Stop(); err != nil {
		log.Fatal(err)
	}
	code := m.Run()
	os.Stderr = stderr
	os.RemoveAll(folder)
	os.Exit(code)
}
