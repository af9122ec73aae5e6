package quota

import (
	"net/http"
	"testing"
	"time"
)

func BenchmarkHeader(b *testing.B) {
	header := http.Header{"Content-Type": {"application/json"}, "X-Request-Id": {"1"}}
	var l Limits
	for kind := range l {
		l[kind] = Fields{Limit: 1e12, Remaining: 1e12 - 1000, Reset: 60 * time.Millisecond, Known: true}
	}
	b.ReportAllocs()
	for b.Loop() {
		l.Set(header, false) // which has the fields, as if a backend had sent them
	}
}
