package replicas

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/pool"
	"github.com/openai-lb/caddy-openai-lb/internal/verdict"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// message is a message between replicas. It contains no key, and no name of a
// backend, a caller or an object.
type message struct {
	// Version is the version of the format. Messages of other versions are
	// ignored, and each version is logged once.
	Version int  `json:"v"`
	Kind    kind `json:"kind"`
	// From is the id of the sender. Sent is the sender's time in microseconds
	// since 1970. At is the same time by the store's clock, or 0 if that clock
	// is not known.
	From string `json:"from"`
	Sent int64  `json:"sent"`
	At   int64  `json:"at,omitempty"`
	// Backend is a digest of the backend's name. Member is a digest of a
	// member's name, which distinguishes members of the same backend.
	Backend  string    `json:"backend,omitempty"`
	Member   string    `json:"member,omitempty"`
	Cooldown *cooldown `json:"cooldown,omitempty"`
	// Order is the number of an order to drain or resume the member.
	Order int64 `json:"order,omitempty"`
	// By says who gave the order, and Reason says why.
	By     string `json:"by,omitempty"`
	Reason string `json:"reason,omitempty"`
	// Host is the replica's host, and Since is when the replica started.
	Host  string `json:"host,omitempty"`
	Since int64  `json:"since,omitempty"`
	// Configs are digests of the replica's configurations, by digests of the
	// pools' names. Older versions do not send it.
	Configs map[string]string `json:"configs,omitempty"`
	// Writers are prefixes of the ids under which the replica reports the use
	// of its pools' callers.
	Writers []string `json:"writers,omitempty"`
	// Shares are the uses by tier at the replica.
	Shares []backendShare `json:"shares,omitempty"`
	// Ask is a question. Key is the public key that encrypts the answers.
	Ask string `json:"ask,omitempty"`
	Key []byte `json:"key,omitempty"`
}

const version = 1

// otherVersion is the error for a message in another version of the format.
type otherVersion int

func (v otherVersion) Error() string { return fmt.Sprintf("it has version %d", int(v)) }

type kind string

const (
	// alive is a sign of life.
	alive kind = "alive"
	// left announces that the replica has stopped, so that no replica waits for
	// it.
	left kind = "left"
	// coolingDown reports that a cooldown started or grew.
	coolingDown kind = "cooldown"
	// doubted reports that a cooldown is in doubt.
	doubted kind = "doubt"
	// disproved reports that a cooldown was disproved.
	disproved kind = "over"
	// drained and resumed are orders for a member.
	drained kind = "drain"
	resumed kind = "resume"
	// tierCosts reports the use by tier.
	tierCosts kind = "tier_costs"
	// asked is a question to all replicas.
	asked kind = "ask"
	// used stands for reports of package usagesync, which have another format.
	used kind = "use"
)

// cooldown is a pool.Cooldown with lengths instead of times.
type cooldown struct {
	ID    string `json:"id"`
	Model string `json:"model,omitempty"`
	// Tiers is the group of service tiers that it covers, by its name in
	// pool.ServiceTiers.
	Tiers string `json:"service_tiers,omitempty"`
	// Operation is the only operation that it covers. It is empty for all.
	Operation string `json:"operation,omitempty"`
	Whole     bool   `json:"whole,omitempty"`
	Throttle  bool   `json:"throttle,omitempty"`
	Class     string `json:"class"`
	Status    int    `json:"status,omitempty"`
	Hint      string `json:"hint,omitempty"`
	// Cause is a code, perhaps from a backend.
	Cause string `json:"cause,omitempty"`
	Cost  int64  `json:"cost,omitempty"`
	// Guess is the guessed length of a throttle in milliseconds. It is 0 if the
	// length is not a guess.
	Guess int64 `json:"guess,omitempty"`
	// AtOnce reports whether the backend asked to be called again immediately.
	AtOnce bool `json:"at_once,omitempty"`
	// Length is the length of the whole cooldown, and Left is the rest of it,
	// both in milliseconds.
	Length int64 `json:"length"`
	Left   int64 `json:"left"`
}

// maxLength is the maximum length of a cooldown from another replica.
const maxLength = state.MaxTTL

// concernsOthers reports whether the cooldown matters to other replicas: one of
// them reported it, or the model exists. A client can make up models, and the
// cooldown of a made-up model matters only to the replica that met it.
func concernsOthers(m *pool.Member, c pool.Cooldown) bool {
	return c.Heard || c.Whole || c.Model == "" || m.Knows(c.Model)
}

// shareable reports whether replicas share cooldowns of this class.
func shareable(c pool.Cooldown) bool {
	return verdict.Class(c.Class).Shared()
}

func cooldownOf(c pool.Cooldown, now time.Time) *cooldown {
	cause := c.Cause
	if !verdict.IsCode(cause) {
		cause = ""
	}
	return &cooldown{
		ID: idOf(c), Model: c.Model, Tiers: c.Tiers.String(), Operation: c.Operation, Whole: c.Whole,
		Throttle: c.Throttle, Class: c.Class, Status: c.Status, Hint: c.Hint, Cause: cause,
		Cost: c.Cost, Guess: milliseconds(c.Guess), AtOnce: c.AsksAtOnce, Length: milliseconds(c.Until.Sub(c.Since)),
		Left: milliseconds(min(c.Until.Sub(now), c.Until.Sub(c.Since))),
	}
}

// message returns a message of this replica without a content.
func (r *Replica) message(kind kind, sent, now time.Time) message {
	return message{Version: version, Kind: kind, From: r.peers.self.ID, Sent: sent.UnixMicro(), At: r.clock.at(now)}
}

// milliseconds rounds up, so that no backend is called before its cooldown is
// over.
func milliseconds(d time.Duration) int64 {
	return int64((min(max(d, 0), maxLength) + time.Millisecond - 1) / time.Millisecond)
}

// idOf returns the ID as a text of fixed length, so that texts are ordered as
// IDs are.
func idOf(c pool.Cooldown) string { return fmt.Sprintf("%016x", c.ID) }

// pool returns the cooldown in the pool's terms, and the rest of it.
func (c *cooldown) pool(now time.Time) (heard pool.Cooldown, left time.Duration) {
	id, _ := strconv.ParseUint(c.ID, 16, 64)
	left = time.Duration(c.Left) * time.Millisecond
	until := now.Add(left)
	return pool.Cooldown{
		Reason: pool.Reason{Class: c.Class, Status: c.Status, Hint: c.Hint, Cause: c.Cause}, ID: id, Whole: c.Whole,
		Model: c.Model, Tiers: pool.TiersOf(c.Tiers), Operation: c.Operation,
		Since: until.Add(-time.Duration(c.Length) * time.Millisecond), Until: until, Throttle: c.Throttle, Cost: c.Cost,
		Guess: time.Duration(c.Guess) * time.Millisecond, AsksAtOnce: c.AtOnce,
	}, left
}

// key returns the scope of the cooldown. A backend has at most one cooldown for
// each key.
func (c *cooldown) key() string {
	key := "failure"
	if c.Throttle {
		key = "throttle"
	}
	if c.Operation != "" {
		key = c.Operation + "-" + key // a model may have any name, and no operation has a space
	}
	if c.Tiers != "" {
		key = c.Tiers + "-" + key
	}
	if !c.Whole {
		key += " " + c.Model
	}
	return key
}

// most returns the maximum number of cooldowns of the backend in the store, if
// this one is among them. Failures of single models leave room for throttles,
// and both leave room for cooldowns of the whole backend.
func (c *cooldown) most() int {
	switch {
	case c.Whole:
		return state.MaxRecords
	case c.Throttle:
		return state.MaxRecords - 2
	}
	return state.MaxRecords / 2
}

// parse parses and checks a message. Any client of the store may have written
// it.
func parse(text []byte) (m message, err error) {
	if len(text) > state.MaxMessage {
		return m, fmt.Errorf("it has %d bytes", len(text))
	}
	err = json.Unmarshal(text, &m) // reads on after a field of another type
	switch {
	case m.Version > 0 && m.Version != version:
		return m, otherVersion(m.Version)
	case err != nil:
		return m, err
	case m.Version != version:
		return m, errors.New("it has no version")
	}
	if !isDigest(m.From) || !isTime(m.Sent) || !isTime(m.At) {
		return m, errors.New("it has no sender or no time")
	}
	return m, m.check()
}

func (m *message) check() error {
	switch m.Kind {
	case left:
		return nil
	case alive:
		if len(m.Host) > maxHost || m.Since > maxTime/1000 || !isTime(m.Since) || !areConfigs(m.Configs) ||
			slices.ContainsFunc(m.Writers, func(w string) bool { return !isShortDigest(w) }) {
			return errors.New("it is not from a replica")
		}
		return nil
	case tierCosts:
		if slices.ContainsFunc(m.Shares,
			func(s backendShare) bool { return !isDigest(s.Backend) || s.Model != pool.ModelKey(s.Model) }) {
			return errors.New("it names no backend or no model")
		}
		return nil
	case asked:
		if _, err := kem.NewPublicKey(m.Key); err != nil || m.Ask == "" || len(m.Ask) > maxQuestion {
			return errors.New("it asks nothing")
		}
		return nil
	case drained, resumed:
		if !isDigest(m.Backend) || !isDigest(m.Member) || !isTime(m.Order) {
			return errors.New("it names no backend")
		}
		return pool.Order{By: m.By, Reason: m.Reason}.Check()
	case coolingDown, doubted, disproved:
		if !isDigest(m.Backend) || m.Cooldown == nil {
			return errors.New("it names no cooldown")
		}
		return m.Cooldown.check()
	}
	return errors.New("it has an unknown kind")
}

func (c *cooldown) check() error {
	if _, err := strconv.ParseUint(c.ID, 16, 64); err != nil {
		return err
	}
	switch {
	case !verdict.Class(c.Class).Shared(), !verdict.HintSource(c.Hint).IsKnown(),
		c.Status < 0 || c.Status > 599, c.Cost < 0, c.Model != pool.ModelKey(c.Model),
		pool.TiersOf(c.Tiers).String() != c.Tiers, c.Whole && (c.Model != "" || c.Tiers != "" || c.Operation != ""),
		c.Operation != "" && (c.Throttle || !isOperation(c.Operation)), c.Cause != "" && !verdict.IsCode(c.Cause):
		return errors.New("its cooldown is not valid")
	case c.Guess < 0, c.Guess > maxLength.Milliseconds(), c.Length < c.Left, c.Left < 0,
		c.Length > maxLength.Milliseconds():
		return errors.New("no cooldown lasts that long")
	}
	return nil
}

// maxOperation is the maximum length of an operation in bytes.
const maxOperation = 64

// isOperation reports whether the text may be the operation of a request for
// inference.
func isOperation(text string) bool {
	return text[0] == '/' && len(text) <= maxOperation &&
		strings.Trim(text, "/._-0123456789abcdefghijklmnopqrstuvwxyz") == ""
}

// maxTime is the last time that can be written as a date in JSON, in
// microseconds since 1970.
const maxTime = 253_402_300_799_999_999

func isTime(micros int64) bool { return 0 <= micros && micros <= maxTime }

// maxHost is the maximum length of a host's name in bytes.
const maxHost = 255

// digest returns a digest of a name that other replicas need not know.
func digest(name string) string {
	sum := sha256.Sum256([]byte("openai_lb " + name))
	return hex.EncodeToString(sum[:digestSize/2])
}

const digestSize = 32

func isDigest(word string) bool { return len(word) == digestSize && isHex(word) }

func isHex(word string) bool { return strings.Trim(word, "0123456789abcdef") == "" }
