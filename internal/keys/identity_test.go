package keys

import (
	"context"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/openai-lb/caddy-openai-lb/internal/bubble"
)

// hanging waits for the keys of its issuer as long as it may, but knows those
// of a token with this text.
type hanging struct{ known string }

func (h hanging) Identify(ctx context.Context, token string) (*Identity, error) {
	if strings.Contains(token, h.known) {
		return &Identity{Name: "bob"}, nil
	}
	select {
	case <-time.After(tokenPatience):
	case <-ctx.Done():
	}
	return nil, ErrIssuerUnavailable
}

func (hanging) Tiers() []string { return []string{} }

func TestARequestWithSeveralTokensWaitsForTheIssuerOnce(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		c, err := NewClients(ClientsConfig{Tokens: hanging{"good"}, Label: strings.ToUpper, Logger: zap.NewNop()})
		if err != nil {
			t.Fatal(err)
		}
		token := func(text string) string { return "ey" + text + strings.Repeat("0", minToken) + ".e.s" }
		for last, want := range map[string]error{"wrong3": ErrIssuerUnavailable, "good": nil} {
			began := time.Now()
			who, err := c.Identify(t.Context(), &Presented{Header: []Line{
				{Name: "Authorization", Values: []string{"Bearer " + token("wrong0")}},
				{Name: "X-Api-Key", Values: []string{token("wrong1"), token("wrong2"), token(last)}},
			}})
			if err != want || want == nil && who.Name != "bob" {
				t.Errorf("with the last token %s, the caller is %q (%v)", last, who.Name, err)
			}
			if took := time.Since(began); took != tokenPatience {
				t.Errorf("with the last token %s, it took %s", last, took)
			}
		}
	})
}

func TestTheNameOfAllCallersIsThatOfNone(t *testing.T) {
	if CheckName("*") == nil || CheckName("a*") != nil {
		t.Error("* is a name, or any name with a star is none")
	}
}
