package metrics

import (
	"testing"

	"github.com/caddyserver/caddy/v2"
)

// TestAFailedReloadIsKnownUntilTheNextOneThatWorks loads configurations as
// Caddy does, with its own gauges.
func TestAFailedReloadIsKnownUntilTheNextOneThatWorks(t *testing.T) {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	defer cancel()
	findLastReload(ctx.GetMetricsRegistry())
	if lastReload.successful.Load() == nil || lastReload.at.Load() == nil {
		t.Fatal("Caddy's gauges are not found: perhaps it has changed their help texts")
	}
	t.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			t.Error(err)
		}
	})
	for _, c := range []struct {
		config         string
		works, failure bool
	}{
		{`{"admin": {"disabled": true}}`, true, false},
		{`{"admin": {"disabled": true}, "apps": {"unknown": {}}}`, false, true},
		{`{"admin": {"disabled": true}, "logging": {}}`, true, false},
	} {
		if err := caddy.Load([]byte(c.config), true); (err == nil) != c.works {
			t.Fatalf("%s: %v", c.config, err)
		}
		if got := ReloadFailed(); got != c.failure {
			t.Errorf("after %s, a reload has failed is %t", c.config, got)
		}
	}
}

func TestAReloadHasNotFailedWhileNothingWasLoaded(t *testing.T) {
	successful, at := lastReload.successful.Swap(nil), lastReload.at.Swap(nil)
	defer func() { lastReload.successful.Store(successful); lastReload.at.Store(at) }()
	if ReloadFailed() {
		t.Error("a reload has failed")
	}
}
