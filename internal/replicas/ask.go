package replicas

import (
	"bytes"
	"compress/flate"
	"context"
	"crypto/ecdh"
	"crypto/hpke"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/openai-lb/caddy-openai-lb/state"
)

// An operator who asks one replica is shown what all of them know. That replica sends a question, with a key that it has
// made for it. Each of the others has the store keep its answer for a while, sealed with that key, so that the store learns
// no names. Nothing is sent while nobody asks.

// Answer is what a replica answers to a question.
type Answer struct {
	Peer
	// Self reports whether it is this replica, which needs not be asked. Connected reports whether this one reached the store.
	Self, Connected bool
	// Engine numbers the engines of this process, and Pools are those that share this one.
	Engine int
	Pools  []string
	// Text is nil without an answer.
	Text []byte
}

const (
	askedGroup = "asked"
	// maxQuestion is how many bytes a question has at most, and maxAnswer how many an answer has before it is compressed.
	maxQuestion, maxAnswer = 3000, 16 << 20
	// answerPart is how many bytes of an answer a record has. The others are for the beginning of the field that keeps it.
	answerPart = state.MaxMessage
	// maxQuestions is how many questions wait to be answered, and answerPause the shortest time between two answers.
	maxQuestions, answerPause = 16, 20 * time.Millisecond
	// sameAnswer is within which time the same question gets the same answer.
	sameAnswer = time.Second
)

var (
	kem      = hpke.DHKEM(ecdh.X25519())
	answerer atomic.Pointer[func(question string, pools []string) []byte]
)

// OnQuestion sets what answers the questions of other replicas about some pools. It returns nil for a question that it does not
// know: anyone who can write to the store can ask.
func OnQuestion(answer func(question string, pools []string) []byte) { answerer.Store(&answer) }

func seal(key []byte, text []byte) ([]byte, error) {
	public, err := kem.NewPublicKey(key)
	if err != nil {
		return nil, err
	}
	var compressed bytes.Buffer
	w, _ := flate.NewWriter(&compressed, flate.BestSpeed) // a valid level
	_, _ = w.Write(text)                                  // to memory
	_ = w.Close()
	return hpke.Seal(public, hpke.HKDFSHA256(), hpke.AES256GCM(), []byte("openai_lb answer"), compressed.Bytes())
}

func open(key hpke.PrivateKey, sealed []byte) ([]byte, error) {
	compressed, err := hpke.Open(key, hpke.HKDFSHA256(), hpke.AES256GCM(), []byte("openai_lb answer"), sealed)
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(compressed)), maxAnswer+1))
	if err == nil && len(text) > maxAnswer {
		err = errors.New("the answer is too long")
	}
	if err != nil {
		return nil, err
	}
	return text, nil
}

// answersGroup returns the group of a replica's answer to the question with this key.
func answersGroup(key []byte, id string) string { return "answer-" + digest(string(key)) + "-" + id }

// answer answers questions.
func (r *Replica) answer(ctx context.Context) {
	var said []byte
	var question string
	var at time.Time
	for pause(ctx, answerPause) {
		var m message
		select {
		case <-ctx.Done():
			return
		case m = <-r.questions:
		}
		answer := answerer.Load()
		if answer == nil {
			continue
		}
		if m.Ask != question || time.Since(at) >= sameAnswer {
			question, at, said = m.Ask, time.Now(), (*answer)(m.Ask, r.pools())
		}
		if said == nil {
			continue
		}
		sealed, err := seal(m.Key, said)
		if err != nil || len(sealed) > state.MaxRecords*answerPart {
			continue
		}
		var records []state.Record
		parts := slices.Collect(slices.Chunk(sealed, answerPart))
		for i, part := range parts {
			records = append(records, state.Record{
				Group: answersGroup(m.Key, r.peers.self.ID), Key: fmt.Sprint(i, " of ", len(parts)), Mode: state.Replace, TTL: lifetime, Message: part, News: []byte{},
			})
		}
		_ = r.put(ctx, records)
	}
}

// hearQuestion has a question answered, unless too many wait.
func (r *Replica) hearQuestion(m message) {
	if m.From == r.peers.self.ID {
		return
	}
	select {
	case r.questions <- m:
	default:
	}
}

// pools returns the names of the pools that share the engine.
func (r *Replica) pools() (names []string) {
	for _, l := range r.openLinks() {
		names = append(names, l.config.Pool)
	}
	return names
}

// Ask asks all other replicas of all engines, and returns the answers that come before the context is done, with those
// replicas from which none came.
func Ask(ctx context.Context, question string) (answers []Answer) {
	replicas := runningReplicas()
	all := make([][]Answer, len(replicas))
	var asking sync.WaitGroup
	for i, r := range replicas {
		asking.Go(func() { all[i] = r.ask(ctx, question) })
	}
	asking.Wait()
	for i, its := range all {
		for _, a := range its {
			a.Engine = i
			answers = append(answers, a)
		}
	}
	return answers
}

func (r *Replica) ask(ctx context.Context, question string) (answers []Answer) {
	connected, pools := r.connectivity.isConnected(), r.pools()
	for _, p := range r.peers.list(time.Now()) {
		if p.ID != r.peers.self.ID {
			answers = append(answers, Answer{Peer: p, Connected: connected, Pools: pools})
		}
	}
	key, err := kem.GenerateKey()
	if connected && len(answers) > 0 && err == nil {
		r.await(ctx, question, key, answers)
	}
	self := r.peers.self
	self.Heard = time.Now()
	return append([]Answer{{Peer: self, Self: true, Connected: connected, Pools: pools}}, answers...)
}

// await sends a question and waits for the answers.
func (r *Replica) await(ctx context.Context, question string, key hpke.PrivateKey, answers []Answer) {
	now, public := time.Now(), key.PublicKey().Bytes()
	m := message{Version: version, Kind: asked, From: r.peers.self.ID, Sent: now.UnixMicro(), At: r.clock.at(now), Ask: question, Key: public}
	if r.put(ctx, []state.Record{{Group: askedGroup, Key: digest(string(public)), Mode: state.Replace, TTL: lifetime, Message: m.text()}}) != nil {
		return
	}
	missing := make(map[string]*Answer)
	for i := range answers {
		missing[answersGroup(public, answers[i].ID)] = &answers[i]
	}
	for wait := 5 * time.Millisecond; len(missing) > 0 && pause(ctx, wait); wait = min(2*wait, 100*time.Millisecond) {
		var groups []string
		for group := range missing {
			groups = append(groups, group)
		}
		kept, _, err := r.store.Load(ctx, groups)
		if err != nil {
			continue
		}
		parts := make(map[string][]state.Kept)
		for _, k := range kept {
			parts[k.Group] = append(parts[k.Group], k)
		}
		for group, its := range parts {
			sealed, whole := joined(its)
			if answer := missing[group]; whole && answer != nil {
				answer.Text, _ = open(key, sealed)
				delete(missing, group)
			}
		}
	}
}

// joined joins the parts of an answer. It returns false if one is missing.
func joined(parts []state.Kept) (whole []byte, ok bool) {
	texts := make(map[string][]byte)
	for _, k := range parts {
		texts[k.Key] = k.Message
	}
	for i := range parts {
		part, ok := texts[fmt.Sprint(i, " of ", len(parts))]
		if !ok {
			return nil, false
		}
		whole = append(whole, part...)
	}
	return whole, true
}
