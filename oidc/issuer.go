package oidc

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
)

const (
	// refreshInterval is how often the keys are fetched.
	refreshInterval = time.Hour
	// firstRetry is the wait after the first fetch that failed. It doubles up
	// to lastRetry.
	firstRetry, lastRetry = time.Second, time.Minute
	// demandInterval is how long after a fetch a token with an unknown key
	// causes another one, which strangers can do at will.
	demandInterval = 10 * time.Second
	// patience is how long a request waits for keys.
	patience = 5 * time.Second
)

// issuer is an identity provider and its keys. One goroutine fetches them, from
// start to Destruct: every hour, and soon if a token names a key that is not
// among them. Only requests with such a token wait for that. If a fetch fails,
// the keys stay, and it is tried again.
type issuer struct {
	source
	keys   atomic.Pointer[keySet] // nil: none were fetched yet
	logger atomic.Pointer[zap.Logger]

	// demand is given when keys should be fetched now.
	demand chan struct{}

	mu sync.Mutex
	// fetching is closed when the fetch that is due or in progress ends. nil:
	// the next one is not due yet.
	fetching chan struct{}
	// fetched is when the last fetch ended, and failed reports whether it
	// failed.
	fetched time.Time
	failed  bool
	// stop ends the goroutine, and stopped waits for that. nil: it has not
	// started.
	stop    context.CancelFunc
	stopped sync.WaitGroup
}

func newIssuer(url string) *issuer {
	return &issuer{source: newSource(url), demand: make(chan struct{}, 1), fetching: make(chan struct{})}
}

// start fetches the keys from now on. Each config calls it, with its logger.
func (i *issuer) start(logger *zap.Logger) {
	i.logger.Store(logger)
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.stop != nil {
		return
	}
	var ctx context.Context
	ctx, i.stop = context.WithCancel(context.Background())
	i.stopped.Go(func() { i.run(ctx) })
}

// Destruct implements caddy.Destructor.
func (i *issuer) Destruct() error {
	i.mu.Lock()
	stop := i.stop
	i.mu.Unlock()
	if stop != nil {
		stop()
	}
	i.stopped.Wait()
	i.client.CloseIdleConnections()
	return nil
}

func (i *issuer) run(ctx context.Context) {
	retry := firstRetry
	for ctx.Err() == nil {
		i.begin()
		found, err := i.fetch(ctx)
		wait := refreshInterval
		if err != nil {
			wait, retry = retry, min(2*retry, lastRetry)
		} else {
			retry = firstRetry
		}
		i.end(found, err, wait)
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-i.demand:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

func (i *issuer) begin() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.fetching == nil {
		i.fetching = make(chan struct{})
	}
	select {
	case <-i.demand: // this fetch is for it, too
	default:
	}
}

// end records what was fetched. Tokens stay verified if the keys are the same.
func (i *issuer) end(found *keySet, err error, wait time.Duration) {
	before, logger := i.keys.Load(), i.logger.Load()
	switch {
	case errors.Is(err, context.Canceled): // by Destruct
	case err != nil && before == nil:
		logger.Error("could not fetch the issuer's keys", zap.Error(err), zap.Float64("retry_in", wait.Seconds()))
	case err != nil:
		logger.Warn("could not fetch the issuer's keys, keeping the previous ones",
			zap.Error(err), zap.Float64("retry_in", wait.Seconds()))
	case before == nil || before.digest != found.digest:
		i.keys.Store(found)
		logger.Info("fetched the issuer's keys")
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	close(i.fetching)
	i.fetching, i.fetched, i.failed = nil, time.Now(), err != nil
}

// due returns a channel that is closed when the keys have been fetched again,
// or nil if they were fetched a short time ago.
func (i *issuer) due() <-chan struct{} {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.fetching == nil {
		if time.Since(i.fetched) < demandInterval {
			return nil
		}
		i.fetching = make(chan struct{})
		select {
		case i.demand <- struct{}{}:
		default:
		}
	}
	return i.fetching
}

// renewed returns the keys of the issuer after a token named one that is not
// among those that were tried.
func (i *issuer) renewed(ctx context.Context, tried *keySet) (*keySet, error) {
	if fetching := i.due(); fetching != nil {
		timer := time.NewTimer(patience)
		defer timer.Stop()
		select {
		case <-fetching:
		case <-timer.C:
			return nil, keys.ErrIssuerUnavailable
		case <-ctx.Done():
			return nil, keys.ErrIssuerUnavailable
		}
	}
	i.mu.Lock()
	failed := i.failed
	i.mu.Unlock()
	current := i.keys.Load()
	switch {
	case current != nil && current != tried:
		return current, nil
	case current == nil || failed: // the key may be a new one
		return nil, keys.ErrIssuerUnavailable
	}
	return nil, errUnknown
}
