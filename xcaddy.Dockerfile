# Caddy with openai_lb, azure_identity, oidc and the engine redis, from this checkout:
#
#	docker build -f xcaddy.Dockerfile -t caddy-openai-lb .
#	docker run -p 80:80 -p 443:443 -p 443:443/udp -e EAST_KEY \
#		-v "$PWD/Caddyfile":/etc/caddy/Caddyfile:ro -v caddy_data:/data caddy-openai-lb
#
# Of a release, for both architectures:
#
#	docker buildx build -f xcaddy.Dockerfile --platform linux/amd64,linux/arm64 --build-arg VERSION=v0.1.0 .

ARG CADDY_VERSION=2.11.9

# It compiles on the platform of the machine, for the platform of the image.
FROM --platform=$BUILDPLATFORM caddy:${CADDY_VERSION}-builder AS builder

ARG TARGETOS
ARG TARGETARCH
# The version of a release, v0.1.0. Without it, this checkout is built.
ARG VERSION

COPY . /src
# The image names the version of Caddy, builds into /usr/bin, and lets the
# binary bind ports below 1024 (cap_net_bind_service). Because each module has a
# version, xcaddy does not look up the newest one.
RUN set --; \
	for module in "" /azure /oidc /redis; do \
		set -- "$@" --with "github.com/openai-lb/caddy-openai-lb$module@${VERSION:-v0.0.0=/src$module}"; \
	done; \
	GOOS=$TARGETOS GOARCH=$TARGETARCH xcaddy build "$@"

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

ARG VERSION
# The commit, and its time as RFC 3339 has it.
ARG REVISION
ARG CREATED
LABEL org.opencontainers.image.title="caddy-openai-lb" \
	org.opencontainers.image.description="Caddy with a load balancer for OpenAI and Azure OpenAI endpoints" \
	org.opencontainers.image.url="https://github.com/openai-lb/caddy-openai-lb" \
	org.opencontainers.image.documentation="https://github.com/openai-lb/caddy-openai-lb" \
	org.opencontainers.image.source="https://github.com/openai-lb/caddy-openai-lb" \
	org.opencontainers.image.vendor="caddy-openai-lb" \
	org.opencontainers.image.licenses="Apache-2.0" \
	org.opencontainers.image.version="$VERSION" \
	org.opencontainers.image.revision="$REVISION" \
	org.opencontainers.image.created="$CREATED"
