package azure

import (
	"strings"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
	"github.com/openai-lb/caddy-openai-lb/modules/tools"
)

func TestTheManagedIdentityOfAPIManagementBecomesAzureIdentity(t *testing.T) {
	t.Setenv("APIM_SUBSCRIPTION_KEY", "a-key-of-a-subscription")
	t.Setenv("GATEWAY_ID", "0000-1111")
	const backends = `[
{"name": "east", "properties": {"url": "https://contoso-east.openai.azure.com/openai", "protocol": "http"}},
{"name": "west", "properties": {"url": "https://contoso-west.openai.azure.com/openai", "protocol": "http", "credentials": {"managedIdentity": {"clientId": "2222-3333"}}}}]`
	const policy = `<policies><inbound><authentication-managed-identity resource="https://cognitiveservices.azure.com" output-token-variable-name="token" client-id="{{gateway-id}}" />
<set-header name="Authorization"><value>@("Bearer " + (string)context.Variables["token"])</value></set-header></inbound></policies>`
	got, err := tools.APIM("", tools.File{Text: []byte(backends)}, tools.File{Text: []byte(policy)})
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"{env.GATEWAY_ID}", "2222-3333"} {
		if !strings.Contains(got, "\t\t\tauth azure_identity {\n\t\t\t\tcredential managed_identity\n\t\t\t\tclient_id "+id+"\n\t\t\t}\n") {
			t.Errorf("no identity %s:\n%s", id, got)
		}
	}
	if err := lbtest.ValidateCaddyfile(t, got); err != nil {
		t.Errorf("%v\n%s", err, got)
	}
}
