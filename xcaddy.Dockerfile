# Caddy with openai_lb, from this checkout:
#
#	docker build -f xcaddy.Dockerfile -t caddy-openai-lb .
#	docker run -p 80:80 -p 443:443 -p 443:443/udp -e EAST_KEY \
#		-v "$PWD/Caddyfile":/etc/caddy/Caddyfile:ro -v caddy_data:/data caddy-openai-lb

ARG CADDY_VERSION=2.11.9

FROM caddy:${CADDY_VERSION}-builder AS builder

COPY . /src
# The image names the version of Caddy, builds into /usr/bin, and lets the
# binary bind ports below 1024 (cap_net_bind_service). With a version, whichever
# it is, nobody is asked for the newest one.
RUN xcaddy build --with github.com/openai-lb/caddy-openai-lb@v0.0.0=/src

FROM caddy:${CADDY_VERSION}

# Without --chown, which would take the capability away.
COPY --from=builder /usr/bin/caddy /usr/bin/caddy

# Certificates are in /data and the last config is in /config.
RUN addgroup -S -g 1000 caddy && \
	adduser -S -D -H -h /data -G caddy -u 1000 caddy && \
	chown -R caddy:caddy /data /config
# By number, so that Kubernetes can tell that it is not root.
USER 1000:1000

# The ports, the command and the working directory are those of Caddy's image.

# Says that Caddy runs, not how the backends are. The admin API has to be where
# it is by default: with another place or `admin off`, use --no-healthcheck.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s \
	CMD ["wget", "-q", "-O", "/dev/null", "http://127.0.0.1:2019/config/"]

LABEL org.opencontainers.image.title="caddy-openai-lb" \
	org.opencontainers.image.description="Caddy with a load balancer for OpenAI and Azure OpenAI endpoints" \
	org.opencontainers.image.url="https://github.com/openai-lb/caddy-openai-lb" \
	org.opencontainers.image.documentation="https://github.com/openai-lb/caddy-openai-lb" \
	org.opencontainers.image.source="https://github.com/openai-lb/caddy-openai-lb" \
	org.opencontainers.image.vendor="caddy-openai-lb"
