package limiter

import (
	"fmt"
	"testing"
)

func TestOfTooManyResponsesInTheBackgroundTheOldestOnesAreForgotten(t *testing.T) {
	l := new(Left[int])
	for i := range 3 * maxLeft {
		l.Add(fmt.Sprint(i), i)
		if i%3 == 0 {
			l.Take(fmt.Sprint(i))
		}
	}
	if len(l.byID) > maxLeft || len(l.ids) != maxLeft {
		t.Errorf("%d responses are kept, of %d ids", len(l.byID), len(l.ids))
	}
	if l.Has("1") || !l.Has(fmt.Sprint(3*maxLeft-2)) {
		t.Error("another one than the oldest is forgotten")
	}
}
