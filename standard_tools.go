//go:build !openai_lb_core || openai_lb_tools

package openailb

import _ "github.com/openai-lb/caddy-openai-lb/modules/tools" // caddy openai-lb check, import
