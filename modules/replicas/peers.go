package replicas

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/modules/replicas/usagesync"
	"github.com/openai-lb/caddy-openai-lb/state"
)

const (
	// lifetime is how long a replica counts as running after it was last heard.
	lifetime = 10 * time.Second
	// missedFor is how long a silent replica is remembered that has not
	// announced its end. It may have lost only the store and still run with an
	// old state. Operators must see that it has not received an order.
	missedFor = 10 * time.Minute
	// heldFor is how long after a replica was last heard the others hold back
	// its part of callers' limits: the length of the longest window that needs
	// this.
	heldFor = time.Minute
	// maxPeers is the maximum number of replicas.
	maxPeers = 1024
)

// peer is a replica. It may be this one.
type peer struct {
	seam.Peer
	// writers are prefixes of the ids under which the replica reports the use
	// of its pools' callers.
	writers []string
}

// isSilent reports whether a replica that was last heard at heard does not
// count as running.
func isSilent(heard, now time.Time) bool { return now.Sub(heard) >= lifetime }

// peers are the replicas that share the store. A silent replica does not count
// as running, but unless it has announced its end, it is remembered for a
// while: it may run without the store.
type peers struct {
	// self is this replica. It does not change while the replica runs.
	self seam.Peer

	mu    sync.Mutex
	known map[string]peer
	// gone are the replicas that have announced their end lately, with the time
	// when that was heard.
	gone map[string]time.Time
	// sent is when this replica last sent its sign of life. back is when its
	// sign of life last came back. read is when all signs of life were last
	// read from the store.
	sent, back, read time.Time
	// ownConfigs are the configurations of this replica, sorted by pool.
	ownConfigs []seam.PeerConfig
	// formats are the other versions of the format that were logged.
	formats map[otherVersion]bool
}

func newPeers() peers {
	id := make([]byte, digestSize/2)
	rand.Read(id)
	self := seam.Peer{ID: hex.EncodeToString(id)}
	if host, err := os.Hostname(); err == nil && isPlain(host) {
		self.Host = host
	}
	return peers{self: self, known: make(map[string]peer), gone: make(map[string]time.Time),
		formats: make(map[otherVersion]bool)}
}

// isPlain reports whether the name of a host is short enough for a message when
// it is encoded as JSON.
func isPlain(host string) bool {
	text, _ := json.Marshal(host)
	return len(text) <= maxHost+len(`""`)
}

// hear records a replica's sign of life that was sent at heard, and returns the
// number of running replicas. A server of the store that hung may deliver a
// sign of life long after it was sent, or after the replica has announced its
// end.
func (p *peers) hear(m message, heard, now time.Time) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before, known := p.known[m.From]
	_, isGone := p.gone[m.From]
	isNews := !isGone && now.Sub(heard) < lifetime
	if known && !before.Heard.After(heard) || !known && isNews && len(p.known) < maxPeers {
		p.known[m.From] = peer{seam.Peer{ID: m.From, Host: m.Host, Since: time.UnixMilli(m.Since), Heard: heard,
			Configs: p.compare(m, before.Configs, heard)}, m.Writers}
	}
	for _, known := range p.known {
		if !isSilent(known.Heard, now) {
			n++
		}
	}
	return n
}

// toRead records that a new sign of life is sent now, and reports whether the
// signs of life must be read from the store. Usually they arrive as messages.
// If this replica's own last one has not come back, the others may be missing,
// too.
func (p *peers) toRead(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	silent := p.back.Before(p.sent)
	p.sent = now
	return silent || now.Sub(p.read) >= lifetime/2
}

func (p *peers) wereRead(at time.Time) {
	p.mu.Lock()
	p.read = at
	p.mu.Unlock()
}

func (p *peers) cameBack(at time.Time) {
	p.mu.Lock()
	p.back = at
	p.mu.Unlock()
}

// list returns the running replicas, the oldest first. This replica is always
// among them, even if it does not hear itself because the store cannot be
// reached.
func (p *peers) list(now time.Time) []peer {
	return slices.DeleteFunc(p.all(),
		func(other peer) bool { return isSilent(other.Heard, now) && other.ID != p.self.ID })
}

// contact returns the running replicas, and the replicas that have vanished
// lately. A pool's writer has not vanished if another running replica
// has it now.
func (p *peers) contact(now time.Time) (c usagesync.Contact) {
	var vanished []limiter.Vanished
	for _, other := range p.all() {
		switch {
		case !isSilent(other.Heard, now) || other.ID == p.self.ID:
			c.Replicas++
			c.Running = append(c.Running, other.writers...)
		case now.Sub(other.Heard) < heldFor:
			c.Missing++
			for _, w := range other.writers {
				vanished = append(vanished, limiter.Vanished{Writer: w, Until: other.Heard.Add(heldFor)})
			}
		}
	}
	c.Vanished = slices.DeleteFunc(vanished,
		func(v limiter.Vanished) bool { return slices.Contains(c.Running, v.Writer) })
	return c
}

// all returns the running replicas and the silent ones that are remembered, the
// oldest first.
func (p *peers) all() []peer {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.SortedFunc(maps.Values(p.known),
		func(a, b peer) int { return cmp.Or(a.Since.Compare(b.Since), strings.Compare(a.ID, b.ID)) })
}

// forget removes the replicas that have been silent for missedFor. It must be
// called after the store was reached, because the store would have had their
// signs of life.
func (p *peers) forget(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.known, func(_ string, other peer) bool { return now.Sub(other.Heard) >= missedFor })
}

// remove removes a replica that has announced its end.
func (p *peers) remove(id string, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.known, id)
	maps.DeleteFunc(p.gone, func(_ string, at time.Time) bool { return now.Sub(at) >= lifetime })
	if len(p.gone) < maxPeers {
		p.gone[id] = now
	}
}

// maxFormats is the maximum number of versions that are logged. The store may
// contain any version.
const maxFormats = 8

// invalid counts an invalid message. If it has another version of the format,
// the first message of that version is also logged.
func (r *Replica) invalid(err error) {
	messagesIn.WithLabelValues("invalid").Inc()
	format, ok := errors.AsType[otherVersion](err)
	if !ok || !r.peers.meet(format) {
		return
	}
	r.logger.Load().Warn("ignoring replicas that use another format",
		zap.Int("other_format", int(format)), zap.Int("own_format", version))
}

// meet reports whether a version of the format is seen for the first time.
func (p *peers) meet(format otherVersion) (isNew bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.formats[format] || len(p.formats) >= maxFormats {
		return false
	}
	p.formats[format] = true
	return true
}

// leave returns the record that announces the end of this replica. It replaces
// the record of its sign of life.
func (r *Replica) leave(now time.Time) state.Record {
	m := r.message(left, now, now)
	return state.Record{Group: replicaGroup, Key: r.peers.self.ID, Mode: state.Replace, TTL: lifetime,
		Message: m.text()}
}

// alive returns the record of this replica's sign of life.
func (r *Replica) alive(now time.Time) state.Record {
	self := r.peers.self
	m := r.message(alive, now, now)
	m.Host, m.Since, m.Configs = self.Host, self.Since.UnixMilli(), r.peers.configs()
	writers := r.usage.Writers()
	for _, writer := range writers[:min(len(writers), maxConfigs)] {
		m.Writers = append(m.Writers, writer[:shortSize])
	}
	return state.Record{Group: replicaGroup, Key: self.ID, Mode: state.Replace, TTL: lifetime, Message: m.text()}
}
