//go:build !openai_lb_core || openai_lb_ledger

package openailb

import _ "github.com/openai-lb/caddy-openai-lb/modules/ledger" // the bill, caddy openai-lb usage
