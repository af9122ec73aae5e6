package logformat

import (
	"reflect"
	"testing"

	"github.com/openai-lb/caddy-openai-lb/internal/redact"
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
		"api_key":  redact.Mark,
		"backends": []any{map[string]any{"api_key": "{env.KEY}", "header": redact.Mark}},
		"state":    map[string]any{"password": redact.Mark, "sentinel_password": "{file./run/password}", "address": []any{"redis:6379"}},
		"request":  map[string]any{"set": map[string]any{"authorization": redact.Mark, "Cf-Aig-Authorization": redact.Mark, "X-Kept": []any{"kept"}}},
		"keys":     map[string]any{"key": redact.Mark},
		"headers":  map[string]any{"Authorization": redact.Mark, "Cookie": redact.Mark, "X-Db-Password": redact.Mark, "Aws_credential": redact.Mark},
	}
	if got := redactConfig(config); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
