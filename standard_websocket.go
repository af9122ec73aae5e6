//go:build !openai_lb_core || openai_lb_websocket

package openailb

import _ "github.com/openai-lb/caddy-openai-lb/modules/websocket" // WebSockets, message by message
