module github.com/openai-lb/caddy-openai-lb/bench

go 1.26
