{{/* What the schema cannot say: values that contradict each other. Called once, by NOTES.txt and the
     first template that is rendered. */}}
{{- define "distca.validate" -}}
{{- with .Values }}
{{- if and (not .controlPlane.enabled) (not .controlPlane.address) (or .attentionNode.enabled .exampleJob.enabled) }}
{{- fail "controlPlane.address is empty and controlPlane.enabled is false; give the host:port of the control plane to join" }}
{{- end }}
{{- if and .controlPlane.enabled .controlPlane.address }}
{{- fail (printf "controlPlane.address is %q and controlPlane.enabled is true; an address is only for a control plane outside this release" .controlPlane.address) }}
{{- end }}
{{- if and (gt (int .controlPlane.replicas) 1) (not .controlPlane.leaderElection.enabled) }}
{{- fail (printf "controlPlane.replicas is %d and controlPlane.leaderElection.enabled is false; without a leader each replica would hold a part of the members" (int .controlPlane.replicas)) }}
{{- end }}
{{- if and .autoscaling.enabled (not .attentionNode.enabled) }}
{{- fail "autoscaling.enabled is true and attentionNode.enabled is false; there is no pool to scale" }}
{{- end }}
{{- if and .autoscaling.enabled (eq .attentionNode.kind "DaemonSet") }}
{{- fail "autoscaling.enabled is true and attentionNode.kind is \"DaemonSet\"; only a StatefulSet or a Deployment can be scaled" }}
{{- end }}
{{- if and .controlPlane.enabled .controlPlane.podDisruptionBudget.enabled (gt (int .controlPlane.replicas) 1) }}
{{- $stay := include "distca.amountOfPods" (dict "amount" .controlPlane.podDisruptionBudget.minAvailable "pods" .controlPlane.replicas) }}
{{- if ge (int $stay) (int .controlPlane.replicas) }}
{{- fail (printf "controlPlane.podDisruptionBudget.minAvailable is %v and controlPlane.replicas %d; all pods would have to stay, and no machine with one could be drained: give at most %d" .controlPlane.podDisruptionBudget.minAvailable (int .controlPlane.replicas) (sub (int .controlPlane.replicas) 1)) }}
{{- end }}
{{- end }}
{{- include "distca.validateRollout" $ }}
{{- include "distca.validateDevices" $ }}
{{- if gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas) }}
{{- fail (printf "autoscaling.minReplicas is %d and autoscaling.maxReplicas %d; the first must not be larger" (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas)) }}
{{- end }}
{{- if le (float64 .attentionNode.stuckSeconds) (float64 .controlPlane.stallSeconds) }}
{{- fail (printf "attentionNode.stuckSeconds is %v and controlPlane.stallSeconds %v; a server must be left out before it gives up" .attentionNode.stuckSeconds .controlPlane.stallSeconds) }}
{{- end }}
{{- $ports := splitList "-" .ucx.tcpPortRange }}
{{- if gt (first $ports | int) (last $ports | int) }}
{{- fail (printf "ucx.tcpPortRange is %q; it is FIRST-LAST and the first port must not be larger" .ucx.tcpPortRange) }}
{{- end }}
{{- if eq .tls.mode "secrets" }}
{{- range $role, $needed := dict "controlPlane" .controlPlane.enabled "attentionNode" .attentionNode.enabled "trainer" .exampleJob.enabled "operator" .tests.enabled }}
{{- if and $needed (not (index $.Values.tls.secrets $role)) }}
{{- fail (printf "tls.secrets.%s is empty and tls.mode is secrets; name the Secret with tls.crt, tls.key and ca.crt" $role) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .exampleJob.enabled (eq .exampleJob.placement "pool") (not .attentionNode.enabled) }}
{{- fail "exampleJob.placement is pool and attentionNode.enabled is false; choose in-place, or enable the pool" }}
{{- end }}
{{- if and .networkPolicy.enabled .attentionNode.enabled .attentionNode.hostNetwork (empty .networkPolicy.hostNetworkFrom) }}
{{- fail "attentionNode.hostNetwork is true and networkPolicy.hostNetworkFrom is empty; nodes would reach neither control plane nor trainers: give the machines' addresses, for example [{ipBlock: {cidr: 10.0.0.0/16}}], or set networkPolicy.enabled to false" }}
{{- end }}
{{- if and .attentionNode.hostNetwork (has .attentionNode.kind (list "StatefulSet" "LeaderWorkerSet")) (gt (int .attentionNode.replicas) 1) (empty .attentionNode.affinity) }}
{{- fail (printf "attentionNode.hostNetwork is true for a %s without attentionNode.affinity; two pods on one machine would want the same ports: use a DaemonSet, or a podAntiAffinity" .attentionNode.kind) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Networks and devices that go together. */}}
{{- define "distca.validateDevices" -}}
{{- with .Values }}
{{- if and .dataInterface.networkAttachment (not .dataInterface.name) }}
{{- fail (printf "dataInterface.networkAttachment is %q and dataInterface.name is empty; name the interface that it is to be in pods, for example net1" .dataInterface.networkAttachment) }}
{{- end }}
{{- range $part := list "attentionNode" "exampleJob" }}
{{- if and $.Values.dataInterface.networkAttachment (hasKey (index $.Values $part "podAnnotations") "k8s.v1.cni.cncf.io/networks") }}
{{- fail (printf "%s.podAnnotations has k8s.v1.cni.cncf.io/networks and dataInterface.networkAttachment is %q; leave one of them out" $part $.Values.dataInterface.networkAttachment) }}
{{- end }}
{{- end }}
{{- if and (or .gpu.dra.enabled .gpu.computeDomain.enabled) (not .gpu.enabled) (eq (int .exampleJob.gpus) 0) }}
{{- fail "gpu.dra.enabled or gpu.computeDomain.enabled is true, gpu.enabled is false and exampleJob.gpus 0; nothing would claim a GPU" }}
{{- end }}
{{- if and .exampleJob.enabled .exampleJob.resume (empty .exampleJob.runVolume) }}
{{- fail "exampleJob.resume is true and exampleJob.runVolume is empty; checkpoints would go with the pods: give a volume that all pods share, for example {persistentVolumeClaim: {claimName: runs}}" }}
{{- end }}
{{- end }}
{{- end }}

{{/* An upgrade of the pool keeps to the budget of evictions, and leaves someone to serve. A percentage
     of a DaemonSet is compared with another one only: how many machines there are is not known. */}}
{{- define "distca.validateRollout" -}}
{{- $pods := include "distca.attentionNode.mostPods" . }}
{{- with .Values.attentionNode }}
{{- if and .enabled (empty .updateStrategy) }}
{{- $away := .rollout.maxUnavailable }}
{{- $budget := .podDisruptionBudget.maxUnavailable }}
{{- $alike := eq (hasSuffix "%" (toString $away)) (hasSuffix "%" (toString $budget)) }}
{{- $of := $pods | default 100 }}
{{- /* A LeaderWorkerSet replaces groups. */}}
{{- $each := include "distca.attentionNode.podsPerReplica" $ | int }}
{{- $awayPods := mul $each (include "distca.amountOfPods" (dict "amount" $away "pods" (div $of $each)) | int) }}
{{- $budgetPods := include "distca.amountOfPods" (dict "amount" $budget "pods" $of) | int }}
{{- if and .podDisruptionBudget.enabled (or $pods $alike) (gt (int $awayPods) $budgetPods) }}
{{- fail (printf "attentionNode.rollout.maxUnavailable is %v and attentionNode.podDisruptionBudget.maxUnavailable %v; an upgrade must not take more pods than the budget lets evictions take: raise the budget, or lower the former" $away $budget) }}
{{- end }}
{{- if and $pods (gt (int $pods) 1) (ge (int $awayPods) (int $pods)) }}
{{- fail (printf "attentionNode.rollout.maxUnavailable is %v of %d pods; an upgrade would take the whole pool at a time: give at most %d" $away (int $pods) (sub (int $pods) 1)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
