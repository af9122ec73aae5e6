package keys

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

// settleTime is how long a file that does not end with a line feed must stay as it is. It may be
// the beginning of a longer one, and its last line may have the beginning of a key.
const settleTime = time.Second

// tierField begins a field of a line that names the tier of a caller.
const tierField = "tier="

// errUnfinished reports that the file is being written, and should be read later.
var errUnfinished = errors.New("the file is being written")

// list reads the lines of the file. They stay as they were if that fails, or if the file is being
// written.
func (c *Clients) list() error {
	if c.file == "" {
		return nil
	}
	text, changed, err := readFile(c.file)
	if err != nil {
		return fmt.Errorf("client_keys_file: %w", err)
	}
	unfinished := !strings.HasSuffix(text, "\n") && !c.settled(text, changed)
	if unfinished && c.known.Load() != nil {
		return errUnfinished
	}
	c.listed = nil
	lines := strings.Split(strings.TrimPrefix(text, "\xef\xbb\xbf"), "\n") // without the byte order mark of some editors
	for i, line := range lines {
		fields := strings.Fields(line)
		if len(fields) == 0 || strings.HasPrefix(fields[0], "#") {
			continue
		}
		key := c.keyOf(fields)
		key.where, key.unfinished = fmt.Sprintf("line %d", i+1), unfinished && i == len(lines)-1
		c.listed = append(c.listed, key)
	}
	return nil
}

func (c *Clients) keyOf(fields []string) (key foundKey) {
	if len(fields) < 2 {
		return foundKey{wrong: errLine.Error()}
	}
	key.name, key.key = fields[0], fields[1]
	for _, field := range fields[2:] {
		tier, isTier := strings.CutPrefix(field, tierField)
		var err error
		switch {
		case isTier && key.tier == "":
			if key.tier = tier; !slices.Contains(c.config.Tiers, tier) {
				err = c.noTier()
			}
		case !isTier && key.expires.IsZero():
			key.expires, err = parseExpiry(field, c.config.Location)
		default:
			err = errLine
		}
		if err != nil {
			key.wrong = err.Error()
			break
		}
	}
	return key
}

// noTier returns the error for a tier that is not declared. It may be a key, in the wrong place.
func (c *Clients) noTier() error {
	if len(c.config.Tiers) == 0 {
		return errors.New("its tier is not declared: expected 'tier <name>' in openai_lb")
	}
	return fmt.Errorf("its tier is not declared: expected one of %s", strings.Join(c.config.Tiers, ", "))
}

// readFile returns the text of a file, and when it was last changed. The text is
// read first, so that a later change shows in the time.
func readFile(path string) (text string, changed time.Time, err error) {
	all, err := os.ReadFile(path)
	if err != nil {
		return "", time.Time{}, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return "", time.Time{}, err
	}
	return string(all), info.ModTime(), nil
}

// settled reports whether a file without a line feed at its end has been as it is for
// settleTime: by the time of its last change or, because the clock of its file
// system may be ahead of ours, by when it was first read.
func (c *Clients) settled(text string, changed time.Time) bool {
	now := time.Now()
	if digest := sha256.Sum256([]byte(text)); digest != c.unfinished {
		c.unfinished, c.seen = digest, now
	}
	return now.Sub(changed) >= settleTime || now.Sub(c.seen) >= settleTime
}
