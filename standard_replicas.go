//go:build !openai_lb_core || openai_lb_replicas

package openailb

import _ "github.com/openai-lb/caddy-openai-lb/modules/replicas" // state
