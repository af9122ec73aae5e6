package oidc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-jose/go-jose/v4"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
)

// wire answers in the place of an issuer, in memory.
type wire struct {
	mu      sync.Mutex
	keys    []signer
	err     error
	delay   time.Duration
	fetches atomic.Int64
}

func (w *wire) set(err error, keys ...signer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err, w.keys = err, keys
}

const wiredIssuer = "https://issuer.example"

// RoundTrip implements http.RoundTripper.
func (w *wire) RoundTrip(r *http.Request) (*http.Response, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case <-time.After(w.delay):
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	if w.err != nil {
		return nil, w.err
	}
	text := []byte(fmt.Sprintf(`{"issuer":%q,"jwks_uri":"%s/keys"}`, wiredIssuer, wiredIssuer))
	if r.URL.Path == "/keys" {
		w.fetches.Add(1)
		var set jose.JSONWebKeySet
		for _, k := range w.keys {
			set.Keys = append(set.Keys, jose.JSONWebKey{Key: k.key.Public(), KeyID: k.kid})
		}
		text, _ = json.Marshal(set)
	}
	return &http.Response{StatusCode: http.StatusOK, Header: make(http.Header), Body: io.NopCloser(bytes.NewReader(text))}, nil
}

// wired runs a test in virtual time with a module and its issuer, which has
// fetched its keys if it could.
func wired(t *testing.T, w *wire, test func(t *testing.T, o *Identity, logs *observer.ObservedLogs)) {
	t.Helper()
	bubble.Test(t, func(t *testing.T) {
		core, logs := observer.New(zapcore.DebugLevel)
		i := newIssuer(wiredIssuer)
		i.client.Transport = w
		o := &Identity{Issuer: wiredIssuer, Audience: audience, Caller: "azp", issuer: i, logger: zap.New(core)}
		i.start(o.logger)
		defer func() {
			if err := i.Destruct(); err != nil {
				t.Error(err)
			}
		}()
		synctest.Wait()
		test(t, o, logs)
	})
}

func tokenBy(t *testing.T, by signer, changed with) string {
	return sign(t, by.alg, by.kid, by.key, claimsOf(wiredIssuer, changed))
}

func (o *Identity) want(t *testing.T, token string, want error) {
	t.Helper()
	if _, err := o.Identify(t.Context(), token); !errors.Is(err, want) {
		t.Errorf("the error is %v, want %v", err, want)
	}
}

func TestARotatedKeyIsFetchedWhenATokenNamesIt(t *testing.T) {
	w := &wire{keys: []signer{firstKey()}}
	wired(t, w, func(t *testing.T, o *Identity, _ *observer.ObservedLogs) {
		old := tokenBy(t, firstKey(), nil)
		o.want(t, old, nil)
		w.set(nil, firstKey(), nextKey())
		time.Sleep(demandInterval)
		o.want(t, tokenBy(t, nextKey(), nil), nil)
		o.want(t, old, nil)
		if n := w.fetches.Load(); n != 2 {
			t.Errorf("the keys were fetched %d times, want 2", n)
		}
		w.set(nil, nextKey()) // the old key is gone, and so are its tokens
		time.Sleep(refreshInterval + time.Second)
		o.want(t, tokenBy(t, nextKey(), nil), nil)
		o.want(t, tokenBy(t, firstKey(), nil), errUnknown)
	})
}

func TestATokenOfAKeyThatIsGoneIsNotRemembered(t *testing.T) {
	w := &wire{keys: []signer{firstKey()}}
	wired(t, w, func(t *testing.T, o *Identity, _ *observer.ObservedLogs) {
		token := tokenBy(t, firstKey(), with{"exp": time.Now().Add(24 * time.Hour).Unix()})
		o.want(t, token, nil)
		w.set(nil, nextKey())
		time.Sleep(refreshInterval + time.Second)
		o.want(t, token, errUnknown)
	})
}

func TestAFloodOfUnknownKeysHardlyReachesTheIssuer(t *testing.T) {
	w := &wire{keys: []signer{firstKey()}, delay: time.Second}
	wired(t, w, func(t *testing.T, o *Identity, _ *observer.ObservedLogs) {
		time.Sleep(4 * time.Second)
		good := tokenBy(t, firstKey(), nil)
		o.want(t, good, nil)
		began, before := time.Now(), w.fetches.Load()
		var flood sync.WaitGroup
		for n := range 600 {
			token := tokenBy(t, signer{fmt.Sprint("kid-", n), jose.ES256, ecKey()}, nil)
			flood.Go(func() {
				if _, err := o.Identify(t.Context(), token); !errors.Is(err, errUnknown) {
					t.Errorf("the error is %v", err)
				}
			})
			at := time.Now()
			o.want(t, good, nil)
			if took := time.Since(at); took != 0 {
				t.Errorf("a good token waited for %s", took)
			}
			time.Sleep(100 * time.Millisecond)
		}
		flood.Wait()
		if n, most := w.fetches.Load()-before, int64(time.Since(began)/demandInterval)+1; n > most || n < 2 {
			t.Errorf("the keys were fetched %d times in %s, want %d at most", n, time.Since(began), most)
		}
	})
}

func TestKnownKeysVerifyWhileTheIssuerIsDown(t *testing.T) {
	w := &wire{keys: []signer{firstKey()}}
	wired(t, w, func(t *testing.T, o *Identity, logs *observer.ObservedLogs) {
		w.set(errors.New("connection refused"))
		time.Sleep(72 * time.Hour)
		o.want(t, tokenBy(t, firstKey(), nil), nil)
		o.want(t, tokenBy(t, nextKey(), nil), keys.ErrIssuerUnavailable) // it may be a new one
		if logs.FilterMessage("could not fetch the issuer's keys, keeping the previous ones").Len() < 70*60 {
			t.Error("it was not tried every minute")
		}
		w.set(nil, nextKey())
		time.Sleep(lastRetry)
		o.want(t, tokenBy(t, nextKey(), nil), nil)
	})
}

func TestWithoutKeysATokenWaitsForThemForAShortTime(t *testing.T) {
	w := &wire{keys: []signer{firstKey()}, delay: time.Second}
	wired(t, w, func(t *testing.T, o *Identity, _ *observer.ObservedLogs) {
		began := time.Now()
		o.want(t, tokenBy(t, firstKey(), nil), nil)
		if took := time.Since(began); took != 2*time.Second { // two requests
			t.Errorf("it took %s", took)
		}
	})
	w = &wire{keys: []signer{firstKey()}, delay: time.Hour} // it hangs
	wired(t, w, func(t *testing.T, o *Identity, logs *observer.ObservedLogs) {
		began := time.Now()
		o.want(t, tokenBy(t, firstKey(), nil), keys.ErrIssuerUnavailable)
		if took := time.Since(began); took != patience {
			t.Errorf("it took %s", took)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := o.Identify(ctx, tokenBy(t, firstKey(), nil)); !errors.Is(err, keys.ErrIssuerUnavailable) || time.Since(began) != patience+time.Second {
			t.Errorf("the error is %v, after %s", err, time.Since(began))
		}
		time.Sleep(fetchTimeout)
		if logs.FilterMessage("could not fetch the issuer's keys").Len() == 0 {
			t.Error("a fetch has no time limit")
		}
	})
}

func TestARememberedTokenExpires(t *testing.T) {
	w := &wire{keys: []signer{firstKey()}}
	wired(t, w, func(t *testing.T, o *Identity, _ *observer.ObservedLogs) {
		token := tokenBy(t, firstKey(), with{"exp": time.Now().Add(time.Minute).Unix()})
		o.want(t, token, nil)
		time.Sleep(time.Minute + skew - time.Second)
		o.want(t, token, nil)
		time.Sleep(time.Second)
		o.want(t, token, keys.ErrExpired)
	})
}

func TestOnlySomeTokensAreRemembered(t *testing.T) {
	var c cache
	var first [32]byte
	c.add(first, new(verified))
	for n := range 3 * maxVerified {
		digest := [32]byte{1, byte(n), byte(n >> 8), byte(n >> 16)}
		c.add(digest, new(verified))
		if _, ok := c.get(first); !ok { // it is used
			t.Fatalf("a token in use was forgotten after %d others", n)
		}
		if size := len(c.new) + len(c.older); size > maxVerified {
			t.Fatalf("%d tokens are remembered", size)
		}
	}
}

func TestARememberedTokenCostsOneAllocation(t *testing.T) {
	w := &wire{keys: []signer{firstKey()}}
	wired(t, w, func(t *testing.T, o *Identity, _ *observer.ObservedLogs) {
		token := tokenBy(t, firstKey(), with{"roles": strings.Repeat("x", 1000)})
		o.want(t, token, nil)
		if n := testing.AllocsPerRun(100, func() { _, _ = o.Identify(t.Context(), token) }); n > 1 { // its bytes, for the digest
			t.Errorf("%v allocations", n)
		}
	})
}

func BenchmarkIdentify(b *testing.B) {
	f := newFakeIssuer(b, firstKey())
	i := newIssuer(f.URL)
	i.start(zap.NewNop())
	o := &Identity{Issuer: f.URL, Audience: audience, Caller: "azp", issuer: i, logger: zap.NewNop()}
	token := f.token(b, firstKey(), nil)
	defer func() { _ = i.Destruct() }()
	for name, remembers := range map[string]bool{"first": false, "remembered": true} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if !remembers {
					o.verified = cache{}
				}
				if _, err := o.Identify(b.Context(), token); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func TestAKeyThatReplacesAnotherOfItsNameIsFetched(t *testing.T) {
	w := &wire{keys: []signer{firstKey()}}
	wired(t, w, func(t *testing.T, o *Identity, _ *observer.ObservedLogs) {
		again := signer{firstKey().kid, nextKey().alg, nextKey().key}
		w.set(nil, again)
		time.Sleep(demandInterval)
		token := tokenBy(t, again, nil)
		o.want(t, token, errSignature) // it does not wait, because strangers can send such a token
		synctest.Wait()
		o.want(t, token, nil)
	})
}

func TestAnIssuerThatIsLeftIsNoFailure(t *testing.T) {
	w := &wire{keys: []signer{firstKey()}}
	wired(t, w, func(t *testing.T, o *Identity, logs *observer.ObservedLogs) {
		w.mu.Lock()
		w.delay = 5 * time.Second
		w.mu.Unlock()
		time.Sleep(refreshInterval + time.Second)
		if err := o.issuer.Destruct(); err != nil {
			t.Error(err)
		}
		if n := logs.FilterLevelExact(zapcore.WarnLevel).Len() + logs.FilterLevelExact(zapcore.ErrorLevel).Len(); n != 0 {
			t.Errorf("logged %v", logs.All())
		}
	})
}
