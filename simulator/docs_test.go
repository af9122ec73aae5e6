package simulator

import (
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/simulator/internal/limits"
	"github.com/openai-lb/caddy-openai-lb/simulator/internal/wire"
)

func TestTheDocsNameEveryOptionStyleAndFault(t *testing.T) {
	text, err := os.ReadFile("../docs/simulator.md")
	if err != nil {
		t.Fatal(err)
	}
	docs := string(text)

	var want []string
	for field := range reflect.TypeFor[Handler]().Fields() {
		if tag, ok := field.Tag.Lookup("json"); ok {
			name, _, _ := strings.Cut(tag, ",")
			want = append(want, "\n- **`"+name+"`**")
		}
	}
	for _, words := range [][]string{limits.HintStyles, limits.BodyStyles, wire.ActionForms} {
		for _, word := range words {
			want = append(want, "\n| `"+word+"` |")
		}
	}
	for field := range reflect.TypeFor[Status]().Fields() {
		if name := field.Tag.Get("json"); name != "name" {
			want = append(want, "\n| `"+name+"` |")
		}
	}
	for _, text := range want {
		if strings.Count(docs, text) != 1 {
			t.Errorf("docs/simulator.md has %q %d times, want once", text, strings.Count(docs, text))
		}
	}
}
