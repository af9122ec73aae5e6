package replicas

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

const (
	// shortSize is the number of characters of a short digest.
	shortSize = 12
	// maxConfigs is the maximum number of pools for which a replica's message
	// contains a digest and a writer, because a message has no room for more.
	maxConfigs = 64
)

func isShortDigest(word string) bool { return len(word) == shortSize && isHex(word) }

// areConfigs reports whether the digests of a message are valid.
func areConfigs(configs map[string]string) bool {
	for pool, config := range configs {
		if !isShortDigest(pool) || !isShortDigest(config) {
			return false
		}
	}
	return len(configs) <= maxConfigs
}

// Configured sets the digest of the configuration of the pool with this name.
// Other replicas know it from Open to Close.
func (l *Link) Configured(pool, digest string) {
	l.config = seam.PeerConfig{Pool: pool, Digest: digest}
}

// configure sets the configurations of this replica from its links. If several
// links have the same pool, the newest one counts.
func (p *peers) configure(links []*Link) {
	configs := make(map[string]seam.PeerConfig)
	for _, l := range links {
		if _, again := configs[l.config.Pool]; l.config.Digest != "" && (again || len(configs) < maxConfigs) {
			configs[l.config.Pool] = l.config
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ownConfigs = slices.SortedFunc(maps.Values(configs),
		func(a, b seam.PeerConfig) int { return strings.Compare(a.Pool, b.Pool) })
}

// configs returns the digests of this replica's configurations, by poolKey.
func (p *peers) configs() map[string]string {
	p.mu.Lock()
	defer p.mu.Unlock()
	configs := make(map[string]string, len(p.ownConfigs))
	for _, c := range p.ownConfigs {
		configs[poolKey(c.Pool)] = c.Digest
	}
	return configs
}

// poolKey returns a short digest of a pool's name for messages.
func poolKey(pool string) string { return digest(pool)[:shortSize] }

// compare returns a replica's configurations of the pools that this replica
// has, too, from a message that was heard at heard. before are its earlier
// configurations. p.mu must be held.
func (p *peers) compare(m message, before []seam.PeerConfig, heard time.Time) (configs []seam.PeerConfig) {
	for _, local := range p.ownConfigs {
		c := seam.PeerConfig{Pool: local.Pool, Digest: m.Configs[poolKey(local.Pool)]}
		if c.Digest == "" {
			continue // it does not have the pool, or is of an older version
		}
		if c.Digest != local.Digest && m.From != p.self.ID {
			c.DiffersSince = &heard
			if i := slices.IndexFunc(before, func(b seam.PeerConfig) bool { return b.Pool == c.Pool }); i >= 0 &&
				before[i].DiffersSince != nil {
				c.DiffersSince = before[i].DiffersSince
			}
		}
		configs = append(configs, c)
	}
	return configs
}
