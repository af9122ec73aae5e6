package lbtest

import (
	"encoding/json"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	openailb "github.com/openai-lb/caddy-openai-lb"
	"github.com/openai-lb/caddy-openai-lb/internal/pool"
)

// emptyConfig is the Caddy configuration that the balancers of all worlds load
// into. Nothing is in it but a log, which a world's tests read, and a storage.
var emptyConfig = sync.OnceValues(func() (caddy.Context, error) {
	ctx, err := caddy.ProvisionContext(&caddy.Config{StorageRaw: json.RawMessage(`{"module":"test"}`),
		Logging: &caddy.Logging{Logs: map[string]*caddy.CustomLog{
			"default": {
				BaseLog: caddy.BaseLog{WriterRaw: json.RawMessage(`{"output":"discard"}`), CoreRaw: json.RawMessage(`{"module":"test"}`)},
				Include: []string{"http.handlers.openai_lb"},
			},
		}}})
	if err == nil {
		ctx.Done() // makes its channel outside of any bubble
	}
	return ctx, err
})

func init() { caddy.RegisterModule(new(logCore)) }

// logCore has Caddy log into memory.
type logCore struct{ zapcore.Core }

// observed writes what logged reads.
var observed, logged = observer.New(zap.DebugLevel)

// CaddyModule returns the Caddy module information.
func (*logCore) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "caddy.logging.cores.test", New: func() caddy.Module { return &logCore{observed} }}
}

// random makes the choices of the pools, which are the same in every run.
var random seeded

func init() { pool.Random = random.Float64 }

// seeded is a source of random numbers for many goroutines.
type seeded struct {
	mu     sync.Mutex
	source rand.PCG
}

// Seed has the random numbers begin anew.
func (s *seeded) Seed(seed1, seed2 uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.source.Seed(seed1, seed2)
}

// Float64 returns the next one.
func (s *seeded) Float64() float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return rand.New(&s.source).Float64()
}

// Context is one that modules can be loaded into.
func Context(t *testing.T) caddy.Context {
	t.Helper()
	cfg, err := emptyConfig()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := caddy.NewContext(cfg)
	t.Cleanup(cancel)
	return ctx
}

// loadHandler takes an openai_lb block the way Caddy does: through JSON.
func loadHandler(t *testing.T, ctx caddy.Context, config string) *openailb.Handler {
	t.Helper()
	var parsed openailb.Handler
	if err := parsed.UnmarshalCaddyfile(caddyfile.NewTestDispenser(config)); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(&parsed)
	if err != nil {
		t.Fatal(err)
	}
	module, err := ctx.LoadModuleByID("http.handlers.openai_lb", text)
	if err != nil {
		t.Fatal(err)
	}
	return module.(*openailb.Handler)
}
