package limits

import (
	"net/http"
	"testing"
	"time"
)

func TestADateHintIsNeverTooSoon(t *testing.T) {
	hdr := make(http.Header)
	now := start.Add(300 * time.Millisecond)
	setHints(hdr, "date", new(Limiter), Refusal{Limit: Tokens, Wait: 2 * time.Second}, now)
	if got := hdr.Get("retry-after"); got != "Wed, 21 Oct 2026 07:28:03 GMT" {
		t.Errorf("got %s for 07:28:02.3", got)
	}
}
