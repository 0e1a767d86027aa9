{{/* The spec of the JobSet. Arguments: root, name. */}}
{{- define "distca.exampleJob.jobSetSpec" -}}
{{- $name := .name }}
{{- $root := .root }}
{{- with .root.Values.exampleJob }}
{{- $rank := dict "fieldRef" (dict "fieldPath" "metadata.annotations['batch.kubernetes.io/job-completion-index']") }}
{{- $env := list
  (dict "name" "PET_NNODES" "value" (toString (int .nodes)))
  (dict "name" "PET_NPROC_PER_NODE" "value" (toString (int .ranksPerNode)))
  (dict "name" "PET_NODE_RANK" "valueFrom" $rank)
  (dict "name" "PET_MASTER_ADDR" "value" (printf "%s-node-0-0.%s" $name $name))
  (dict "name" "PET_MASTER_PORT" "value" "29400")
}}
{{- with include "distca.exampleJob.failurePolicy" $root }}{{ . }}{{ end }}
replicatedJobs:
  - name: node
    replicas: 1
    template:
      spec:
        parallelism: {{ int64 .nodes }}
        completions: {{ int64 .nodes }}
        completionMode: Indexed
        backoffLimit: 0
        {{- with include "distca.exampleJob.podFailurePolicy" $root }}{{ . | nindent 8 }}{{ end }}
        template:
          {{- include "distca.exampleJob.pod" (dict "root" $root "env" $env "jobSet" $name) | nindent 10 }}
{{- end }}
{{- end }}

{{/* Ends with a digest of what cannot be changed: the spec, by JobSet, and the labels of Kueue, by that.
     An upgrade that changes it makes another JobSet and deletes the one before. */}}
{{- define "distca.exampleJob.jobSetName" -}}
{{- $fixed := include "distca.exampleJob.jobSetSpec" (dict "root" . "name" "any") | fromYaml }}
{{- $admission := dict "queueName" .Values.exampleJob.queueName }}
{{- range $key, $value := .Values.exampleJob.labels }}
{{- if hasPrefix "kueue.x-k8s.io/" $key }}{{ $_ := set $admission $key $value }}{{ end }}
{{- end }}
{{- $digest := list $fixed $admission | toJson | sha256sum | trunc 8 }}
{{- $fit := include "distca.exampleJob.fit" . }}
{{- include "distca.fittingName" (dict "root" . "ending" (printf "-example-%s" $digest) "fit" $fit "most" $fit) }}
{{- end }}
