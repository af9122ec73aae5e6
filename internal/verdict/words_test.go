package verdict

import (
	"os"
	"strings"
	"testing"
)

// TestEveryCodeOfOpenAIsSDKHasAMeaning reads what e2e/python/vocabulary.py has
// found in the package of the SDK.
func TestEveryCodeOfOpenAIsSDKHasAMeaning(t *testing.T) {
	text, err := os.ReadFile("../openaiapi/testdata/openai-python.txt")
	if err != nil {
		t.Fatal(err)
	}
	codes := 0
	for line := range strings.Lines(string(text)) {
		code, ok := strings.CutPrefix(strings.TrimSpace(line), "code ")
		if !ok {
			continue
		}
		if codes++; meaningOf(code).status == 0 {
			t.Errorf("the table of words does not mention %s", code)
		}
	}
	if codes < 30 {
		t.Errorf("the list has %d codes", codes)
	}
}
