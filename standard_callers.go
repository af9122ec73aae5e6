//go:build !openai_lb_core || openai_lb_callers

package openailb

import _ "github.com/openai-lb/caddy-openai-lb/modules/callers" // caller, callers_file, tier, timezone
