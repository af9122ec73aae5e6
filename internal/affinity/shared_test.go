package affinity

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/apierror"
	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
	"github.com/openai-lb/caddy-openai-lb/modules/replicas"
	"github.com/openai-lb/caddy-openai-lb/state/statetest"
)

// shared is replicas of a pool that share what they know.
type shared struct {
	*testing.T
	hub *statetest.Hub
}

// inTouch runs a test in virtual time.
func inTouch(t *testing.T, test func(*shared)) {
	t.Helper()
	bubble.Test(t, func(t *testing.T) { test(&shared{t, statetest.NewHub()}) })
}

// replica returns what a replica knows whose pool has these accounts.
func (s *shared) replica(accounts ...string) *Affinity {
	s.Helper()
	a := s.config(s.run(), accounts...)
	a.owners = newSavedOwners("a pool") // not that of the other replicas in this process
	a.Start()
	return a
}

// run runs a replica until the end of the test.
func (s *shared) run() *replicas.Replica {
	s.Helper()
	r := replicas.New(s.hub.Store(), zap.NewNop())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	s.Cleanup(func() {
		cancel()
		<-done
	})
	time.Sleep(2 * time.Second)
	return r
}

// config returns what the pool of a config with these accounts knows.
func (s *shared) config(r *replicas.Replica, accounts ...string) *Affinity {
	s.Helper()
	a, err := New(storage(s.T, s.TempDir()), Config{Pool: "a pool", Accounts: accounts, Others: r.NewLink().Owners("a pool", accounts), Logger: zap.NewNop()})
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { _ = a.Close() })
	return a
}

// names is a request that names these ids.
func (a *Affinity) names(caller string, ids ...string) (*Placement, apierror.Error, bool) {
	text := []byte(`{"input":[{"id":"` + strings.Join(ids, `"},{"id":"`) + `"}]}`)
	body := openaiapi.ParseJSON(text, nil)
	return a.Place(&Query{Method: http.MethodPost, Operation: "/responses", Body: &body, Text: text, Caller: caller})
}

func (s *shared) wantFinds(want int) {
	s.Helper()
	if n := s.hub.Finds(); n != want {
		s.Errorf("replicas asked %d times, want %d", n, want)
	}
}

func TestWhatAnotherReplicaLearnedIsLookedUpOnce(t *testing.T) {
	inTouch(t, func(s *shared) {
		one, other := s.replica("a", "b"), s.replica("a", "b")
		one.learn("b", "alice", "resp_12345678", "rs_12345678")
		synctest.Wait()
		for range 3 {
			h, _, refused := other.names("alice", "resp_12345678", "rs_12345678")
			if refused || !h.owns() || h.Asks() || h.Allows("a") || !h.Allows("b") {
				t.Errorf("it has the placement %+v", h)
			}
		}
		s.wantFinds(1)
		one.learn("b", "alice", "resp_12345678")
		other.learn("a", "bob", "resp_23456789")
		synctest.Wait()
		if h, _, _ := one.names("alice", "resp_12345678"); !h.owns() {
			t.Errorf("it has the placement %+v", h)
		}
		body := openaiapi.ParseJSON([]byte(`{"model":"m","input":"resp_34567890"}`), nil)
		other.Place(&Query{Method: http.MethodPost, Operation: "/responses", Body: &body, Caller: "alice"})
		s.wantFinds(1) // for nothing that a replica knows, nor for what names nothing
	})
}

func TestAnothersIDIsNotFoundAtAnyReplica(t *testing.T) {
	inTouch(t, func(s *shared) {
		for _, accounts := range [][]string{{"a", "b"}, {"a"}} {
			one, other := s.replica(accounts...), s.replica(accounts...)
			id := fmt.Sprint("resp_1234567_", len(accounts))
			one.learn("a", "alice", id)
			synctest.Wait()
			for range 2 {
				if _, refusal, refused := other.names("bob", "rs_unknown", id); !refused || refusal.Status != 404 || !strings.Contains(refusal.Message, id) {
					t.Errorf("bob may have it: %+v", refusal)
				}
			}
			if h, _, refused := other.names("alice", id); refused || !h.owns() {
				t.Error("alice may not have it")
			}
		}
		s.wantFinds(2) // who is refused by what the replica knows does not ask
	})
}

func TestAnAccountThatAnotherConfigHasIsFoundByAsking(t *testing.T) {
	inTouch(t, func(s *shared) {
		one, other := s.replica("a", "b", "c"), s.replica("a", "b")
		one.learn("c", "alice", "resp_12345678")
		one.learn("a", "", "resp_23456789")
		synctest.Wait()
		if h, _, refused := other.names("alice", "resp_12345678"); refused || !h.Asks() {
			t.Errorf("it has the placement %+v", h)
		}
		if h, _, refused := other.names("alice", "resp_23456789", "resp_12345678"); refused || !h.Allows("a") || h.Allows("b") {
			t.Errorf("it has the placement %+v", h)
		}
		if _, refusal, refused := other.names("bob", "resp_12345678"); !refused || refusal.Status != 404 {
			t.Errorf("bob may have it: %+v", refusal)
		}
		// found by asking, it is still alice's
		h, _, _ := other.names("alice", "resp_12345678")
		h.Exclude("a")
		h.Served("b", &http.Response{StatusCode: 200})
		if h, _, refused := other.names("alice", "resp_12345678"); refused || !h.owns() || h.Allows("a") {
			t.Errorf("it has the placement %+v", h)
		}
		if _, _, refused := other.names("bob", "resp_12345678"); !refused {
			t.Error("bob may have it")
		}
	})
}

func TestWhatWasFoundByAskingIsShared(t *testing.T) {
	inTouch(t, func(s *shared) {
		one, other := s.replica("a", "b"), s.replica("a", "b")
		h, _, _ := one.names("alice", "resp_12345678")
		if !h.Asks() {
			t.Errorf("it has the placement %+v", h)
		}
		h.Exclude("a")
		h.Served("b", &http.Response{StatusCode: 200})
		synctest.Wait()
		if h, _, refused := other.names("bob", "resp_12345678"); refused || !h.owns() || h.Allows("a") {
			t.Errorf("it has the placement %+v", h)
		}
	})
}

func TestWithoutTheStoreAccountsAreAsked(t *testing.T) {
	for name, fault := range map[string]func(*statetest.Hub){
		"down": func(h *statetest.Hub) { h.Fail(errors.New("down")) },
		"slow": func(h *statetest.Hub) { h.SlowDown(time.Minute) },
	} {
		t.Run(name, func(t *testing.T) {
			inTouch(t, func(s *shared) {
				one, other := s.replica("a", "b"), s.replica("a", "b")
				one.learn("b", "alice", "resp_12345678")
				synctest.Wait()
				fault(s.hub)
				synctest.Wait()
				for i := range 10 {
					began := time.Now()
					if h, _, refused := other.names("alice", "resp_12345678"); refused || !h.Asks() {
						t.Errorf("it has the placement %+v", h)
					}
					if took := time.Since(began); took > replicas.LeastPatience || took > 0 && i > 0 {
						t.Errorf("request %d waited for %v", i, took)
					}
				}
				s.wantFinds(1)
			})
		})
	}
}

func TestWhatNobodyNeedsIsNotShared(t *testing.T) {
	inTouch(t, func(s *shared) {
		one := s.replica("a")
		one.learn("a", "", "resp_12345678")
		one.names("", "resp_unknown")
		synctest.Wait()
		s.wantFinds(0)
		two := s.replica("a", "b")
		for range 1000 {
			two.learn("b", "", "resp_12345678")
		}
		synctest.Wait()
		if n := len(s.hub.Entries()); n != 1 {
			t.Errorf("%d ids are shared, want 1", n)
		}
	})
}

// wantRefused checks that bob may not use alice's response.
func (a *Affinity) wantRefused(t *testing.T, when string) {
	t.Helper()
	if h, _, refused := a.names("bob", "resp_of_alice"); !refused {
		t.Errorf("%s, bob may use alice's response: %+v", when, h)
	}
}

// findByAsking has a caller find the owner of an id by asking the accounts.
func (a *Affinity) findByAsking(t *testing.T, caller, id, account string) {
	t.Helper()
	h, refusal, refused := a.Place(&Query{Method: "GET", Operation: "/responses/" + id, Body: new(openaiapi.Body), Caller: caller})
	if refused {
		t.Fatalf("%s is refused: %+v", caller, refusal)
	}
	res := &http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {"application/json"}}}
	h.Served(account, res)
	h.IDReader(account, res).Watch([]byte(`{"id":"`+id+`"}`), true)
}

// TestMadeUpIDsHideNoOther at a replica that has to look all of them up.
func TestMadeUpIDsHideNoOther(t *testing.T) {
	inTouch(t, func(s *shared) {
		one, other := s.replica("a", "b"), s.replica("a", "b")
		one.learn("b", "alice", "resp_of_alice")
		synctest.Wait()
		ids := make([]string, 1000, 1001)
		for i := range ids {
			ids[i] = fmt.Sprintf("rs_%08d", i)
		}
		if h, _, refused := other.names("bob", append(ids, "resp_of_alice")...); !refused {
			t.Errorf("bob may use alice's response: %+v", h.named[1000])
		}
		s.wantFinds(1)
	})
}

// TestWhatWasFoundWhileTheStoreDidNotAnswerIsLookedUpLater so that a fault
// opens nothing for longer than it lasts.
func TestWhatWasFoundWhileTheStoreDidNotAnswerIsLookedUpLater(t *testing.T) {
	inTouch(t, func(s *shared) {
		one, other := s.replica("a", "b"), s.replica("a", "b")
		one.learn("b", "alice", "resp_of_alice")
		synctest.Wait()
		s.hub.SlowDown(3 * time.Second)
		for range 3 {
			other.findByAsking(t, "bob", "resp_of_alice", "b")
		}
		s.hub.SlowDown(0)
		time.Sleep(time.Second)
		other.wantRefused(t, "after the store has answered")
	})
}

// TestWhatBelongsToNoCallerIsLookedUpAgain because the replica that knows the
// caller may not have been able to write that.
func TestWhatBelongsToNoCallerIsLookedUpAgain(t *testing.T) {
	inTouch(t, func(s *shared) {
		one, other := s.replica("a", "b"), s.replica("a", "b")
		s.hub.FailWrites(errors.New("OOM command not allowed"))
		one.learn("b", "alice", "resp_of_alice")
		synctest.Wait()
		other.findByAsking(t, "bob", "resp_of_alice", "b")
		before := s.hub.Finds()
		other.findByAsking(t, "bob", "resp_of_alice", "b") // looked up once for all
		s.wantFinds(before)
		s.hub.FailWrites(nil)
		time.Sleep(ownership.Unclaimed)
		other.wantRefused(t, "five minutes later")
	})
}

// TestAReloadLosesNoNews of requests that the config before still serves, which
// has left the other replicas.
func TestAReloadLosesNoNews(t *testing.T) {
	inTouch(t, func(s *shared) {
		other := s.replica("a", "b")
		before := s.config(replicas.New(s.hub.Store(), zap.NewNop()), "a", "b") // runs no longer
		h, _, _ := before.Place(&Query{Method: "POST", Operation: "/responses", Body: new(openaiapi.Body), Caller: "alice"})
		after := s.config(s.run(), "a", "b")
		after.Start()
		h.learn("b", openaiapi.ObjectID, []byte("resp_of_alice"))
		synctest.Wait()
		other.wantRefused(t, "after a reload")
	})
}

// TestAnAccountIsRememberedForItsTimeWithoutTheStore although it is not known
// for as long whose the object is.
func TestAnAccountIsRememberedForItsTimeWithoutTheStore(t *testing.T) {
	inTouch(t, func(s *shared) {
		one := s.replica("a", "b")
		one.learn("b", "", "resp_mentioned")
		synctest.Wait()
		one.findByAsking(t, "alice", "resp_12345678", "b")
		for _, fails := range []error{nil, errors.New("down")} {
			s.hub.Fail(fails)
			for _, id := range []string{"resp_mentioned", "resp_12345678"} {
				for range 3 {
					if h, _, refused := one.names("alice", id); refused || !h.owns() || h.Allows("a") {
						t.Errorf("%s has the placement %+v", id, h)
					}
					time.Sleep(ownership.Unclaimed)
				}
			}
		}
	})
}

// TestWhatAReplyMentionsIsLookedUpBeforeItIsUsed because it may be another's.
func TestWhatAReplyMentionsIsLookedUpBeforeItIsUsed(t *testing.T) {
	inTouch(t, func(s *shared) {
		one, other := s.replica("a", "b"), s.replica("a", "b")
		one.learn("b", "alice", "resp_of_alice")
		synctest.Wait()
		h, _, _ := other.Place(&Query{Method: "GET", Operation: "/files", Body: new(openaiapi.Body), Caller: "bob"})
		h.learn("b", openaiapi.ObjectID, []byte("resp_of_alice"))
		h.learn("b", openaiapi.ObjectID, []byte("file_of_nobody"))
		other.wantRefused(t, "after a list")
		for range 3 {
			if h, _, refused := other.names("bob", "file_of_nobody"); refused || h.Asks() || h.Allows("a") {
				t.Errorf("it has the placement %+v", h)
			}
		}
		s.wantFinds(2)
	})
}

// TestACallerIsRefusedWhoseLookupsCannotBeMadeInTime because otherwise it could
// choose not to be refused.
func TestACallerIsRefusedWhoseLookupsCannotBeMadeInTime(t *testing.T) {
	inTouch(t, func(s *shared) {
		one, other := s.replica("a", "b"), s.replica("a", "b")
		one.learn("b", "alice", "resp_of_alice")
		synctest.Wait()
		s.hub.SlowDown(replicas.LeastPatience - 1)
		var all sync.WaitGroup
		for range 100 {
			all.Go(func() {
				switch _, refusal, refused := other.names("bob", "resp_of_alice"); {
				case !refused:
					t.Error("bob may use alice's response")
				case refusal.Status != 404 && refusal != apierror.OwnersUnknown:
					t.Errorf("bob got %+v", refusal)
				}
			})
		}
		all.Wait()
	})
}

// strict has the replicas let callers reach only what they made.
func strict(all ...*Affinity) {
	for _, a := range all {
		a.strict = true
	}
}

func TestAStrictPoolKnowsWhatOtherReplicasLearned(t *testing.T) {
	inTouch(t, func(s *shared) {
		for _, accounts := range [][]string{{"a", "b"}, {"a"}} {
			one, other := s.replica(accounts...), s.replica(accounts...)
			strict(one, other)
			one.learn("a", "alice", "resp_of_alice", "rs_of_alice")
			one.learn("a", "", "resp_of_nobody")
			synctest.Wait()
			for range 2 {
				other.wantRefused(t, "with the store")
				if _, refusal, refused := other.names("alice", "resp_of_nobody"); !refused || refusal.Status != 404 {
					t.Errorf("alice may use what belongs to nobody: %+v", refusal)
				}
				if h, refusal, refused := other.names("alice", "resp_of_alice", "rs_of_alice"); refused || !h.Allows("a") {
					t.Errorf("alice may not use her response: %+v", refusal)
				}
			}
		}
	})
}

func TestAStrictPoolRefusesWhatItCannotLookUp(t *testing.T) {
	for name, fault := range map[string]func(*statetest.Hub){
		"down": func(h *statetest.Hub) { h.Fail(errors.New("down")) },
		"slow": func(h *statetest.Hub) { h.SlowDown(time.Minute) },
	} {
		t.Run(name, func(t *testing.T) {
			inTouch(t, func(s *shared) {
				one, other := s.replica("a", "b"), s.replica("a", "b")
				strict(one, other)
				one.learn("b", "alice", "resp_of_alice")
				synctest.Wait()
				fault(s.hub)
				for range 3 {
					for _, caller := range []string{"alice", "bob"} {
						if _, refusal, refused := other.names(caller, "resp_of_alice"); !refused || refusal != apierror.OwnersUnknown {
							t.Errorf("%s got %+v", caller, refusal)
						}
					}
				}
				if h, refusal, refused := one.names("alice", "resp_of_alice"); refused || !h.Allows("b") {
					t.Errorf("alice may not use what the replica knows: %+v", refusal)
				}
				one.wantRefused(t, "at the replica that knows it")
				s.hub.Fail(nil)
				s.hub.SlowDown(0)
				time.Sleep(2 * time.Second)
				if _, refusal, refused := other.names("alice", "resp_of_alice"); refused {
					t.Errorf("afterwards, alice got %+v", refusal)
				}
				other.wantRefused(t, "afterwards")
			})
		})
	}
}

// TestAStrictPoolForgetsNoRefusal has an id become alice's after it was looked
// up.
func TestAStrictPoolForgetsNoRefusal(t *testing.T) {
	inTouch(t, func(s *shared) {
		one, other := s.replica("a", "b"), s.replica("a", "b")
		strict(one, other)
		if _, refusal, refused := other.names("alice", "resp_of_alice"); !refused || refusal.Status != 404 {
			t.Errorf("alice got %+v", refusal)
		}
		one.learn("b", "alice", "resp_of_alice")
		synctest.Wait()
		if _, refusal, refused := other.names("alice", "resp_of_alice"); refused {
			t.Errorf("alice got %+v", refusal)
		}
	})
}
