#!/bin/sh
# Clients: two callers who send requests of several kinds until they are stopped.
#
#	URL=http://localhost:8080 sh traffic.sh

post() { # caller, path, body
	wget -q -O /dev/null --header "Authorization: Bearer example-key-of-$1" --header 'Content-Type: application/json' \
		--post-data "$3" "${URL:-http://localhost:8080}$2" 2>/dev/null
}

chat() { # caller, model, more of the body
	post "$1" /v1/chat/completions \
		"{\"model\":\"$2\",\"messages\":[{\"role\":\"user\",\"content\":\"Tell me a story about a load balancer.\"}]$3}"
}

# again NAME ARGUMENTS... repeats a request, whatever becomes of it.
again() {
	while sleep 0.3; do
		"$@"
	done
}

again chat alice gpt-5.5 ',"max_tokens":100' &
again chat alice gpt-5.5 ',"max_tokens":200,"stream":true' &
again chat bob gpt-5.5 ',"stream":true,"stream_options":{"include_usage":true}' &
again chat bob gpt-5.5 '' &
again chat bob gpt-5.6-terra '' &
again chat alice gpt-5.6-terra ',"stream":true' &
again post alice /v1/embeddings '{"model":"text-embedding-3-small","input":"a load balancer"}' &
wait
