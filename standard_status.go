//go:build !openai_lb_core || openai_lb_status

package openailb

import (
	// /openai_lb/ in the admin API, caddy openai-lb status, drain, callers, …
	_ "github.com/openai-lb/caddy-openai-lb/modules/status"
	_ "github.com/openai-lb/caddy-openai-lb/modules/status/statuspage" // openai_lb_status
)
