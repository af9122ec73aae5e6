package azure

import (
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

func TestACaddyfileBecomesTheSameJSON(t *testing.T) {
	for name, tc := range map[string]struct{ input, want string }{
		"bare":        {`azure_identity`, `{}`},
		"empty block": {"azure_identity {\n}", `{}`},
		"managed identity": {
			`azure_identity {
				credential managed_identity
				client_id  {env.ID}
				cloud      government
			}`,
			`{"credential":"managed_identity","client_id":"{env.ID}","cloud":"government"}`,
		},
		"managed identity by object ID": {
			`azure_identity {
				credential managed_identity
				object_id  2
			}`,
			`{"credential":"managed_identity","object_id":"2"}`,
		},
		"managed identity by resource ID": {
			`azure_identity {
				credential  managed_identity
				resource_id /subscriptions/1/resourcegroups/2
			}`,
			`{"credential":"managed_identity","resource_id":"/subscriptions/1/resourcegroups/2"}`,
		},
		"workload identity": {
			`azure_identity {
				credential     workload_identity
				tenant_id      1
				client_id      2
				token_file     /var/run/token
				authority_host https://login.example
			}`,
			`{"credential":"workload_identity","tenant_id":"1","client_id":"2","token_file":"/var/run/token","authority_host":"https://login.example"}`,
		},
		"client secret": {
			`azure_identity {
				tenant_id     1
				client_id     2
				client_secret {file./run/secret}
				scope         https://ai.azure.com/.default
				credential    client_secret
			}`,
			`{"credential":"client_secret","tenant_id":"1","client_id":"2","client_secret":"{file./run/secret}","scope":"https://ai.azure.com/.default"}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			var c Credentials
			if err := c.UnmarshalCaddyfile(caddyfile.NewTestDispenser(tc.input)); err != nil {
				t.Fatal(err)
			}
			if got := string(caddyconfig.JSON(c, nil)); got != tc.want {
				t.Errorf("got  %s\nwant %s", got, tc.want)
			}
		})
	}
}

func TestMistakesInACaddyfileAreNamed(t *testing.T) {
	for _, tc := range []struct{ block, want string }{
		{"scopes x", "unrecognized option 'scopes': expected one of authority_host, client_id, client_secret, cloud, credential, object_id, resource_id, scope, tenant_id, token_file, at Testfile:2"},
		{"scope", "scope requires an argument (an environment variable in {$...} may be empty), at Testfile:2"},
		{`scope ""`, "scope requires an argument (an environment variable in {$...} may be empty), at Testfile:2"},
		{"scope a b", "unexpected argument 'b' after scope, at Testfile:2"},
		{"scope {\n}", "scope requires an argument (an environment variable in {$...} may be empty)"},
		{"client_secret CLIENTSECRET~8Q or so", "client_secret has too many arguments: quote a value that contains spaces, at Testfile:2"},
		{"scope a\nscope b", "scope is given twice, at Testfile:3"},
		{"\ncredential msi", "credential 'msi' is not one of default, managed_identity, workload_identity, client_secret, at Testfile:3"},
		{"cloud germany", "cloud 'germany' is not one of public, government, china, at Testfile:2"},
		{"credential managed_identity\ntenant_id 1", "credential managed_identity does not take tenant_id: expected only client_id, object_id, resource_id, scope, cloud, at Testfile"},
		{"credential managed_identity\nclient_id 1\nobject_id 2", "expected one of them, or none for the system-assigned one"},
		{"client_secret CLIENTSECRET~8Q", "credential default does not take client_secret: expected only tenant_id, scope, cloud, authority_host (or credential client_secret)"},
		{"client_id 1", "(or the environment variable AZURE_CLIENT_ID, or another credential)"},
		{"resource_id 1", "(or credential managed_identity)"},
		{"token_file 1", "(or credential workload_identity)"},
		{"credential client_secret\nclient_id 1\nclient_secret CLIENTSECRET~8Q", "credential client_secret requires tenant_id: it takes tenant_id, client_id and client_secret"},
		{"credential client_secret\nclient_id 1\ntenant_id 2", "credential client_secret requires client_secret"},
		{"scope api://x", "scope 'api://x': expected one that ends with /.default"},
		{"authority_host http://login.example", "authority_host 'http://login.example': expected an https URL"},
		{"tenant_id {nothing.here}", "tenant_id: unrecognized placeholder {nothing.here}, at Testfile:2"},
		{"cloud china\nauthority_host https://a", "cloud and authority_host both set where to sign in: expected one of them"},
	} {
		var c Credentials
		err := c.UnmarshalCaddyfile(caddyfile.NewTestDispenser("azure_identity {\n" + tc.block + "\n}"))
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q gives\n     %v,\nwant %s", tc.block, err, tc.want)
			continue
		}
		without(t, "the error", err.Error())
	}
	var c Credentials
	if err := c.UnmarshalCaddyfile(caddyfile.NewTestDispenser("azure_identity managed_identity")); err == nil || !strings.Contains(err.Error(), "unexpected argument 'managed_identity': the options of azure_identity belong in a block") {
		t.Errorf("got %v", err)
	}
}

func TestMistakesInJSONAreNamed(t *testing.T) {
	clearEnv(t)
	t.Setenv("BLANK", " \n")
	file := writeFile(t, "empty", "\n")
	for _, tc := range []struct{ config, want string }{
		{`{"scopes":"x"}`, "scopes"},
		{`{"credential":"msi"}`, "credential 'msi' is not one of default, managed_identity, workload_identity, client_secret"},
		{`{"cloud":"de"}`, "cloud 'de' is not one of public, government, china"},
		{`{"credential":"managed_identity","token_file":"x"}`, "credential managed_identity does not take token_file"},
		{`{"credential":"managed_identity","client_id":"{env.MISSING}"}`, "client_id: "},
		{`{"credential":"managed_identity","client_id":"{env.BLANK}"}`, "client_id is empty"},
		{`{"scope":"https://cognitiveservices.azure.com"}`, "scope 'https://cognitiveservices.azure.com': expected one that ends with /.default, like https://cognitiveservices.azure.com/.default"},
		{`{"scope":"a b/.default","cloud":"china"}`, "like https://cognitiveservices.azure.cn/.default"},
		{`{"authority_host":"http://login.example"}`, "authority_host 'http://login.example': expected an https URL, like https://login.microsoftonline.com/"},
		{`{"authority_host":"login.example"}`, "expected an https URL"},
		{`{"credential":"workload_identity"}`, "credential workload_identity: no client ID specified"},
		{`{"credential":"workload_identity","client_id":"1","tenant_id":"2"}`, "no token file specified"},
		{`{"credential":"client_secret","tenant_id":"a/b","client_id":"1","client_secret":"CLIENTSECRET~8Q"}`, "credential client_secret: invalid tenantID"},
		{`{"credential":"client_secret","tenant_id":"a","client_id":"1","client_secret":"{CLIENTSECRET~8Q}"}`, "client_secret: a placeholder in it is unknown or resolves to nothing"},
		{`{"credential":"client_secret","tenant_id":"a","client_id":"1","client_secret":"{file.` + file + `}"}`, "client_secret"},
		{`{"credential":"client_secret","tenant_id":"a","client_id":"1","client_secret":"{env.BLANK}"}`, "client_secret is empty"},
	} {
		_, err := load(t, tc.config)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s gives\n     %v,\nwant %s", tc.config, err, tc.want)
			continue
		}
		without(t, "the error", err.Error())
	}
	sources.Range(func(_, value any) bool {
		t.Errorf("a config that was refused left %v", value)
		return true
	})
}

func TestTheScopeIsThatOfTheCloud(t *testing.T) {
	for host, want := range map[string]struct{ scope, other string }{
		"":                                   {"https://cognitiveservices.azure.com/.default", "https://ai.azure.com/.default"},
		"https://login.microsoftonline.com/": {"https://cognitiveservices.azure.com/.default", "https://ai.azure.com/.default"},
		"https://login.microsoftonline.us":   {"https://cognitiveservices.azure.us/.default", ""},
		"https://login.chinacloudapi.cn/":    {"https://cognitiveservices.azure.cn/.default", ""},
		"https://login.example/":             {"https://cognitiveservices.azure.com/.default", "https://ai.azure.com/.default"},
	} {
		clearEnv(t)
		t.Setenv("AZURE_AUTHORITY_HOST", host)
		if s, err := new(Credentials).resolve(); err != nil || s.scope != want.scope || s.otherScope != want.other || s.privateAuthority() != strings.Contains(host, "example") {
			t.Errorf("for %q the scopes are %q and %q, %v, want %q", host, s.scope, s.otherScope, err, want)
		}
	}
}
