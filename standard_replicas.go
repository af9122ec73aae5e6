package openailb

import _ "github.com/openai-lb/caddy-openai-lb/internal/replicas" // state
