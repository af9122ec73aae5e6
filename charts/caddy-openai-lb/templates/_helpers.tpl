{{- define "openai-lb.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* 52 characters at most, which leaves room for what follows: "-dashboard". */}}
{{- define "openai-lb.fullname" -}}
{{- $name := include "openai-lb.name" . }}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) }}
{{- .Values.fullnameOverride | default $full | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "openai-lb.selectorLabels" -}}
app.kubernetes.io/name: {{ include "openai-lb.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "openai-lb.commonLabels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | replace "+" "_" | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "openai-lb.labels" -}}
{{ include "openai-lb.selectorLabels" . }}
{{ include "openai-lb.commonLabels" . }}
{{- end }}

{{/* The Service selects no pod with these. */}}
{{- define "openai-lb.testLabels" -}}
app.kubernetes.io/name: {{ include "openai-lb.name" . }}-test
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "openai-lb.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (include "openai-lb.fullname" .) "default") }}
{{- end }}

{{- define "openai-lb.image" -}}
{{- $tag := .Values.image.tag | default (eq .Chart.AppVersion "0.0.0" | ternary "" .Chart.AppVersion) }}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (required "image.tag or image.digest is required: this chart is of no release" $tag) }}
{{- end }}
{{- end }}

{{/* The scheme, the name of the port and its number, for clients. */}}
{{- define "openai-lb.scheme" -}}
{{- empty .Values.tls.existingSecret | ternary "http" "https" }}
{{- end }}

{{- define "openai-lb.port" -}}
{{- empty .Values.tls.existingSecret | ternary 8080 8443 }}
{{- end }}

{{- define "openai-lb.servicePort" -}}
{{- .Values.service.port | default (empty .Values.tls.existingSecret | ternary 80 443) }}
{{- end }}

{{/* Which values exclude each other. Each is right by itself, as values.schema.json has it. */}}
{{- define "openai-lb.check" -}}
{{- with .Values }}
{{- if .config.existingConfigMap }}
{{- if or .config.openaiLB .config.globalOptions .config.site .config.trustedProxies .redis.addresses }}
{{- fail "config.existingConfigMap has the whole Caddyfile: openaiLB, globalOptions, site, trustedProxies and redis.addresses have no effect" }}
{{- end }}
{{- else if not .config.openaiLB }}
{{- fail "config.openaiLB is required: the lines inside the block openai_lb, with a backend; or config.existingConfigMap" }}
{{- end }}
{{- if and .redis.passwordFile (not .keys.existingSecret) }}
{{- fail "redis.passwordFile is a file of keys.existingSecret, which is empty" }}
{{- end }}
{{- $noticed := mul .probes.readiness.periodSeconds .probes.readiness.failureThreshold }}
{{- if le (int .shutdown.delaySeconds) (int $noticed) }}
{{- fail (printf "probes.readiness notices a stop after %d s: shutdown.delaySeconds must be more, and is %d" $noticed (int .shutdown.delaySeconds)) }}
{{- end }}
{{- if .autoscaling.enabled }}
{{- if gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas) }}
{{- fail "autoscaling.minReplicas is more than autoscaling.maxReplicas" }}
{{- end }}
{{- if not (or .autoscaling.cpuPercent .autoscaling.requestsInFlight.perPod) }}
{{- fail "autoscaling requires cpuPercent or requestsInFlight.perPod" }}
{{- end }}
{{- if and .autoscaling.cpuPercent (not (dig "requests" "cpu" "" .resources)) }}
{{- fail "autoscaling.cpuPercent requires resources.requests.cpu" }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
