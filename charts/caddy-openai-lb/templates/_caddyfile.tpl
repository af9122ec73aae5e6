{{/* Lines of a value, with tabs instead of what the first line begins with. */}}
{{- define "openai-lb.lines" -}}
{{- $lines := regexReplaceAll "^(\\s*\n)+" .lines "" | trimSuffix "\n" }}
{{- $lines = regexReplaceAll (printf "(?m)^%s" (regexFind "^[ \t]*" $lines)) $lines "" }}
{{- regexReplaceAll "(?m)^(.)" $lines (printf "%s${1}" .tabs) | trimAll "\n" }}
{{- end }}

{{/* The Caddyfile of examples/kubernetes, which explains it, with the values. */}}
{{- define "openai-lb.caddyfile" -}}
{
	# Only for `kubectl exec` and `kubectl port-forward`.
	admin localhost:2019

	# The file system is read-only.
	auto_https off
	ocsp_stapling off
	persist_config off
	storage_check off
	storage_clean_interval off

	metrics

	shutdown_delay {{ .Values.shutdown.delaySeconds }}s
	grace_period {{ .Values.shutdown.graceSeconds }}s

	servers {
		protocols {{ empty .Values.tls.existingSecret | ternary "h1" "h1 h2" }}
		{{- with .Values.config.trustedProxies }}
		trusted_proxies static {{ join " " . }}
		trusted_proxies_strict
		{{- end }}
		timeouts {
			read_body_idle 1m 8192
			write_idle 1m
		}
	}

	log {
		output stdout
		format openai_lb
	}
	{{- with .Values.config.globalOptions }}

{{ include "openai-lb.lines" (dict "lines" . "tabs" "\t") }}
	{{- end }}
}

{{ include "openai-lb.scheme" . }}://:{{ include "openai-lb.port" . }} {
	{{- if .Values.tls.existingSecret }}
	tls /run/secrets/tls/tls.crt /run/secrets/tls/tls.key
{{ end }}
	# While the pod stops, clients are asked to open new connections, which go to
	# another pod.
	@stopping vars {http.shutting_down} true
	header @stopping Connection close

	@limited not path */files */parts
	request_body @limited {
		max_size {{ .Values.config.maxBodyMiB }}MiB
	}

	log
	log_skip /readyz
	log_append backend {http.openai_lb.backend}
	log_append attempts {http.openai_lb.attempts}
	log_append class {http.openai_lb.class}
	{{- with .Values.config.site }}

{{ include "openai-lb.lines" (dict "lines" . "tabs" "\t") }}
	{{- end }}

	openai_lb {
		ready_path /readyz
		{{- with .Values.redis }}
		{{- if .addresses }}

		state redis {
			address {{ join " " .addresses }}
			{{- with .sentinel }}
			sentinel {{ . }}
			{{- end }}
			{{- if .cluster }}
			cluster
			{{- end }}
			{{- if .tls }}
			tls
			{{- end }}
			{{- with .username }}
			username {{ . }}
			{{- end }}
			{{- with .passwordFile }}
			password {file./run/secrets/openai-lb/{{ . }}}
			{{- end }}
		}
		{{- end }}
		{{- end }}

{{ include "openai-lb.lines" (dict "lines" .Values.config.openaiLB "tabs" "\t\t") }}
	}

	# SDKs expect errors in OpenAI's form.
	handle_errors 413 {
		header Content-Type application/json
		header X-Request-Id {http.request.uuid}
		respond `{"error":{"message":"The request body is larger than the {{ .Values.config.maxBodyMiB }} MiB allowed here.","type":"invalid_request_error","param":null,"code":"request_too_large"}}`
	}
}

# For the kubelet and Prometheus.
http://:8081 {
	handle /healthz {
		respond OK
	}

	handle /readyz {
		@stopping vars {http.shutting_down} true
		respond @stopping Stopping 503
		reverse_proxy {{ include "openai-lb.scheme" . }}://127.0.0.1:{{ include "openai-lb.port" . }}
		{{- if .Values.tls.existingSecret }} {
			transport http {
				# The site is in this process.
				tls_insecure_skip_verify
			}
		}
		{{- end }}
	}

	handle /metrics {
		metrics
	}

	handle {
		respond 404
	}
}
{{ end }}
