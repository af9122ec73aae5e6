package replicas

import (
	"context"
	"crypto/ecdh"
	"crypto/hpke"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/admin"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// An operator asks one replica and sees what all replicas know. The asked
// replica sends a question with a new public key. Each other replica encrypts
// its answer with this key and puts it into the store for a few seconds, so the
// store learns no names. Without a question, nothing is sent.

const (
	askedGroup = "asked"
	// maxQuestion is the maximum length of a question in bytes.
	maxQuestion = 3000
	// answerPart is the number of bytes of an answer in a record.
	answerPart = state.MaxMessage
	// maxAge is the age after which a question is not answered, because the
	// replica that asked no longer waits.
	maxAge = 5 * time.Second
	// maxQuestions is the maximum number of questions that wait to be answered.
	// answerPause is the shortest time between two answers.
	maxQuestions, answerPause = 16, 20 * time.Millisecond
	// sameAnswer is how long an answer is reused for the same question.
	sameAnswer = time.Second
)

var (
	kem      = hpke.DHKEM(ecdh.X25519())
	answerer atomic.Pointer[answerFunc]
)

// answerFunc answers a question of another replica about some pools. It returns
// nil for an unknown question, because anyone who can write to the store can
// ask.
type answerFunc func(ctx context.Context, question string, shared seam.SharedPools) []byte

func onQuestion(answer answerFunc) { answerer.Store(&answer) }

func init() { onQuestion(admin.AnswerQuestion) }

func seal(key []byte, text []byte) ([]byte, error) {
	public, err := kem.NewPublicKey(key)
	if err != nil {
		return nil, err
	}
	return hpke.Seal(public, hpke.HKDFSHA256(), hpke.AES256GCM(), []byte("openai_lb answer"), seam.Pack(text))
}

func open(key hpke.PrivateKey, sealed []byte) (packed []byte, err error) {
	return hpke.Open(key, hpke.HKDFSHA256(), hpke.AES256GCM(), []byte("openai_lb answer"), sealed)
}

// answersGroup returns the group of a replica's answer to the question with the
// public key key.
func answersGroup(key []byte, id string) string { return "answer-" + digest(string(key)) + "-" + id }

// answer answers the questions of other replicas until the context is done.
func (r *Replica) answer(ctx context.Context) {
	var packed []byte
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
		if answer == nil || r.clock.age(m, time.Now()) > maxAge {
			continue
		}
		if m.Ask != question || time.Since(at) >= sameAnswer {
			question, at, packed = m.Ask, time.Now(), (*answer)(ctx, m.Ask, r.shared())
		}
		if packed == nil {
			continue
		}
		sealed, err := seal(m.Key, packed)
		if err != nil || len(sealed) > state.MaxRecords*answerPart {
			continue
		}
		var records []state.Record
		parts := slices.Collect(slices.Chunk(sealed, answerPart))
		for i, part := range parts {
			records = append(records, state.Record{
				Group: answersGroup(m.Key, r.peers.self.ID), Key: fmt.Sprint(i, " of ", len(parts)),
				Mode: state.Replace, TTL: lifetime, Message: part, News: []byte{},
			})
		}
		_ = r.put(ctx, records)
	}
}

// hearQuestion queues a question to be answered, unless too many wait.
func (r *Replica) hearQuestion(m message) {
	if m.From == r.peers.self.ID {
		return
	}
	select {
	case r.questions <- m:
	default:
	}
}

// shared returns the pools that share the engine, and those that do not.
func (r *Replica) shared() (s seam.SharedPools) {
	for _, other := range runningReplicas() {
		for _, l := range other.openLinks() {
			if other == r {
				s.Pools = append(s.Pools, l.config.Pool)
			} else {
				s.Elsewhere = append(s.Elsewhere, l.config.Pool)
			}
		}
	}
	return s
}

// Ask implements seam.ReplicationModule.
func (Module) Ask(ctx context.Context, question string,
	choose func([]seam.PeerAnswer) ([]seam.PeerAnswer, error)) (answers []seam.PeerAnswer, err error) {
	replicas := runningReplicas()
	for i, r := range replicas {
		answers = append(answers, r.others(i)...)
	}
	if answers, err = choose(answers); err != nil {
		return nil, err
	}
	var asking sync.WaitGroup
	for i, r := range replicas {
		asking.Go(func() { r.ask(ctx, question, i, answers) })
	}
	asking.Wait()
	return answers, nil
}

// others returns the replicas of the engine, this one first, without answers.
// It includes replicas that are silent, unless they have announced their end.
func (r *Replica) others(engine int) []seam.PeerAnswer {
	a := seam.PeerAnswer{Peer: r.peers.self, Self: true, Engine: engine, SharedPools: r.shared()}
	a.Connected, a.Whole = r.connectivity.isConnected(), r.connectivity.isWhole()
	a.Heard = time.Now()
	answers := []seam.PeerAnswer{a}
	a.Self = false
	for _, p := range r.peers.all() {
		if a.Peer = p.Peer; a.ID != r.peers.self.ID {
			answers = append(answers, a)
		}
	}
	return answers
}

// ask asks the replicas of this engine, for as long as this replica runs.
func (r *Replica) ask(ctx context.Context, question string, engine int, answers []seam.PeerAnswer) {
	missing, now := make(map[string]*seam.PeerAnswer), time.Now()
	for i, a := range answers {
		if a.Engine == engine && a.Connected && !a.Self && !isSilent(a.Heard, now) {
			missing[a.ID] = &answers[i]
		}
	}
	key, err := kem.GenerateKey()
	if len(missing) == 0 || err != nil {
		return
	}
	r.mu.Lock()
	life := r.life
	if life != nil {
		r.asking.Add(1)
	}
	r.mu.Unlock()
	if life == nil {
		return
	}
	defer r.asking.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(life, cancel)()
	r.await(ctx, question, key, missing)
}

// await sends a question and waits for the answers.
func (r *Replica) await(ctx context.Context, question string, key hpke.PrivateKey,
	replicas map[string]*seam.PeerAnswer) {
	now, public := time.Now(), key.PublicKey().Bytes()
	m := r.message(asked, now, now)
	m.Ask, m.Key = question, public
	if r.put(ctx,
		[]state.Record{
			{Group: askedGroup, Key: digest(string(public)), Mode: state.Replace, TTL: lifetime, Message: m.text()},
		}) != nil {
		return
	}
	missing := make(map[string]*seam.PeerAnswer)
	for id, answer := range replicas {
		missing[answersGroup(public, id)] = answer
	}
	for wait := 5 * time.Millisecond; len(missing) > 0 && pause(ctx, wait); wait = min(2*wait, 100*time.Millisecond) {
		kept, _, err := r.store.Load(ctx, slices.Collect(maps.Keys(missing)))
		if err != nil {
			continue
		}
		parts := make(map[string][]state.Kept)
		for _, k := range kept {
			parts[k.Group] = append(parts[k.Group], k)
		}
		for group, records := range parts {
			sealed, whole := joined(records)
			if answer := missing[group]; whole && answer != nil {
				answer.Packed, _ = open(key, sealed)
				delete(missing, group)
			}
		}
	}
}

// joined joins the parts of an answer. ok is false if a part is missing.
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
