package cli

import (
	"fmt"
	"io"
	"os"
)

// maxFile is how long a file may be that a command reads. A device such as
// /dev/zero has no end.
const maxFile = 64 << 20

// ReadFile returns the text of a file.
func ReadFile(name string) ([]byte, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	text, err := ReadUpTo(file, maxFile)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", Printable(name), err)
	}
	return text, nil
}

// ReadUpTo reads all of a text, which must not be longer than most.
func ReadUpTo(from io.Reader, most int64) ([]byte, error) {
	text, err := io.ReadAll(io.LimitReader(from, most+1))
	if err == nil && int64(len(text)) > most {
		err = fmt.Errorf("expected at most %d MiB", most>>20)
	}
	return text, err
}
