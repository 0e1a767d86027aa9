{{/* The pod of attention nodes, the same for all kinds of workloads. */}}
{{- define "distca.attentionNode.pod" -}}
{{- $labels := dict "root" . "component" "attention-node" }}
{{- $gpus := ternary 1 0 .Values.gpu.enabled }}
{{- with .Values.attentionNode -}}
metadata:
  labels:
    {{- include "distca.podLabels" $labels | nindent 4 }}
    {{- with .podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with include "distca.dataPlaneAnnotations" (dict "root" $ "own" .podAnnotations) }}{{ . | nindent 2 }}{{ end }}
spec:
  serviceAccountName: {{ include "distca.attentionNode.serviceAccount" $ }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "distca.attentionNode.graceSeconds" $ }}
  {{- with include "distca.imagePullSecrets" $ }}{{ . | nindent 2 }}{{ end }}
  {{- if .hostIPC }}
  hostIPC: true
  {{- end }}
  {{- if .hostPID }}
  hostPID: true
  {{- end }}
  {{- if .hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  securityContext:
    {{- toYaml .podSecurityContext | nindent 4 }}
  {{- with .priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with .runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with .schedulerName }}
  schedulerName: {{ . | quote }}
  {{- end }}
  {{- $claims := list }}
  {{- range $index := until (int .serversPerPod) }}{{ $claims = append $claims (printf "gpu-%d" $index) }}{{ end }}
  {{- with include "distca.resourceClaims" (dict "root" $ "gpus" $gpus "claims" $claims) }}{{ . | nindent 2 }}{{ end }}
  {{- if .doctor.enabled }}
  initContainers:
    {{- include "distca.attentionNode.doctor" (dict "root" $ "gpus" (mul $gpus .serversPerPod) "claims" $claims) | nindent 4 }}
  {{- end }}
  containers:
    {{- range $index := until (int .serversPerPod) }}
    {{- include "distca.attentionNode.server" (dict "root" $ "index" $index "gpus" $gpus) | nindent 4 }}
    {{- end }}
  volumes:
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ .sharedMemorySize }}
    - name: cache
      {{- toYaml (default (dict "emptyDir" dict) .cacheVolume) | nindent 6 }}
    - name: tmp
      emptyDir: {}
    {{- with include "distca.tls.volume" (dict "root" $ "role" "attentionNode") }}{{ . | nindent 4 }}{{ end }}
    {{- with .extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    {{- include "distca.spread" (dict "own" .topologySpreadConstraints "labels" $labels) | nindent 4 }}
{{- end }}
{{- end }}

{{/* The drain deadline, and time to tell the control plane and to end. */}}
{{- define "distca.attentionNode.graceSeconds" -}}
{{ add (ceil .Values.attentionNode.drainSeconds) 30 }}
{{- end }}

{{/* One attention server. Arguments: root, index, gpus. */}}
{{- define "distca.attentionNode.server" -}}
{{- $root := .root }}
{{- $index := .index }}
{{- $several := gt (int .root.Values.attentionNode.serversPerPod) 1 }}
{{- with .root.Values.attentionNode }}
{{- $ports := dict }}
{{- range $name := list "data" "metrics" }}
{{- $_ := set $ports $name (include "distca.attentionNode.port" (dict "root" $root "name" $name "index" $index)) }}
{{- end -}}
- name: server-{{ $index }}
  image: {{ include "distca.image" (dict "root" $root "image" .image "gpus" $.gpus) }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: [distca]
  args:
    - attention-node
    - --control-plane=$(DISTCA_CONTROL_PLANE)
    - --server-id=$(POD_NAME){{ if $several }}-{{ $index }}{{ end }}
    - --device={{ include "distca.attentionNode.device" $root }}
    {{- range .shapes }}
    - --shape={{ . }}
    {{- end }}
    - --data-host=$(POD_IP)
    {{- with $root.Values.dataInterface.name }}
    - --data-interface={{ . }}
    {{- end }}
    - --data-port={{ $ports.data }}
    - --metrics-port={{ $ports.metrics }}
    - --transport={{ $root.Values.transport }}
    - --capacity-rows={{ int64 .capacityRows }}
    - --buffer-limit-mib={{ int64 .bufferLimitMib }}
    - --profile-dir=/var/lib/distca/profiles
    - --connect-seconds={{ .connectSeconds }}
    - --control-plane-timeout-seconds={{ .controlPlaneTimeoutSeconds }}
    - --stuck-seconds={{ .stuckSeconds }}
    - --drain-seconds={{ .drainSeconds }}
    {{- range .extraArgs }}
    - {{ . | quote }}
    {{- end }}
  env:
    {{- include "distca.attentionNode.env" (dict "root" $root "gpus" $.gpus) | nindent 4 }}
  {{- with .extraEnvFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  ports:
    - name: data-{{ $index }}
      containerPort: {{ $ports.data }}
    - name: metrics-{{ $index }}
      containerPort: {{ $ports.metrics }}
  {{- /* It lives while it measures; it must serve in time. */}}
  startupProbe:
    {{- include "distca.probe" (dict "path" "/readyz" "port" (printf "metrics-%d" $index)) | nindent 4 }}
    periodSeconds: 5
    timeoutSeconds: 5
    failureThreshold: {{ div (add .startupSeconds 4) 5 }}
  readinessProbe:
    {{- include "distca.probe" (dict "path" "/readyz" "port" (printf "metrics-%d" $index)) | nindent 4 }}
    periodSeconds: 10
    timeoutSeconds: 10
  livenessProbe:
    {{- include "distca.probe" (dict "path" "/livez" "port" (printf "metrics-%d" $index)) | nindent 4 }}
    periodSeconds: 30
    timeoutSeconds: 10
  resources:
    {{- include "distca.resources" (dict "root" $root "resources" .resources "gpus" $.gpus "claims" (list (printf "gpu-%d" $.index))) | nindent 4 }}
  securityContext:
    {{- include "distca.dataPlaneSecurityContext" (dict "root" $root "securityContext" .securityContext) | nindent 4 }}
  volumeMounts:
    {{- include "distca.attentionNode.mounts" $root | nindent 4 }}
{{- end }}
{{- end }}

{{/* Preflight of all servers, with their devices and volumes. Arguments: root, gpus (of all servers),
     claims. */}}
{{- define "distca.attentionNode.doctor" -}}
{{- $root := .root }}
{{- with .root.Values.attentionNode -}}
- name: doctor
  image: {{ include "distca.image" (dict "root" $root "image" .image "gpus" $.gpus) }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: [distca]
  args:
    - doctor
    - --control-plane=$(DISTCA_CONTROL_PLANE)
    - --connect-seconds={{ .connectSeconds }}
    - --device={{ include "distca.attentionNode.device" $root }}
    {{- range $index := untilStep 1 (int $.gpus) 1 }}
    - --also-device=cuda:{{ $index }}
    {{- end }}
    {{- range .shapes }}
    - --shape={{ . }}
    {{- end }}
    - --data-host=$(POD_IP)
    {{- with $root.Values.dataInterface.name }}
    - --data-interface={{ . }}
    {{- end }}
    - --transport={{ $root.Values.transport }}
    {{- if $root.Values.rdma.enabled }}
    - --rdma
    {{- end }}
    # Data travels between trainers and nodes, not among nodes.
    - --no-pool
    - --min-gigabytes-per-second={{ .doctor.minGigabytesPerSecond }}
    {{- range .doctor.skip }}
    - --skip={{ . }}
    {{- end }}
  env:
    {{- include "distca.attentionNode.env" (dict "root" $root "gpus" $.gpus) | nindent 4 }}
  {{- with .extraEnvFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  resources:
    {{- include "distca.resources" (dict "root" $root "resources" .resources "gpus" $.gpus "claims" $.claims "servers" .serversPerPod) | nindent 4 }}
  securityContext:
    {{- include "distca.dataPlaneSecurityContext" (dict "root" $root "securityContext" .securityContext) | nindent 4 }}
  volumeMounts:
    {{- include "distca.attentionNode.mounts" $root | nindent 4 }}
{{- end }}
{{- end }}

{{- define "distca.attentionNode.device" -}}
{{ ternary "cuda:0" "cpu" .Values.gpu.enabled }}
{{- end }}

{{/* Arguments: root, gpus. */}}
{{- define "distca.attentionNode.env" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: DISTCA_CONTROL_PLANE
  value: {{ include "distca.controlPlane.address" .root }}
{{ include "distca.commonEnv" (dict "root" .root "role" "attentionNode") }}
{{ include "distca.ucxEnv" (dict "root" .root "gpus" .gpus) }}
{{- with .root.Values.attentionNode.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "distca.attentionNode.mounts" -}}
- name: shm
  mountPath: /dev/shm
- name: cache
  mountPath: /var/lib/distca
- name: tmp
  mountPath: /tmp
{{- with include "distca.tls.mount" . }}
{{ . }}
{{- end }}
{{- with .Values.attentionNode.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}
