package azure

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"

	openailb "github.com/openai-lb/caddy-openai-lb"
)

func TestTheFirstTokenIsRequestedOnceForAllWhoWait(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeSource) {
		f.delay = 2 * time.Second
		var users sync.WaitGroup
		for range 50 {
			users.Go(func() { f.wantTokenAfter("token-1", 2*time.Second) })
		}
		users.Wait()
		f.wantToken("token-1")
		f.wantAsked(1)
		f.wantLogged("info", "token renewed", 1)
	})
}

func TestNobodyWaitsWhileATokenIsValid(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeSource) {
		f.wantToken("token-1")
		time.Sleep(55*time.Minute - 1)
		f.wantToken("token-1")
		f.wantAsked(1)

		f.delay = 20 * time.Second
		time.Sleep(time.Nanosecond)
		for range 50 {
			f.wantToken("token-1")
		}
		time.Sleep(20*time.Second - 1)
		f.wantToken("token-1")
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		f.wantToken("token-2")
		f.wantAsked(2)
		if r := f.requests[1]; r.previous != "token-1" || r.refused {
			t.Errorf("the second request was %+v", r)
		}
		f.wantLogged("debug", "token renewed", 1)
	})
}

func TestATokenIsReplacedWhenItSaysSo(t *testing.T) {
	for name, tc := range map[string]struct{ life, refreshIn, want time.Duration }{
		"at its own time":                     {24 * time.Hour, 12 * time.Hour, 12 * time.Hour},
		"after a day, though it has no end":   {math.MaxInt64, 0, 24 * time.Hour},
		"five minutes before its end":         {time.Hour, 0, 55 * time.Minute},
		"in time though it says later":        {time.Hour, 59 * time.Minute, 55 * time.Minute},
		"a short one in its last fifth":       {100 * time.Second, 0, 80 * time.Second},
		"not at once, though it says so":      {time.Hour, time.Millisecond, minRefreshInterval},
		"what was due when it came":           {4 * time.Minute, -time.Hour, 4 * time.Minute * 4 / 5},
		"a very short one not before its end": {5 * time.Second, 0, 5 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, f *fakeSource) {
				f.life = tc.life
				f.shape = func(token *azcore.AccessToken) {
					if tc.refreshIn != 0 {
						token.RefreshOn = time.Now().Add(tc.refreshIn)
					}
				}
				f.wantToken("token-1")
				time.Sleep(tc.want - 1)
				f.wantToken("token-1")
				f.wantAsked(1)
				time.Sleep(time.Nanosecond)
				f.credential(t.Context())
				f.wantAsked(2)
			})
		})
	}
}

func TestAFailedRefreshIsTriedAgainWithCareWhileTheTokenServes(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeSource) {
		f.wantToken("token-1")
		f.err = errors.New("the endpoint is down")
		time.Sleep(55 * time.Minute)
		begin := time.Now()
		for time.Since(begin) < 5*time.Minute {
			f.wantToken("token-1")
			time.Sleep(100 * time.Millisecond)
		}
		// after 0, 2, 6, 14, 30, 62, 122, 182 and 242 s
		f.wantAsked(1 + 9)
		f.wantLogged("warn", "could not renew token, keeping the current one", 9)
		f.wantLogged("error", "could not get a token", 0)

		f.wantError("the endpoint is down", 0)
		f.wantAsked(1 + 10)
		f.wantLogged("error", "could not get a token", 1)
		for range 100 {
			f.wantError("the endpoint is down", 0)
		}
		f.wantAsked(1 + 10)

		f.err = nil
		time.Sleep(maxBackoff)
		f.wantToken("token-12")
		f.wantLogged("info", "token renewed", 2)
	})
}

// TestAClockThatIsSetBackKeepsNoTokenAway such as one that was hours ahead when
// Caddy started, so that the received token seemed to have expired.
func TestAClockThatIsSetBackKeepsNoTokenAway(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeSource) {
		f.life = -time.Hour
		f.wantError("check the clock", 0)
		now := time.Now()
		if f.refresh(now) != nil || f.refresh(now.Add(-time.Second)) != nil || f.replace(now.Add(-time.Second)) != nil {
			t.Error("a request immediately after a failure")
		}
		f.life = time.Hour
		if f.refresh(now.Add(-2*time.Hour)) == nil {
			t.Fatal("no request before the clock shows the time of the failure again")
		}
		synctest.Wait()
		f.wantToken("token-2")

		f.err = errors.New("the endpoint is down")
		time.Sleep(55 * time.Minute)
		f.wantToken("token-2")
		f.wantAsked(3)
		if f.replace(time.Now()) != nil || f.replace(time.Now().Add(-2*time.Minute)) == nil {
			t.Error("a refused token is renewed too soon, or not before the clock shows the time of the failure again")
		}
	})
}

func TestAnEndpointThatAsksForATimeGetsIt(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeSource) {
		f.err = &failure{message: "429 Too Many Requests", retryAfter: 17 * time.Second}
		f.wantError("429", 0)
		time.Sleep(17*time.Second - 1)
		f.wantError("429", 0)
		f.wantAsked(1)
		time.Sleep(time.Nanosecond)
		f.err = nil
		f.wantToken("token-2")
	})
}

func TestNobodyWaitsLongForAnEndpointThatHangs(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeSource) {
		f.delay = time.Hour
		f.wantError("no token within 5s", maxWait)
		f.wantError("no token within 5s", 0) // who comes later does not begin anew
		f.wantAsked(1)

		// a user who leaves is not kept
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := f.credential(ctx); err == nil {
			t.Error("a user who left got a token")
		}

		// the request ends as well, and the next one is another user's
		time.Sleep(requestTimeout - maxWait)
		synctest.Wait()
		f.wantError("deadline exceeded", 0)
		f.wantAsked(1)
		f.delay = 0
		time.Sleep(minBackoff)
		f.wantToken("token-2")
	})
}

func TestASlowAnswerServesThoseWhoComeLater(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeSource) {
		f.delay = 12 * time.Second
		f.wantError("no token within 5s", maxWait)
		time.Sleep(7 * time.Second)
		synctest.Wait()
		f.wantToken("token-1")
		f.wantAsked(1)
	})
}

func TestAnExpiredTokenIsWaitedFor(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeSource) {
		f.wantToken("token-1")
		time.Sleep(2 * time.Hour)
		f.delay = time.Second
		var users sync.WaitGroup
		for range 50 {
			users.Go(func() { f.wantTokenAfter("token-2", time.Second) })
		}
		users.Wait()
		f.wantAsked(2)
	})
}

func TestARefusedTokenIsRenewedOnceForAll(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeSource) {
		f.wantToken("token-1")
		time.Sleep(renewInterval)
		f.delay = time.Second
		var users sync.WaitGroup
		for range 50 {
			users.Go(func() {
				if c, err := f.renew(t.Context(), bearer("token-1")); err != nil || c != bearer("token-2") {
					t.Errorf("got %v, %v, want token-2", c, err)
				}
			})
		}
		users.Wait()
		f.wantAsked(2)
		if r := f.requests[1]; r.previous != "token-1" || !r.refused {
			t.Errorf("the second request was %+v", r)
		}

		// a refusal that comes late is that of the token before
		if c, err := f.renew(t.Context(), bearer("token-1")); err != nil || c != bearer("token-2") {
			t.Errorf("got %v, %v, want token-2", c, err)
		}
		f.wantAsked(2)
		f.wantLogged("info", "token renewed", 2)
	})
}

func TestARefusedTokenIsNotRenewedForEachRequest(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeSource) {
		var last openailb.Credential
		for range 600 { // ten minutes of a backend that refuses whatever it gets
			c, err := f.credential(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if last, err = f.renew(t.Context(), c); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
		}
		f.wantAsked(1 + 19) // each 30 s after the one before
		f.wantToken(last.Secret)
	})
}

func TestTheSameTokenAgainIsNoRenewal(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeSource) {
		end := time.Now().Add(time.Hour)
		f.shape = func(token *azcore.AccessToken) { token.Token, token.ExpiresOn = "always", end }
		f.wantToken("always")
		time.Sleep(renewInterval)
		for range 100 {
			if c, err := f.renew(t.Context(), bearer("always")); err != nil || c != bearer("always") {
				t.Errorf("got %v, %v", c, err)
			}
		}
		f.wantAsked(2)
		f.wantLogged("warn", "could not renew token: there is no newer one yet", 1)

		// refreshes that bring nothing new: after 55, 59, 59.8 and 59.97
		// minutes
		for time.Until(end) > 0 {
			f.wantToken("always")
			time.Sleep(time.Second)
		}
		f.wantAsked(2 + 4)
	})
}

func TestARenewalThatFailsLeavesTheTokenToOtherBackends(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeSource) {
		f.wantToken("token-1")
		time.Sleep(renewInterval)
		f.err = errors.New("the endpoint is down")
		for range 100 {
			if c, _ := f.renew(t.Context(), bearer("token-1")); c != bearer("token-1") {
				t.Errorf("got %v, want token-1", c)
			}
		}
		f.wantAsked(2)
		f.wantToken("token-1")

		f.err, f.delay = nil, time.Hour
		time.Sleep(minBackoff)
		before := time.Now()
		if c, err := f.renew(t.Context(), bearer("token-1")); err != errSlow || c != bearer("token-1") {
			t.Errorf("got %v, %v, want token-1", c, err)
		}
		if waited := time.Since(before); waited != maxWait {
			t.Errorf("waited for %s", waited)
		}
	})
}

func TestATokenThatIsNoneIsAFailure(t *testing.T) {
	for name, tc := range map[string]struct {
		token azcore.AccessToken
		want  string
	}{
		"empty":       {azcore.AccessToken{ExpiresOn: time.Now().Add(1e6 * time.Hour)}, "is empty"},
		"two lines":   {azcore.AccessToken{Token: "a\nb", ExpiresOn: time.Now().Add(1e6 * time.Hour)}, "white space"},
		"too long":    {azcore.AccessToken{Token: strings.Repeat("a", maxToken+1), ExpiresOn: time.Now().Add(1e6 * time.Hour)}, "65537 bytes"},
		"of the past": {azcore.AccessToken{Token: "a", ExpiresOn: time.Unix(1, 0)}, "check the clock"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, f *fakeSource) {
				f.shape = func(token *azcore.AccessToken) { *token = tc.token }
				f.wantError(tc.want, 0)
				f.wantError(tc.want, 0)
				f.wantAsked(1)
			})
		})
	}
}

func TestClosingEndsTheRequestThatIsUnderWay(t *testing.T) {
	inBubble(t, func(t *testing.T, f *fakeSource) {
		f.wantToken("token-1")
		f.delay, f.linger = time.Hour, time.Second
		time.Sleep(55 * time.Minute)
		f.wantToken("token-1")
		f.wantAsked(2)
		before := time.Now()
		f.close()
		if waited := time.Since(before); waited != time.Second {
			t.Errorf("closing took %s", waited)
		}
		// what is still being answered can use the token until it expires
		f.wantToken("token-1")
		time.Sleep(5 * time.Minute)
		f.wantError("shut down", 0)
		var u unavailable
		if _, err := f.credential(t.Context()); !errors.As(err, &u) || u.RetryAfter() != minBackoff {
			t.Errorf("the next request is to come after %s, want %s: the config that replaced this one serves it", u.RetryAfter(), minBackoff)
		}
		if c, _ := f.renew(t.Context(), bearer("token-1")); c != bearer("token-1") {
			t.Errorf("got %v", c)
		}
		f.wantAsked(2)
		f.wantLogged("warn", "could not renew token, keeping the current one", 0)
	})
}
