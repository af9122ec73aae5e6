// Package callers limits the use of each caller, and has the options for that:
// caller, callers_file, tier and timezone. It also limits what backends get, by
// the options requests and tokens of a backend.
//
// A caller is identified by a name. The block `caller <name>` has the caller's
// limits. A caller without a block has those of the block `caller *`. A limit
// that the block does not name comes from the caller's tier.
//
// The package uses the seam of admission. A [Module] reads and checks the
// options of package calleroptions, and opens a [Callers] for each pool of a
// config, which implements [seam.Admission]. Package limiter counts the use and
// admits requests. Callers configures its limiters by the options, answers the
// requests that they refuse, and saves the use. Other replicas hear of the use
// by [seam.Replication].
//
// # Promises
//
//   - The use outlives reloads and restarts, even if several processes share a
//     storage (TestProcessesWithOneStorageDoNotForgetWhatTheOthersUsed).
//   - What a person has reset stays reset (TestARestartDoesNotUndoAReset).
//   - A storage that fails stops no request, and is logged once
//     (TestAStorageThatFailsIsLoggedOnce).
//   - A request of a caller allocates only its charge here
//     (TestAdmissionAllocatesOnlyItsCharge), and any number of tokens needs
//     little memory (TestWhatATokenSaysIsForgotten).
//   - A wrong option is an error with its line and its value
//     (TestAWrongOptionOfACallerIsRefusedByLineAndValue).
package callers

import (
	"github.com/caddyserver/caddy/v2"

	"github.com/openai-lb/caddy-openai-lb/internal/calleroptions"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

func init() { caddy.RegisterModule(Module{}) }

// Module applies the options about callers. It has none of its own: they are
// those of the handler.
type Module struct{}

// CaddyModule returns the Caddy module information.
func (Module) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  seam.AdmissionNamespace + ".callers",
		New: func() caddy.Module { return new(Module) },
	}
}

// Directives implements seam.AdmissionModule.
func (Module) Directives(c *calleroptions.Config) directive.Options { return (*Config)(c).directives() }

// Check implements seam.AdmissionModule.
func (Module) Check(c *calleroptions.Config, named bool, backends []seam.NamedBackend) error {
	return (*Config)(c).Check(named, backends)
}

// Shared implements seam.AdmissionModule.
func (Module) Shared(c *calleroptions.Config) (seam.SharedOptions, error) {
	location, err := (*Config)(c).Location()
	return seam.SharedOptions{
		TierNames: (*Config)(c).TierNames(), Tiers: (*Config)(c).QuotaTiers(), Location: location,
	}, err
}

// Open implements seam.AdmissionModule.
func (Module) Open(ctx caddy.Context, c *calleroptions.Config, o seam.AdmissionConfig) (seam.Admission, error) {
	return (*Config)(c).open(ctx, o)
}

// Interface guards
var (
	_ seam.AdmissionModule = Module{}
	_ seam.Admission       = (*Callers)(nil)
)
