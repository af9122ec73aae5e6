package background

import (
	"fmt"
	"testing"
)

func TestOfTooManyResponsesInTheBackgroundTheOldestOnesAreForgotten(t *testing.T) {
	r := new(Responses[int])
	for i := range 3 * maxResponses {
		r.Add(fmt.Sprint(i), i)
		if i%3 == 0 {
			r.Take(fmt.Sprint(i))
		}
	}
	if len(r.byID) > maxResponses || len(r.ids) != maxResponses {
		t.Errorf("%d responses are kept, of %d ids", len(r.byID), len(r.ids))
	}
	if r.Has("1") || !r.Has(fmt.Sprint(3*maxResponses-2)) {
		t.Error("another one than the oldest is forgotten")
	}
}
