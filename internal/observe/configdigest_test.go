package observe

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

// TestADigestIsOfAllButSecrets changes one thing after the other in a
// configuration that has each kind of secret.
func TestADigestIsOfAllButSecrets(t *testing.T) {
	const config = `{"pool": "llm", "backends": [{"url": "https://a", "api_key": "KEY-1", "auth": "azure", "auth_options": {"client_secret": "KEY-2"},
		"header": {"X-Key": ["KEY-3"]}, "priority": 1, "model": [{"name": "m"}]}], "client_keys": [{"name": "alice", "key": "KEY-4"}],
		"lb_policy": {"policy": "cookie", "secret": "KEY-5", "fallback": {"policy": "random"}}, "state": {"engine": "redis", "password": "KEY-6"},
		"transport": {"protocol": "http", "network_proxy": {"from": "url", "url": "http://user:KEY-7@proxy"}, "dial_timeout": -1}, "callers": [{"name": "alice", "tokens": [{"limit": "1k/day"}]}]}`
	of := func(text string) string {
		t.Helper()
		digest, err := ConfigDigest(json.RawMessage(text))
		if err != nil || len(digest) != 2*configDigestSize {
			t.Fatalf("%s: %q, %v", text, digest, err)
		}
		return digest
	}
	for i := range 7 {
		key := fmt.Sprint("KEY-", i+1)
		if !strings.Contains(config, key) || of(strings.Replace(config, key, "another", 1)) != of(config) {
			t.Errorf("the digest depends on %s", key)
		}
	}
	for _, same := range []string{
		strings.ReplaceAll(config, "\n", " "),
		strings.Replace(strings.Replace(config, `"pool": "llm", `, "", 1), `"transport"`, `"pool": "llm", "transport"`, 1),
		strings.Replace(config, `"priority": 1`, `"priority": 2`, 1),
		strings.Replace(config, `"engine": "redis"`, `"engine": "redis", "address": ["10.0.0.1:6379"]`, 1),
	} {
		if of(same) != of(config) {
			t.Errorf("%s has another digest", same)
		}
	}
	for _, change := range [][2]string{
		{`"llm"`, `"other"`}, {"https://a", "https://b"}, {`"api_key"`, `"another_key"`}, {`"azure"`, `"other"`}, {"X-Key", "X-Other"},
		{`"m"`, `"n"`}, {`"alice", "key"`, `"bob", "key"`}, {`"cookie"`, `"random"`}, {`"random"`, `"first"`}, {`"dial_timeout": -1`, `"dial_timeout": 1`}, {"1k/day", "2k/day"},
	} {
		changed := strings.Replace(config, change[0], change[1], 1)
		if changed == config || of(changed) == of(config) {
			t.Errorf("%s instead of %s does not change the digest", change[1], change[0])
		}
	}
}
