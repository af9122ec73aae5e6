package azure

import (
	"bytes"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

const (
	subscription = "11111111-2222-3333-4444-555555555555"
	group        = "/subscriptions/" + subscription + "/resourceGroups/rg-one"
	provider     = "/providers/Microsoft.CognitiveServices/accounts"
)

// fakeARM is Azure Resource Manager with some accounts. A page of a list has
// two entries.
type fakeARM struct {
	*httptest.Server
	tokens *endpoint

	mu       sync.Mutex
	lists    map[string][]any
	requests []string
	// reply replaces an answer, if it returns true.
	reply func(w http.ResponseWriter, r *http.Request, n int) bool
}

func newFakeARM(t *testing.T) *fakeARM {
	t.Helper()
	f := &fakeARM{lists: make(map[string][]any), tokens: appService(t)}
	f.tokens.same = true
	f.lists["/subscriptions/"+subscription+provider] = []any{}
	f.lists[group+provider] = []any{}
	f.Server = httptest.NewTLSServer(http.HandlerFunc(f.answer))
	t.Cleanup(f.Close)
	roots := writeFile(t, "roots.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: f.Certificate().Raw})))
	t.Setenv("SSL_CERT_FILE", roots)
	t.Setenv("AZURE_SUBSCRIPTION_ID", "")
	return f
}

func (f *fakeARM) answer(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests = append(f.requests, r.URL.EscapedPath())
	if f.reply != nil && f.reply(w, r, len(f.requests)) {
		return
	}
	all, ok := f.lists[r.URL.Path]
	query := r.URL.Query()
	switch {
	case r.Header.Get("Authorization") != "Bearer "+tokenNumber(1):
		errorReply(401, `{"error":{"code":"InvalidAuthenticationToken","message":"The access token is invalid."}}`)(w, r)
		return
	case query.Get("api-version") != "2025-06-01":
		errorReply(400, `{"error":{"code":"MissingApiVersionParameter","message":"The api-version query parameter (?api-version=) is required for all requests."}}`)(w, r)
		return
	case !ok:
		errorReply(404, `{"error":{"code":"ResourceNotFound","message":"The Resource was not found."}}`)(w, r)
		return
	}
	from, _ := strconv.Atoi(query.Get("$skipToken"))
	page := map[string]any{"value": all[from:min(from+2, len(all))]}
	if from+2 < len(all) {
		query.Set("$skipToken", strconv.Itoa(from+2))
		page["nextLink"] = f.URL + r.URL.EscapedPath() + "?" + query.Encode()
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	json.NewEncoder(w).Encode(page)
}

func (f *fakeARM) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// account adds an account of a kind, with the shape that Microsoft documents.
// Deployments and models are JSON.
func (f *fakeARM) account(kind, name, endpoints, deployments, models string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	id := group + provider + "/" + name
	of := map[string]any{
		"id": id, "name": name, "type": "Microsoft.CognitiveServices/accounts", "kind": kind, "location": "eastus2",
		"sku": map[string]any{"name": "S0"}, "etag": `W/"datetime'2026-05-01'"`, "identity": map[string]any{"type": "SystemAssigned"},
		"properties": json.RawMessage(strings.ReplaceAll(`{"provisioningState":"Succeeded","customSubDomainName":"NAME","dateCreated":"2026-05-01T00:00:00Z",
			"publicNetworkAccess":"Enabled","isMigrated":false,"capabilities":[{"name":"VirtualNetworks"}],`+endpoints+`}`, "NAME", name)),
	}
	for _, list := range []string{"/subscriptions/" + subscription + provider, group + provider} {
		f.lists[list] = append(f.lists[list], of)
	}
	for list, text := range map[string]string{"/deployments": deployments, "/models": models} {
		var all []any
		if err := json.Unmarshal([]byte("["+text+"]"), &all); err != nil {
			panic(err)
		}
		f.lists[id+list] = all
	}
}

// openAI are the endpoints of an account for Azure OpenAI.
const openAI = `"endpoint":"https://NAME.openai.azure.com/","endpoints":{"OpenAI Language Model Instance API":"https://NAME.openai.azure.com/"}`

// foundry are those of an account for all AI services.
const foundry = `"endpoint":"https://NAME.cognitiveservices.azure.com/","endpoints":{"AI Foundry API":"https://NAME.services.ai.azure.com/",
	"OpenAI Language Model Instance API":"https://NAME.openai.azure.com/","Speech Services Speech to Text":"https://eastus2.stt.speech.microsoft.com/"}`

// deployed is a deployment with the shape that Microsoft documents.
func deployed(name, sku string, capacity int, model, version string) string {
	text := func(s string) string { b, _ := json.Marshal(s); return string(b) }
	return fmt.Sprintf(`{"id":"/subscriptions/x","type":"Microsoft.CognitiveServices/accounts/deployments","name":%s,"sku":{"name":%s,"capacity":%d},
		"properties":{"model":{"format":"OpenAI","name":%s,"version":%s},"versionUpgradeOption":"OnceNewDefaultVersionAvailable","currentCapacity":%[3]d,
		"capabilities":{"chatCompletion":"true"},"provisioningState":"Succeeded","raiPolicyName":"Microsoft.DefaultV2",
		"rateLimits":[{"key":"request","renewalPeriod":10,"count":%[6]d},{"key":"token","renewalPeriod":60,"count":%[7]d}]},
		"systemData":{"createdBy":"a@contoso.com","createdByType":"User"},"etag":"\"1\""}`,
		text(name), text(sku), capacity, text(model), text(version), capacity, capacity*1000)
}

// model is a model that an account could deploy, and retires on these days: in
// general, and for the SKU GlobalStandard.
func model(name, version, retires, global string) string {
	return fmt.Sprintf(`{"model":{"format":"x"},"format":"OpenAI","name":%q,"version":%q,"maxCapacity":3,"capabilities":{"chatCompletion":"true"},
		"lifecycleStatus":"GenerallyAvailable","isDefaultVersion":true,"deprecation":{"fineTune":"2030-01-01T00:00:00Z","inference":%q},
		"skus":[{"name":"GlobalStandard","usageName":"OpenAI.GlobalStandard.x","deprecationDate":%q,"capacity":{"maximum":1000,"default":10}}]}`,
		name, version, retires, global)
}

func inDays(days int) string {
	return time.Now().UTC().AddDate(0, 0, days).Format(time.DateOnly) + "T00:00:00Z"
}

// caddyCommand runs caddy, and returns its output and its exit status.
func caddyCommand(t *testing.T, args ...string) (out, complaints string, status int) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	command := exec.Command(os.Args[0], args...)
	command.Env = append(os.Environ(), runsCaddy+"=1")
	command.Stdout, command.Stderr = &stdout, &stderr
	if err := command.Run(); err != nil && command.ProcessState == nil {
		t.Fatal(err)
	}
	without(t, "the output of caddy", stdout.String()+stderr.String())
	return stdout.String(), stderr.String(), command.ProcessState.ExitCode()
}

// discover runs `caddy openai-lb discover` with the identity of an app.
func (f *fakeARM) discover(t *testing.T, args ...string) (out, complaints string, status int) {
	t.Helper()
	return caddyCommand(t, slices.Concat([]string{"openai-lb", "discover", "--credential", "managed_identity", "--arm-endpoint", f.URL, "--subscription", subscription}, args)...)
}

// check compares the backends of a Caddyfile with the deployments.
func (f *fakeARM) check(t *testing.T, backends string, args ...string) (found []string, complaints string, status int) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "Caddyfile")
	lbtest.WriteFile(t, file, "{\nadmin off\n}\n:8080 {\nopenai_lb {\npool llm\n"+backends+"\n}\n}\n")
	out, complaints, status := f.discover(t, append([]string{"--check", file}, args...)...)
	return strings.Split(strings.TrimSpace(out), "\n"), complaints, status
}

// resource is what a token was requested for.
func resource(values url.Values) string { return values.Get("resource") }
