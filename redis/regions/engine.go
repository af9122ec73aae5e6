// Package regions is an engine of state for balancers that run in several
// regions, with a server in each. Every record and every message goes to all
// servers, and a replica hears all of them. So the loss of a region loses
// nothing that replicas know, and while the link between two regions is cut,
// the replicas of each still share what they know.
//
//	state regions {
//		redis {
//			address redis.east.internal:6379
//		}
//		redis {
//			address redis.west.internal:6379
//		}
//	}
//
// All replicas have the same servers in the same order. Which of them is near
// is measured. No request waits for a server that is far away, except for the
// lookup of an id that the near one does not know.
//
// # What it promises
//
//   - A message that comes from two servers is passed on once.
//   - The servers may get records in different orders: a record has only one
//     writer, or a version that decides which of two records is kept.
//   - A server that comes back, with its data or empty, gets what it lacks: the
//     store says which records are not everywhere, and the replicas put them
//     again.
//   - A region that is cut off goes on with its own server.
package regions

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/state"
)

func init() { caddy.RegisterModule(new(Engine)) }

const namespace = "http.openai_lb.state"

// Engine shares the knowledge of replicas by a server in each region.
type Engine struct {
	// EnginesRaw are the engines, such as `redis`, one for each region, in the
	// same order at all replicas. At least two are required.
	EnginesRaw []json.RawMessage `json:"engines,omitempty" caddy:"namespace=http.openai_lb.state inline_key=engine"`

	engines []state.Engine
}

// CaddyModule returns the Caddy module information.
func (*Engine) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: namespace + ".regions", New: func() caddy.Module { return new(Engine) }}
}

// UnmarshalCaddyfile sets up the engine from Caddyfile tokens. Syntax:
//
//	state regions {
//	    <engine> [{...}]
//	    <engine> [{...}]
//	}
func (e *Engine) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the engine's name
	if d.NextArg() {
		return d.Errf("unexpected argument '%s' after regions, expected a block of engines", d.Val())
	}
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		name := d.Val()
		if _, err := caddy.GetModule(namespace + "." + name); err != nil {
			return d.WrapErr(directive.NotInBuild("state", namespace, name))
		}
		module, err := caddyfile.UnmarshalModule(d, namespace+"."+name)
		if err != nil {
			return err
		}
		e.EnginesRaw = append(e.EnginesRaw, caddyconfig.JSONModuleObject(module, "engine", name, nil))
	}
	if err := e.check(); err != nil {
		return d.WrapErr(err)
	}
	return nil
}

func (e *Engine) check() error {
	if len(e.EnginesRaw) < 2 {
		return fmt.Errorf("regions requires an engine for each of two regions or more, and has %d", len(e.EnginesRaw))
	}
	return nil
}

// Provision sets up the engines. It opens no connection.
func (e *Engine) Provision(ctx caddy.Context) error {
	if err := e.check(); err != nil {
		return err
	}
	loaded, err := ctx.LoadModule(e, "EnginesRaw")
	if err != nil {
		return fmt.Errorf("regions: %w", err)
	}
	identities := make(map[string]bool)
	for _, module := range loaded.([]any) {
		engine, ok := module.(state.Engine)
		if _, isRegions := module.(*Engine); !ok || isRegions {
			return fmt.Errorf("regions: a module of type %T cannot be used here", module)
		}
		identity := nameOf(engine) + engine.Identity()
		if identities[identity] {
			return errors.New("regions names the same server twice")
		}
		identities[identity] = true
		e.engines = append(e.engines, engine)
	}
	return nil
}

func nameOf(e state.Engine) string { return e.(caddy.Module).CaddyModule().ID.Name() }

// Identity implements state.Engine.
func (e *Engine) Identity() string {
	var all strings.Builder
	for _, engine := range e.engines {
		fmt.Fprintf(&all, "%s %q\n", nameOf(engine), engine.Identity())
	}
	return all.String()
}

// Secrets implements state.SecretReader.
func (e *Engine) Secrets() map[string]func() error {
	secrets := make(map[string]func() error)
	for i, engine := range e.engines {
		reader, ok := engine.(state.SecretReader)
		if !ok {
			continue
		}
		for option, read := range reader.Secrets() {
			secrets[fmt.Sprintf("%s of engine %d", option, i+1)] = read
		}
	}
	return secrets
}

// Open implements state.Engine.
func (e *Engine) Open() (state.Store, error) {
	var servers []*server
	for i, engine := range e.engines {
		opened, err := engine.Open()
		if err != nil {
			for _, s := range servers {
				_ = s.Close()
			}
			return nil, err
		}
		servers = append(servers, newServer(opened, fmt.Sprintf("%s %d", nameOf(engine), i+1)))
	}
	return newStore(servers), nil
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Engine)(nil)
	_ caddyfile.Unmarshaler = (*Engine)(nil)
	_ state.Engine          = (*Engine)(nil)
	_ state.SecretReader    = (*Engine)(nil)
	_ state.SpreadStore     = (*store)(nil)
)
