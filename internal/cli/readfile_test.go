package cli

import (
	"os"
	"testing"
)

func TestAFileWithoutAnEndIsNotReadToIt(t *testing.T) {
	if _, err := os.Stat("/dev/zero"); err != nil {
		t.Skip(err)
	}
	if _, err := ReadFile("/dev/zero"); err == nil || err.Error() != "/dev/zero: expected at most 64 MiB" {
		t.Errorf("got %v", err)
	}
}
