package callers

import (
	"fmt"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/meter"
)

func TestOfTooManyResponsesInTheBackgroundTheOldestOnesAreForgotten(t *testing.T) {
	b := new(background)
	for i := range 3 * maxBackground {
		b.add(fmt.Sprint(i), meter.Reservation{})
		if i%3 == 0 {
			b.take(fmt.Sprint(i))
		}
	}
	if len(b.byID) > maxBackground || len(b.ids) != maxBackground {
		t.Errorf("%d responses are kept, of %d ids", len(b.byID), len(b.ids))
	}
	if b.has("1") || !b.has(fmt.Sprint(3*maxBackground-2)) {
		t.Error("another one than the oldest is forgotten")
	}
}
