{{/*
Arguments of the launcher: those that the chart decides, then `flags`. Arguments: root, part; model and port, for KServe.
*/}}
{{- define "text-generation.args" -}}
{{- $root := .root }}
{{- $values := .root.Values }}
{{- $name := include "text-generation.fullname" .root }}
{{- $http := has .part (list "cell" "router") }}
- --model-id={{ include "text-generation.modelId" . }}
{{- with $values.model.revision }}
- --revision={{ . }}
{{- end }}
{{- if $http }}
- --port={{ .port | default $values.ports.http }}
{{- if not .port }}
- --management-port={{ $values.ports.management }}
{{- end }}
{{- if or $values.monitoring.serviceMonitor.enabled $values.autoscaling.enabled $values.gateway.pool.enabled $values.kserve.kind }}
- --open-metrics
{{- end }}
{{- if $values.secrets.apiKeys.secret }}
- --api-keys-file=/run/secrets/text-generation/api-keys.toml
{{- end }}
{{- end }}
{{- if ne .part "cell" }}
- --parts={{ ternary "router" "shards" (eq .part "router") }}
{{- if $values.tls.enabled }}
- --shard-tls-cert=/run/secrets/tls/tls.crt
- --shard-tls-key=/run/secrets/tls/tls.key
- --shard-tls-ca=/run/secrets/tls/ca.crt
{{- else }}
- --insecure
{{- end }}
{{- if $values.secrets.shardToken.secret }}
- --shard-token-file=/run/secrets/text-generation/shard-token
{{- end }}
{{- if eq .part "router" }}
{{- $source := ternary (printf "kubernetes://%s/%s" $root.Release.Namespace $name) (printf "dns://%s" $name) (eq $values.router.discovery "kubernetes") }}
{{- $domain := ternary "" (printf ".%s.svc" $root.Release.Namespace) (eq $values.router.discovery "kubernetes") }}
- --shards={{ $source }}-shards{{ $domain }}:{{ $values.ports.shards }}
- --peers={{ $source }}-routers{{ $domain }}:{{ $values.ports.http }}
{{- else }}
- --shard-hostname=$(POD_IP)
- --shard-tcp-port={{ $values.ports.shards }}
- --health-port={{ $values.ports.health }}
{{- end }}
{{- end }}
{{- $flags := include "text-generation.flags" . | fromYaml }}
{{- if not (hasKey $flags "shard-connect-timeout") }}
- --shard-connect-timeout={{ $values.startupSeconds }}
{{- end }}
{{- range $flag, $value := $flags }}
{{- if kindIs "bool" $value }}
- --{{ ternary "" "no-" $value }}{{ $flag }}
{{- else if kindIs "slice" $value }}
- {{ printf "--%s=%s" $flag (join "," $value) | quote }}
{{- else if kindIs "string" $value }}
- {{ printf "--%s=%s" $flag $value | quote }}
{{- else if not (kindIs "invalid" $value) }}
- --{{ $flag }}={{ toJson $value }}
{{- end }}
{{- end }}
{{- end }}

{{/* The value of --model-id. Arguments: root; model, for KServe. */}}
{{- define "text-generation.modelId" -}}
{{- with .root.Values.model }}
{{- if $.model }}{{ $.model }}
{{- else if .hub }}{{ .hub }}
{{- else }}/model{{ with .path }}/{{ trimAll "/" . }}{{ end }}{{ end }}
{{- end }}
{{- end }}

{{/* The container. Arguments: root, part; name, model and port, for KServe. */}}
{{- define "text-generation.container" -}}
{{- $values := .root.Values }}
{{- $front := has .part (list "cell" "router") }}
{{- $router := eq .part "router" }}
{{- $image := ternary $values.router.image $values.image $router }}
name: {{ .name | default "text-generation" }}
image: {{ include "text-generation.image" $image }}
imagePullPolicy: {{ $values.image.pullPolicy }}
command: [text-generation-launcher]
args:
  {{- include "text-generation.args" . | trim | nindent 2 }}
env:
  - {name: HF_HOME, value: /data}
  - {name: HOME, value: /data}  # compiled kernels
  {{- if not $front }}
  - name: POD_IP
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  {{- end }}
  {{- if $values.secrets.hubToken.secret }}
  - {name: HF_TOKEN_PATH, value: /run/secrets/text-generation/hf-token}
  {{- end }}
  {{- with $values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  {{- if .port }}
  - containerPort: {{ .port }}  # Knative takes one port, without a name
  {{- else if $front }}
  - {name: http, containerPort: {{ $values.ports.http }}}
  - {name: management, containerPort: {{ $values.ports.management }}}
  {{- else }}
  - {name: shards, containerPort: {{ $values.ports.shards }}}
  - {name: health, containerPort: {{ $values.ports.health }}}
  {{- end }}
{{- include "text-generation.probes" . | trim | nindent 0 }}
{{- with ternary $values.router.resources $values.resources $router }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml $values.securityContext | nindent 2 }}
terminationMessagePolicy: FallbackToLogsOnError
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: cache, mountPath: /data}
  {{- if not $router }}
  - {name: shared-memory, mountPath: /dev/shm}
  {{- end }}
  {{- if or $values.model.claim $values.model.oci }}
  - {name: model, mountPath: /model, readOnly: true}
  {{- end }}
  {{- with include "text-generation.secretFiles" . }}
  - {name: secrets, mountPath: /run/secrets/text-generation, readOnly: true}
  {{- end }}
  {{- if and (ne .part "cell") $values.tls.enabled }}
  - {name: tls, mountPath: /run/secrets/tls, readOnly: true}
  {{- end }}
  {{- with $values.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/*
Liveness is the last resort: the launcher itself ends and restarts what hangs, and ends if that does not help. Readiness falls within two seconds of SIGTERM.
A shard pod is ready when a router drives it. Arguments: root, part; port, for KServe.
*/}}
{{- define "text-generation.probes" -}}
{{- $values := .root.Values }}
{{- $port := .port | default "management" }}
{{- $starts := ceil (divf $values.startupSeconds 5) | int }}
{{- if has .part (list "cell" "router") }}
startupProbe:
  httpGet: {path: /health/live, port: {{ $port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ $starts }}
readinessProbe:
  httpGet: {path: /health/ready, port: {{ $port }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 1
livenessProbe:
  httpGet: {path: /health/live, port: {{ $port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- else }}
startupProbe:
  grpc: {port: {{ $values.ports.health }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ $starts }}
readinessProbe:
  grpc: {port: {{ $values.ports.health }}{{ if eq .part "shards" }}, service: driven{{ end }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 1
# While the launcher restarts a shard, nothing answers: the container must not be ended then.
livenessProbe:
  grpc: {port: {{ $values.ports.health }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ ceil (divf $values.startupSeconds 10) | int }}
{{- end }}
{{- end }}

{{/* Files of the volume with secrets: those that this part needs. Arguments: root, part. */}}
{{- define "text-generation.secretFiles" -}}
{{- $secrets := .root.Values.secrets }}
{{- $files := dict "hubToken" "hf-token" }}
{{- if ne .part "cell" }}{{ $_ := set $files "shardToken" "shard-token" }}{{ end }}
{{- if has .part (list "cell" "router") }}{{ $files = merge $files (dict "apiKeys" "api-keys.toml") }}{{ end }}
{{- range $name, $file := $files }}
{{- with get $secrets $name }}
{{- if .secret }}
- secret: {name: {{ .secret | quote }}, items: [{key: {{ .key }}, path: {{ $file }}}]}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The volumes of a pod. Arguments: root, part. */}}
{{- define "text-generation.volumes" -}}
{{- $values := .root.Values }}
- {name: tmp, emptyDir: {}}
- name: cache
  {{- $claim := ternary (printf "%s-cache" (include "text-generation.fullname" .root)) $values.model.cache.claim $values.model.cache.create }}
  {{- if and $claim (ne .part "router") }}
  persistentVolumeClaim: {claimName: {{ $claim | quote }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ $values.model.cache.size }}}
  {{- end }}
{{- if ne .part "router" }}
- {name: shared-memory, emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory }}}}
{{- end }}
{{- if $values.model.claim }}
- {name: model, persistentVolumeClaim: {claimName: {{ $values.model.claim | quote }}, readOnly: true}}
{{- else if $values.model.oci }}
- {name: model, image: {reference: {{ $values.model.oci }}, pullPolicy: IfNotPresent}}
{{- end }}
{{- with include "text-generation.secretFiles" . }}
- name: secrets
  projected:
    defaultMode: 0440
    sources:
      {{- . | nindent 6 }}
{{- end }}
{{- if and (ne .part "cell") $values.tls.enabled }}
- {name: tls, secret: {secretName: {{ include "text-generation.tlsSecret" .root | quote }}, defaultMode: 0440}}
{{- end }}
{{- with $values.volumes }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end }}

{{/* Nodes that pods may run on. Arguments: root, part. */}}
{{- define "text-generation.nodes" -}}
{{- $place := ternary .root.Values.router .root.Values (eq .part "router") }}
{{- with $place.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $place.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $place.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Choice of the node of a pod. Arguments: root, part. */}}
{{- define "text-generation.scheduling" -}}
{{- $values := .root.Values }}
{{- include "text-generation.nodes" . }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $values.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- if and $values.runtimeClassName (ne .part "router") }}
runtimeClassName: {{ $values.runtimeClassName }}
{{- end }}
{{- if and $values.topologySpread.enabled (has .part (list "cell" "router" "shards")) (ne $values.shape "group") }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ $values.topologySpread.topologyKey }}
    whenUnsatisfiable: {{ $values.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "text-generation.selector" . | nindent 8 }}
    matchLabelKeys: [pod-template-hash]
{{- end }}
{{- end }}

{{/* The template of a pod. Arguments: root, part. */}}
{{- define "text-generation.pod" -}}
{{- $values := .root.Values }}
{{- $own := ternary $values.router $values (eq .part "router") }}
{{- $discovers := and (eq .part "router") (eq $values.router.discovery "kubernetes") }}
metadata:
  # No version of the chart: pods restart only when they change.
  labels:
    {{- include "text-generation.selector" . | nindent 4 }}
    {{- if has .part (list "cell" "router") }}
    llm-d.ai/engine-type: trtllm-serve  # the names of our gauges for endpoint pickers
    inference.networking.k8s.io/engine-type: trtllm-serve
    {{- end }}
    {{- with $own.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $own.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "text-generation.fullname" .root }}{{ if eq .part "router" }}-router{{ end }}
  automountServiceAccountToken: {{ $discovers }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "text-generation.graceSeconds" . }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml $values.podSecurityContext | nindent 4 }}
  {{- with include "text-generation.scheduling" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $values.initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and $values.resourceClaims (ne .part "router") }}
  resourceClaims:
    {{- toYaml $values.resourceClaims | nindent 4 }}
  {{- end }}
  containers:
    -
      {{- include "text-generation.container" . | trim | nindent 6 }}
    {{- with $values.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "text-generation.volumes" . | trim | nindent 4 }}
{{- end }}
