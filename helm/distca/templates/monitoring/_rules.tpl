{{/* A rule group with the release's own labels and runbook links on its alerts. Arguments: root,
     group. */}}
{{- define "distca.ruleGroup" -}}
{{- $settings := .root.Values.monitoring.prometheusRule }}
{{- $rules := list }}
{{- range .group.rules }}
{{- $rule := deepCopy . }}
{{- if hasKey $rule "alert" }}
{{- with $settings.alertLabels }}
{{- $_ := set $rule "labels" (merge (deepCopy .) (default dict $rule.labels)) }}
{{- end }}
{{- if $settings.runbookUrl }}
{{- $link := printf "%s#%s" (trimSuffix "#" $settings.runbookUrl) (lower $rule.alert) }}
{{- $_ := set $rule "annotations" (merge (dict "runbook_url" $link) (default dict $rule.annotations)) }}
{{- end }}
{{- end }}
{{- $rules = append $rules $rule }}
{{- end }}
{{- list (merge (dict "rules" $rules) .group) | toYaml }}
{{- end }}
