package seam

import (
	"bytes"
	"compress/flate"
	"io"
	"time"
)

// EngineStatus is the status of an engine of state, for operators.
type EngineStatus struct {
	// InTouch reports whether the engine can be reached, with all its servers.
	InTouch bool `json:"in_touch"`
	// Near names the server that answers fastest, if the engine has several.
	Near string `json:"near,omitempty"`
	// Queue is how many messages wait to be sent.
	Queue int `json:"queue"`
	// Self is the id of this one of the replicas.
	Self string `json:"self"`
	// Peers are the replicas that share the engine, this one included.
	Peers []Peer `json:"replicas"`
	// Pools are the pools of this process that share the engine.
	Pools []string `json:"-"`
}

// Peer is a replica. It may be this one.
type Peer struct {
	ID   string `json:"id"`
	Host string `json:"host"`
	// Since is when the replica started, and Heard is when it was last heard.
	Since time.Time `json:"since"`
	Heard time.Time `json:"heard"`
	// Configs are the replica's configurations, sorted by pool.
	Configs []PeerConfig `json:"configs"`
}

// PeerConfig identifies a replica's configuration of a pool that this replica
// has, too.
type PeerConfig struct {
	Pool string `json:"pool"`
	// Digest is a short digest of the pool's options.
	Digest string `json:"digest"`
	// DiffersSince is since when the replica's configuration differs from this
	// one's. It is nil if they are the same.
	DiffersSince *time.Time `json:"differs_since"`
}

// Differing returns the peers with a different configuration of the pool. since
// is when the first of them started to differ.
func Differing(statuses []EngineStatus, pool string) (peers []Peer, since time.Time) {
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

// PeerAnswer is the answer of a replica to a question.
type PeerAnswer struct {
	Peer
	// Self reports whether the replica is this one, which need not be asked.
	// Connected reports whether this replica reaches the engine, and Whole
	// whether it reaches all servers of the engine.
	Self, Connected, Whole bool
	// Engine numbers the engines of state in this process.
	Engine int
	SharedPools
	// Packed is the compressed answer. It is nil if there is no answer.
	Packed []byte
}

// SharedPools lists the pools of this process that share an engine, and the
// pools that share other engines.
type SharedPools struct{ Pools, Elsewhere []string }

// Text returns the uncompressed answer. It may have any content and length,
// because any client of the engine's store can make one up.
func (a PeerAnswer) Text() io.Reader { return flate.NewReader(bytes.NewReader(a.Packed)) }

// Pack compresses an answer.
func Pack(text []byte) []byte {
	var packed bytes.Buffer
	w, _ := flate.NewWriter(&packed, flate.BestSpeed) // a valid level
	_, _ = w.Write(text)                              // to memory
	_ = w.Close()
	return packed.Bytes()
}
