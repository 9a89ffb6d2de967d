{{/* Name of the release's objects. The name of a Service begins with a letter. */}}
{{- define "text-generation.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride }}
{{- else if mustRegexMatch "^[0-9]" .Release.Name }}{{ printf "%s-%s" .Chart.Name .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* Labels that select the pods of one part. Arguments: root, part. */}}
{{- define "text-generation.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
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

{{/* The object that makes the pods with the model, as YAML. */}}
{{- define "text-generation.workload" -}}
{{- $group := eq .Values.shape "group" }}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" $group }}
kind: {{ ternary "LeaderWorkerSet" "Deployment" $group }}
name: {{ include "text-generation.fullname" . }}{{ get (dict "cell" "" "split" "-shards" "group" "-group") .Values.shape }}
{{- end }}

{{/*
Number of pods with the model in the manifest. With autoscaling an update keeps the number that it finds, which is not known to
`helm template`. Without the field the API server would set it to 1.
*/}}
{{- define "text-generation.currentReplicas" -}}
{{- $live := dict }}
{{- if .Values.autoscaling.enabled }}
{{- $workload := include "text-generation.workload" . | fromYaml }}
{{- $live = lookup $workload.apiVersion $workload.kind .Release.Namespace $workload.name }}
{{- end }}
{{- max (include "text-generation.replicas" .) (dig "spec" "replicas" 0 $live) }}
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
{{- $flags := include "text-generation.flags" (dict "root" . "part" "shards") | fromYaml }}
{{- $replicas := get $flags "num-replicas" | default 1 | int }}
{{- if and (eq .Values.shape "split") (gt $replicas 1) }}
{{- fail "flags.num-replicas is for the shape cell: in the shape split a pod has one replica, and `replicas` is the number of pods" }}
{{- end }}
{{- $hosts := ternary (int .Values.group.size) 1 (eq .Values.shape "group") }}
{{- $shards := mul $replicas (div (get $flags "num-shard" | default 1 | int) $hosts) | int }}
{{- $ports := .Values.ports }}
{{- if and (ne .Values.shape "cell") (lt (sub $ports.health $ports.shards | toString | trimPrefix "-" | int) $shards) }}
{{- fail (printf "ports.health (%v) and ports.shards (%v): each is the first of %v ports of a pod, and these overlap" $ports.health $ports.shards $shards) }}
{{- end }}
{{- if eq (int $ports.http) (int $ports.management) }}
{{- fail (printf "ports.http and ports.management are both %v" $ports.http) }}
{{- end }}
{{- if and (has (get .Values.updateStrategy "maxSurge" | toString) (list "0" "0%")) (has (get .Values.updateStrategy "maxUnavailable" | toString) (list "0" "0%")) }}
{{- fail "updateStrategy: with maxSurge and maxUnavailable both 0 no pod is ever replaced" }}
{{- end }}
{{- range $label, $_ := merge (dict) .Values.podLabels .Values.router.podLabels }}
{{- if hasKey (include "text-generation.selector" (dict "root" $ "part" "")  | fromYaml) $label }}
{{- fail (printf "podLabels: %s selects the pods of the release" $label) }}
{{- end }}
{{- end }}
{{- if and .Values.model.cache.create .Values.model.cache.claim }}
{{- fail "model.cache: with `create` the chart makes the claim; `claim` names one that exists" }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) }}
{{- fail "ingress needs ingress.hosts" }}
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
