package seam_test

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/openai-lb/caddy-openai-lb/internal/calleroptions"
	"github.com/openai-lb/caddy-openai-lb/internal/directive"
	"github.com/openai-lb/caddy-openai-lb/internal/seam"
)

// TestWithoutTheModuleCallersEachOfItsOptionsIsAnError as this test has no
// modules.
func TestWithoutTheModuleCallersEachOfItsOptionsIsAnError(t *testing.T) {
	const want = " is not available: this binary was built without the module callers (build tag openai_lb_callers)"
	path := "/etc/limits"
	all := calleroptions.Config{
		Callers: []calleroptions.Caller{{Name: "alice"}}, CallersFile: &path,
		Tiers: []calleroptions.Tier{{Name: "gold"}}, Timezone: "UTC",
	}
	module := seam.Callers()
	for i := range reflect.TypeFor[calleroptions.Config]().NumField() {
		var c calleroptions.Config
		reflect.ValueOf(&c).Elem().Field(i).Set(reflect.ValueOf(all).Field(i))
		_, shared := module.Shared(&c)
		_, opened := module.Open(caddy.Context{}, &c, seam.AdmissionConfig{})
		for _, err := range []error{module.Check(&c, true, nil), shared, opened} {
			if err == nil || !strings.HasSuffix(err.Error(), want) {
				t.Errorf("%+v: got %v", c, err)
			}
		}
	}
	for _, word := range []string{"caller alice", "callers_file /etc/limits", "tier gold", "timezone UTC"} {
		name, _, _ := strings.Cut(word, " ")
		err := directive.Unmarshal(caddyfile.NewTestDispenser("openai_lb {\n"+word+"\n}"), module.Directives(new(calleroptions.Config)))
		if err == nil || !strings.HasPrefix(err.Error(), name+want+", at Testfile:2") {
			t.Errorf("%s: got %v", word, err)
		}
	}
	var none calleroptions.Config
	shared, err := module.Shared(&none)
	if err != nil || shared.TierNames != nil || shared.Tiers != nil || shared.Location != time.UTC {
		t.Errorf("without options, the core gets %+v, %v", shared, err)
	}
	if admission, err := module.Open(caddy.Context{}, &none, seam.AdmissionConfig{}); admission != nil || err != nil {
		t.Errorf("without options, got %v, %v", admission, err)
	}
}
