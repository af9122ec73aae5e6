package observe

import (
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
)

// AuditLogger returns the audit logger of a pool. Its name is that of the
// module, followed by audit.
func AuditLogger(module *zap.Logger, pool string) *zap.Logger {
	return module.Named("audit").With(zap.String("pool", pool))
}

// loggedState is the state of a pool as the log has it, so that only changes
// are logged.
type loggedState struct {
	// config is the config in use, and digest that of the pool's options.
	config any
	digest string
	keys   map[id]keys.AuditedKey
	// backends are digests of their keys, by name.
	backends map[string]string
}

// id identifies a key of a caller.
type id struct {
	caller string
	key    [32]byte
}

var (
	mu    sync.Mutex
	pools = make(map[string]*loggedState)
)

// Trail logs how the config and the keys of a pool differ from what the audit
// log last said of them. That outlives a reload, so that a key which a reload
// takes away is logged like one that a file no longer has. A nil Trail logs
// nothing.
type Trail struct {
	log    *zap.Logger
	pool   string
	config any
}

// NewTrail returns the trail of a pool for a config, which may be anything
// comparable. A pool may have several trails for a config.
func NewTrail(module *zap.Logger, pool string, config any) *Trail {
	return &Trail{AuditLogger(module, pool), pool, config}
}

// Begin logs that the config is in use, with a digest of the pool's options,
// and how its keys differ from those before: those of callers, and those of
// backends, of which there are digests by name.
func (t *Trail) Begin(digest string, given []keys.AuditedKey, backends map[string]string) {
	mu.Lock()
	defer mu.Unlock()
	last, again := pools[t.pool]
	if !again {
		last = &loggedState{keys: make(map[id]keys.AuditedKey)}
		pools[t.pool] = last
		for _, k := range given { // a start adds none
			k.Expired = false
			last.keys[id{k.Caller, k.ID}] = k
		}
	}
	if last.config != t.config {
		t.log.Info("config loaded", zap.String("before", last.digest), zap.String("after", digest))
	}
	last.config, last.digest = t.config, digest
	last.update(t.log, given)
	for _, name := range slices.Sorted(maps.Keys(backends)) {
		if before, known := last.backends[name]; known && before != backends[name] {
			t.apiKeyChanged(name, "config")
		}
	}
	last.backends = make(map[string]string)
	maps.Copy(last.backends, backends)
}

// APIKey logs that a file has another key for a backend, if the config is in
// use.
func (t *Trail) APIKey(backend, digest string) {
	mu.Lock()
	defer mu.Unlock()
	if last := pools[t.pool]; last != nil && last.config == t.config && last.backends[backend] != digest {
		t.apiKeyChanged(backend, "file")
		last.backends[backend] = digest
	}
}

func (t *Trail) apiKeyChanged(backend, source string) {
	t.log.Info("api_key changed", zap.String("backend", backend), zap.String("by", source))
}

// End logs that no config has the pool any longer, unless another one has it.
func (t *Trail) End() {
	mu.Lock()
	defer mu.Unlock()
	if last := pools[t.pool]; last != nil && last.config == t.config {
		t.log.Info("config removed", zap.String("before", last.digest))
		delete(pools, t.pool)
	}
}

// Keys logs how the keys have changed, if the config is in use.
func (t *Trail) Keys(given []keys.AuditedKey) {
	mu.Lock()
	defer mu.Unlock()
	if last := pools[t.pool]; last != nil && last.config == t.config {
		last.update(t.log, given)
	}
}

// update logs how the keys differ from those before, caller by caller.
func (s *loggedState) update(log *zap.Logger, given []keys.AuditedKey) {
	before, now := s.keys, make(map[id]keys.AuditedKey, len(given))
	callers := make(map[string]*changes)
	changesOf := func(caller string) *changes {
		if callers[caller] == nil {
			callers[caller] = new(changes)
		}
		return callers[caller]
	}
	for _, k := range given {
		key := id{k.Caller, k.ID}
		now[key] = k
		old, known := before[key]
		switch {
		case !known:
			changesOf(k.Caller).added = append(changesOf(k.Caller).added, k)
		case !old.Expires.Equal(k.Expires):
			changesOf(k.Caller).changed = append(changesOf(k.Caller).changed, k)
		}
		if k.Expired && (!old.Expired || !old.Expires.Equal(k.Expires)) {
			changesOf(k.Caller).expired = append(changesOf(k.Caller).expired, k)
		}
	}
	for key, old := range before {
		if _, still := now[key]; !still {
			changesOf(key.caller).removed = append(changesOf(key.caller).removed, old)
		}
	}
	for _, caller := range slices.Sorted(maps.Keys(callers)) {
		callers[caller].write(log)
	}
	s.keys = now
}

// changes are those of the keys of a caller.
type changes struct{ added, changed, removed, expired []keys.AuditedKey }

// write logs the changes. A key that is removed while another one is added has
// changed.
func (c *changes) write(log *zap.Logger) {
	replaced := min(len(c.added), len(c.removed))
	for _, lines := range []struct {
		message string
		keys    []keys.AuditedKey
	}{
		{"client key added", c.added[replaced:]},
		{"client key changed", append(c.changed, c.added[:replaced]...)},
		{"client key removed", c.removed[replaced:]},
		{"client key expired", c.expired},
	} {
		for _, k := range lines.keys {
			expires := zap.Skip()
			if !k.Expires.IsZero() {
				expires = zap.String("expires", k.Expires.Format(time.RFC3339))
			}
			log.Info(lines.message, zap.String("caller", k.Caller), zap.String("by", k.By), expires)
		}
	}
}
