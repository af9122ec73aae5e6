package statuspage

import (
	"fmt"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// shareView is what the page shows of the replicas that share state.
type shareView struct {
	Summary  string
	InTouch  bool
	Replicas []replicaView
}

// replicaView is one of them.
type replicaView struct {
	seam.Peer
	// Silent reports whether it has not been heard from for a while.
	Silent bool
	// Self reports whether it is the one that the page is from.
	Self bool
}

const (
	// silence is how long a silent replica has not been heard from. Each
	// replica reports once a second that it is there.
	silence = 3 * time.Second
	// maxReplicas is how many are shown.
	maxReplicas = 50
)

// sharesOf returns the replicas of each engine.
func sharesOf(s Status) (shares []shareView) {
	for _, state := range s.States {
		view := shareView{Summary: shareSummaryOf(state), InTouch: state.InTouch}
		for _, p := range state.Peers[:min(maxReplicas, len(state.Peers))] {
			view.Replicas = append(view.Replicas, replicaView{p, s.Time.Sub(p.Heard) >= silence, p.ID == state.Self})
		}
		shares = append(shares, view)
	}
	return shares
}

// shareSummaryOf returns a sentence with their number.
func shareSummaryOf(s seam.EngineStatus) string {
	switch n := len(s.Peers); {
	case !s.InTouch:
		return "Out of touch: this one goes on by itself."
	case n == 1:
		return "1 replica shares what it knows: this one."
	default:
		return fmt.Sprintf("%d replicas share what they know, this one included.", n)
	}
}
