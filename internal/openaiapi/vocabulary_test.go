package openaiapi

import (
	"os"
	"strings"
	"testing"
)

// otherTiers are service tiers of OpenAI's SDK that requests do not name here:
// scale is one of replies only, and another one the name of a pilot.
var otherTiers = map[string]bool{"scale": true, "fast_tier_temp_pilot": true}

// TestEveryServiceTierOfOpenAIsSDKIsKnown reads what e2e/python/vocabulary.py
// has found in the package of the SDK.
func TestEveryServiceTierOfOpenAIsSDKIsKnown(t *testing.T) {
	text, err := os.ReadFile("testdata/openai-python.txt")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if tier, ok := strings.CutPrefix(strings.TrimSpace(line), "tier "); ok && IsServiceTier(tier) == otherTiers[tier] {
			t.Errorf("requests may name the tier %s: %v", tier, IsServiceTier(tier))
		}
	}
}
