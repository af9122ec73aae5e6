package keys

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
)

// settleTime is how long a file that does not end with a line feed must stay
// unchanged before it is used. It may still be written, and its last line may
// have only the beginning of a key.
const settleTime = backgroundInterval

// tierField is the prefix of the field that gives a caller's tier.
const tierField = "tier="

// errUnfinished means that the file is being written, and should be read later.
var errUnfinished = errors.New("the file is being written")

// list reloads the lines of the file if it has changed. The lines do not change
// if that fails, or if the file is being written.
func (c *Clients) list() error {
	if c.file == "" || c.latest.isCurrent(c.file) {
		return nil
	}
	text, state, err := readFile(c.file)
	c.latest = fileState{}
	if err != nil {
		return fmt.Errorf("client_keys_file: %w", err)
	}
	unfinished := !strings.HasSuffix(text, "\n") && !c.settled(text, state.info.ModTime())
	if unfinished && c.known.Load() != nil {
		return errUnfinished
	}
	// some editors write a byte order mark
	lines := strings.Split(strings.TrimPrefix(text, "\xef\xbb\xbf"), "\n")
	c.listed = c.parse(lines, unfinished)
	if !unfinished {
		c.latest = state
	}
	return nil
}

// parse returns the key of each line. The key is empty for an empty line or a
// comment. To be fast, it parses only the changed lines, between the unchanged
// ones at the beginning and at the end.
func (c *Clients) parse(lines []string, unfinished bool) []foundKey {
	before, parsed := c.read, make([]foundKey, len(lines))
	if len(before) != len(c.listed) {
		before = nil // they were not parsed
	}
	c.read = lines
	same := 0
	for same < min(len(lines), len(before)) && lines[same] == before[same] {
		parsed[same] = c.listed[same]
		same++
	}
	end, endBefore := len(lines), len(before)
	for end > same && endBefore > same && lines[end-1] == before[endBefore-1] {
		end, endBefore = end-1, endBefore-1
		if parsed[end] = c.listed[endBefore]; parsed[end].line > 0 {
			parsed[end].line = end + 1
		}
	}
	for i := same; i < end; i++ {
		if fields := strings.Fields(lines[i]); len(fields) > 0 && !strings.HasPrefix(fields[0], "#") {
			parsed[i] = c.keyOf(fields)
			parsed[i].line = i + 1
			parsed[i].check()
		}
	}
	for i := range parsed {
		parsed[i].unfinished = unfinished && i == len(lines)-1 && parsed[i].line > 0
	}
	return parsed
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

// noTier returns the error for a tier that is not declared. The error does not
// repeat the tier, which may be a key in the wrong place.
func (c *Clients) noTier() error {
	if len(c.config.Tiers) == 0 {
		return errors.New("its tier is not declared: expected 'tier <name>' in openai_lb")
	}
	return fmt.Errorf("its tier is not declared: expected one of %s", strings.Join(c.config.Tiers, ", "))
}

// fileState is the state of a file when it was read.
type fileState struct {
	info os.FileInfo // nil: it was not read
	read time.Time
}

const (
	// coarsestClock is the coarsest resolution of change times in a file
	// system. A file that was changed within this time before it was read may
	// have been changed again with the same time.
	coarsestClock = 2 * time.Second
	// longestUnread is how long a file is not read again if its state shows no
	// change.
	longestUnread = time.Minute
)

// isCurrent reports whether the file has not changed since it was read.
func (s *fileState) isCurrent(path string) bool {
	if s.info == nil || time.Since(s.read) >= longestUnread || s.read.Sub(s.info.ModTime()) < coarsestClock {
		return false
	}
	info, err := os.Stat(path)
	return err == nil && os.SameFile(info, s.info) && info.ModTime().Equal(s.info.ModTime()) &&
		info.Size() == s.info.Size()
}

// maxKeysFile is the maximum length of a file of keys, in bytes. It matters for
// a device such as /dev/zero, which has no end.
const maxKeysFile = 1 << 30

// readFile returns the text of a file, and its state. The time is taken before
// reading, so that a later change is noticed.
func readFile(path string) (text string, state fileState, err error) {
	file, err := os.Open(path)
	if err != nil {
		return "", state, err
	}
	defer file.Close()
	state.read = time.Now()
	var all strings.Builder
	n, err := io.Copy(&all, io.LimitReader(file, maxKeysFile+1))
	if err == nil && n > maxKeysFile {
		err = fmt.Errorf("%s: expected at most %d bytes", path, maxKeysFile)
	}
	if err != nil {
		return "", state, err
	}
	state.info, err = file.Stat() // of this file, although another one may have its name by now
	return all.String(), state, err
}

// settled reports whether a file without a line feed at its end has been
// unchanged for settleTime. That is counted from its last change, or from when
// it was first read, because the file system's clock may be ahead.
func (c *Clients) settled(text string, changed time.Time) bool {
	now := time.Now()
	if digest := sha256.Sum256([]byte(text)); digest != c.unfinished {
		c.unfinished, c.seen = digest, now
	}
	return now.Sub(changed) >= settleTime || now.Sub(c.seen) >= settleTime
}
