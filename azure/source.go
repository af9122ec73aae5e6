package azure

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"go.uber.org/zap"

	openailb "github.com/openai-lb/caddy-openai-lb"
	"github.com/openai-lb/caddy-openai-lb/internal/keys"
)

const (
	// requestTimeout ends a request for a token, with all its retries.
	requestTimeout = 30 * time.Second
	// maxWait is how long users wait for a request, from its beginning: the
	// balancer has other backends to try.
	maxWait = 5 * time.Second
	// refreshMargin is how long before its end a token is replaced. Entra's
	// tokens live for an hour or more.
	refreshMargin = 5 * time.Minute
	// minRefreshInterval is between two refreshes that bring the same token.
	minRefreshInterval = 10 * time.Second
	// maxRefreshInterval is the longest time between two refreshes, for tokens
	// whose end is far in the future.
	maxRefreshInterval = 24 * time.Hour
	// renewInterval is between a token's arrival and its renewal because a
	// backend refuses it: one that refuses all tokens, as they do that lack a
	// role, must not turn each request into one for a token.
	renewInterval = 30 * time.Second
	// After failures, users wait twice as long each time.
	minBackoff = 2 * time.Second
	maxBackoff = time.Minute
	// maxToken is how many bytes a token has at most. Entra's have a few
	// thousand, and servers refuse longer headers as the client's fault.
	maxToken = 64 << 10
)

var (
	errClosed = errors.New("the token source is shut down")
	errSlow   = fmt.Errorf("no token within %s, the request fails over", maxWait)
)

// token is an access token, ready for use.
type token struct {
	azcore.AccessToken

	credential openailb.Credential
	arrived    time.Time
}

func (t *token) valid(now time.Time) bool { return t != nil && now.Before(t.ExpiresOn) }

// refreshOn is when to replace it by a newer one.
func (t *token) refreshOn() time.Time {
	life := t.ExpiresOn.Sub(t.arrived)
	due := t.arrived.Add(min(maxRefreshInterval, life-min(refreshMargin, life/5)))
	// What was due already before it came, as when the endpoint gives the
	// token that it gave before, is not due again immediately.
	if t.RefreshOn.After(t.arrived) && t.RefreshOn.Before(due) {
		due = t.RefreshOn
	}
	if soonest := t.arrived.Add(minRefreshInterval); due.Before(soonest) {
		due = soonest
	}
	if due.After(t.ExpiresOn) {
		due = t.ExpiresOn
	}
	return due
}

// source holds the current token of an identity, and replaces it in time. Its
// users never wait while it has a valid one. At most one request for a token
// is in progress at a time.
type source struct {
	// get requests a token. It must not return the previous one out of a
	// cache of this process. refused reports whether a backend refused that.
	get func(ctx context.Context, previous string, refused bool) (azcore.AccessToken, error)
	// fields are those of its log lines that its users do not know.
	fields []zap.Field

	current atomic.Pointer[token]
	// due is when the next request may be made, in nanoseconds of Unix time.
	// With a valid token, that is when to replace it; without, it is in the
	// future after a failure only.
	due atomic.Int64

	mu       sync.Mutex // guards what follows
	pending  *request
	failures int
	err      error         // of the last request, if it failed
	loggers  []*zap.Logger // of all users, the latest last

	ctx      context.Context // of all requests
	cancel   context.CancelCauseFunc
	requests sync.WaitGroup
}

// request is a request for a token that is in progress.
type request struct {
	started time.Time
	done    chan struct{}
}

func newSource(get func(ctx context.Context, previous string, refused bool) (azcore.AccessToken, error)) *source {
	s := &source{get: get}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	return s
}

// close ends the request that is in progress, and waits until it is gone.
func (s *source) close() {
	s.mu.Lock()
	s.cancel(errClosed)
	s.mu.Unlock()
	s.requests.Wait()
}

// use adds a logger, and disuse removes it. A logger lives as long as the
// config that it is from, and the source outlives configs.
func (s *source) use(logger *zap.Logger) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.loggers = append(s.loggers, logger)
}

func (s *source) disuse(logger *zap.Logger) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.loggers = slices.DeleteFunc(s.loggers, func(l *zap.Logger) bool { return l == logger })
}

// credential returns the current token, and waits for it only if there is none.
func (s *source) credential(ctx context.Context) (openailb.Credential, error) {
	now := time.Now()
	t := s.current.Load()
	if t.valid(now) {
		if now.UnixNano() >= s.due.Load() {
			s.refresh(now)
		}
		return t.credential, nil
	}
	err := s.refresh(now).wait(ctx)
	if t = s.current.Load(); t.valid(time.Now()) {
		return t.credential, nil
	}
	if err == nil {
		err = s.failure()
	}
	return openailb.Credential{}, s.unavailable(err)
}

// unavailable is an error that asks users to stay away until the next request
// is due.
type unavailable struct {
	error
	retryAfter time.Duration
}

func (u unavailable) Unwrap() error { return u.error }

// RetryAfter is how long the balancer leaves the backend alone.
func (u unavailable) RetryAfter() time.Duration { return u.retryAfter }

func (s *source) unavailable(err error) error {
	wait := minBackoff // a request is under way, and may bring a token at any time
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending == nil && s.ctx.Err() == nil { // or another config serves the next request
		wait = max(wait, time.Until(time.Unix(0, s.due.Load())))
	}
	return unavailable{err, wait}
}

// renew returns a token to replace one that a backend refused, or that one if
// there is no other.
func (s *source) renew(ctx context.Context, refused openailb.Credential) (openailb.Credential, error) {
	if t := s.current.Load(); t.valid(time.Now()) && t.credential != refused {
		return t.credential, nil
	}
	if err := s.replace(time.Now()).wait(ctx); err != nil {
		return refused, err
	}
	if t := s.current.Load(); t.valid(time.Now()) {
		return t.credential, nil
	}
	return refused, nil
}

// gave reports whether the credential is that of the current token.
func (s *source) gave(credential openailb.Credential) bool {
	t := s.current.Load()
	return t != nil && t.credential == credential
}

// refresh returns the request that is in progress, after starting one if it is
// time to; else nil.
func (s *source) refresh(now time.Time) *request {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending == nil && s.isDue(now) {
		s.start(now, false)
	}
	return s.pending
}

// isDue reports whether the next request may be made. After a failure it is due
// within maxBackoff: if it is further away, the clock was set back. s.mu must
// be locked.
func (s *source) isDue(now time.Time) bool {
	wait := time.Duration(s.due.Load() - now.UnixNano())
	return wait <= 0 || s.failures > 0 && wait > maxBackoff
}

// replace is refresh for a token that was refused.
func (s *source) replace(now time.Time) *request {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.current.Load()
	tooSoon := t != nil && now.Before(t.arrived.Add(renewInterval))
	backingOff := s.failures > 0 && !s.isDue(now)
	if s.pending == nil && !tooSoon && !backingOff {
		s.start(now, true)
	}
	return s.pending
}

// start makes a request. s.mu must be locked.
func (s *source) start(now time.Time, refused bool) {
	if s.ctx.Err() != nil {
		return
	}
	r := &request{started: now, done: make(chan struct{})}
	s.pending = r
	s.due.Store(now.Add(requestTimeout).UnixNano()) // no other call needs to look
	s.requests.Go(func() {
		ctx, cancel := context.WithTimeout(s.ctx, requestTimeout)
		defer cancel()
		var previous string
		if t := s.current.Load(); t != nil {
			previous = t.Token
		}
		received, err := s.get(ctx, previous, refused)
		s.finish(received, err, previous, refused)
		close(r.done)
	})
}

// finish remembers what came of a request.
func (s *source) finish(received azcore.AccessToken, err error, previous string, refused bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending = nil
	now := time.Now()
	if err == nil {
		err = check(received, now)
	}
	if s.ctx.Err() != nil {
		return
	}
	if err != nil {
		s.failed(err, now)
		return
	}
	t := &token{
		AccessToken: received,
		credential:  keys.Bearer(received.Token),
		arrived:     now,
	}
	level, message := zap.DebugLevel, "token renewed"
	switch {
	case received.Token == previous:
		message = "could not renew token: there is no newer one yet"
		if refused {
			level = zap.WarnLevel
		}
	case refused || previous == "" || s.failures > 0:
		level = zap.InfoLevel
	}
	s.failures, s.err = 0, nil
	s.current.Store(t)
	s.due.Store(t.refreshOn().UnixNano())
	if c := s.logger().Check(level, message); c != nil {
		c.Write(zap.Duration("expires_in", t.ExpiresOn.Sub(now).Round(time.Second)), zap.Bool("refused", refused))
	}
}

// failed remembers a failure. s.mu must be locked.
func (s *source) failed(err error, now time.Time) {
	s.failures++
	s.err = err
	backoff := min(minBackoff<<min(s.failures-1, 10), maxBackoff)
	if f := new(failure); errors.As(err, &f) {
		backoff = max(backoff, min(f.retryAfter, maxBackoff))
	}
	due := now.Add(backoff)
	t := s.current.Load()
	level, message, left := zap.ErrorLevel, "could not get a token", time.Duration(0)
	if t.valid(now) {
		level, message, left = zap.WarnLevel, "could not renew token, keeping the current one", t.ExpiresOn.Sub(now)
		if due.After(t.ExpiresOn) {
			due = t.ExpiresOn
		}
	}
	s.due.Store(due.UnixNano())
	if c := s.logger().Check(level, message); c != nil {
		c.Write(zap.Error(err), zap.Duration("expires_in", left.Round(time.Second)),
			zap.Duration("retry_in", due.Sub(now)))
	}
}

// logger returns the logger of the latest user. s.mu must be locked.
func (s *source) logger() *zap.Logger {
	if len(s.loggers) == 0 {
		return zap.NewNop()
	}
	return s.loggers[len(s.loggers)-1].With(s.fields...)
}

// failure says why there is no token.
func (s *source) failure() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.ctx.Err() != nil:
		return errClosed
	case s.err != nil:
		return s.err
	}
	return errSlow
}

// wait waits until the request is done, or too long.
func (r *request) wait(ctx context.Context) error {
	if r == nil {
		return nil
	}
	select {
	case <-r.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(time.Until(r.started.Add(maxWait))):
		return errSlow
	}
}

// check returns an error if a token cannot be used.
func check(t azcore.AccessToken, now time.Time) error {
	switch {
	case t.Token == "":
		return errors.New("the received token is empty")
	case len(t.Token) > maxToken:
		return fmt.Errorf("the received token has %d bytes: expected %d at most", len(t.Token), maxToken)
	case strings.ContainsFunc(t.Token, func(r rune) bool { return r <= ' ' || r >= 0x7f }):
		return errors.New("the received token contains white space or control characters")
	case !now.Before(t.ExpiresOn):
		return errors.New("the received token has expired: check the clock")
	}
	return nil
}
