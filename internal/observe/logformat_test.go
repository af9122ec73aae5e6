package observe

import (
	"reflect"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/keys"
)

func TestAConfigIsShownWithoutItsSecrets(t *testing.T) {
	config := map[string]any{
		"name":     "ptu",
		"api_key":  "literal",
		"backends": []any{map[string]any{"api_key": "{env.KEY}", "header": map[string]any{"X-Token": []any{"literal"}}}},
		"state":    map[string]any{"password": "literal", "sentinel_password": "{file./run/password}", "address": []any{"redis:6379"}},
		"request":  map[string]any{"set": map[string]any{"authorization": []any{"Bearer literal"}, "Cf-Aig-Authorization": []any{"Bearer literal"}, "X-Kept": []any{"kept"}}},
		"keys":     map[string]any{"key": []any{"literal", "{env.KEY}"}},
		"headers":  map[string]any{"Authorization": "Bearer literal", "Cookie": []any{"literal"}, "X-Db-Password": []any{"literal"}, "Aws_credential": []any{"literal"}},
	}
	want := map[string]any{
		"name":     "ptu",
		"api_key":  keys.Redacted,
		"backends": []any{map[string]any{"api_key": "{env.KEY}", "header": keys.Redacted}},
		"state":    map[string]any{"password": keys.Redacted, "sentinel_password": "{file./run/password}", "address": []any{"redis:6379"}},
		"request":  map[string]any{"set": map[string]any{"authorization": keys.Redacted, "Cf-Aig-Authorization": keys.Redacted, "X-Kept": []any{"kept"}}},
		"keys":     map[string]any{"key": keys.Redacted},
		"headers":  map[string]any{"Authorization": keys.Redacted, "Cookie": keys.Redacted, "X-Db-Password": keys.Redacted, "Aws_credential": keys.Redacted},
	}
	if got := redactConfig(config); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
