package affinity

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"maps"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/openaiapi"
	"github.com/openai-lb/caddy-openai-lb/internal/ownership"
)

// shelf is a storage whose reads fail or hang, and whose writes fail, while a
// test wants them to.
type shelf struct {
	certmagic.Storage
	mu    sync.Mutex
	files map[string][]byte
	fails error
	takes time.Duration
	reads int
	full  error // what writes fail with
}

func (s *shelf) Load(ctx context.Context, key string) ([]byte, error) {
	s.mu.Lock()
	s.reads++
	takes, fails := s.takes, s.fails
	s.mu.Unlock()
	select {
	case <-time.After(takes):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if fails != nil {
		return nil, fails
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	data, ok := s.files[key]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return bytes.Clone(data), nil
}

func (s *shelf) Store(_ context.Context, key string, data []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.full != nil {
		return s.full
	}
	s.files[key] = bytes.Clone(data)
	return nil
}

// set changes how the storage behaves from now on.
func (s *shelf) set(fails error, takes time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fails, s.takes = fails, takes
}

// on returns what is known by a balancer that has just started with this
// storage.
func (s *shelf) on(t *testing.T, logger *zap.Logger) *Affinity {
	t.Helper()
	a := open(t, storage(t, t.TempDir()), zap.NewNop())
	a.owners.configure(s, logger)
	return a
}

const savedKey = "openai_lb/ids_a%20pool"

func (a *Affinity) knows(caller, id string) bool {
	h, _, refused := a.Place(&Query{Method: "GET", Operation: "/responses/" + id, Body: new(openaiapi.Body), Caller: caller})
	return h.owns() && !refused
}

func TestIDsAreSavedInTheStorageOfTheNewestConfig(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		before, after := &shelf{files: make(map[string][]byte)}, &shelf{files: make(map[string][]byte)}
		a := before.on(t, zap.NewNop())
		a.learn("b", "alice", "resp_11111111")
		a.owners.save()
		a.owners.configure(after, zap.NewNop())
		_ = a.Close()
		if a = after.on(t, zap.NewNop()); !a.knows("alice", "resp_11111111") {
			t.Error("after a restart, the new storage has no ids")
		}
		_ = a.Close()
	})
}

func TestNothingIsSavedBeforeWhatWasSavedIsRead(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		s := &shelf{files: make(map[string][]byte)}
		core, logs := observer.New(zapcore.ErrorLevel)
		a := s.on(t, zap.New(core))
		a.learn("a", "alice", "resp_11111111", "resp_22222222")
		_ = a.Close()
		before := bytes.Clone(s.files[savedKey])

		s.set(errors.New("no route to host"), 0)
		a = s.on(t, zap.New(core))
		a.learn("b", "alice", "resp_33333333")
		a.learn("a", "", "resp_22222222") // found by asking
		for range 3 {
			time.Sleep(saveInterval)
			a.learn("b", "alice", "resp_33333333")
			synctest.Wait()
		}
		if !bytes.Equal(s.files[savedKey], before) {
			t.Fatal("what could not be read was written over")
		}
		if n := logs.FilterMessage("could not read saved ids").Len(); n != 1 {
			t.Errorf("%d lines are logged about it, want one", n)
		}

		s.set(nil, 0)
		time.Sleep(time.Minute)
		for range 2 { // the first request has it read
			a.knows("alice", "resp_11111111")
			synctest.Wait()
		}
		for _, id := range []string{"resp_11111111", "resp_22222222", "resp_33333333"} {
			if !a.knows("alice", id) || a.knows("bob", id) {
				t.Errorf("%s is not alice's", id)
			}
		}
		_ = a.Close()
		a = s.on(t, zap.New(core))
		if !a.knows("alice", "resp_11111111") || !a.knows("alice", "resp_33333333") {
			t.Error("not all ids were saved")
		}
		_ = a.Close()
	})
}

// TestAStorageThatCannotBeWrittenIsLoggedOnce, as that of a container with a
// read-only file system, until it works again.
func TestAStorageThatCannotBeWrittenIsLoggedOnce(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		s := &shelf{files: make(map[string][]byte)}
		core, logs := observer.New(zapcore.ErrorLevel)
		a := s.on(t, zap.New(core))
		a.learn("a", "alice", "resp_00000000")
		a.owners.save()
		saves := func(fails error, ids ...string) {
			s.full = fails
			for _, id := range ids {
				a.learn("a", "alice", id)
				a.owners.save()
			}
		}
		readOnly := errors.New("read-only file system")
		saves(readOnly, "resp_11111111", "resp_22222222", "resp_33333333")
		saves(nil, "resp_44444444")
		saves(readOnly, "resp_55555555", "resp_66666666")
		if n := logs.FilterMessage("could not save ids").Len(); n != 2 {
			t.Errorf("logged %d times, want once for each of two times: %v", n, logs.All())
		}
		_ = a.Close()
	})
}

func TestAnEndWithoutAReadSavesNothing(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		s := &shelf{files: map[string][]byte{savedKey: []byte("something")}, fails: errors.New("no route to host")}
		core, logs := observer.New(zapcore.ErrorLevel)
		a := s.on(t, zap.New(core))
		a.learn("a", "", "resp_11111111")
		if a.Close(); string(s.files[savedKey]) != "something" || logs.FilterMessage("could not save ids").Len() != 1 {
			t.Errorf("%q is stored, %v is logged", s.files, logs.All())
		}
		// a storage that works by then is used
		delete(s.files, savedKey)
		a = s.on(t, zap.New(core))
		a.learn("a", "", "resp_11111111")
		s.set(nil, 0)
		if a.Close(); len(s.files) != 1 {
			t.Errorf("%q is stored", s.files)
		}
	})
}

func TestRequestsWaitAShortTimeForAHangingStorage(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		s := &shelf{files: make(map[string][]byte), takes: time.Hour}
		a := s.on(t, zap.NewNop())
		begin := time.Now()
		var waited []time.Duration
		for range 200 {
			before := time.Now()
			a.learn("a", "", "resp_11111111")
			waited = append(waited, time.Since(before))
			time.Sleep(time.Second)
		}
		if total := time.Since(begin) - 200*time.Second; total > 5*time.Second || slices.Max(waited[1:]) > 0 {
			t.Errorf("requests waited %v", waited)
		}
		synctest.Wait()
		if s.reads < 2 || s.reads > 20 {
			t.Errorf("it was read %d times", s.reads)
		}
		s.set(nil, 0)
		time.Sleep(time.Minute) // the last read has ended by then
		_ = a.Close()
		if len(s.files) != 1 {
			t.Error("nothing is saved at the end")
		}
	})
}

func TestACallerIsToComeBackWhileWhatWasSavedIsNotRead(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		s := &shelf{files: make(map[string][]byte)}
		a := s.on(t, zap.NewNop())
		a.learn("a", "alice", "resp_11111111")
		_ = a.Close()
		for name, fault := range map[string]func(){
			"it fails": func() { s.set(errors.New("no route to host"), 0) },
			"it hangs": func() { s.set(nil, 20*time.Second) },
		} {
			fault()
			a = s.on(t, zap.NewNop())
			a.strict = true
			a.learn("a", "alice", "resp_33333333")
			status := func(caller, id string) int {
				_, refusal, _ := a.Place(&Query{Method: "GET", Operation: "/responses/" + id, Body: new(openaiapi.Body), Caller: caller})
				return refusal.Status
			}
			want := func(when string, statuses map[string]int) {
				for asks, want := range statuses {
					caller, id, _ := strings.Cut(asks, " ")
					if got := status(caller, id); got != want {
						t.Errorf("%s, %s: %s gets %d, want %d", name, when, asks, got, want)
					}
				}
			}
			want("before it is read", map[string]int{"alice resp_11111111": 503, "bob resp_11111111": 503, "alice resp_33333333": 0, "bob resp_33333333": 404})
			s.set(nil, 0)
			time.Sleep(time.Minute)
			status("alice", "resp_11111111") // has it read
			synctest.Wait()
			want("after it was read", map[string]int{"alice resp_11111111": 0, "bob resp_11111111": 404, "alice resp_33333333": 0, "alice resp_44444444": 404})
			_ = a.Close()
		}
	})
}

func TestIDsThatCannotBeReadAreKeptAside(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		s := &shelf{files: map[string][]byte{savedKey: []byte("openai_lb ids 1\nof an older version")}}
		core, logs := observer.New(zapcore.ErrorLevel)
		for range 2 {
			a := s.on(t, zap.New(core))
			a.learn("a", "", "resp_12345678")
			if !a.knows("", "resp_12345678") {
				t.Error("what is learned since is not known")
			}
			_ = a.Close()
			time.Sleep(time.Minute)
		}
		var aside []string
		for key, data := range s.files {
			if strings.Contains(string(data), "of an older version") {
				aside = append(aside, key)
			}
		}
		if len(aside) != 1 || aside[0] == savedKey || !strings.HasPrefix(aside[0], savedKey) || len(s.files) != 2 {
			t.Fatalf("stored is %q", slices.Sorted(maps.Keys(s.files)))
		}
		lines := logs.FilterMessage("could not read saved ids").All()
		if len(lines) != 1 || lines[0].ContextMap()["kept_as"] != aside[0] {
			t.Errorf("logged is %v", logs.All())
		}
	})
}

func TestAccountsAreNotSavedInClearText(t *testing.T) {
	s := &shelf{files: make(map[string][]byte)}
	named := openaiapi.AccountOf("contoso-finance", &url.URL{Host: "api.openai.com"}, "0123456789")
	byHost := openaiapi.AccountOf("", &url.URL{Host: "contoso-east.openai.azure.com"}, "")
	byKey := openaiapi.AccountOf("", &url.URL{Host: "gateway.contoso.example"}, "0123456789")
	for range 2 {
		a := s.on(t, zap.NewNop())
		a.accounts = []string{named, byHost, byKey}
		for i, account := range a.accounts {
			id := "resp_1234567" + string(rune('0'+i))
			if h := a.of(t, "", id); h.owns() && !h.Allows(account) {
				t.Errorf("%s is elsewhere after a restart", id)
			}
			a.learn(account, "", id)
		}
		_ = a.Close()
	}
	for _, text := range []string{"contoso", "openai.com", "0123456789"} {
		if len(s.files) != 1 || bytes.Contains(s.files[savedKey], []byte(text)) {
			t.Errorf("%q is in what is saved: %q", text, s.files)
		}
	}
}

// slowStorage has a write wait.
type slowStorage struct {
	certmagic.Storage
	begun, end chan struct{}
}

func (s *slowStorage) Store(ctx context.Context, key string, text []byte) error {
	s.begun <- struct{}{}
	<-s.end
	return s.Storage.Store(ctx, key, text)
}

func TestASaveUnderWayIsNotThatOfTheNextStorage(t *testing.T) {
	o := newSavedOwners("main")
	slow := &slowStorage{&certmagic.FileStorage{Path: t.TempDir()}, make(chan struct{}), make(chan struct{})}
	o.configure(slow, zap.NewNop())
	o.memory.Put(ownership.Key{1}, ownership.Owner{}, time.Now(), time.Hour)
	saved := make(chan struct{})
	go func() { o.save(); close(saved) }()
	<-slow.begun
	next := &certmagic.FileStorage{Path: t.TempDir()}
	o.configure(next, zap.NewNop())
	close(slow.end)
	<-saved
	if o.save(); !next.Exists(t.Context(), o.key) {
		t.Error("the next storage has no ids")
	}
	o.saver.Close()
}
