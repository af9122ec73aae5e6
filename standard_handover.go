//go:build !openai_lb_core || openai_lb_handover

package openailb

import _ "github.com/openai-lb/caddy-openai-lb/modules/handover" // openai_lb_handover
