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

	"github.com/openai-lb/caddy-openai-lb/internal/callers"
	"github.com/openai-lb/caddy-openai-lb/internal/limiter"
	"github.com/openai-lb/caddy-openai-lb/state"
)

const (
	// lifetime is how long a replica counts after it was last heard.
	lifetime = 10 * time.Second
	// missedFor is how long a replica is missed that is not heard any more, and
	// has not said that it stops. It may have lost the store alone, and go on
	// with what it knew: operators have to hear that it has not got an order.
	missedFor = 10 * time.Minute
	// heldFor is how long after it was last heard the others hold back its part
	// of callers' limits: the length of the windows that matter.
	heldFor = time.Minute
	// maxPeers is how many replicas are counted.
	maxPeers = 1024
)

// Peer is a replica, this one included.
type Peer struct {
	ID   string `json:"id"`
	Host string `json:"host"`
	// Since is when it began, and Heard when it was last heard of.
	Since time.Time `json:"since"`
	Heard time.Time `json:"heard"`
	// Configs are what it has configured, in the order of the pools' names.
	Configs []Config `json:"configs"`
	// writers are how the ids of its pools in reports begin.
	writers []string
}

func (p *Peer) isSilent(now time.Time) bool { return now.Sub(p.Heard) >= lifetime }

// peers are the replicas that share the store. One that is silent does not
// count any more, but it is remembered for a while, unless it has said that it
// stops: nobody knows whether it goes on without the store.
type peers struct {
	// self is this one. It does not change while the replica runs.
	self Peer

	mu    sync.Mutex
	known map[string]Peer
	// gone are those that have said lately that they stop, and when that was
	// heard.
	gone map[string]time.Time
	// said is when this replica last sent its sign of life, back when that last
	// came back, and read when those of all were last read.
	said, back, read time.Time
	// own are what is configured here, in the same order.
	own []Config
	// formats are the versions of the format in use elsewhere that were logged.
	formats map[otherVersion]bool
}

func newPeers() peers {
	id := make([]byte, digestSize/2)
	rand.Read(id)
	self := Peer{ID: hex.EncodeToString(id)}
	if host, err := os.Hostname(); err == nil && isPlain(host) {
		self.Host = host
	}
	return peers{self: self, known: make(map[string]Peer), gone: make(map[string]time.Time), formats: make(map[otherVersion]bool)}
}

// isPlain reports whether the name of a host takes no more of a message than it
// has characters.
func isPlain(host string) bool {
	text, _ := json.Marshal(host)
	return len(text) <= maxHost+len(`""`)
}

// hear records that a replica sent a sign of life then, and returns how many
// count. A server that hung may keep a sign of life that was sent long ago, or
// from before the replica said that it stops.
func (p *peers) hear(m message, heard, now time.Time) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before, known := p.known[m.From]
	_, isGone := p.gone[m.From]
	isNews := !isGone && now.Sub(heard) < lifetime
	if known && !before.Heard.After(heard) || !known && isNews && len(p.known) < maxPeers {
		p.known[m.From] = Peer{ID: m.From, Host: m.Host, Since: time.UnixMilli(m.Since), Heard: heard, Configs: p.compare(m, before.Configs, heard), writers: m.Writers}
	}
	for _, peer := range p.known {
		if !peer.isSilent(now) {
			n++
		}
	}
	return n
}

// toRead reports whether the signs of life have to be read in the store,
// because a new one is sent now: those of the others come as messages, and so
// does this replica's own, or none does.
func (p *peers) toRead(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	silent := p.back.Before(p.said)
	p.said = now
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

// list returns the replicas that count, the oldest first. This one does, also
// while it does not hear itself, because the store cannot be reached.
func (p *peers) list(now time.Time) []Peer {
	return slices.DeleteFunc(p.all(), func(peer Peer) bool { return peer.isSilent(now) && peer.ID != p.self.ID })
}

// contact returns which replicas count, and which have vanished lately. A pool
// that another replica has now has not vanished with the one before.
func (p *peers) contact(now time.Time) (c callers.Contact) {
	var running []string
	var vanished []limiter.Vanished
	for _, peer := range p.all() {
		switch {
		case !peer.isSilent(now) || peer.ID == p.self.ID:
			c.Replicas++
			running = append(running, peer.writers...)
		case now.Sub(peer.Heard) < heldFor:
			c.Missing++
			for _, w := range peer.writers {
				vanished = append(vanished, limiter.Vanished{Writer: w, Until: peer.Heard.Add(heldFor)})
			}
		}
	}
	c.Vanished = slices.DeleteFunc(vanished, func(v limiter.Vanished) bool { return slices.Contains(running, v.Writer) })
	return c
}

// all returns the replicas that count and those that may still run, the oldest
// first.
func (p *peers) all() []Peer {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := slices.AppendSeq([]Peer{}, maps.Values(p.known)) // in JSON, none is an empty list
	slices.SortFunc(list, func(a, b Peer) int { return cmp.Or(a.Since.Compare(b.Since), strings.Compare(a.ID, b.ID)) })
	return list
}

// forget forgets the replicas that were missed for long. It is called when the
// store has been reached, which would have had their signs of life.
func (p *peers) forget(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.known, func(_ string, peer Peer) bool { return now.Sub(peer.Heard) >= missedFor })
}

// remove forgets a replica that has said that it stops.
func (p *peers) remove(id string, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.known, id)
	maps.DeleteFunc(p.gone, func(_ string, at time.Time) bool { return now.Sub(at) >= lifetime })
	if len(p.gone) < maxPeers {
		p.gone[id] = now
	}
}

// maxFormats is how many versions of the format are logged: the store may hold
// any.
const maxFormats = 8

// invalid counts a message that was not understood. If a replica of another
// version sent it, the first one of that version is also logged.
func (r *Replica) invalid(err error) {
	messagesIn.WithLabelValues("invalid").Inc()
	format, ok := errors.AsType[otherVersion](err)
	if !ok || !r.peers.meet(format) {
		return
	}
	r.logger.Load().Warn("ignoring replicas that use another format", zap.Int("other_format", int(format)), zap.Int("own_format", version))
}

// meet reports whether the version of the format is new.
func (p *peers) meet(format otherVersion) (isNew bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.formats[format] || len(p.formats) >= maxFormats {
		return false
	}
	p.formats[format] = true
	return true
}

// leave returns the record by which others know that this replica has stopped,
// in place of the one that says that it runs.
func (r *Replica) leave(now time.Time) state.Record {
	m := r.message(left, now, now)
	return state.Record{Group: replicaGroup, Key: r.peers.self.ID, Mode: state.Replace, TTL: lifetime, Message: m.text()}
}

// alive returns the record by which others know that this replica runs.
func (r *Replica) alive(now time.Time) state.Record {
	self := r.peers.self
	m := r.message(alive, now, now)
	m.Host, m.Since, m.Configs = self.Host, self.Since.UnixMilli(), r.peers.configs()
	writers := r.tally.Writers()
	for _, writer := range writers[:min(len(writers), maxConfigs)] {
		m.Writers = append(m.Writers, writer[:shortSize])
	}
	return state.Record{Group: replicaGroup, Key: self.ID, Mode: state.Replace, TTL: lifetime, Message: m.text()}
}
