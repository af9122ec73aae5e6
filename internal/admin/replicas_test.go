package admin

import (
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

func TestAReplicaIsFoundByItsHostOrTheBeginningOfItsID(t *testing.T) {
	answers := []seam.PeerAnswer{
		{Peer: seam.Peer{ID: "0000"}, Self: true},
		{Peer: seam.Peer{ID: "aaaabbbb", Host: "host-aaaabbbb"}},
		{Peer: seam.Peer{ID: "aaaacccc", Host: "host-aaaacccc"}},
		{Peer: seam.Peer{ID: "dddddddd", Host: "host-aaaabbbb"}, Engine: 1},
	}
	for name, want := range map[string]string{
		"*": "0000 aaaabbbb aaaacccc dddddddd", "host-aaaacccc": "aaaacccc", "aaaab": "aaaabbbb", "host-aaaabbbb": "aaaabbbb dddddddd",
		"aaaa": "several replicas are called 'aaaa'", "aaa": "no replica is called 'aaa'", "": "no replica is called ''", "dddd": "dddddddd",
	} {
		its, err := chosen(answers, name)
		var ids []string
		for _, a := range its {
			ids = append(ids, a.ID)
		}
		if got := strings.Join(ids, " "); err == nil && got != want || err != nil && !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s is %s (%v), want %s", name, got, err, want)
		}
	}
}

// A small answer may unpack to one that takes all memory.
