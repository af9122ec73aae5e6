module github.com/openai-lb/caddy-openai-lb/release

go 1.26.0

toolchain go1.26.8

require (
	github.com/CycloneDX/cyclonedx-go v0.12.0
	golang.org/x/mod v0.42.0
)
