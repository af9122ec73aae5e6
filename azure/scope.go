package azure

import (
	"context"
	"strings"
	"sync/atomic"

	"go.uber.org/zap"

	openailb "github.com/openai-lb/caddy-openai-lb"
)

// shared are the sources of an identity's tokens, in use by any number of
// backends: that of the scope in the settings, and another one if there is
// another scope. A source requests no token before a backend needs one.
type shared struct {
	*source
	identity *identity

	// other is nil if the operator chose the scope, or the cloud has only one.
	other *shared
	// prefersOther reports whether backends of the next config begin with the
	// other scope: it was the last one that a backend changed to.
	prefersOther atomic.Bool
}

func newShared(s settings) *shared {
	i := newIdentity(s)
	result := &shared{source: newSource(i.token), identity: i}
	result.fields = []zap.Field{zap.String("scope", s.scope)}
	if s.otherScope != "" {
		s.scope, s.otherScope = s.otherScope, ""
		result.other = newShared(s)
	}
	return result
}

// Destruct ends the sources after their last use.
func (s *shared) Destruct() error {
	s.close()
	s.identity.client.CloseIdleConnections()
	if s.other != nil {
		return s.other.Destruct()
	}
	return nil
}

func (s *shared) use(logger *zap.Logger) {
	s.source.use(logger)
	if s.other != nil {
		s.other.use(logger)
	}
}

func (s *shared) disuse(logger *zap.Logger) {
	s.source.disuse(logger)
	if s.other != nil {
		s.other.disuse(logger)
	}
}

// inOrder returns the sources in the order in which a backend tries them. The
// second one may be nil.
func (s *shared) inOrder() [2]*shared {
	if s.prefersOther.Load() {
		return [2]*shared{s.other, s}
	}
	return [2]*shared{s, s.other}
}

// isIn reports whether a text names the audience of the scope.
func (s *shared) isIn(text string) bool {
	return strings.Contains(text, strings.TrimSuffix(s.identity.scope, "/.default"))
}

// choice is which scope a backend uses.
type choice struct {
	shared  *shared
	order   [2]*shared
	changes atomic.Int32 // from one to the other
}

// maxChanges is how often a backend changes its scope: to the other one, and
// back if that is refused, too.
const maxChanges = 2

func (c *choice) used() *shared { return c.order[c.changes.Load()%2] }

// renew returns a token to replace one that the backend refused with a text
// about the audience. Azure's text is the same for tokens that have expired: it
// is about those if it names the audience of the token, which is accepted then.
func (c *choice) renew(ctx context.Context, refused openailb.Credential, text string,
	logger *zap.Logger) (openailb.Credential, error) {
	changes := c.changes.Load()
	used, other := c.order[changes%2], c.order[(changes+1)%2]
	if other == nil || changes == maxChanges || used.isIn(text) {
		return used.renew(ctx, refused)
	}
	if !used.gave(refused) && !other.isIn(text) { // it may be of the scope that another request has changed from
		return used.renew(ctx, refused)
	}
	renewed, err := other.credential(ctx)
	if err != nil {
		return refused, err
	}
	toOther := other == c.shared.other
	if c.changes.CompareAndSwap(changes, changes+1) && c.shared.prefersOther.Swap(toOther) != toOther {
		logger.Info("scope changed", zap.String("scope", other.identity.scope),
			zap.String("refused_scope", used.identity.scope))
	}
	return renewed, nil
}
