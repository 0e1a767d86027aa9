{{/* What the schema cannot say: values that contradict each other. Called once, by NOTES.txt and the
     first template that is rendered. */}}
{{- define "distca.validate" -}}
{{- with .Values }}
{{- if not (regexMatch "^([a-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)*/?)?$" .image.registry) }}
{{- fail (printf "image.registry is %q; give host, port and folder in small letters and without a scheme, for example registry.example.com/ml" .image.registry) }}
{{- end }}
{{- if and (not .controlPlane.enabled) (not .controlPlane.address) .attentionNode.enabled }}
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
{{- fail (printf "controlPlane.podDisruptionBudget.minAvailable is %v and controlPlane.replicas %d; all pods would have to stay, and no machine with one could be drained: give at most %d" (include "distca.intOrPercent" .controlPlane.podDisruptionBudget.minAvailable) (int .controlPlane.replicas) (sub (int .controlPlane.replicas) 1)) }}
{{- end }}
{{- end }}
{{- include "distca.validateNames" $ }}
{{- include "distca.validateRollout" $ }}
{{- include "distca.validateDevices" $ }}
{{- include "distca.validatePorts" $ }}
{{- include "distca.validateAmounts" $ }}
{{- if gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas) }}
{{- fail (printf "autoscaling.minReplicas is %d and autoscaling.maxReplicas %d; the first must not be larger" (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas)) }}
{{- end }}
{{- if le (float64 .attentionNode.stuckSeconds) (float64 .controlPlane.stallSeconds) }}
{{- fail (printf "attentionNode.stuckSeconds is %v and controlPlane.stallSeconds %v; a server must be left out before it gives up" .attentionNode.stuckSeconds .controlPlane.stallSeconds) }}
{{- end }}
{{- if eq .tls.mode "secrets" }}
{{- range $role, $needed := dict "controlPlane" .controlPlane.enabled "attentionNode" .attentionNode.enabled "operator" .tests.enabled }}
{{- if and $needed (not (index $.Values.tls.secrets $role)) }}
{{- fail (printf "tls.secrets.%s is empty and tls.mode is secrets; name the Secret with tls.crt, tls.key and ca.crt" $role) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .networkPolicy.enabled .attentionNode.enabled .attentionNode.hostNetwork (empty .networkPolicy.hostNetworkFrom) }}
{{- fail "attentionNode.hostNetwork is true and networkPolicy.hostNetworkFrom is empty; nodes would reach neither control plane nor trainers: give the machines' addresses, for example [{ipBlock: {cidr: 10.0.0.0/16}}], or set networkPolicy.enabled to false" }}
{{- end }}
{{- if and .attentionNode.enabled .attentionNode.hostNetwork (gt (include "distca.attentionNode.mostPods" $ | int) 1) (empty .attentionNode.affinity) }}
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
{{- if and .dataInterface.networkAttachment (hasKey .attentionNode.podAnnotations "k8s.v1.cni.cncf.io/networks") }}
{{- fail (printf "attentionNode.podAnnotations has k8s.v1.cni.cncf.io/networks and dataInterface.networkAttachment is %q; leave one of them out" .dataInterface.networkAttachment) }}
{{- end }}
{{- if and .gpu.dra.enabled (not .gpu.enabled) }}
{{- fail "gpu.dra.enabled is true and gpu.enabled is false; nothing would claim a GPU" }}
{{- end }}
{{- $kubernetes := $.Capabilities.KubeVersion.Version }}
{{- if and .gpu.dra.enabled (semverCompare "<1.34-0" $kubernetes) }}
{{- fail (printf "gpu.dra.enabled is true and Kubernetes is %s; it has no resource.k8s.io/v1 before 1.34: give gpu.resourceName" $kubernetes) }}
{{- end }}
{{- $service := lookup "v1" "Service" "default" "kubernetes" }}
{{- if eq "IPv6" (dig "spec" "ipFamilies" (list "IPv4") $service | first) }}
{{- fail "the cluster's Services are IPv6 by default, and rows travel over IPv4; install into a cluster of IPv4, or of both with IPv4 first" }}
{{- end }}
{{- end }}
{{- end }}

{{/* An upgrade of the pool keeps to the budget of evictions, and leaves someone to serve. A DaemonSet has
     no budget, and how many machines there are is not known. */}}
{{- define "distca.validateRollout" -}}
{{- $pods := include "distca.attentionNode.mostPods" . }}
{{- with .Values.attentionNode }}
{{- if and .enabled $pods (empty .updateStrategy) }}
{{- $away := include "distca.intOrPercent" .rollout.maxUnavailable }}
{{- $budget := include "distca.intOrPercent" .podDisruptionBudget.maxUnavailable }}
{{- $awayPods := include "distca.amountOfPods" (dict "amount" $away "pods" $pods) | int }}
{{- $budgetPods := include "distca.amountOfPods" (dict "amount" $budget "pods" $pods) | int }}
{{- if and .podDisruptionBudget.enabled (gt (int $awayPods) $budgetPods) }}
{{- fail (printf "attentionNode.rollout.maxUnavailable is %v and attentionNode.podDisruptionBudget.maxUnavailable %v; an upgrade must not take more pods than the budget lets evictions take: raise the budget, or lower the former" $away $budget) }}
{{- end }}
{{- if and (gt (int $pods) 1) (ge (int $awayPods) (int $pods)) }}
{{- fail (printf "attentionNode.rollout.maxUnavailable is %v of %d pods; an upgrade would take the whole pool at a time: give at most %d" $away (int $pods) (sub (int $pods) 1)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Services are called after the release. From 1.36 on Kubernetes lets a Service's name begin
     with a digit. */}}
{{- define "distca.validateNames" -}}
{{- $fullname := include "distca.fullname" . }}
{{- $label := "^[a-z]([-a-z0-9]*[a-z0-9])?$" }}
{{- $digits := semverCompare ">=1.36-0" .Capabilities.KubeVersion.Version }}
{{- if not (regexMatch (ternary "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$" $label $digits) $fullname) }}
{{- $rule := "with small letters, digits and hyphens alone, and a letter first" }}
{{- if .Values.fullnameOverride }}
{{- fail (printf "fullnameOverride is %q; the names of Services begin with it: give one %s" .Values.fullnameOverride $rule) }}
{{- else if and .Values.nameOverride (regexMatch $label .Release.Name) }}
{{- fail (printf "nameOverride is %q; the names of Services begin with %q: give one %s, or fullnameOverride" .Values.nameOverride $fullname $rule) }}
{{- else }}
{{- fail (printf "the release is called %q; the names of Services begin with it: give fullnameOverride, or another name of the release, %s" .Release.Name $rule) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Ports of one pod must differ, and UCX opens those of its range by itself. */}}
{{- define "distca.validatePorts" -}}
{{- $range := splitList "-" .Values.ucx.tcpPortRange }}
{{- $first := first $range | int }}
{{- $last := last $range | int }}
{{- with .Values }}
{{- if gt $first $last }}
{{- fail (printf "ucx.tcpPortRange is %q; it is FIRST-LAST and the first port must not be larger" .ucx.tcpPortRange) }}
{{- end }}
{{- if gt $last 65535 }}
{{- fail (printf "ucx.tcpPortRange is %q; ports end at 65535: give a lower range" .ucx.tcpPortRange) }}
{{- end }}
{{- if hasKey .ucx.env "UCX_TCP_PORT_RANGE" }}
{{- fail (printf "ucx.env has UCX_TCP_PORT_RANGE %q and ucx.tcpPortRange is %q, which NetworkPolicies open: give the latter alone" (toString .ucx.env.UCX_TCP_PORT_RANGE) .ucx.tcpPortRange) }}
{{- end }}
{{- range .attentionNode.extraEnv }}
{{- if eq (toString .name) "UCX_TCP_PORT_RANGE" }}
{{- fail (printf "attentionNode.extraEnv has UCX_TCP_PORT_RANGE and ucx.tcpPortRange is %q, which NetworkPolicies open: give the latter alone" $.Values.ucx.tcpPortRange) }}
{{- end }}
{{- end }}
{{- if and .controlPlane.enabled (eq (int .controlPlane.service.port) (int .controlPlane.metricsPort)) }}
{{- fail (printf "controlPlane.metricsPort is %d and controlPlane.service.port too; give another port to one of them" (int .controlPlane.metricsPort)) }}
{{- end }}
{{- if .attentionNode.enabled }}
{{- $taken := dict }}
{{- range $index := until (int .attentionNode.serversPerPod) }}
{{- range $name := list "data" "metrics" }}
{{- $given := index $.Values.attentionNode.ports $name | int }}
{{- $port := include "distca.attentionNode.port" (dict "root" $ "name" $name "index" $index) | int }}
{{- $what := printf "attentionNode.ports.%s is %d, with which server %d of a pod has port %d" $name $given $index $port }}
{{- if gt $port 65535 }}
{{- fail (printf "%s; ports end at 65535: give a lower port, or fewer attentionNode.serversPerPod (%d)" $what (int $.Values.attentionNode.serversPerPod)) }}
{{- end }}
{{- if and (ge $port $first) (le $port $last) }}
{{- fail (printf "%s; ucx.tcpPortRange %s holds it, whose ports UCX opens by itself: give a port outside, or another range" $what $.Values.ucx.tcpPortRange) }}
{{- end }}
{{- $other := index $taken (toString $port) }}
{{- if $other }}
{{- fail (printf "%s, and %s too; give ports that differ, with several servers by no multiple of 10, as 7710 and 7712 do" $what $other) }}
{{- end }}
{{- $_ := set $taken (toString $port) (printf "with attentionNode.ports.%s server %d" $name $index) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Amounts of which one must not exceed the other. */}}
{{- define "distca.validateAmounts" -}}
{{- range $part := list "controlPlane" "attentionNode" }}
{{- $resources := (index $.Values $part).resources }}
{{- range $name, $limit := $resources.limits }}
{{- $request := get (default dict $resources.requests) $name | default 0 }}
{{- if gt (include "distca.quantity" $request | float64) (include "distca.quantity" $limit | float64) }}
{{- fail (printf "%s.resources.requests.%s is %v and limits.%s %v; a pod must not ask for more than its limit" $part $name $request $name $limit) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $name, $monitor := pick .Values.monitoring "serviceMonitor" "podMonitor" }}
{{- if and $monitor.scrapeTimeout (gt (include "distca.seconds" $monitor.scrapeTimeout | float64) (include "distca.seconds" $monitor.interval | float64)) }}
{{- fail (printf "monitoring.%s.scrapeTimeout is %s and interval %s; Prometheus takes none above the interval" $name $monitor.scrapeTimeout $monitor.interval) }}
{{- end }}
{{- end }}
{{- with .Values.tls.certManager }}
{{- if ge (include "distca.seconds" .renewBefore | float64) (include "distca.seconds" .duration | float64) }}
{{- fail (printf "tls.certManager.renewBefore is %s and duration %s; certificates must be renewed after they begin" .renewBefore .duration) }}
{{- end }}
{{- end }}
{{- end }}

{{/* A quantity of Kubernetes, such as 500m or 16Gi, as a number. */}}
{{- define "distca.quantity" -}}
{{- $units := dict "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 }}
{{- $text := toString . }}
{{- mulf (regexFind "^[0-9.]+(e[+][0-9]+)?" $text | float64) (get $units (regexFind "[mkMGTPEi]+$" $text) | default 1) }}
{{- end }}

{{/* A duration, such as 1m30s, in seconds. */}}
{{- define "distca.seconds" -}}
{{- $units := dict "ms" 0.001 "s" 1 "m" 60 "h" 3600 "d" 86400 "w" 604800 "y" 31536000 }}
{{- $seconds := 0.0 }}
{{- range regexFindAll "[0-9]+[a-z]+" . -1 }}
{{- $seconds = addf $seconds (mulf (regexFind "[0-9]+" . | float64) (get $units (regexFind "[a-z]+" .))) }}
{{- end }}
{{- $seconds }}
{{- end }}
