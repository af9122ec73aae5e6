package statuspage

import (
	"fmt"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/replicas"
)

// shareView is what the page shows of replicas that share what they know.
type shareView struct {
	Summary  string
	Replicas []replicaView
}

// replicaView is one of them.
type replicaView struct {
	replicas.Peer
	// Silent tells that it was not heard of for a while.
	Silent bool
}

const (
	// silence is how long a replica is not heard of that is silent. Each tells
	// once a second that it is there.
	silence = 3 * time.Second
	// maxReplicas is how many are shown.
	maxReplicas = 50
)

func sharesOf(statuses []replicas.Status, now time.Time) (shares []shareView) {
	for _, s := range statuses {
		view := shareView{Summary: shareSummaryOf(s)}
		for _, p := range s.Peers[:min(maxReplicas, len(s.Peers))] {
			view.Replicas = append(view.Replicas, replicaView{p, now.Sub(p.Heard) >= silence})
		}
		shares = append(shares, view)
	}
	return shares
}

// shareSummaryOf says in a sentence how many there are.
func shareSummaryOf(s replicas.Status) string {
	switch n := len(s.Peers); {
	case !s.InTouch:
		return "Out of touch: this one goes on by itself."
	case n == 1:
		return "1 replica shares what it knows: this one."
	default:
		return fmt.Sprintf("%d replicas share what they know, this one included.", n)
	}
}
