package openailb

import (
	"fmt"
	"testing"
)

func TestMetricsTellSoManyCallersApart(t *testing.T) {
	var l labels
	for range 2 {
		for i := range maxCallerLabels {
			if name := fmt.Sprint("caller-", i); l.of(name) != name {
				t.Fatalf("%s is %s", name, l.of(name))
			}
		}
		if got := l.of("one more"); got != otherCallers {
			t.Errorf("the next one is %s, want %s", got, otherCallers)
		}
	}
}
