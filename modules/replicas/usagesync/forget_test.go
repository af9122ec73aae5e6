package usagesync

import (
	"fmt"
	"testing"
)

// TestForgottenCallersAreNotSent has a thousand new callers each month, of
// which all other replicas forget the ones before, too.
func TestForgottenCallersAreNotSent(t *testing.T) {
	from, to := tokenLimiters(t, "1M/minute"), tokenLimiters(t, "1M/minute")
	var a, b Syncer
	a.Share(digest, from)
	b.Share(digest, to)
	for month := range 5 {
		now := someTime.AddDate(0, month, 0)
		for i := range 1000 {
			spend(from, now, fmt.Sprintf("%d of %d", i, month), 7)
		}
		spend(from, now, "stays", 7)
		for _, r := range a.sent(now) {
			if err := b.Hear(r.Message, now); err != nil {
				t.Fatal(err)
			}
		}
		members := 0
		for _, c := range a.pools[0].chunks {
			members += len(c.members)
		}
		if all := len(from.All()); members != all || all > 1001 || len(a.pools[0].chunks) > 12 {
			t.Errorf("in month %d %d members are in %d chunks, of %d callers", month, members, len(a.pools[0].chunks), all)
		}
		for _, name := range []string{"stays", fmt.Sprintf("999 of %d", month)} {
			if used := tokensUsed(to, now, name); used != 7 {
				t.Errorf("in month %d %s has used %d elsewhere", month, name, used)
			}
		}
	}
}
