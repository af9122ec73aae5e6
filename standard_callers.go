package openailb

import _ "github.com/openai-lb/caddy-openai-lb/internal/callers" // caller, callers_file, tier, timezone
