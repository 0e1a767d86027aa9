{{/* A container of the test pod. Arguments: root, args. */}}
{{- define "distca.testContainer" -}}
image: {{ include "distca.image" (dict "root" .root "image" .root.Values.controlPlane.image) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command: [distca]
args:
  {{- toYaml .args | nindent 2 }}
env:
  - name: HOME
    value: /tmp
  {{- with include "distca.tls.env" (dict "root" .root "role" "operator") }}{{ . | nindent 2 }}{{ end }}
resources:
  requests:
    cpu: 100m
    memory: 256Mi
  limits:
    memory: 512Mi
securityContext:
  {{- toYaml .root.Values.controlPlane.securityContext | nindent 2 }}
volumeMounts:
  - name: tmp
    mountPath: /tmp
  {{- with include "distca.tls.mount" .root }}{{ . | nindent 2 }}{{ end }}
{{- end }}
