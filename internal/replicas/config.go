package replicas

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"time"
)

// Config is what one replica has configured for a pool that this one has as
// well.
type Config struct {
	Pool string `json:"pool"`
	// Digest is that of ConfigDigest.
	Digest string `json:"digest"`
	// DiffersSince is since when the replica's configuration differs from this
	// one's. nil: it does not.
	DiffersSince *time.Time `json:"differs_since"`
}

// secretive are the options whose texts may be secrets. Those of other modules
// are among them, and fields of headers.
var secretive = []string{"api_key", "auth_options", "caller_identity", "header", "key", "lb_policy", "transport"}

// ConfigDigest returns a short digest of a handler's options as they were
// written, the same wherever they are. A text that may be a secret has no part
// in it, nor has the engine of state: replicas that hear each other may reach
// it in several ways. The priorities of backends have none either: they differ
// by region.
func ConfigDigest(handler any) (string, error) {
	text, err := json.Marshal(handler)
	if err != nil {
		return "", err
	}
	var options map[string]any
	if err := json.Unmarshal(text, &options); err != nil {
		return "", err
	}
	delete(options, "state")
	backends, _ := options["backends"].([]any)
	for _, b := range backends {
		if b, ok := b.(map[string]any); ok {
			delete(b, "priority") // each region prefers its own
		}
	}
	if text, err = json.Marshal(withoutSecrets(options, true)); err != nil {
		return "", err
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:shortSize/2]), nil
}

// withoutSecrets returns the value with only those texts that cannot be
// secrets: all of them if public, and otherwise the names of policies.
func withoutSecrets(value any, public bool) any {
	switch value := value.(type) {
	case string:
		if !public {
			return ""
		}
	case []any:
		for i, element := range value {
			value[i] = withoutSecrets(element, public)
		}
	case map[string]any:
		for name, element := range value {
			value[name] = withoutSecrets(element, name == "policy" || public && !slices.Contains(secretive, name))
		}
	}
	return value
}

const (
	// shortSize is how many characters a short digest has.
	shortSize = 12
	// maxConfigs is how many pools a replica has a digest and a writer for in
	// its message, which has room for no more.
	maxConfigs = 64
)

func isShortDigest(word string) bool { return len(word) == shortSize && isHex(word) }

// areConfigs reports whether a replica may have sent these digests.
func areConfigs(configs map[string]string) bool {
	for pool, config := range configs {
		if !isShortDigest(pool) || !isShortDigest(config) {
			return false
		}
	}
	return len(configs) <= maxConfigs
}

// Configured sets the digest of what is configured for the pool with this name.
// Other replicas know it from Open to Close.
func (l *Link) Configured(pool, digest string) {
	if l != nil {
		l.config = Config{Pool: pool, Digest: digest}
	}
}

// configure sets what is configured here: what the links say, the newest of
// each pool last.
func (p *peers) configure(links []*Link) {
	own := make(map[string]Config)
	for _, l := range links {
		if _, again := own[l.config.Pool]; l.config.Digest != "" && (again || len(own) < maxConfigs) {
			own[l.config.Pool] = l.config
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.own = slices.SortedFunc(maps.Values(own), func(a, b Config) int { return strings.Compare(a.Pool, b.Pool) })
}

// configs returns the digests of what is configured here, as messages have
// them.
func (p *peers) configs() map[string]string {
	p.mu.Lock()
	defer p.mu.Unlock()
	configs := make(map[string]string, len(p.own))
	for _, c := range p.own {
		configs[poolKey(c.Pool)] = c.Digest
	}
	return configs
}

// poolKey stands for the name of a pool in a message.
func poolKey(pool string) string { return digest(pool)[:shortSize] }

// compare returns what a replica that was heard then has configured for the
// pools that are here as well. before is what it had configured earlier. p.mu
// is held.
func (p *peers) compare(m message, before []Config, heard time.Time) (configs []Config) {
	for _, own := range p.own {
		c := Config{Pool: own.Pool, Digest: m.Configs[poolKey(own.Pool)]}
		if c.Digest == "" {
			continue // it does not have the pool, or is of an older version
		}
		if c.Digest != own.Digest && m.From != p.self.ID {
			c.DiffersSince = &heard
			if i := slices.IndexFunc(before, func(b Config) bool { return b.Pool == c.Pool }); i >= 0 && before[i].DiffersSince != nil {
				c.DiffersSince = before[i].DiffersSince
			}
		}
		configs = append(configs, c)
	}
	return configs
}

// Differing returns the peers whose configuration of the pool differs, and
// since when one of them does.
func Differing(statuses []Status, pool string) (peers []Peer, since time.Time) {
	for _, s := range statuses {
		for _, p := range s.Peers {
			for _, c := range p.Configs {
				if c.Pool != pool || c.DiffersSince == nil {
					continue
				}
				if peers = append(peers, p); since.IsZero() || c.DiffersSince.Before(since) {
					since = *c.DiffersSince
				}
			}
		}
	}
	return peers, since
}
