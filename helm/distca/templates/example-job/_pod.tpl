{{/* A pod of the example job. Arguments: root, env (how torchrun finds the other pods), jobSet (name of
     the JobSet that the pod is of, unless another makes it). */}}
{{- define "distca.exampleJob.pod" -}}
{{- $root := .root }}
{{- with .root.Values.exampleJob -}}
metadata:
  labels:
    {{- include "distca.steadyLabels" (dict "root" $root "component" "trainer") | nindent 4 }}
    {{- with $.jobSet }}
    {{ include "distca.exampleJob.jobSetLabel" $root }}: {{ . }}
    {{- end }}
    {{- toYaml $root.Values.networkPolicy.jobPodLabels | nindent 4 }}
  {{- with include "distca.dataPlaneAnnotations" (dict "root" $root "own" .podAnnotations) }}{{ . | nindent 2 }}{{ end }}
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  enableServiceLinks: false
  # Time to finish the step and save a checkpoint.
  terminationGracePeriodSeconds: 120
  {{- with include "distca.imagePullSecrets" $root }}{{ . | nindent 2 }}{{ end }}
  securityContext:
    {{- toYaml .podSecurityContext | nindent 4 }}
  {{- with include "distca.resourceClaims" (dict "root" $root "gpus" .gpus "claims" (list "gpu") "component" "trainer") }}{{ . | nindent 2 }}{{ end }}
  containers:
    - name: node
      image: {{ include "distca.image" (dict "root" $root "image" .image "gpus" .gpus) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      # How many there are, and where they meet, torchrun reads from PET_* variables.
      command: [torchrun]
      args:
        - --module
        - distca
        - train
        - --control-plane=$(DISTCA_CONTROL_PLANE)
        - --run-dir=/runs/{{ include "distca.exampleJob.run" $root }}
        - --placement={{ .placement }}
        - --data-host=$(POD_IP)
        {{- with $root.Values.dataInterface.name }}
        - --data-interface={{ . }}
        {{- end }}
        - --transport={{ $root.Values.transport }}
        - --metrics-port={{ .metricsPort }}
        {{- if .resume }}
        - --resume-or-start
        {{- end }}
        {{- range .args }}
        - {{ . | quote }}
        {{- end }}
      env:
        - name: POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        - name: DISTCA_CONTROL_PLANE
          value: {{ include "distca.controlPlane.address" $root }}
        - name: DISTCA_LOG_LEVEL
          value: {{ $root.Values.logLevel }}
        - name: HOME
          value: /tmp
        {{- with include "distca.tls.env" (dict "root" $root "role" "trainer") }}{{ . | nindent 8 }}{{ end }}
        {{- with $.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- include "distca.ucxEnv" (dict "root" $root "gpus" .gpus) | nindent 8 }}
        {{- with .extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- range $index := until (int .ranksPerNode) }}
        - name: metrics-{{ $index }}
          containerPort: {{ add $root.Values.exampleJob.metricsPort $index }}
        {{- end }}
      resources:
        {{- include "distca.resources" (dict "root" $root "resources" .resources "gpus" .gpus "claims" (list "gpu")) | nindent 8 }}
      securityContext:
        {{- include "distca.dataPlaneSecurityContext" (dict "root" $root "securityContext" .securityContext) | nindent 8 }}
      volumeMounts:
        - name: runs
          mountPath: /runs
        - name: shm
          mountPath: /dev/shm
        - name: tmp
          mountPath: /tmp
        {{- with include "distca.tls.mount" $root }}{{ . | nindent 8 }}{{ end }}
  volumes:
    - name: runs
      {{- toYaml (default (dict "emptyDir" dict) .runVolume) | nindent 6 }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $root.Values.attentionNode.sharedMemorySize }}
    - name: tmp
      emptyDir: {}
    {{- with include "distca.tls.volume" (dict "root" $root "role" "trainer") }}{{ . | nindent 4 }}{{ end }}
  {{- with .nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "distca.exampleJob.affinity" (dict "root" $root "jobSet" $.jobSet) | fromYaml }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* By which pods of one JobSet of the release are told from those of another. */}}
{{- define "distca.exampleJob.jobSetLabel" -}}distca.dev/job-set{{- end }}

{{/* Where pods go. Those of a JobSet wait until those of the one that it replaces have saved their
     checkpoint and are gone: two jobs of one name would not go together, nor in one folder. All machines
     have one value of the topology, so the rule holds for the whole cluster. Arguments: root, jobSet. */}}
{{- define "distca.exampleJob.affinity" -}}
{{- $affinity := deepCopy .root.Values.exampleJob.affinity }}
{{- with .jobSet }}
{{- $selector := dict
  "matchLabels" (include "distca.selectorLabels" (dict "root" $.root "component" "trainer") | fromYaml)
  "matchExpressions" (list (dict "key" (include "distca.exampleJob.jobSetLabel" $.root) "operator" "NotIn" "values" (list .)))
}}
{{- $others := dict "topologyKey" "kubernetes.io/os" "labelSelector" $selector }}
{{- $apart := deepCopy (default dict $affinity.podAntiAffinity) }}
{{- $required := default list $apart.requiredDuringSchedulingIgnoredDuringExecution }}
{{- $_ := set $apart "requiredDuringSchedulingIgnoredDuringExecution" (append $required $others) }}
{{- $_ := set $affinity "podAntiAffinity" $apart }}
{{- end }}
{{- toYaml $affinity }}
{{- end }}

{{/* All pods start again when one has failed, since no rank can train alone. Those that a drain or a
     preemption takes away are told apart: they cost none of the restarts. */}}
{{- define "distca.exampleJob.failurePolicy" -}}
{{- if gt (int .Values.exampleJob.restarts) 0 -}}
failurePolicy:
  maxRestarts: {{ int64 .Values.exampleJob.restarts }}
  rules:
    - name: taken-away
      action: RestartJobSetAndIgnoreMaxRestarts
      onJobFailureReasons: [PodFailurePolicy]
{{- end }}
{{- end }}

{{- define "distca.exampleJob.podFailurePolicy" -}}
{{- if gt (int .Values.exampleJob.restarts) 0 -}}
podFailurePolicy:
  rules:
    - action: FailJob
      onPodConditions:
        - type: DisruptionTarget
          status: "True"
{{- end }}
{{- end }}

{{/* Labels of the job itself; Kueue admits it by its queue. */}}
{{- define "distca.exampleJob.labels" -}}
{{ include "distca.labels" (dict "root" . "component" "trainer") }}
{{- with .Values.exampleJob.queueName }}
kueue.x-k8s.io/queue-name: {{ . }}
{{- end }}
{{- with .Values.exampleJob.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}
