package redis

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/lbtest"
)

func TestTheOptionsOfACaddyfileAreThoseOfJSON(t *testing.T) {
	for block, want := range map[string]string{
		"address redis:6379": `{"address":["redis:6379"]}`,
		"address a:1 b:2\nsentinel main\nsentinel_username watcher\nsentinel_password {env.X}\nusername lb\npassword {env.Y}\ndb 2\ntls\nkey_prefix lb:": `{"address":["a:1","b:2"],"sentinel":"main","sentinel_username":"watcher","sentinel_password":"{env.X}",` +
			`"username":"lb","password":"{env.Y}","db":2,"tls":true,"key_prefix":"lb:"}`,
		"address {env.NODES}\ncluster\ntls redis.internal": `{"address":["{env.NODES}"],"cluster":true,"tls":true,"server_name":"redis.internal"}`,
	} {
		e := new(Engine)
		if err := e.UnmarshalCaddyfile(caddyfile.NewTestDispenser("redis {\n" + block + "\n}")); err != nil {
			t.Errorf("%s: %v", block, err)
		}
		if got, err := json.Marshal(e); err != nil || string(got) != want {
			t.Errorf("%s becomes %s, %v, want %s", block, got, err, want)
		}
	}
}

func TestAMistakeIsRefusedWithItsLineAndWhatIsAllowed(t *testing.T) {
	for block, want := range map[string]string{
		"":                                  "no address: expected 'address <host:port>' in redis",
		"address":                           "address requires at least one argument",
		"address redis":                     "address 'redis' is not a host:port, such as redis.internal:6379",
		"address h:99999":                   "address 'h:99999' is not a host:port",
		"address h:abc":                     "address 'h:abc' is not a host:port",
		"address h:0":                       "address 'h:0' is not a host:port",
		"address :6379":                     "address ':6379' is not a host:port",
		"address redis://lb:s3cret@redis:1": "address must be a host:port, without a scheme, a user or a password",
		"address a:1 b:2":                   "address names 2 servers: expected one, or sentinel or cluster",
		"address a:1\nsentinel m\ncluster":  "sentinel and cluster cannot be combined",
		"address a:1\nusername lb":          "username requires a password",
		"address a:1\nsentinel m\nsentinel_username w":               "sentinel_username requires a sentinel_password",
		"address a:1\npassword s3cret s3cret":                        "password has too many arguments",
		"address a:1\ndb -1":                                         "db '-1' is not a whole number of 0 or more",
		"address a:1 {nothing.here}:2\ncluster":                      "address: unrecognized placeholder {nothing.here}",
		"address {env.NO_SUCH}\nkey_prefix \"a b\"":                  "key_prefix 'a b' must not contain white space",
		"address {env.NO_SUCH}\ncluster\ndb 1":                       "db '1' is not available: a cluster has only 0",
		"address a:1\nsentinel_username w\nsentinel_password s3cret": "sentinel_username and sentinel_password are not used without sentinel",
		"address a:1\nusername {nothing.here}\npassword s3cret":      "username: unrecognized placeholder {nothing.here}",
		"address a:1\nkey_prefix {nothing.here}":                     "key_prefix: unrecognized placeholder {nothing.here}",
		"address a:1\ntls {nothing.here}":                            "tls: unrecognized placeholder {nothing.here}",
		"address a:1\ntls a b":                                       "unexpected argument 'b' after tls",
		"address a:1\nport 1":                                        "unrecognized option 'port': expected one of address, cluster, db, key_prefix, password, sentinel, sentinel_password, sentinel_username, tls, username",
	} {
		err := new(Engine).UnmarshalCaddyfile(caddyfile.NewTestDispenser("redis {\n" + block + "\n}"))
		wantError(t, err, want, block)
		if err != nil && !strings.Contains(err.Error(), "Testfile:") {
			t.Errorf("%s: %v has no line", block, err)
		}
	}
}

func TestWhatIsWrongAtLoadIsSaid(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "none")
	t.Setenv("PASSWORD", "s3cret")
	t.Setenv("ADDRESSES", "a:1 b:2")
	for _, tt := range []struct {
		engine Engine
		want   string
	}{
		{Engine{}, "address requires a host:port"},
		{Engine{Address: []string{"{env.NO_SUCH}"}}, "address: "},
		{Engine{Address: []string{"{env.ADDRESSES}"}}, "address names 2 servers"},
		{Engine{Address: []string{"a:1"}, Password: "{env.NO_SUCH}"}, "password: "},
		{Engine{Address: []string{"a:1"}, Password: "{file." + missing + "}"}, "password: open " + missing},
		{Engine{Address: []string{"a:1"}, Password: "{env.PASSWORD} s3cret"}, "password: it must not contain white space"},
		{Engine{Address: []string{"a:1"}, SentinelPassword: "{env.PASSWORD}"}, "sentinel_username and sentinel_password are not used without sentinel"},
		{Engine{Address: []string{"a:1"}, Sentinel: "m", SentinelUsername: "{env.ADDRESSES}"}, "sentinel_username requires a sentinel_password"},
		{Engine{Address: []string{"a:1"}, Sentinel: "m", SentinelPassword: "{file." + missing + "}"}, "sentinel_password: open " + missing},
		{Engine{Address: []string{"a:1"}, Cluster: true, DB: 1}, "db '1' is not available: a cluster has only 0"},
		{Engine{Address: []string{"a:1"}, ServerName: "a"}, "server_name is not used without tls"},
		{Engine{Address: []string{"a:1"}, KeyPrefix: "a b"}, "key_prefix 'a b' must not contain white space"},
	} {
		wantError(t, tt.engine.Provision(caddyContext(t)), tt.want, fmt.Sprintf("%+v", &tt.engine))
	}
}

func wantError(t *testing.T, err error, want, what string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%s: got %v, want %s", what, err, want)
	}
	if err != nil && strings.Contains(err.Error(), "s3cret") {
		t.Errorf("%s: the error shows a secret: %v", what, err)
	}
}

func TestEnginesOfOtherOptionsAreOthers(t *testing.T) {
	identity := func(password string) string {
		t.Setenv("PASSWORD", password)
		e := &Engine{Address: []string{"a:1"}, Password: "{env.PASSWORD}"}
		if err := e.Provision(caddyContext(t)); err != nil {
			t.Fatal(err)
		}
		return e.Identity()
	}
	one, again, two := identity("one"), identity("one"), identity("two")
	if one != again || one == two {
		t.Error("passwords do not tell engines apart")
	}
}

func TestNothingOfTheClientIsInABuildWithoutThisModule(t *testing.T) {
	text := lbtest.ReadFile(t, "../go.mod")
	if strings.Contains(string(text), "go-redis") {
		t.Error("the root module requires go-redis")
	}
}
