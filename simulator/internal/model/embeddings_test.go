package model

import (
	"encoding/json"
	"testing"
)

func TestAListOfTokensIsOneInput(t *testing.T) {
	for input, want := range map[string]int{
		`"text"`:        1,
		`["a","b","c"]`: 3,
		`[1,2,3]`:       1,
		`[[1,2],[3]]`:   2,
		`[]`:            0,
	} {
		var v any
		if err := json.Unmarshal([]byte(input), &v); err != nil {
			t.Fatal(err)
		}
		if got := len(inputs(v)); got != want {
			t.Errorf("%s: got %d inputs, want %d", input, got, want)
		}
	}
}
