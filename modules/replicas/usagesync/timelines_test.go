package usagesync

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/state"
)

func TestTimelinesOfManyCallersFitIntoMessages(t *testing.T) {
	from, now := tokenLimiters(t, "1M/minute"), someTime
	var syncer Syncer
	syncer.Share(digest, from)
	const n = 500
	for i := range n {
		for range 20 {
			spend(from, now.Add(time.Duration(i%60)*time.Second), fmt.Sprint(i), 10_000_000)
		}
	}
	now = now.Add(time.Minute)
	p, b := syncer.pools[0], new(batch)
	p.grow()
	p.sendTimelines(b, now)
	var messages [][]byte
	for _, r := range b.records {
		if len(r.Message) > state.MaxMessage {
			t.Errorf("a message has %d bytes", len(r.Message))
		}
		if r.TTL != 2*time.Minute {
			t.Errorf("use of a minute is kept for %s", r.TTL)
		}
		messages = append(messages, r.Message)
	}
	if found := timelinesIn(messages); len(found) != n {
		t.Errorf("%d of %d callers are found in %d messages", len(found), n, len(messages))
	}
	p.sendTimelines(b, now.Add(time.Hour))
	if len(b.records) != len(messages) {
		t.Error("timelines that have not changed are sent again")
	}
}

// FuzzTimelines has a replica that starts load any timelines. They change when
// something was used, and not how much.
func FuzzTimelines(f *testing.F) {
	other := tokenLimiters(f, "1M/minute")
	var syncer Syncer
	syncer.Share(digest, other)
	spend(other, someTime, "alice", 1000)
	f.Add([]byte(`{}`))
	f.Add(fmt.Appendf(nil, `{"writer":"a","version":1,"callers":{"1":[{"limit":"tokens/minute","last":%d,"used":[1,-1]}]}}`, math.MinInt64))
	var b batch
	syncer.pools[0].collect(&b, someTime, 0)
	for _, r := range b.records {
		f.Add(r.Message)
	}
	f.Fuzz(func(t *testing.T, message []byte) {
		cs := tokenLimiters(t, "1M/minute")
		for _, r := range b.records {
			if r.Group == groupOf(digest) {
				var starting Syncer
				starting.Share(digest, cs)
				starting.Groups(someTime)
				starting.Loaded([]state.Kept{
					{Group: r.Group, Key: r.Key, TTL: r.TTL, Message: r.Message}, {Group: timelinesGroup(digest), Key: "any", TTL: time.Hour, Message: message},
				}, someTime)
			}
		}
		if used := tokensUsed(cs, someTime, "alice"); used < 999 || used > 1000 { // a 24th of the oldest part may not count
			t.Errorf("%d tokens are used", used)
		}
	})
}
