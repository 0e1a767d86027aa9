{{/* A certificate for one role. Its URI is how the control plane knows the role. Arguments: root,
     role (controlPlane, attentionNode, trainer, operator), names (DNS). */}}
{{- define "distca.certificate" -}}
{{- $own := not .root.Values.tls.certManager.issuerRef.name }}
{{- $fullname := include "distca.fullname" .root }}
{{- $uri := index (dict "controlPlane" "control-plane" "attentionNode" "server" "trainer" "trainer" "operator" "operator") .role }}
{{- with .root.Values.tls.certManager }}
---
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  name: {{ $fullname }}-{{ kebabcase $.role }}
  namespace: {{ $.root.Release.Namespace }}
  labels:
    {{- include "distca.labels" (dict "root" $.root "component" "certificates") | nindent 4 }}
spec:
  secretName: {{ include "distca.tls.secret" $ }}
  commonName: {{ $fullname }}-{{ kebabcase $.role }}
  uris:
    - spiffe://distca/{{ $uri }}/{{ $fullname }}
  {{- with $.names }}
  dnsNames:
    {{- toYaml . | nindent 4 }}
  ipAddresses: ["127.0.0.1"]
  {{- end }}
  usages:
    - digital signature
    - client auth
    {{- if $.names }}
    - server auth
    {{- end }}
  duration: {{ .duration }}
  renewBefore: {{ .renewBefore }}
  privateKey:
    algorithm: ECDSA
    size: 256
    rotationPolicy: Always
  issuerRef:
    {{- if $own }}
    name: {{ $fullname }}-ca
    kind: Issuer
    group: cert-manager.io
    {{- else }}
    {{- toYaml .issuerRef | nindent 4 }}
    {{- end }}
{{- end }}
{{- end }}
