package azure

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	openailb "github.com/openai-lb/caddy-openai-lb"
	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

// fakeSource is a source with a token endpoint that tests direct.
type fakeSource struct {
	*source
	t    *testing.T
	logs *observer.ObservedLogs

	mu       sync.Mutex
	requests []fakeRequest
	life     time.Duration // of the tokens
	delay    time.Duration // before the answer
	linger   time.Duration // before it takes notice of a cancellation
	err      error
	// shape changes a token before it is given.
	shape func(*azcore.AccessToken)
}

type fakeRequest struct {
	at       time.Time
	previous string
	refused  bool
}

// inBubble runs a test of a source in virtual time.
func inBubble(t *testing.T, test func(*testing.T, *fakeSource)) {
	t.Helper()
	bubble.Test(t, func(t *testing.T) {
		f := &fakeSource{t: t, life: time.Hour}
		f.source = newSource(f.get)
		core, logs := observer.New(zap.DebugLevel)
		f.logs = logs
		f.use(zap.New(core))
		defer f.close()
		test(t, f)
	})
}

func (f *fakeSource) get(ctx context.Context, previous string, refused bool) (azcore.AccessToken, error) {
	f.mu.Lock()
	f.requests = append(f.requests, fakeRequest{time.Now(), previous, refused})
	n, life, delay, err, shape := len(f.requests), f.life, f.delay, f.err, f.shape
	f.mu.Unlock()
	select {
	case <-time.After(delay):
	case <-ctx.Done():
		time.Sleep(f.linger)
		return azcore.AccessToken{}, ctx.Err()
	}
	t := azcore.AccessToken{Token: fmt.Sprintf("token-%d", n), ExpiresOn: time.Now().Add(life)}
	if shape != nil {
		shape(&t)
	}
	return t, err
}

// asked waits until nothing is under way, and returns how many requests there
// were.
func (f *fakeSource) asked() int {
	synctest.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.requests)
}

// wantToken asks for a credential, and wants this token without waiting for it.
func (f *fakeSource) wantToken(token string) {
	f.t.Helper()
	f.wantTokenAfter(token, 0)
	synctest.Wait()
}

func (f *fakeSource) wantTokenAfter(token string, wait time.Duration) {
	f.t.Helper()
	before := time.Now()
	c, err := f.credential(f.t.Context())
	if err != nil || c != bearer(token) {
		f.t.Errorf("got %v, %v, want %s", c, err, token)
	}
	if waited := time.Since(before); waited != wait {
		f.t.Errorf("waited for %s, want %s", waited, wait)
	}
}

func (f *fakeSource) wantError(text string, wait time.Duration) {
	f.t.Helper()
	before := time.Now()
	c, err := f.credential(f.t.Context())
	if err == nil || !strings.Contains(err.Error(), text) || c != (openailb.Credential{}) {
		f.t.Errorf("got %v, %v, want an error with %q", c, err, text)
	}
	if waited := time.Since(before); waited != wait {
		f.t.Errorf("waited for %s, want %s", waited, wait)
	}
}

func (f *fakeSource) wantAsked(n int) {
	f.t.Helper()
	if got := f.asked(); got != n {
		f.t.Errorf("%d requests for a token, want %d", got, n)
	}
}

func (f *fakeSource) wantLogged(level, message string, n int) {
	f.t.Helper()
	got := 0
	for _, entry := range f.logs.All() {
		if entry.Level.String() == level && entry.Message == message {
			got++
		}
	}
	if got != n {
		f.t.Errorf("%d times %s %q logged, want %d: %v", got, level, message, n, f.logs.All())
	}
}

func bearer(token string) openailb.Credential {
	return openailb.Credential{Header: "Authorization", Value: "Bearer " + token, Secret: token}
}
