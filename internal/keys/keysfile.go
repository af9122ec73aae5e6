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

// settleTime is how long a file that does not end with a line feed must stay as
// it is. It may be the beginning of a longer one, and its last line may have
// the beginning of a key.
const settleTime = backgroundInterval

// tierField begins a field of a line that names the tier of a caller.
const tierField = "tier="

// errUnfinished reports that the file is being written, and should be read
// later.
var errUnfinished = errors.New("the file is being written")

// list reads the lines of the file, if that has changed. They stay as they were
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
	lines := strings.Split(strings.TrimPrefix(text, "\xef\xbb\xbf"), "\n") // without the byte order mark of some editors
	c.listed = c.parse(lines, unfinished)
	if !unfinished {
		c.latest = state
	}
	return nil
}

// parse returns the key of each line, which has none if it is empty or a
// comment. Only lines are parsed that have changed, between those at the
// beginning and at the end that have not.
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

// noTier returns the error for a tier that is not declared. It may be a key, in
// the wrong place.
func (c *Clients) noTier() error {
	if len(c.config.Tiers) == 0 {
		return errors.New("its tier is not declared: expected 'tier <name>' in openai_lb")
	}
	return fmt.Errorf("its tier is not declared: expected one of %s", strings.Join(c.config.Tiers, ", "))
}

// fileState is a file as it was read at a time.
type fileState struct {
	info os.FileInfo // nil: it was not read
	read time.Time
}

const (
	// coarsestClock is how exact file systems are with the time of a change, at
	// least. A file that was changed shortly before it was read may have been
	// changed once more at the same time.
	coarsestClock = 2 * time.Second
	// longestUnread is after how long a file is read again, although nothing
	// says that it has changed.
	longestUnread = time.Minute
)

// isCurrent reports whether the file has not changed since it was read.
func (s *fileState) isCurrent(path string) bool {
	if s.info == nil || time.Since(s.read) >= longestUnread || s.read.Sub(s.info.ModTime()) < coarsestClock {
		return false
	}
	info, err := os.Stat(path)
	return err == nil && os.SameFile(info, s.info) && info.ModTime().Equal(s.info.ModTime()) && info.Size() == s.info.Size()
}

// maxKeysFile is how long a file of keys may be, in bytes. A device such as
// /dev/zero has no end.
const maxKeysFile = 1 << 30

// readFile returns the text of a file, and its state. The text is read first,
// so that a later change shows in the time.
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

// settled reports whether a file without a line feed at its end has been as it
// is for settleTime: by the time of its last change or, because the clock of
// its file system may be ahead of ours, by when it was first read.
func (c *Clients) settled(text string, changed time.Time) bool {
	now := time.Now()
	if digest := sha256.Sum256([]byte(text)); digest != c.unfinished {
		c.unfinished, c.seen = digest, now
	}
	return now.Sub(changed) >= settleTime || now.Sub(c.seen) >= settleTime
}
