package lbtest

import (
	"errors"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	_ "github.com/caddyserver/caddy/v2/modules/filestorage"
	_ "github.com/caddyserver/caddy/v2/modules/logging"
	_ "github.com/caddyserver/caddy/v2/modules/metrics"
)

// foldersVariable names the folder that Caddy has instead of the user's.
const foldersVariable = "OPENAI_LB_TEST_FOLDER"

// Main runs the tests of a package, for its TestMain. It gives Caddy folders of
// its own, so that tests write nothing to the user's, and a file to log to,
// which ShowLog shows if a test fails. A process that a test starts has the
// folder of that test.
func Main(m *testing.M) {
	flag.Parse() // while errors of usage are still seen
	folder, given := os.LookupEnv(foldersVariable)
	if !given {
		var err error
		if folder, err = os.MkdirTemp("", "openai-lb-test-"); err != nil {
			log.Fatal(err)
		}
	}
	for _, name := range []string{foldersVariable, "HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"} {
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
	debug.SetGCPercent(400) // the tests make much garbage, and little else
	code := m.Run()
	os.Stderr = stderr
	if !given {
		os.RemoveAll(folder)
	}
	os.Exit(code)
}

// ShowLog shows Caddy's log until the end of the test, if the test fails.
func ShowLog(t testing.TB) {
	t.Helper()
	begin, err := os.Stderr.Stat()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		text, err := os.ReadFile(os.Stderr.Name())
		if err != nil {
			t.Error(err)
			return
		}
		t.Logf("Caddy logged:\n%s", text[begin.Size():])
	})
}

// Run starts Caddy itself with a Caddyfile, as `caddy run` does.
func Run(t testing.TB, caddyfile string) {
	t.Helper()
	ShowLog(t)
	Reload(t, caddyfile)
	t.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			t.Error(err)
		}
		forgetIDs()
	})
}

// forgetIDs removes the ids that pools have saved, so that no test knows those
// of another one, and their ledgers.
func forgetIDs() {
	inMemory.clear()
	os.RemoveAll(filepath.Join(caddy.DefaultStorage.Path, "openai_lb", "ledger"))
	saved, _ := filepath.Glob(filepath.Join(caddy.DefaultStorage.Path, "openai_lb", "ids_*"))
	for _, file := range saved {
		os.Remove(file)
	}
}

// Reload replaces the config of the Caddy that runs, as `caddy reload` does.
func Reload(t testing.TB, caddyfile string) {
	t.Helper()
	config, err := Adapt(caddyfile)
	if err != nil {
		t.Fatal(err)
	}
	if err := caddy.Load([]byte(config), true); err != nil {
		t.Fatal(err)
	}
}

// ServeAt runs a site with these directives, and returns its address.
func ServeAt(t testing.TB, directives string, globalOptions ...string) (address string) {
	t.Helper()
	port := FreePort(t)
	Run(t, fmt.Sprintf("{\nadmin off\ndefault_bind 127.0.0.1\n%s\n}\nhttp://:%d {\n%s\n}",
		strings.Join(globalOptions, "\n"), port, directives))
	return fmt.Sprintf("127.0.0.1:%d", port)
}

// FreePort returns a port of 127.0.0.1 that no other test gets until this one
// is over. Systems choose other ports (32768 and above) for programs that ask
// for any. The port is held at another loopback address, if the system has one,
// so that tests that run at the same time do not take it.
func FreePort(t testing.TB) int {
	t.Helper()
	for range 1000 {
		port := 10_000 + rand.IntN(20_000)
		held, err := net.Listen("tcp", fmt.Sprintf("127.0.0.2:%d", port))
		if err == nil {
			t.Cleanup(func() { held.Close() })
		} else if !errors.Is(err, syscall.EADDRNOTAVAIL) {
			continue
		}
		if l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			l.Close()
			return port
		}
	}
	t.Fatal("no port is free")
	return 0
}

// patience is for how long a test waits at most for what takes a moment on an
// idle machine. Another machine may be busy.
const patience = 2 * time.Minute

// WaitFor waits, for a bounded time, for what happens in the background.
func WaitFor(t *testing.T, happened func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for !happened() {
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<20)
			t.Fatalf("it did not happen; goroutines:\n%s", stacks[:runtime.Stack(stacks, true)])
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// Within waits, for a bounded time, until something happened.
func Within(t *testing.T, what string, happened <-chan struct{}) {
	t.Helper()
	select {
	case <-happened:
	case <-time.After(patience):
		t.Fatalf("it did not happen in time: %s", what)
	}
}
