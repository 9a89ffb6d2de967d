{{/* Name of the release's objects. */}}
{{- define "text-generation.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* Labels that select the pods of one part. Arguments: root, part. */}}
{{- define "text-generation.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{/* Labels of every object. Arguments: root, part. */}}
{{- define "text-generation.labels" -}}
{{ include "text-generation.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* Name and labels of an object. Arguments: root, part, and name, a suffix. */}}
{{- define "text-generation.metadata" -}}
name: {{ include "text-generation.fullname" .root }}{{ with .name }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "text-generation.labels" . | nindent 2 }}
{{- end }}

{{/* The part that serves HTTP: cell, or router in the other shapes. */}}
{{- define "text-generation.front" -}}
{{ ternary "cell" "router" (eq .Values.shape "cell") }}
{{- end }}

{{/* Fewest pods with the model. */}}
{{- define "text-generation.replicas" -}}
{{ ternary .Values.autoscaling.minReplicas .Values.replicas .Values.autoscaling.enabled | int }}
{{- end }}

{{/* Reference of an image. Argument: the image. */}}
{{- define "text-generation.image" -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
{{- end }}

{{/* The flags of a part as a YAML map. Arguments: root, part. */}}
{{- define "text-generation.flags" -}}
{{- $flags := deepCopy .root.Values.flags }}
{{- if eq .part "router" }}{{ $flags = mergeOverwrite $flags (deepCopy .root.Values.router.flags) }}{{ end }}
{{- toYaml $flags }}
{{- end }}

{{/*
Seconds from SIGTERM to SIGKILL: the timeouts of the part's shutdown, with the server's defaults for those that are not set,
and a margin in which the launcher ends children that exceed theirs. Arguments: root, part.
*/}}
{{- define "text-generation.graceSeconds" -}}
{{- $defaults := dict "shutdown-delay" 0 "graceful-termination-timeout" 90 "drain-timeout" 0 "shutdown-timeout" 10 }}
{{- $router := list "shutdown-delay" "graceful-termination-timeout" }}
{{- $shards := list "drain-timeout" "shutdown-timeout" }}
{{- $timeouts := dict "cell" (concat $router $shards) "router" $router "shards" $shards "workers" $shards }}
{{- $flags := include "text-generation.flags" . | fromYaml }}
{{- $sum := 15.0 }}
{{- range get $timeouts .part }}
{{- $seconds := get $flags . }}
{{- if kindIs "invalid" $seconds }}{{ $seconds = get $defaults . }}{{ end }}
{{- $sum = addf $sum (ternary (get $defaults .) $seconds (eq (toString $seconds) "")) }}
{{- end }}
{{- ceil $sum | int }}
{{- end }}

{{/* How pods with the model are replaced: see updateStrategy in values.yaml. */}}
{{- define "text-generation.rollingUpdate" -}}
{{- $one := eq (include "text-generation.replicas" .) "1" }}
{{- $default := ternary (dict "maxSurge" 1 "maxUnavailable" 0) (dict "maxSurge" 0 "maxUnavailable" 1) $one }}
{{- toYaml (.Values.updateStrategy | default $default) }}
{{- end }}

{{/* Name of the Secret with the certificates. */}}
{{- define "text-generation.tlsSecret" -}}
{{ .Values.tls.secret | default (printf "%s-tls" (include "text-generation.fullname" .)) }}
{{- end }}

{{/* Errors for values that do not go together. */}}
{{- define "text-generation.check" -}}
{{- $sources := compact (list .Values.model.hub .Values.model.claim .Values.model.oci) }}
{{- if and (not .Values.kserve.kind) (ne (len $sources) 1) }}
{{- fail "set one of model.hub, model.claim and model.oci" }}
{{- end }}
{{- if and .Values.model.oci (semverCompare "<1.33.0-0" .Capabilities.KubeVersion.Version) }}
{{- fail (printf "model.oci needs Kubernetes 1.33, not %s" .Capabilities.KubeVersion.Version) }}
{{- end }}
{{- if and (eq .Values.shape "group") (not .Values.secrets.shardToken.secret) }}
{{- fail "the shape group needs secrets.shardToken: the hosts of a replica know each other by it" }}
{{- end }}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) }}
{{- fail "autoscaling.minReplicas is more than autoscaling.maxReplicas" }}
{{- end }}
{{- if and (ne .Values.shape "cell") (gt (int .Values.router.replicas) (max 1 (include "text-generation.replicas" .))) }}
{{- fail (printf "router.replicas is %v, and there are %s shard pods: a router without a shard serves nothing" .Values.router.replicas (include "text-generation.replicas" .)) }}
{{- end }}
{{- if and .Values.gateway.pool.enabled (not .Values.gateway.pool.endpointPicker.name) }}
{{- fail "gateway.pool needs gateway.pool.endpointPicker.name: the Service of the endpoint picker" }}
{{- end }}
{{- if and .Values.gateway.route.enabled (not .Values.gateway.route.parentRefs) }}
{{- fail "gateway.route needs gateway.route.parentRefs: the Gateways" }}
{{- end }}
{{- if and .Values.kserve.kind (ne .Values.shape "cell") }}
{{- fail "kserve starts cells: set shape to cell" }}
{{- end }}
{{- if and (eq .Values.kserve.kind "LLMInferenceService") (not .Values.kserve.modelUri) }}
{{- fail "LLMInferenceService needs kserve.modelUri" }}
{{- end }}
{{- end }}
