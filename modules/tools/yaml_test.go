package tools

import (
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// panics is a file at which the parser panics.
type panics struct{}

func (panics) Read([]byte) (int, error) { panic("internal error (please report)") }

func TestAPanicOfTheParserIsAnError(t *testing.T) {
	err := decodeYAML(yaml.NewDecoder(panics{}), new(yaml.Node))
	if err == nil || !strings.Contains(err.Error(), "the YAML parser cannot read the file") {
		t.Errorf("got %v", err)
	}
}

func TestWeightsAreTheSmallestWholeNumbers(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   []int
	}{
		{[]float64{3, 1}, []int{3, 1}},
		{[]float64{0.75, 0.25}, []int{3, 1}},
		{[]float64{0.1, 0.25, 0}, []int{2, 5, 0}},
		{[]float64{480, 200}, []int{12, 5}},
		{[]float64{7, 7}, []int{1, 1}},
		{[]float64{1e12, 1}, []int{1_000_000, 1}},
		{[]float64{0.0001, 0.0003, 0}, []int{1, 3, 0}},
	} {
		got := wholeWeights(c.values)
		for i, want := range c.want {
			if got[i] != want {
				t.Errorf("%v: got %v, want %v", c.values, got, c.want)
				break
			}
		}
	}
}
