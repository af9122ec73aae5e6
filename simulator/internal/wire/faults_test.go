package wire

import (
	"strings"
	"testing"
)

func TestEveryFaultIsKnownByItsForm(t *testing.T) {
	for _, form := range ActionForms {
		kind, _, _ := strings.Cut(form, ":")
		_, err := ParseAction(kind)
		if err != nil && strings.Contains(err.Error(), "none of") {
			t.Errorf("%s is listed, but not known", kind)
		}
	}
}
