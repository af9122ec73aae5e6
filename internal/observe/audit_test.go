package observe

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
)

func key(caller string, id byte) keys.AuditedKey {
	return keys.AuditedKey{Caller: caller, ID: [32]byte{id}, By: "file"}
}

func until(k keys.AuditedKey, day int, expired bool) keys.AuditedKey {
	k.Expires, k.Expired = time.Date(2027, 1, day, 0, 0, 0, 0, time.UTC), expired
	return k
}

// lines returns what was logged since the last call.
func lines(logs *observer.ObservedLogs) (all []string) {
	for _, entry := range logs.TakeAll() {
		fields := entry.ContextMap()
		delete(fields, "pool")
		all = append(all, fmt.Sprint(entry.LoggerName, " ", entry.Level, " ", entry.Message, " ", fields))
	}
	return all
}

func want(t *testing.T, logs *observer.ObservedLogs, when string, want ...string) {
	t.Helper()
	for i := range want {
		want[i] = "module.audit info " + want[i]
	}
	if got := lines(logs); !slices.Equal(got, want) {
		t.Errorf("%s:\n got %q\nwant %q", when, got, want)
	}
}

func TestALineForEachKeyThatChanges(t *testing.T) {
	core, logs := observer.New(zap.DebugLevel)
	trail := NewTrail(zap.New(core).Named("module"), t.Name(), 1)
	defer trail.End()
	trail.Keys([]keys.AuditedKey{key("alice", 1)})
	want(t, logs, "before the config is in use")
	trail.Begin("d1", []keys.AuditedKey{key("alice", 1), key("alice", 2), key("bob", 3)}, nil)
	want(t, logs, "a start", "config loaded map[after:d1 before:]")
	for _, step := range []struct {
		when  string
		keys  []keys.AuditedKey
		lines []string
	}{
		{"nothing changes", []keys.AuditedKey{key("bob", 3), key("alice", 2), key("alice", 1)}, nil},
		{"one is added", []keys.AuditedKey{key("alice", 1), key("alice", 2), key("bob", 3), key("carol", 4)}, []string{"client key added map[by:file caller:carol]"}},
		{"one takes the place of another", []keys.AuditedKey{key("alice", 5), key("alice", 2), key("bob", 3), key("carol", 4)}, []string{"client key changed map[by:file caller:alice]"}},
		{"one is removed", []keys.AuditedKey{key("alice", 5), key("bob", 3), key("carol", 4)}, []string{"client key removed map[by:file caller:alice]"}},
		{"one gets another owner", []keys.AuditedKey{key("alice", 5), key("dave", 3), key("carol", 4)},
			[]string{"client key removed map[by:file caller:bob]", "client key added map[by:file caller:dave]"}},
		{"one gets a date", []keys.AuditedKey{until(key("alice", 5), 2, false), key("dave", 3), key("carol", 4)},
			[]string{"client key changed map[by:file caller:alice expires:2027-01-02T00:00:00Z]"}},
		{"it expires", []keys.AuditedKey{until(key("alice", 5), 2, true), key("dave", 3), key("carol", 4)},
			[]string{"client key expired map[by:file caller:alice expires:2027-01-02T00:00:00Z]"}},
		{"it stays expired", []keys.AuditedKey{until(key("alice", 5), 2, true), key("dave", 3), key("carol", 4)}, nil},
		{"it gets another date", []keys.AuditedKey{until(key("alice", 5), 3, false), key("dave", 3), key("carol", 4)},
			[]string{"client key changed map[by:file caller:alice expires:2027-01-03T00:00:00Z]"}},
		{"all are removed", nil, []string{"client key removed map[by:file caller:alice expires:2027-01-03T00:00:00Z]",
			"client key removed map[by:file caller:carol]", "client key removed map[by:file caller:dave]"}},
	} {
		trail.Keys(step.keys)
		want(t, logs, step.when, step.lines...)
	}
}

func TestAReloadIsComparedWithTheConfigBefore(t *testing.T) {
	core, logs := observer.New(zap.DebugLevel)
	log := zap.New(core).Named("module")
	first := NewTrail(log, t.Name(), 1)
	first.Begin("d1", []keys.AuditedKey{until(key("alice", 1), 1, true), key("bob", 2)}, nil)
	want(t, logs, "a start", "config loaded map[after:d1 before:]", "client key expired map[by:file caller:alice expires:2027-01-01T00:00:00Z]")
	second := NewTrail(log, t.Name(), 2)
	second.Keys(nil)
	want(t, logs, "a config that is only checked")
	second.Begin("d2", []keys.AuditedKey{until(key("alice", 1), 1, true), key("carol", 3)}, nil)
	want(t, logs, "a reload", "config loaded map[after:d2 before:d1]", "client key removed map[by:file caller:bob]", "client key added map[by:file caller:carol]")
	NewTrail(log, t.Name(), 2).Begin("d2", []keys.AuditedKey{until(key("alice", 1), 1, true), key("carol", 3)}, nil)
	want(t, logs, "another handler of the same pool and config")
	first.Keys([]keys.AuditedKey{key("bob", 2)})
	first.End()
	want(t, logs, "the config before ends")
	third := NewTrail(log, t.Name(), 3)
	third.Begin("d2", nil, nil)
	want(t, logs, "a config without keys", "config loaded map[after:d2 before:d2]",
		"client key removed map[by:file caller:alice expires:2027-01-01T00:00:00Z]", "client key removed map[by:file caller:carol]")
	third.End()
	third.End()
	want(t, logs, "no config has the pool", "config removed map[before:d2]")
}

func TestALineForEachBackendWhoseKeyChanges(t *testing.T) {
	core, logs := observer.New(zap.DebugLevel)
	log := zap.New(core).Named("module")
	first := NewTrail(log, t.Name(), 1)
	first.APIKey("a", "k1")
	first.Begin("d", nil, map[string]string{"a": "k1", "b": "k1"})
	want(t, logs, "a start", "config loaded map[after:d before:]")
	first.APIKey("a", "k2")
	NewTrail(log, t.Name(), 1).APIKey("a", "k2")
	want(t, logs, "two handlers see that a file has changed", "api_key changed map[backend:a by:file]")
	second := NewTrail(log, t.Name(), 2)
	second.Begin("d", nil, map[string]string{"a": "k2", "b": "k2", "c": "k1"})
	want(t, logs, "a reload", "config loaded map[after:d before:d]", "api_key changed map[backend:b by:config]")
	first.APIKey("a", "k3")
	want(t, logs, "the config before sees a change")
	second.End()
	want(t, logs, "the end", "config removed map[before:d]")
}
