// Command caddy is Caddy with the openai_lb modules, the engine redis and the
// simulator built in, for development and the example. Production builds come
// from xcaddy.
package main

import (
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/openai-lb/caddy-openai-lb"
	_ "github.com/openai-lb/caddy-openai-lb/redis"
	_ "github.com/openai-lb/caddy-openai-lb/simulator"
)

func main() {
	caddycmd.Main()
}
