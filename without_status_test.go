//go:build openai_lb_core && !openai_lb_status

package openailb_test

import (
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig"
)

func TestADirectiveOfAModuleThatIsLeftOutIsAnErrorThatNamesTheModule(t *testing.T) {
	config := ":80 {\n\topenai_lb_status /status\n\topenai_lb {\n\t\tbackend http://a\n\t}\n}"
	_, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(config), nil)
	if err == nil || !strings.Contains(err.Error(), "this binary was built without the module status (build tag openai_lb_status)") {
		t.Errorf("got %v", err)
	}
}
