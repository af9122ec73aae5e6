package openailb_test

import (
	"context"
	"fmt"

	"github.com/caddyserver/caddy/v2"

	openailb "github.com/openai-lb/caddy-openai-lb"
)

// Broker is a credential source: `auth broker` uses it.
type Broker struct {
	// Team is the team whose tokens it gets.
	Team string `json:"team"`
}

func init() { caddy.RegisterModule(new(Broker)) }

// CaddyModule returns the Caddy module information.
func (*Broker) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.openai_lb.credentials.broker",
		New: func() caddy.Module { return new(Broker) },
	}
}

// Credential implements openailb.CredentialSource.
func (b *Broker) Credential(context.Context) (openailb.Credential, error) {
	return b.bearer("token-1"), nil // from a cache
}

// Renew implements openailb.CredentialSource.
func (b *Broker) Renew(_ context.Context, refused openailb.Credential) (openailb.Credential, error) {
	if next := b.bearer("token-2"); next != refused { // from the broker
		return next, nil
	}
	return refused, nil
}

// Identity implements openailb.CredentialSource.
func (b *Broker) Identity() string { return "broker " + b.Team }

func (b *Broker) bearer(token string) openailb.Credential {
	return openailb.Credential{Header: "Authorization", Value: "Bearer " + b.Team + "-" + token}
}

func ExampleCredentialSource() {
	var source openailb.CredentialSource = &Broker{Team: "red"}
	first, _ := source.Credential(context.Background())
	next, _ := source.Renew(context.Background(), first)
	fmt.Println(first.Value)
	fmt.Println(next.Value)
	fmt.Println(source.Identity())
	// Output:
	// Bearer red-token-1
	// Bearer red-token-2
	// broker red
}
