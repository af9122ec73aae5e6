package e2e

import (
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestTheBicepFitsItsCaddyfile compares what they say of each other. Nothing
// here compiles Bicep.
func TestTheBicepFitsItsCaddyfile(t *testing.T) {
	t.Parallel()
	const folder = "../examples/container-apps"
	config, bicep := string(readFile(t, folder+"/Caddyfile")), string(readFile(t, folder+"/main.bicep"))
	find := func(text, pattern string) []string {
		var found []string
		for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
			found = append(found, match[1])
		}
		if len(found) == 0 {
			t.Fatalf("found no %s", pattern)
		}
		return found
	}
	for _, variable := range find(config, `\{env\.(\w+)\}`) {
		if !strings.Contains(bicep, "name: '"+variable+"'\n") {
			t.Errorf("the container has no %s", variable)
		}
	}
	mount := find(bicep, `mountPath: '(\S+)'`)[0]
	for _, file := range find(config, regexp.QuoteMeta(mount)+`/(\S+)`) {
		if !strings.Contains(bicep, "path: '"+file+"'\n") {
			t.Errorf("nobody mounts %s/%s", mount, file)
		}
	}
	for _, path := range find(bicep, `path: '(/\S+)'`) {
		if !strings.Contains(config, "handle "+path+" {") {
			t.Errorf("nobody answers the probe at %s", path)
		}
	}
	for _, port := range append(find(bicep, ` port: (\d+)`), find(bicep, `targetPort: (\d+)`)...) {
		if !strings.Contains(config, "\n:"+port+" {") {
			t.Errorf("nobody listens at %s", port)
		}
	}
	if target := find(bicep, `targetPort: (\d+)`)[0]; !strings.Contains(config, "reverse_proxy 127.0.0.1:"+target+"\n") {
		t.Errorf("readiness is not that of port %s", target)
	}
	var stop time.Duration
	for _, option := range find(config, `(?:shutdown_delay|grace_period) (\S+)`) {
		duration, err := time.ParseDuration(option)
		if err != nil {
			t.Fatal(err)
		}
		stop += duration
	}
	if seconds, err := strconv.Atoi(find(bicep, `terminationGracePeriodSeconds: (\d+)`)[0]); err != nil || time.Duration(seconds)*time.Second <= stop {
		t.Errorf("Container Apps kills after %d s (%v), Caddy takes %v", seconds, err, stop)
	}
}
