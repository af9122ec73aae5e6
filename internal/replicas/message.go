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

// message is what replicas send each other. It holds no key and no name of a
// backend, a caller or an object.
type message struct {
	// Version is that of this format. Others are ignored, and each is logged
	// once.
	Version int  `json:"v"`
	Kind    kind `json:"kind"`
	// From is the replica that sent it, and Sent its time, in microseconds
	// since 1970. At is the same by the store's clock, or 0 if that is not
	// known.
	From string `json:"from"`
	Sent int64  `json:"sent"`
	At   int64  `json:"at,omitempty"`
	// Backend is a digest, as is Member, which distinguishes members of a
	// backend.
	Backend  string    `json:"backend,omitempty"`
	Member   string    `json:"member,omitempty"`
	Cooldown *cooldown `json:"cooldown,omitempty"`
	// Order is the number of an order to take the member out of use, or to put
	// it back.
	Order int64 `json:"order,omitempty"`
	// By is who gave it, and Reason why.
	By     string `json:"by,omitempty"`
	Reason string `json:"reason,omitempty"`
	// Host is where the replica runs, and Since when it began.
	Host  string `json:"host,omitempty"`
	Since int64  `json:"since,omitempty"`
	// Configs are digests of what it has configured, by those of the pools'
	// names. Older versions have none.
	Configs map[string]string `json:"configs,omitempty"`
	// Writers are how the ids of its pools in reports begin.
	Writers []string `json:"writers,omitempty"`
	// Shares are what tiers have got there.
	Shares []backendShare `json:"shares,omitempty"`
	// Ask is a question, and Key seals the answers.
	Ask string `json:"ask,omitempty"`
	Key []byte `json:"key,omitempty"`
}

const version = 1

// otherVersion is the error for a message in another version of the format.
type otherVersion int

func (v otherVersion) Error() string { return fmt.Sprintf("it has version %d", int(v)) }

type kind string

const (
	// alive: the replica is there.
	alive kind = "alive"
	// left: the replica has stopped, and nobody need miss it.
	left kind = "left"
	// cooling down: a cooldown began, or grew.
	coolingDown kind = "cooldown"
	// doubted: the cooldown is in doubt.
	doubted kind = "doubt"
	// disproved: the cooldown is over before its time.
	disproved kind = "over"
	// drained and resumed are about a member.
	drained kind = "drain"
	resumed kind = "resume"
	// given: tiers have got something there.
	given kind = "given"
	// asked: an operator asks all replicas something.
	asked kind = "ask"
	// used is not in a message: it is about callers, as package callers has it.
	used kind = "use"
)

// cooldown is a pool.Cooldown, with lengths in place of times.
type cooldown struct {
	ID    string `json:"id"`
	Model string `json:"model,omitempty"`
	// Tiers is the group of service tiers that it covers, by its name in
	// pool.ServiceTiers.
	Tiers string `json:"service_tiers,omitempty"`
	// Operation is the only one that it covers, or empty.
	Operation string `json:"operation,omitempty"`
	Whole     bool   `json:"whole,omitempty"`
	Throttle  bool   `json:"throttle,omitempty"`
	Class     string `json:"class"`
	Status    int    `json:"status,omitempty"`
	Hint      string `json:"hint,omitempty"`
	// Cause is a code, which may come from a backend.
	Cause string `json:"cause,omitempty"`
	Cost  int64  `json:"cost,omitempty"`
	// Guess is the guessed length of a throttle, in milliseconds, if it is a
	// guess.
	Guess int64 `json:"guess,omitempty"`
	// Length is that of the whole cooldown, and Left what is left of it, both in
	// milliseconds.
	Length int64 `json:"length"`
	Left   int64 `json:"left"`
}

// maxLength is the longest cooldown of another replica, whatever the store holds.
const maxLength = state.MaxTTL

var hints = []verdict.HintSource{verdict.NoHint, verdict.RetryAfterMS, verdict.XMSRetryAfterMS, verdict.RetryAfter, verdict.ErrorText, verdict.RateLimitReset}

// concernsOthers reports whether other replicas may know of a cooldown of the
// member: one of them reported it, or the model exists. Clients can make up any
// number of models, and the cooldown of each is needed only by the replica that
// met it.
func concernsOthers(m *pool.Member, b pool.Cooldown) bool {
	return b.Heard || b.Whole || b.Model == "" || m.Knows(b.Model)
}

// shareable reports whether replicas share cooldowns for this reason.
func shareable(b pool.Cooldown) bool {
	return verdict.Class(b.Class).Shared()
}

func cooldownOf(b pool.Cooldown, now time.Time) *cooldown {
	cause := b.Cause
	if !verdict.IsCode(cause) {
		cause = ""
	}
	return &cooldown{
		ID: idOf(b), Model: b.Model, Tiers: b.Tiers.String(), Operation: b.Operation, Whole: b.Whole, Throttle: b.Throttle, Class: b.Class, Status: b.Status, Hint: b.Hint, Cause: cause,
		Cost: b.Cost, Guess: milliseconds(b.Guess), Length: milliseconds(b.Until.Sub(b.Since)), Left: milliseconds(min(b.Until.Sub(now), b.Until.Sub(b.Since))),
	}
}

// message returns a message of this replica's, without what it says.
func (r *Replica) message(kind kind, sent, now time.Time) message {
	return message{Version: version, Kind: kind, From: r.peers.self.ID, Sent: sent.UnixMicro(), At: r.clock.at(now)}
}

// milliseconds rounds up: no backend is called before its cooldown is over.
func milliseconds(d time.Duration) int64 {
	return int64((min(max(d, 0), maxLength) + time.Millisecond - 1) / time.Millisecond)
}

// idOf returns the ID as text. Texts compare as IDs do.
func idOf(b pool.Cooldown) string { return fmt.Sprintf("%016x", b.ID) }

// pool returns the cooldown as a pool knows it, and what is left of it.
func (b *cooldown) pool(now time.Time) (heard pool.Cooldown, left time.Duration) {
	id, _ := strconv.ParseUint(b.ID, 16, 64)
	left = time.Duration(b.Left) * time.Millisecond
	until := now.Add(left)
	return pool.Cooldown{
		Reason: pool.Reason{Class: b.Class, Status: b.Status, Hint: b.Hint, Cause: b.Cause}, ID: id, Whole: b.Whole, Model: b.Model, Tiers: pool.TiersOf(b.Tiers), Operation: b.Operation,
		Since: until.Add(-time.Duration(b.Length) * time.Millisecond), Until: until, Throttle: b.Throttle, Cost: b.Cost,
		Guess: time.Duration(b.Guess) * time.Millisecond,
	}, left
}

// key returns what the cooldown is about: no backend has two cooldowns of one key.
func (b *cooldown) key() string {
	key := "failure"
	if b.Throttle {
		key = "throttle"
	}
	if b.Operation != "" {
		key = b.Operation + "-" + key // a model may have any name, and no operation has a space
	}
	if b.Tiers != "" {
		key = b.Tiers + "-" + key
	}
	if !b.Whole {
		key += " " + b.Model
	}
	return key
}

// most returns how many cools the backend down may have in the store, this one
// included. Those for failures of single models leave room for throttles, and
// both for those of the whole backend.
func (b *cooldown) most() int {
	switch {
	case b.Whole:
		return state.MaxRecords
	case b.Throttle:
		return state.MaxRecords - 2
	}
	return state.MaxRecords / 2
}

// parse reads a message, whoever wrote it.
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
		if len(m.Host) > maxHost || m.Since > maxTime/1000 || !isTime(m.Since) || !areConfigs(m.Configs) || slices.ContainsFunc(m.Writers, func(w string) bool { return !isShortDigest(w) }) {
			return errors.New("it is not from a replica")
		}
		return nil
	case given:
		if slices.ContainsFunc(m.Shares, func(s backendShare) bool { return !isDigest(s.Backend) || s.Model != pool.ModelKey(s.Model) }) {
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

func (b *cooldown) check() error {
	if _, err := strconv.ParseUint(b.ID, 16, 64); err != nil {
		return err
	}
	switch {
	case !verdict.Class(b.Class).Shared(), !slices.Contains(hints, verdict.HintSource(b.Hint)),
		b.Status < 0 || b.Status > 599, b.Cost < 0, b.Model != pool.ModelKey(b.Model), pool.TiersOf(b.Tiers).String() != b.Tiers, b.Whole && (b.Model != "" || b.Tiers != "" || b.Operation != ""),
		b.Operation != "" && (b.Throttle || !isOperation(b.Operation)), b.Cause != "" && !verdict.IsCode(b.Cause):
		return errors.New("its cooldown is not valid")
	case b.Guess < 0, b.Guess > maxLength.Milliseconds(), b.Length < b.Left, b.Left < 0, b.Length > maxLength.Milliseconds():
		return errors.New("no cooldown lasts that long")
	}
	return nil
}

// maxOperation is how many bytes an operation has at most.
const maxOperation = 64

// isOperation reports whether the text may be the operation of a request for
// inference.
func isOperation(text string) bool {
	return text[0] == '/' && len(text) <= maxOperation && strings.Trim(text, "/._-0123456789abcdefghijklmnopqrstuvwxyz") == ""
}

// maxTime is the last moment, in microseconds since 1970, that has a date in
// JSON.
const maxTime = 253_402_300_799_999_999

func isTime(micros int64) bool { return 0 <= micros && micros <= maxTime }

// maxHost is how many bytes the name of a host has at most.
const maxHost = 255

// digest stands for a name that others need not know.
func digest(name string) string {
	sum := sha256.Sum256([]byte("openai_lb " + name))
	return hex.EncodeToString(sum[:digestSize/2])
}

const digestSize = 32

func isDigest(word string) bool { return len(word) == digestSize && isHex(word) }

func isHex(word string) bool { return strings.Trim(word, "0123456789abcdef") == "" }
