package keys

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
)

const (
	// digestPrefix marks a digest that is configured instead of a key.
	digestPrefix = "sha256:"
	// maxName is the maximum length of a caller's name, in bytes.
	maxName = 64
	// minKey is the minimum length of a key, in characters. A shorter one can
	// be guessed, or is the beginning of a key.
	minKey = 16
)

// Reasons why a caller is refused.
var (
	ErrNoKey      = errors.New("the request has no key")
	errUnknownKey = errors.New("the request has no known key")
	ErrExpired    = errors.New("the request has a key that has expired")
	ErrTwoCallers = errors.New("the request has keys of different callers")
)

// ClientKey is a key and the name of its caller. The key may have placeholders,
// or be the digest of a key.
type ClientKey struct{ Name, Key string }

// Caller is the owner of a key.
type Caller struct {
	Name string
	// Label is the caller's label in metrics.
	Label string
	// KeyID distinguishes the caller's keys. It is the same in every process,
	// and not logged. It is empty if the caller sent a token.
	KeyID string
	// Token has the claims of the caller's token. It is nil if the caller sent
	// a key.
	Token *Identity
}

// ClientsConfig has the keys of callers, and the options for a file with more.
type ClientsConfig struct {
	Keys []ClientKey
	// File is the path of a file with more keys, which may have placeholders.
	// It is nil if there is no file.
	File *string
	// Tokens identifies callers that send a token. It is nil if only keys
	// identify callers.
	Tokens CallerIdentity
	// Tiers are the tiers that lines of the File may name.
	Tiers []string
	// Location is the time zone of the day after which a key expires. Required
	// with a File.
	Location *time.Location
	// Label returns the metrics label of a caller. Required.
	Label func(name string) string
	// Logger logs warnings of keys that expire soon. Required.
	Logger *zap.Logger
	// Audit is called with all keys when they have changed, or one has expired.
	// It may be nil.
	Audit func([]AuditedKey)
}

// Clients maps the keys of callers to their names. The keys come from the
// config and from a file. Both are reloaded when files change, see
// [Clients.Read]. Many requests use it concurrently.
//
// The time of a lookup must not reveal a key. So lookups use digests that are
// mixed with the random number blind.
type Clients struct {
	config ClientsConfig
	file   string // of the config, without placeholders

	mu sync.Mutex // guards the reading
	// changed is called with the names of the callers, and their tiers, before
	// changes apply. It may be nil.
	changed func(names []string, tiers map[string]string)
	// tiers are the tiers that lines of the file give to callers.
	tiers map[string]string
	// given are the keys of the config, and listed the lines of the file, as
	// last read.
	given, listed []foundKey
	// expiring are the keys that have an expiry date.
	expiring []client
	// unread is the error if the file could not be read. clashes are the errors
	// of ignored keys of the config, and wrong the errors of ignored lines of
	// the file.
	unread         error
	clashes, wrong []string
	// latest is the state of the file when it was last read, and read are its
	// lines.
	latest fileState
	read   []string
	// unfinished is the digest of a file that ended within a line. seen is when
	// this file was first read.
	unfinished [sha256.Size]byte
	seen       time.Time

	known atomic.Pointer[map[blinded]client]
}

// client is a caller with one of its keys. source is the origin of the key:
// config or file.
type client struct {
	Caller
	expiry *expiry
	source string
	// digest is the digest of the key, if the key expires.
	digest blinded
}

// blind is a random number. All configs share it, so that their keys can be
// compared.
var blind = func() (random [32]byte) {
	rand.Read(random[:])
	return random
}()

// blinded is the digest of blind and a key's digest.
type blinded [sha256.Size]byte

// NewClients reads the keys. Its errors do not contain a key.
func NewClients(config ClientsConfig) (*Clients, error) {
	c := &Clients{config: config}
	if config.File != nil {
		var err error
		if c.file, err = caddy.NewReplacer().ReplaceOrErr(*config.File, true, true); err != nil {
			return nil, fmt.Errorf("client_keys_file: %w", err)
		}
		if strings.TrimSpace(c.file) == "" {
			return nil, errors.New("client_keys_file is empty: expected the path of a file")
		}
	}
	return c, c.Read()
}

// InFiles reports whether any key comes from a file.
func (c *Clients) InFiles() bool {
	return c.file != "" || slices.ContainsFunc(c.config.Keys, func(k ClientKey) bool { return InFile(k.Key) })
}

// Read reloads the keys. A configured key that cannot be read keeps its value,
// and a file that cannot be read keeps its lines. Wrong lines are ignored. The
// error says what is wrong, and does not contain a key.
func (c *Clients) Read() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	given, listed := c.given, c.listed
	problems := c.resolve()
	if err := c.list(); !errors.Is(err, errUnfinished) {
		c.unread = err
	}
	changed := c.known.Load() == nil || !slices.Equal(c.given, given) ||
		!isSame(c.listed, listed) && !slices.Equal(c.listed, listed)
	if changed {
		c.use()
	}
	if expired := c.noticeExpiry(time.Now()); (expired || changed) && c.config.Audit != nil {
		c.config.Audit(c.Audited())
	}
	problems = append(problems, c.clashes...)
	if c.unread != nil {
		problems = append(problems, c.unread.Error())
	}
	if len(c.wrong) > 0 {
		problems = append(problems, fmt.Sprintf("client_keys_file %s: %s", c.file, firstOf(c.wrong)))
	}
	if len(problems) == 0 {
		return nil
	}
	return errors.New(firstOf(problems))
}

// isSame reports whether two lists share the same memory.
func isSame(a, b []foundKey) bool { return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0]) }

// maxProblems is how many problems an error lists.
const maxProblems = 3

func firstOf(problems []string) string {
	text := strings.Join(problems[:min(maxProblems, len(problems))], "; ")
	if more := len(problems) - maxProblems; more > 0 {
		text += fmt.Sprintf("; and %d more", more)
	}
	return text
}

// resolve reads the keys of the config; when called again, only those in files.
// It returns the errors of keys that keep their previous value.
func (c *Clients) resolve() (problems []string) {
	given := make([]foundKey, len(c.config.Keys))
	for i, k := range c.config.Keys {
		if c.given != nil && !InFile(k.Key) {
			given[i] = c.given[i]
			continue
		}
		found, err := k.resolve()
		if err == nil {
			err = found.err()
		}
		if err == nil {
			given[i] = found
			continue
		}
		if problems = append(problems, err.Error()); c.given != nil {
			given[i] = c.given[i]
		}
	}
	c.given = given
	return problems
}

// use applies the keys that were read.
func (c *Clients) use() {
	known := make(map[blinded]client, len(c.given)+len(c.listed))
	c.tiers = make(map[string]string)
	add := func(keys []foundKey, source string) (problems []string) {
		for i := range keys {
			k := &keys[i]
			if *k == (foundKey{}) {
				continue // it could not be read, or the line has none
			}
			if err := c.add(known, k, source); err != nil {
				problems = append(problems, err.Error())
			}
		}
		return problems
	}
	c.clashes, c.wrong = add(c.given, "config"), add(c.listed, "file")
	c.expiring = nil
	before := c.known.Load()
	for key, client := range known {
		if client.expiry.at.IsZero() {
			continue // nearly all
		}
		client.digest = key
		c.expiring = append(c.expiring, client)
		if before == nil {
			continue
		}
		if previous := (*before)[key].expiry; previous != nil {
			client.expiry.noticed = previous.noticed
		}
	}
	if c.changed != nil {
		c.changed(namesOf(known), c.tiers)
	}
	c.known.Store(&known)
}

// foundKey is a key and its place for errors: in the config or in a line of the
// file, counted from 1.
type foundKey struct {
	inConfig  string
	line      int
	name, key string
	tier      string    // empty: the line names none
	expires   time.Time // zero: never
	// unfinished reports whether the key may be incomplete, because the file is
	// being written.
	unfinished bool
	// wrong is the error of the key or the line. If it is empty, digest is the
	// digest of the key.
	wrong  string
	digest blinded
	id     string // as in Caller
}

// err returns the error of the key, or nil.
func (k *foundKey) err() error {
	if k.wrong == "" {
		return nil
	}
	return fmt.Errorf("%s: %s", k.place(), k.wrong)
}

func (k *foundKey) place() string {
	if k.line > 0 {
		return fmt.Sprintf("line %d", k.line)
	}
	return k.inConfig
}

// resolve replaces the placeholders of a key.
func (k ClientKey) resolve() (foundKey, error) {
	key, err := ResolveKey(k.Key)
	if err != nil {
		return foundKey{}, fmt.Errorf("%s: %w", k.nameForError(), err)
	}
	found := foundKey{inConfig: k.nameForError(), name: k.Name, key: key}
	found.check()
	return found, nil
}

// nameForError returns the name of the key for an error.
func (k ClientKey) nameForError() string {
	if utf8.RuneCountInString(k.Name) < minKey { // a longer one may be the key, written in its place
		return fmt.Sprintf("client_key %q", k.Name)
	}
	return "client_key"
}

// WrittenKeys collects keys as they are written in a config, to find
// duplicates. The zero WrittenKeys is empty.
type WrittenKeys struct {
	names map[blinded]string
	// placeholders maps texts of keys with placeholders to the names of the
	// callers.
	placeholders map[string]string
}

// Add adds a key as it is written. It returns an error if the key or its name
// is not valid, or if another caller has the same key.
func (w *WrittenKeys) Add(k ClientKey) error {
	if err := CheckWritten(k.Key); err != nil {
		return fmt.Errorf("%s: %w", k.nameForError(), err)
	}
	found := foundKey{inConfig: k.nameForError(), name: k.Name, key: strings.TrimSpace(k.Key)}
	isWhole := !strings.Contains(found.key, "{")
	if !isWhole {
		found.key = rand.Text() // it is not known yet
	}
	switch found.check(); {
	case found.wrong != "":
		return found.err()
	case !isWhole:
		return w.addPlaceholder(k)
	}
	if other, again := w.names[found.digest]; again && other != k.Name {
		return fmt.Errorf("%s: it is also the key of %q", k.nameForError(), other)
	}
	if w.names == nil {
		w.names = make(map[blinded]string)
	}
	w.names[found.digest] = k.Name
	return nil
}

// addPlaceholder adds a key with placeholders. It returns an error if another
// name has the same text, and so the same key.
func (w *WrittenKeys) addPlaceholder(k ClientKey) error {
	if other, again := w.placeholders[k.Key]; again && other != k.Name {
		return fmt.Errorf("%s: it is also the key of %q", k.nameForError(), other)
	}
	if w.placeholders == nil {
		w.placeholders = make(map[string]string)
	}
	w.placeholders[k.Key] = k.Name
	return nil
}

// CheckName returns an error if the name of a caller is not valid.
func CheckName(name string) error {
	switch {
	case name == "" || len(name) > maxName:
		return fmt.Errorf("expected a name of 1 to %d bytes, found %d", maxName, len(name))
	case name == "*":
		return errors.New("expected the name of one caller, found *, which stands for all of them")
	case !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }):
		return errors.New("expected a name of printable characters")
	}
	return nil
}

// check sets wrong if the key or its name is not valid, else the digest.
func (k *foundKey) check() {
	text, isDigest := strings.CutPrefix(k.key, digestPrefix)
	if k.wrong != "" {
		return
	}
	if err := CheckName(k.name); err != nil {
		k.wrong = err.Error()
		return
	}
	switch {
	case isDigest:
		digest, err := hex.DecodeString(text)
		if err != nil || len(digest) != sha256.Size {
			k.wrong = fmt.Sprintf("expected %d hexadecimal digits after %s", 2*sha256.Size, digestPrefix)
			return
		}
		k.setDigest([sha256.Size]byte(digest))
	case utf8.RuneCountInString(k.key) < minKey:
		k.wrong = fmt.Sprintf("a key must have at least %d characters", minKey)
	default:
		k.setDigest(sha256.Sum256([]byte(k.key)))
	}
}

// setDigest sets the fields that depend on the digest of the key.
func (k *foundKey) setDigest(digest [sha256.Size]byte) {
	k.digest = blindedOf(digest)
	id := sha256.Sum256(append([]byte("client key\x00"), digest[:]...))
	k.id = string(id[:16])
}

// add adds a key, or the digest of one, to the known keys. An unfinished key is
// only checked.
func (c *Clients) add(known map[blinded]client, k *foundKey, source string) error {
	if k.wrong != "" {
		return k.err()
	}
	other, again := known[k.digest]
	switch {
	case again && other.Name != k.name:
		return fmt.Errorf("%s: it is also the key of %q", k.place(), other.Name)
	case again && !other.expiry.at.Equal(k.expires):
		return fmt.Errorf("%s: %q has the same key with another date, or without one", k.place(), k.name)
	case k.tier != "" && c.tiers[k.name] != "" && c.tiers[k.name] != k.tier:
		return fmt.Errorf("%s: %q has another tier in a line before", k.place(), k.name)
	case k.unfinished:
		return nil
	}
	if k.tier != "" {
		c.tiers[k.name] = k.tier
	}
	known[k.digest] = c.newClient(k, source)
	return nil
}

// newClient returns the client for a key. It reuses the label of a key that was
// known before.
func (c *Clients) newClient(k *foundKey, source string) client {
	made := client{Caller{Name: k.name, KeyID: k.id}, never, source, blinded{}}
	if !k.expires.IsZero() {
		made.expiry = &expiry{at: k.expires}
	}
	if before := c.known.Load(); before != nil {
		if previous := (*before)[k.digest]; previous.Name == k.name {
			made.Label = previous.Label
			return made
		}
	}
	made.Label = c.config.Label(k.name)
	return made
}

func blindedOf(digest [sha256.Size]byte) blinded {
	var text [len(blind) + len(digest)]byte
	copy(text[copy(text[:], blind[:]):], digest[:])
	return sha256.Sum256(text[:])
}

// Identify returns the caller that presented the keys or a token. It removes
// the balancer's own keys from presented, because they must not reach a
// backend. Unknown keys next to a known one are ignored, because they may be
// for a backend, and so are expired keys. If the keys belong to different
// callers, it returns ErrTwoCallers.
func (c *Clients) Identify(ctx context.Context, presented *Presented) (caller Caller, err error) {
	known, tokens := *c.known.Load(), tokens{ctx: ctx}
	defer tokens.end()
	err = ErrNoKey
	presented.remove(func(key string, identifies bool) bool {
		found, mustRemove, problem := c.find(&tokens, known, key)
		switch {
		case !identifies:
		case problem == nil && caller.Name == "":
			caller, err = found, nil
		case problem == nil && caller.Name != found.Name:
			err = ErrTwoCallers
		case problem != nil && caller.Name == "" && (errors.Is(err, ErrNoKey) || !errors.Is(problem, errUnknownKey)):
			err = problem
		}
		return mustRemove
	})
	if err != nil {
		return Caller{}, err
	}
	return caller, nil
}

// find returns the caller that has a key or a token. mustRemove reports whether
// the key or token must not reach a backend.
func (c *Clients) find(tokens *tokens, known map[blinded]client,
	key string) (caller Caller, mustRemove bool, err error) {
	var text [128]byte // longer than nearly all keys, so they are not copied to the heap
	client, found := known[blindedOf(sha256.Sum256(append(text[:0], key...)))]
	switch {
	case found && client.expiry.isOver():
		return Caller{}, true, ErrExpired
	case found:
		return client.Caller, true, nil
	case c.config.Tokens != nil && isToken(key):
		if len(key) > maxToken || !tokens.next() {
			return Caller{}, true, errUnknownKey
		}
		return c.ofToken(tokens.ctx, key)
	}
	return Caller{}, false, errUnknownKey
}
