package ledger

import (
	"math"
	"testing"
)

// FuzzReadPrices checks that each price is a number that can be multiplied.
func FuzzReadPrices(f *testing.F) {
	f.Add([]byte("model,service_tier,input,cached,output\ngpt-4o,,2.5,1.25,10\ngpt-4o,flex,1,,5\n"))
	f.Add([]byte("\xef\xbb\xbfModel,Input,Output\n\"a,b\",1e3,0\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		prices, err := ReadPrices(text)
		if err != nil {
			return
		}
		for key := range prices {
			row := Row{Key{Model: key[0], ServiceTier: key[1]}, Use{Input: 7, Cached: 3, Output: 5}}
			if cost, ok := prices.cost(&row); !ok || math.IsNaN(cost) || math.IsInf(cost, 0) || cost < 0 {
				t.Errorf("%+v costs %v (%v)", row, cost, ok)
			}
		}
	})
}

// FuzzReadExport checks that what is read can be compared.
func FuzzReadExport(f *testing.F) {
	f.Add([]byte("start_time,model,input_tokens,output_tokens,input_audio_tokens\n1764028800,gpt-4o-2024-08-06,600,300,1\n"))
	f.Add([]byte("TimeStamp,ModelDeploymentName,ProcessedPromptTokens,GeneratedTokens\n2026-11-25 13:00:00,o3,1500.0,700\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		export, err := ReadExport(text, nil, func(day string) bool { return len(day) == len("2026-11-25") })
		if err != nil {
			return
		}
		for _, d := range Compare(nil, export) {
			if d.Input != 0 || d.Output != 0 || d.Differs() != (d.ExportedInput != 0 || d.ExportedOutput != 0) {
				t.Errorf("an empty ledger differs so: %+v", d)
			}
		}
	})
}

func TestAServiceTierWithTwoNamesHasOnePrice(t *testing.T) {
	for text, want := range map[string][3]float64{ // fast, priority, ultrafast
		"m,priority,5,5\n":                        {5, 5, -1},
		"m,fast,5,5\nm,,1,1\n":                    {5, 5, 1},
		"m,fast,5,5\nm,priority,6,6\n":            {5, 6, -1},
		"m,ultrafast,30,30\nm,,1,1\n":             {1, 1, 30},
		"m,ultrafast,30,30\nm,priority,5,5\n":     {5, 5, 30},
		"other,priority,5,5\nm,ultrafast,30,30\n": {-1, -1, 30},
	} {
		prices, err := ReadPrices([]byte("model,service_tier,input,output\n" + text))
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		for i, tier := range []string{"fast", "priority", "ultrafast"} {
			row := Row{Key: Key{Model: "m", ServiceTier: tier}}
			row.Input = 1e6
			cost, ok := prices.cost(&row)
			if ok != (want[i] >= 0) || ok && cost != want[i] {
				t.Errorf("%s: %s costs %v, known: %v, want %v", text, tier, cost, ok, want[i])
			}
		}
	}
}
