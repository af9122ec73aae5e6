package replicas

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/admin"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
	"github.com/openai-lb/caddy-openai-lb/state"
)

// answerWith has the replicas of a test answer questions.
func answerWith(t *testing.T, answer func(question string, pools []string) []byte) {
	t.Cleanup(func() { onQuestion(admin.AnswerQuestion) })
	onQuestion(func(_ context.Context, question string, shared seam.SharedPools) []byte {
		return answer(question, shared.Pools)
	})
}

// askFor asks for so long, and returns the texts, the own one without, in the
// order of the replicas.
func (r *testReplica) askFor(patience time.Duration, question string) (texts []string) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	answers := r.others(0)
	r.ask(ctx, question, 0, answers)
	for _, a := range answers {
		text := "-"
		if a.Packed != nil {
			said, _ := io.ReadAll(a.Text())
			text = string(said)
		}
		if a.Self {
			text = "self"
		}
		texts = append(texts, text)
	}
	return texts
}

// answers returns what loads the answers to all questions that the store keeps
// now.
func (w *world) answers() (load func() []state.Kept) {
	store := w.hub.Store()
	var groups []string
	questions, _, _ := store.Load(context.Background(), []string{askedGroup})
	for _, q := range questions {
		m, err := parse(q.Message)
		if err != nil {
			w.Error(err)
		}
		for _, r := range w.replicas {
			groups = append(groups, answersGroup(m.Key, r.peers.self.ID))
		}
	}
	return func() []state.Kept {
		kept, _, _ := store.Load(context.Background(), groups)
		return kept
	}
}

// TestReplicasThatCannotBeReachedAreNotForgotten because they may go on, so
// that an order may miss them. One that has stopped is forgotten at once.
func TestReplicasThatCannotBeReachedAreNotForgotten(t *testing.T) {
	share(t, 3, func(w *world) {
		r := w.replicas[0]
		others := func() (n int) { return len(r.others(0)) - 1 }
		w.replicas[2].stop()
		time.Sleep(2 * lifetime)
		if n := others(); n != 1 {
			t.Fatalf("it knows %d others, want the one that runs", n)
		}
		w.hub.Fail(errors.New("down"))
		time.Sleep(time.Hour)
		if n := others(); n != 1 || len(r.peers.list(time.Now())) != 1 {
			t.Errorf("it knows %d others without the store, and %d replicas count, want 1, and only itself", n, len(r.peers.list(time.Now())))
		}
		w.replicas[1].stop()
		w.hub.Fail(nil)
		time.Sleep(2 * lifetime)
		if n := others(); n != 0 {
			t.Errorf("it knows %d others after the store is back, want none", n)
		}
	})
}

func TestAllReplicasAnswerAQuestion(t *testing.T) {
	share(t, 3, func(w *world) {
		var asked atomic.Int32
		answerWith(t, func(question string, pools []string) []byte {
			asked.Add(1)
			return []byte(fmt.Sprint(question, " of ", pools))
		})
		w.replicas[0].link.Configured("llm", "aaaaaaaaaaaa")
		wants := func(i int, question string, want ...string) {
			t.Helper()
			began := time.Now()
			got := w.replicas[i].askFor(time.Second, question)
			slices.Sort(got)
			if strings.Join(got, ", ") != strings.Join(want, ", ") {
				t.Errorf("got %q, want %q", got, want)
			}
			if took := time.Since(began); took > 200*time.Millisecond {
				t.Errorf("it took %v", took)
			}
		}
		wants(0, "use", "self", "use of []", "use of []")
		wants(1, "use", "self", "use of []", "use of [llm]")
		if asked.Load() != 3 { // the third replica says the same again
			t.Errorf("%d answers were made, want 3", asked.Load())
		}
		time.Sleep(sameAnswer)
		wants(0, "use", "self", "use of []", "use of []")
		if asked.Load() != 5 {
			t.Errorf("%d answers were made, want 5", asked.Load())
		}
		late := w.start()
		time.Sleep(2 * time.Second)
		if got := late.askFor(time.Second, "use"); len(got) != 4 {
			t.Errorf("to a replica that has just started, there are %q", got)
		}
	})
}

func TestALongAnswerArrivesWhole(t *testing.T) {
	share(t, 2, func(w *world) {
		long := make([]byte, 300_000)
		rand.NewChaCha8([32]byte{}).Read(long)
		answerWith(t, func(string, []string) []byte { return long })
		if got := w.replicas[0].askFor(time.Second, "long"); len(got) != 2 || got[1] != string(long) {
			t.Error("it does not arrive, or not whole")
		}
		load := w.answers()
		if len(load()) == 0 {
			t.Error("the store has no answer")
		}
		time.Sleep(lifetime)
		if kept := load(); len(kept) > 0 {
			t.Errorf("the store has %d records of answers for too long", len(kept))
		}
	})
}

func TestAReplicaThatDoesNotAnswerIsShownWithoutAnAnswer(t *testing.T) {
	share(t, 2, func(w *world) {
		answerWith(t, func(string, []string) []byte { return []byte("here") })
		cut := &cutStore{Store: w.hub.Store()}
		w.startWith(cut)
		time.Sleep(2 * time.Second)
		cut.cut.Store(true) // it counts for a while
		began := time.Now()
		got := w.replicas[0].askFor(time.Second, "?")
		if took := time.Since(began); strings.Count(strings.Join(got, " "), "here") != 1 || strings.Count(strings.Join(got, " "), "-") != 1 || took != time.Second {
			t.Errorf("got %q after %v", got, took)
		}
		time.Sleep(lifetime)
		began = time.Now()
		if got := w.replicas[0].askFor(time.Second, "?"); !slices.Contains(got, "-") || time.Since(began) == time.Second {
			t.Errorf("later, there are %q after %v", got, time.Since(began))
		}
		w.hub.Fail(errors.New("down"))
		time.Sleep(2 * time.Second)
		began = time.Now()
		if got := w.replicas[0].askFor(time.Second, "?"); len(got) != 3 || got[1] != "-" || got[2] != "-" || time.Since(began) > 0 {
			t.Errorf("without the store, there are %q after %v", got, time.Since(began))
		}
	})
}

// Whoever reads what the store keeps, or passes on, learns no name.
func TestTheStoreLearnsNoNamesFromAnswers(t *testing.T) {
	share(t, 2, func(w *world) {
		answerWith(t, func(string, []string) []byte { return []byte(strings.Repeat("alice uses gpt ", 100)) })
		if got := w.replicas[0].askFor(time.Second, "callers"); !strings.Contains(got[1], "alice") {
			t.Fatalf("got %q", got)
		}
		kept := w.answers()()
		for _, k := range kept {
			if bytes.Contains(k.Message, []byte("alice")) || bytes.Contains(k.Message, []byte("gpt ")) {
				t.Errorf("the store has %q", k.Message)
			}
		}
		if len(kept) != 1 {
			t.Errorf("the store has %d records of answers", len(kept))
		}
	})
}

func TestAQuestionThatNobodyKnowsIsNotAnswered(t *testing.T) {
	share(t, 2, func(w *world) {
		answerWith(t, func(string, []string) []byte { return nil })
		if got := w.replicas[0].askFor(100*time.Millisecond, "?"); got[1] != "-" {
			t.Errorf("got %q", got)
		}
		for range 10 * maxQuestions {
			w.replicas[1].hearQuestion(message{From: w.replicas[0].peers.self.ID, Ask: "?", Key: make([]byte, 32)})
		}
	})
}

// closing counts the uses of a store after it was closed.
type closing struct {
	state.Store
	closed atomic.Bool
	late   atomic.Int32
}

func (c *closing) count() {
	if c.closed.Load() {
		c.late.Add(1)
	}
}

func (c *closing) Close() error { c.closed.Store(true); return nil }

func (c *closing) Put(ctx context.Context, records []state.Record) error {
	defer c.count()
	return c.Store.Put(ctx, records)
}

func (c *closing) Load(ctx context.Context, groups []string) ([]state.Kept, time.Time, error) {
	defer c.count()
	return c.Store.Load(ctx, groups)
}

func TestAQuestionEndsWithTheReplica(t *testing.T) {
	share(t, 1, func(w *world) {
		answerWith(t, func(string, []string) []byte { return nil })
		store := &closing{Store: w.hub.Store()}
		r := New(store, zap.NewNop())
		r.start(zap.NewNop(), &certmagic.FileStorage{Path: t.TempDir()}, "number")
		time.Sleep(3 * time.Second)
		answers := r.others(0)
		ctx, cancel := context.WithTimeout(w.Context(), time.Second)
		defer cancel()
		over := make(chan struct{})
		go func() { r.ask(ctx, "?", 0, answers); close(over) }()
		time.Sleep(200 * time.Millisecond)
		began := time.Now()
		if r.Destruct() != nil || len(answers) != 2 || time.Since(began) > 0 {
			t.Errorf("%d replicas were asked, and it ended after %v", len(answers), time.Since(began))
		}
		<-over
		r.ask(ctx, "?", 0, answers)
		if n := store.late.Load(); n > 0 {
			t.Errorf("the store was used %d times after it was closed", n)
		}
	})
}

func TestAnOldQuestionIsNotAnswered(t *testing.T) {
	share(t, 2, func(w *world) {
		asked := make(chan string, 2)
		answerWith(t, func(question string, _ []string) []byte { asked <- question; return nil })
		r, from := w.replicas[0], w.replicas[1]
		for _, old := range []time.Duration{0, maxAge + time.Second} {
			r.hearQuestion(message{From: from.peers.self.ID, Ask: old.String(), Key: make([]byte, 32), At: from.clock.at(time.Now().Add(-old))})
		}
		time.Sleep(time.Second)
		if n := len(asked); n != 1 || <-asked != "0s" {
			t.Errorf("%d questions are answered, or the old one", n)
		}
	})
}

func FuzzAnswers(f *testing.F) {
	key, err := kem.GenerateKey()
	if err != nil {
		f.Fatal(err)
	}
	sealed, err := seal(key.PublicKey().Bytes(), []byte("alice"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add("0 of 1", sealed, "1 of 2", []byte("x"))
	f.Add("0 of 2", sealed[:20], "1 of 2", sealed[20:])
	f.Add("1 of 1", sealed, "", []byte(nil))
	f.Fuzz(func(t *testing.T, key1 string, part1 []byte, key2 string, part2 []byte) {
		whole, ok := joined([]state.Kept{{Key: key1, Message: part1}, {Key: key2, Message: part2}})
		if ok && !bytes.Equal(whole, append(bytes.Clone(part1), part2...)) && !bytes.Equal(whole, append(bytes.Clone(part2), part1...)) {
			t.Errorf("joined are %q", whole)
		}
		if packed, err := open(key, whole); err == nil && !bytes.Equal(packed, seam.Pack([]byte("alice"))) {
			t.Errorf("opened is %q", packed)
		}
	})
}

func TestQuestionsAreBounded(t *testing.T) {
	key, err := kem.GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	for question, valid := range map[string]bool{"status": true, "": false, strings.Repeat("x", maxQuestion): true, strings.Repeat("x", maxQuestion+1): false} {
		m := message{Version: version, Kind: asked, From: digest("r"), Ask: question, Key: key.PublicKey().Bytes()}
		if _, err := parse(m.text()); (err == nil) != valid {
			t.Errorf("a question of %d bytes: %v", len(question), err)
		}
		m.Key = m.Key[1:]
		if _, err := parse(m.text()); err == nil {
			t.Error("a key is too short")
		}
	}
	var m message
	if json.Unmarshal([]byte(`{"key":"AA=="}`), &m) != nil || len(m.Key) != 1 {
		t.Error("keys are not read as they are written")
	}
}
