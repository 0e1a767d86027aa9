{{/* Names */}}

{{- define "distca.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* At most 40 characters, so that the names of Services, made from it, fit into 63. */}}
{{- define "distca.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "distca.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "distca.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "distca.controlPlane.name" -}}{{ include "distca.fullname" . }}-control-plane{{- end }}
{{- define "distca.jobs.name" -}}{{ include "distca.fullname" . }}-jobs{{- end }}

{{/* A name of the release with an ending; its front is cut if it has more characters than fit, with a
     digest instead of what is lost, so that releases stay apart. Arguments: root, ending, fit, most
     (characters of a cut name). */}}
{{- define "distca.fittingName" -}}
{{- $fullname := include "distca.fullname" .root }}
{{- $name := printf "%s%s" $fullname .ending }}
{{- if gt (len $name) (int .fit) }}
{{- $front := trunc (sub (int .most) (add (len .ending) 9) | int) $fullname | trimSuffix "-" }}
{{- $name = printf "%s-%s%s" $front (sha256sum $fullname | trunc 8) .ending }}
{{- end }}
{{- $name }}
{{- end }}

{{/* Pods of a StatefulSet carry its name and a hash of 10 characters in one label, of 63 characters at
     most. */}}
{{- define "distca.attentionNode.name" -}}
{{- $fit := ternary 52 63 (eq .Values.attentionNode.kind "StatefulSet") }}
{{- include "distca.fittingName" (dict "root" . "ending" "-attention-node" "fit" $fit "most" $fit) }}
{{- end }}

{{- define "distca.controlPlane.serviceAccount" -}}
{{- with .Values.controlPlane.serviceAccount }}
{{- if .create }}{{ default (include "distca.controlPlane.name" $) .name }}{{ else }}{{ default "default" .name }}{{ end }}
{{- end }}
{{- end }}

{{- define "distca.attentionNode.serviceAccount" -}}
{{- with .Values.attentionNode.serviceAccount }}
{{- if .create }}{{ default (include "distca.attentionNode.name" $) .name }}{{ else }}{{ default "default" .name }}{{ end }}
{{- end }}
{{- end }}

{{/* host:port of the control plane, as every client of the release knows it. */}}
{{- define "distca.controlPlane.address" -}}
{{- if .Values.controlPlane.enabled -}}
{{ include "distca.controlPlane.name" . }}.{{ .Release.Namespace }}.svc:{{ .Values.controlPlane.service.port }}
{{- else -}}
{{ .Values.controlPlane.address }}
{{- end }}
{{- end }}

{{- define "distca.controlPlane.tokenSecret" -}}
{{ .Values.controlPlane.tokenSecret.name | default (printf "%s-token" (include "distca.controlPlane.name" .)) }}
{{- end }}

{{/* How pods of a component spread over machines, if that can be had. Arguments: own (constraints that
     stand instead), labels (arguments of the component's labels). */}}
{{- define "distca.spread" -}}
{{- if .own }}
{{- toYaml .own }}
{{- else -}}
- topologyKey: kubernetes.io/hostname
  maxSkew: 1
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "distca.selectorLabels" .labels | nindent 6 }}
{{- end }}
{{- end }}

{{/* How many pods the pool has at most; empty where the machines decide. */}}
{{- define "distca.attentionNode.mostPods" -}}
{{- if .Values.autoscaling.enabled }}{{ int64 .Values.autoscaling.maxReplicas }}
{{- else if ne .Values.attentionNode.kind "DaemonSet" }}{{ int64 .Values.attentionNode.replicas }}
{{- end }}
{{- end }}

{{/* How many of some pods a number or a percentage stands for, rounded up as Kubernetes does for
     budgets. Arguments: amount, pods. */}}
{{- define "distca.amountOfPods" -}}
{{- $text := include "distca.intOrPercent" .amount }}
{{- if hasSuffix "%" $text }}
{{- $share := mul (trimSuffix "%" $text | int) (int .pods) }}
{{- div (add $share 99) 100 }}
{{- else }}
{{- int $text }}
{{- end }}
{{- end }}

{{/* A number or a percentage, as it is written. */}}
{{- define "distca.intOrPercent" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ int64 . }}{{ end }}
{{- end }}

{{/* Ports */}}

{{/* What is added to the ports of attentionNode.ports for each server of a pod, as a JSON list: 10 more
     than for the one before, and past UCX's range where that would lead into it. */}}
{{- define "distca.attentionNode.portOffsets" -}}
{{- $range := splitList "-" .Values.ucx.tcpPortRange }}
{{- $first := first $range | int }}
{{- $last := last $range | int }}
{{- $ports := values .Values.attentionNode.ports }}
{{- $offsets := list 0 }}
{{- $offset := 0 }}
{{- range untilStep 1 (int .Values.attentionNode.serversPerPod) 1 }}
{{- $offset = add $offset 10 }}
{{- /* Past the range for one port may be in it for another. */}}
{{- range until (len $ports) }}
{{- range $ports }}
{{- $port := add . $offset }}
{{- if and (ge (int $port) $first) (le (int $port) $last) }}
{{- $offset = add $offset (mul 10 (div (sub (add $last 10) $port) 10)) }}
{{- end }}
{{- end }}
{{- end }}
{{- $offsets = append $offsets $offset }}
{{- end }}
{{- toJson $offsets }}
{{- end }}

{{/* A port of one of a pod's servers. Arguments: root, name (data or metrics), index. */}}
{{- define "distca.attentionNode.port" -}}
{{- $offsets := include "distca.attentionNode.portOffsets" .root | fromJsonArray }}
{{- add (index .root.Values.attentionNode.ports .name) (index $offsets (int .index)) }}
{{- end }}

{{/* Labels */}}

{{/* Arguments: root, component. What selects the pods of a component; it never changes. */}}
{{- define "distca.selectorLabels" -}}
app.kubernetes.io/name: {{ include "distca.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Labels of pods: another version of the chart leaves them as they are, and with them the pods.
     Arguments: root, component. */}}
{{- define "distca.podLabels" -}}
{{ include "distca.selectorLabels" . }}
app.kubernetes.io/part-of: distca
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Arguments: root, component. */}}
{{- define "distca.labels" -}}
{{ include "distca.podLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Images. What runs on GPUs has an image of its own, called so by `make images VARIANT=cuda`.
     Arguments: root, image, gpus (of the container; none by default). */}}
{{- define "distca.image" -}}
{{- $registry := .root.Values.image.registry | trimSuffix "/" }}
{{- if $registry }}{{ $registry }}/{{ end }}{{ .image.repository }}
{{- if .image.digest }}@{{ .image.digest }}
{{- else if .image.tag }}:{{ .image.tag }}
{{- else }}:{{ default .root.Chart.AppVersion .root.Values.image.tag }}{{ if gt (int .gpus) 0 }}-cuda{{ end }}
{{- end }}
{{- end }}

{{- define "distca.imagePullSecrets" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Certificates */}}

{{- define "distca.tls.enabled" -}}
{{- if ne .Values.tls.mode "none" }}true{{ end }}
{{- end }}

{{/* Name of the Secret of a role: controlPlane, attentionNode, trainer or operator. Arguments: root,
     role. */}}
{{- define "distca.tls.secret" -}}
{{- if eq .root.Values.tls.mode "secrets" -}}
{{ index .root.Values.tls.secrets .role }}
{{- else -}}
{{ include "distca.fullname" .root }}-{{ kebabcase .role }}-tls
{{- end }}
{{- end }}

{{/* Volume with a role's certificate. Arguments: root, role. */}}
{{- define "distca.tls.volume" -}}
{{- if include "distca.tls.enabled" .root -}}
- name: tls
  secret:
    secretName: {{ include "distca.tls.secret" . }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{- define "distca.tls.mount" -}}
{{- if include "distca.tls.enabled" . -}}
- name: tls
  mountPath: /etc/distca/tls
  readOnly: true
{{- end }}
{{- end }}

{{/* Where a process finds its certificate; the control plane itself also takes client-ca. Arguments:
     root, role. */}}
{{- define "distca.tls.env" -}}
{{- if include "distca.tls.enabled" .root -}}
- name: DISTCA_TLS_CA
  value: /etc/distca/tls/ca.crt
- name: DISTCA_TLS_CERTIFICATE
  value: /etc/distca/tls/tls.crt
- name: DISTCA_TLS_KEY
  value: /etc/distca/tls/tls.key
{{- if eq .role "controlPlane" }}
- name: DISTCA_TLS_CLIENT_CA
  value: /etc/distca/tls/ca.crt
{{- end }}
{{- end }}
{{- end }}

{{/* Devices */}}

{{/* Requests or limits of a container, with devices. Arguments: root, base (cpu, memory), gpus,
     servers. */}}
{{- define "distca.resourceList" -}}
{{- $list := deepCopy (default dict .base) }}
{{- if and (gt (int .gpus) 0) (not .root.Values.gpu.dra.enabled) }}{{ $_ := set $list .root.Values.gpu.resourceName (int .gpus) }}{{ end }}
{{- if .root.Values.rdma.enabled }}
{{- $_ := set $list .root.Values.rdma.resourceName (mul .root.Values.rdma.count (default 1 .servers)) }}
{{- with .root.Values.rdma.hugepagesMiB }}
{{- $_ := set $list "hugepages-2Mi" (printf "%dMi" (mul . (default 1 $.servers))) }}
{{- end }}
{{- end }}
{{- toYaml $list }}
{{- end }}

{{/* Arguments: root, resources, gpus, claims (names of the pod's claims for these GPUs), servers (whose
     devices the container has; 1 by default). */}}
{{- define "distca.resources" -}}
requests:
  {{- include "distca.resourceList" (dict "root" .root "base" .resources.requests "gpus" .gpus "servers" .servers) | nindent 2 }}
limits:
  {{- include "distca.resourceList" (dict "root" .root "base" .resources.limits "gpus" .gpus "servers" .servers) | nindent 2 }}
{{- if and (gt (int .gpus) 0) .root.Values.gpu.dra.enabled }}
claims:
  {{- range .claims }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Claims of a pod for GPUs that DRA hands out. Arguments: root, gpus (of a server), claims (names, one
     for each server). */}}
{{- define "distca.resourceClaims" -}}
{{- if and (gt (int .gpus) 0) .root.Values.gpu.dra.enabled -}}
{{- $template := include "distca.gpuClaimTemplate" .root -}}
resourceClaims:
  {{- range .claims }}
  - name: {{ . }}
    resourceClaimTemplateName: {{ $template }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "distca.gpuClaimTemplate" -}}
{{ include "distca.fullname" . }}-attention-node-gpu
{{- end }}

{{/* Networks */}}

{{/* Annotations of a pod that exchanges rows. Arguments: root, own (those of its values). */}}
{{- define "distca.dataPlaneAnnotations" -}}
{{- $annotations := deepCopy .own }}
{{- with .root.Values.dataInterface }}
{{- if .networkAttachment }}
{{- $_ := set $annotations "k8s.v1.cni.cncf.io/networks" (printf "%s@%s" .networkAttachment .name) }}
{{- end }}
{{- end }}
{{- with $annotations -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* A container's security context, with IPC_LOCK where memory is registered for RDMA. Arguments:
     root, securityContext. */}}
{{- define "distca.dataPlaneSecurityContext" -}}
{{- $context := deepCopy .securityContext }}
{{- if .root.Values.rdma.enabled }}
{{- $capabilities := deepCopy (default dict $context.capabilities) }}
{{- $_ := set $capabilities "add" (append (default list $capabilities.add) "IPC_LOCK" | uniq) }}
{{- $_ := set $context "capabilities" $capabilities }}
{{- end }}
{{- toYaml $context }}
{{- end }}

{{/* What UCX reads from the environment. Arguments: root, gpus. */}}
{{- define "distca.ucxEnv" -}}
{{- $env := dict "UCX_TCP_PORT_RANGE" .root.Values.ucx.tcpPortRange }}
{{- with .root.Values.rdma }}
{{- if .enabled }}
{{- $_ := set $env "UCX_TLS" (ternary (printf "%s,cuda_copy,cuda_ipc" .transports) .transports (gt (int $.gpus) 0)) }}
{{- if .addressType }}{{ $_ := set $env "UCX_IB_ADDR_TYPE" .addressType }}{{ end }}
{{- if .netDevices }}{{ $_ := set $env "UCX_NET_DEVICES" .netDevices }}{{ end }}
{{- if .systemUcx }}{{ $_ := set $env "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY" "true" }}{{ end }}
{{- end }}
{{- end }}
{{- $list := list }}
{{- range $name, $value := merge (deepCopy .root.Values.ucx.env) $env }}
{{- $list = append $list (dict "name" $name "value" (toString $value)) }}
{{- end }}
{{- toYaml $list }}
{{- end }}

{{/* Probes */}}

{{/* Probes ask beside the metrics, over HTTP: no certificate is needed for it, and no process is
     started. Arguments: path (/readyz: whether it serves; /livez: whether it goes on at all, as who
     drains or stands by does), port. */}}
{{- define "distca.probe" -}}
httpGet:
  path: {{ .path }}
  port: {{ .port }}
{{- end }}

{{/* Environment of every process. Arguments: root, role, health (host:port that `distca health` asks). */}}
{{- define "distca.commonEnv" -}}
- name: DISTCA_LOG_LEVEL
  value: {{ .root.Values.logLevel }}
- name: HOME
  value: /var/lib/distca
{{- with .health }}
- name: DISTCA_HEALTH_ADDRESS
  value: {{ . | quote }}
{{- if include "distca.tls.enabled" $.root }}
# The certificate is for localhost, whatever the pod's address.
- name: DISTCA_HEALTH_TLS_SERVER_NAME
  value: localhost
{{- end }}
{{- end }}
{{- with include "distca.tls.env" (dict "root" .root "role" .role) }}
{{ . }}
{{- end }}
{{- end }}
