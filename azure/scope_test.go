package azure

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

const (
	oldAudience = "https://cognitiveservices.azure.com"
	newAudience = "https://ai.azure.com"
)

// entraThatNames is Entra with tokens that name their audience, and the options
// of an identity in it.
func entraThatNames(t *testing.T) (e *endpoint, identity string) {
	t.Helper()
	e = entra(t)
	e.names = true
	t.Setenv("THE_SECRET", clientSecret)
	return e, fmt.Sprintf(`credential client_secret
		tenant_id the-tenant
		client_id the-client
		client_secret {env.THE_SECRET}
		authority_host %s`, e.URL)
}

// wantAudiences wants tokens requested for these audiences, in this order.
func (e *endpoint) wantAudiences(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	for _, values := range e.received() {
		got = append(got, audienceOf(values))
	}
	if !slices.Equal(got, want) {
		t.Errorf("tokens were requested for %q, want %q", got, want)
	}
}

// backendOf serves those that bring a token of the audience it wants, and
// refuses the others as Azure does.
func backendOf(t *testing.T, name, audience string) *backend {
	b := &backend{name: name}
	b.want.Store(audience)
	b.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b.calls.Add(1)
		io.Copy(io.Discard, r.Body)
		audience := b.want.Load().(string)
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Backend", b.name)
		if !strings.HasSuffix(r.Header.Get("Authorization"), "-for-"+audience) {
			w.WriteHeader(http.StatusUnauthorized)
			fmt.Fprintf(w, `{ "statusCode": 401, "message": "Unauthorized. Access token is missing, invalid, audience is incorrect (%s), or have expired." }`, audience)
			return
		}
		io.WriteString(w, `{"id":"chatcmpl-1"}`)
	}))
	t.Cleanup(b.Close)
	return b
}

func (b *balancer) wantLogged(message string, n int) {
	b.t.Helper()
	if got := b.logged(message); len(got) != n {
		b.t.Errorf("%q was logged %d times, want %d: %v", message, len(got), n, got)
	}
}

func TestATokenThatIsRefusedForItsAudienceIsReplacedByOneOfTheOtherScope(t *testing.T) {
	e, identity := entraThatNames(t)
	a, other := backendOf(t, "a", newAudience), newBackend(t, "b", "key-of-b")
	options := a.auth(identity) + other.key()
	b := start(t, options)
	b.wantServed(100, a)
	e.wantAudiences(t, oldAudience, newAudience)
	b.wantLogged("scope changed", 1)
	changes := b.logged("scope changed")
	if len(changes) != 1 || changes[0]["level"] != "info" || changes[0]["scope"] != newAudience+"/.default" || changes[0]["refused_scope"] != oldAudience+"/.default" || changes[0]["client_id"] != "the-client" {
		t.Errorf("logged %v, want the change at level info", changes)
	}

	// it is kept, also by the next config
	before := a.calls.Load()
	b.wantServed(100, a)
	b.reload(options + "lb_retries 2")
	b.wantServed(100, a)
	if n := a.calls.Load() - before; n != 200 {
		t.Errorf("the backend got %d requests, want 200", n)
	}

	// and the other way round
	a.want.Store(oldAudience)
	b.wantServed(100, a)
	e.wantAudiences(t, oldAudience, newAudience)
	b.wantLogged("scope changed", 2)
	b.wantLogged("cooldown started", 0)
}

func TestEachBackendOfAnIdentityGetsTheScopeThatItAccepts(t *testing.T) {
	e, identity := entraThatNames(t)
	one, two := backendOf(t, "one", oldAudience), backendOf(t, "two", newAudience)
	options := one.auth(identity) + two.auth(identity)
	b := start(t, options)
	b.wantServed(100, one, two)
	for _, more := range []string{"lb_retries 1", "lb_retries 2", "lb_retries 3"} {
		b.reload(options + more)
		b.wantServed(100, one, two)
	}
	if one.calls.Load() < 100 || two.calls.Load() < 100 {
		t.Errorf("the backends got %d and %d requests, want both to serve", one.calls.Load(), two.calls.Load())
	}
	e.wantAudiences(t, oldAudience, newAudience)
	b.wantLogged("cooldown started", 0)
}

func TestABackendThatRefusesBothScopesCausesOneRequestForEach(t *testing.T) {
	e, identity := entraThatNames(t)
	a, other := backendOf(t, "a", "urn:ms.scopedToken"), newBackend(t, "b", "key-of-b")
	options := a.auth(identity)
	b := start(t, options+other.key())
	b.wantServed(100, other)
	b.reload(options) // it is called for want of another
	for range 50 {
		if status, _ := b.post(); status == http.StatusOK {
			t.Error("it was served")
		}
	}
	e.wantAudiences(t, oldAudience, newAudience)
	if n := len(b.logged("scope changed")); n < 1 || n > 4 {
		t.Errorf("the scope changed %d times, want there and back in each config at most", n)
	}
	for _, cooldown := range b.logged("cooldown started") {
		if cooldown["backend"] != "a" || cooldown["class"] != "credential" {
			t.Errorf("logged %v, want cooldowns of a only, which accepts neither token", cooldown)
		}
	}
}

func TestAScopeOfTheOperatorsIsNeverReplaced(t *testing.T) {
	for scope, refuses := range map[string]string{oldAudience: newAudience, newAudience: oldAudience} {
		t.Run(scope, func(t *testing.T) {
			e, identity := entraThatNames(t)
			a, other := backendOf(t, "a", refuses), newBackend(t, "b", "key-of-b")
			b := start(t, a.auth(identity+"\nscope "+scope+"/.default")+other.key())
			b.wantServed(100, other)
			e.wantAudiences(t, scope)
			b.wantLogged("scope changed", 0)
		})
	}
}

func TestOnlyARefusalForTheAudienceChangesTheScope(t *testing.T) {
	for name, body := range map[string]string{
		"a missing role":       `{"error":{"code":"PermissionDenied","message":"The principal lacks the required data action for the audience https://ai.azure.com"}}`,
		"a wrong tenant":       `{"error":{"code":"Unauthorized","message":"Token tenant does not match resource tenant. https://ai.azure.com"}}`,
		"a token that expired": `{ "statusCode": 401, "message": "Unauthorized. Access token is missing, invalid, audience is incorrect (https://cognitiveservices.azure.com/ or https://ai.azure.com/), or have expired." }`,
		"text":                 `the audience is not https://cognitiveservices.azure.com`,
	} {
		t.Run(name, func(t *testing.T) {
			e, identity := entraThatNames(t)
			a, other := newBackend(t, "a", "none"), newBackend(t, "b", "key-of-b")
			a.Config.Handler = errorReply(http.StatusUnauthorized, body)
			b := start(t, a.auth(identity)+other.key())
			b.wantServed(20, other)
			e.wantAudiences(t, oldAudience)
			b.wantLogged("scope changed", 0)
		})
	}
}

func TestAScopeThatEntraDoesNotKnowReplacesNone(t *testing.T) {
	e, identity := entraThatNames(t)
	a, other := backendOf(t, "a", oldAudience), newBackend(t, "b", "key-of-b")
	b := start(t, a.auth(identity)+other.key())
	b.wantServed(1, a)
	e.set(func() {
		e.fail = errorReply(http.StatusBadRequest, `{"error":"invalid_resource","error_description":"AADSTS500011: The resource principal named https://ai.azure.com was not found in the tenant."}`)
	})
	a.want.Store(newAudience)
	b.wantServed(20, other)
	b.wantLogged("scope changed", 0)
	a.want.Store(oldAudience)
	b.reload(a.auth(identity))
	b.wantServed(20, a)
	if failures := b.logged("could not get a token"); len(failures) != 1 || failures[0]["scope"] != newAudience+"/.default" {
		t.Errorf("logged %v, want one failure, of the scope %s", failures, newAudience)
	}
}

func TestTheCheckOfABackendFindsTheScopeThatItAccepts(t *testing.T) {
	e, identity := entraThatNames(t)
	a := backendOf(t, "a", newAudience)
	config := writeFile(t, "Caddyfile", "{\nadmin off\n}\nhttp://lb {\nopenai_lb {\n"+a.auth(identity)+"}\n}\n")
	command, out := cobra.Command{SilenceUsage: true}, new(bytes.Buffer)
	caddycmd.Commands()["openai-lb"].CobraFunc(&command)
	command.SetOut(out)
	command.SetErr(out)
	command.SetArgs([]string{"check", "--config", config})
	if err := command.Execute(); err != nil || strings.Contains(out.String(), "refused") {
		t.Errorf("got %v, %s, want no complaint about the credential", err, out)
	}
	without(t, "the check", out.String())
	e.wantAudiences(t, oldAudience, newAudience)
}
