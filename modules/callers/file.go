package callers

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// A callers_file contains blocks of `caller` as in a Caddyfile, with limits,
// the tier and deny. It is read again while requests come, so that a limit
// changes without a reload, at all replicas that have the file. The other
// options of a caller decide which backends a request may use. They must be
// known when the config is loaded, so they are not allowed in the file.
//
// An option in the file replaces the same option in the Caddyfile's block. The
// other options of that block still apply. The use so far stays. An invalid
// file has no effect, and neither has one that changes between two reads, one
// second apart: an editor or a copy may write the file in parts, and a part may
// be valid.

// maxFile is the maximum size of the file in bytes.
const maxFile = 16 << 20

// errNoLimit reports an option that is not allowed in the file.
var errNoLimit = errors.New("models, backends and service_tiers belong in the Caddyfile: expected requests, tokens, max_requests and tier")

// errOtherFile reports a file that is not a file of callers. It may be another
// file by mistake, such as the file of client keys, so the error shows none of
// its text.
var errOtherFile = errors.New("expected blocks that begin with 'caller', found something else")

// path returns the path of the file, with its placeholders replaced. It is
// empty if there is no file.
func (c *Config) path() (string, error) {
	if c.CallersFile == nil {
		return "", nil
	}
	path, err := caddy.NewReplacer().ReplaceOrErr(*c.CallersFile, true, true)
	if err == nil && strings.TrimSpace(path) == "" {
		err = errors.New("expected the path of a file, found none")
	}
	if err != nil {
		return "", fmt.Errorf("callers_file: %w", err)
	}
	return path, nil
}

// WithFile returns the options, merged with the callers of the file if there is
// one.
func (c *Config) WithFile() (Config, error) {
	text, path, err := c.readFile()
	if path == "" || err != nil {
		return *c, err
	}
	return c.with(path, text)
}

func (c *Config) readFile() (text []byte, path string, err error) {
	if path, err = c.path(); path == "" || err != nil {
		return nil, "", err
	}
	file, err := os.Open(path)
	if err != nil {
		return nil, path, fmt.Errorf("callers_file: %w", err)
	}
	defer file.Close()
	text, err = io.ReadAll(io.LimitReader(file, maxFile+1))
	if err == nil && len(text) > maxFile {
		err = fmt.Errorf("%s: expected at most %d bytes", path, maxFile)
	}
	if err != nil {
		return nil, path, fmt.Errorf("callers_file: %w", err)
	}
	return text, path, nil
}

// with returns the options, merged with the callers in the text of a file.
func (c *Config) with(path string, text []byte) (Config, error) {
	merged := *c
	tokens, err := caddyfile.Tokenize(text, path)
	if err != nil { // it is left out, because it quotes the file
		return merged, fmt.Errorf("callers_file %s: %w", path, errOtherFile)
	}
	open := 0 // a dispenser takes the end of the file for that of a block
	for _, token := range tokens {
		switch token.Text {
		case "{":
			open++
		case "}":
			open--
		}
	}
	if open != 0 {
		return merged, fmt.Errorf("callers_file %s: expected as many { as }", path)
	}
	var read Config
	for d := caddyfile.NewDispenser(tokens); d.Next(); {
		begin := *d
		if d.Val() != "caller" {
			return merged, fmt.Errorf("callers_file: %w", d.WrapErr(errOtherFile))
		}
		if err := read.unmarshalCaller(d); err != nil {
			return merged, fmt.Errorf("callers_file: %w", err)
		}
		last := read.Callers[len(read.Callers)-1]
		if last.Models != nil || last.Backends != nil || last.ServiceTiers != nil {
			return merged, fmt.Errorf("callers_file: %w",
				begin.WrapErr(fmt.Errorf("caller '%s': %w", last.Name, errNoLimit)))
		}
	}
	if len(read.Callers) == 0 {
		return merged, fmt.Errorf("callers_file %s: expected at least one caller, found none", path)
	}
	if err := read.checkTwice(); err != nil {
		return merged, fmt.Errorf("callers_file %s: %w", path, err)
	}
	merged.Callers = slices.Clone(c.Callers)
	for _, caller := range read.Callers {
		i := slices.IndexFunc(c.Callers, func(given Caller) bool { return given.Name == caller.Name })
		if i < 0 {
			merged.Callers = append(merged.Callers, caller)
			continue
		}
		given := c.Callers[i]
		if caller.Deny {
			merged.Callers[i] = caller
			continue
		}
		caller.Deny = given.Deny && withoutOptions(caller)
		caller.Allowance, caller.Tier = orAllowance(caller.Allowance, given.Allowance), cmp.Or(caller.Tier, given.Tier)
		merged.Callers[i] = caller
	}
	return merged, nil
}

// checkTwice returns an error if a caller has more than one block.
func (c *Config) checkTwice() error {
	given := make(map[string]bool, len(c.Callers))
	for _, caller := range c.Callers {
		if given[caller.Name] {
			return fmt.Errorf("caller '%s' is given twice: expected one block with all of its limits", caller.Name)
		}
		given[caller.Name] = true
	}
	return nil
}

// watched is the state of watching the file.
type watched struct {
	mu sync.Mutex // held while it is read
	// options are the options of the Caddyfile, with the pool's backends.
	// applied are the callers whose options are in use.
	options Options
	applied []Caller
	// latest is the text when the file was last read. failed is the error of
	// the latest text that was the same in two reads, or of reading.
	latest string
	failed error
}

// Read reads the file again, and applies it if it is valid and the same as at
// the previous read. If it returns an error, the limits stay as they are.
func (c *Callers) Read() error {
	w := &c.watched
	w.mu.Lock()
	defer w.mu.Unlock()
	text, path, err := w.options.readFile()
	if err != nil {
		w.latest, w.failed = "", err
		return err
	}
	if w.latest != string(text) { // it is looked at once more before it applies
		w.latest = string(text)
		return w.failed
	}
	merged, err := w.options.with(path, text)
	if err == nil {
		err = merged.Check(true, w.options.Backends)
	}
	if w.failed = err; err != nil || reflect.DeepEqual(merged.Callers, w.applied) {
		return err
	}
	w.applied = merged.Callers
	o := w.options
	o.Config = merged
	c.use(&o)
	if c.started.Load() { // what was used stays
		c.configure()
	}
	return nil
}
