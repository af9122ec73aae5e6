package lbtest

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// WithExtendedConnect runs a test in another process: net/http's HTTP/2 server
// offers extended CONNECT (RFC 8441) only if GODEBUG says so when the process
// starts.
func WithExtendedConnect(t *testing.T, test func(*testing.T)) {
	t.Helper()
	const setting = "http2xconnect=1"
	if strings.Contains(os.Getenv("GODEBUG"), setting) {
		test(t)
		return
	}
	again := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=60s")
	again.Env = append(os.Environ(), "GODEBUG="+setting)
	out, err := again.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Errorf("%v\n%s", err, out)
	}
}
