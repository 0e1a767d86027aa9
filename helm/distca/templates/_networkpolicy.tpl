{{/* Pods of this release, of whatever component. */}}
{{- define "distca.releaseLabels" -}}
app.kubernetes.io/name: {{ include "distca.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Pods of jobs, as NetworkPolicy peers: in this namespace, and in those that are selected. */}}
{{- define "distca.jobPeers" -}}
{{- $pods := dict "matchLabels" .Values.networkPolicy.jobPodLabels }}
{{- $peers := list (dict "podSelector" $pods) }}
{{- with .Values.networkPolicy.jobNamespaceSelector }}
{{- $peers = append $peers (dict "podSelector" $pods "namespaceSelector" .) }}
{{- end }}
{{- toYaml $peers }}
{{- end }}

{{/* Who may scrape. Arguments: root, ports (names). */}}
{{- define "distca.metricsIngress" -}}
- ports:
    {{- range .ports }}
    - protocol: TCP
      port: {{ . }}
    {{- end }}
  {{- with .root.Values.networkPolicy.metricsFrom }}
  from:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* The names of the metrics ports of a pod of a job, one a rank, as a JSON list. */}}
{{- define "distca.jobMetricsPorts" -}}
{{- $names := list }}
{{- range $index := until (int .Values.networkPolicy.jobRanksPerPod) }}
{{- $names = append $names (printf "metrics-%d" $index) }}
{{- end }}
{{- toJson $names }}
{{- end }}
