#!/usr/bin/env bash
# Installs the chart with the given images in a cluster of kind's, tests it, replaces its nodes, tests it
# again, and takes it away: nothing may stay. Needs docker, kind, kubectl 1.31 or newer, and helm.
set -euo pipefail
cd "$(dirname "$0")/.."

cluster=distca-test
settings=(
    --values helm/distca/ci/cpu-values.yaml
    --set controlPlane.replicas=2 --set controlPlane.leaderElection.enabled=true
    --set attentionNode.replicas=1 --set attentionNode.resources.requests.cpu=100m
    --set attentionNode.drainSeconds=20
    --wait --timeout 15m
)
kube=(kubectl --context "kind-${cluster}" --namespace distca)
release=(helm --kube-context "kind-${cluster}" --namespace distca)

# Names of all objects in the namespace, but those that come and go by themselves.
objects() {
    "${kube[@]}" api-resources --namespaced --verbs=list --output=name | grep --invert-match '^events' \
        | paste --serial --delimiters=, | xargs -I KINDS "${kube[@]}" get KINDS --output=name | sort
}

finish() {
    local code=$?
    ((code == 0)) || "${kube[@]}" describe pods || true
    kind delete cluster --name "${cluster}"
    exit "${code}"
}

trap finish EXIT
kind create cluster --name "${cluster}" --wait 3m
kind load docker-image --name "${cluster}" "$@"
"${kube[@]}" create namespace distca
# Admits only pods of Pod Security Standard "restricted".
"${kube[@]}" label namespace distca pod-security.kubernetes.io/enforce=restricted
# Controllers put these into every namespace.
"${kube[@]}" wait --for=create serviceaccount/default configmap/kube-root-ca.crt --timeout=60s
before=$(objects)

"${release[@]}" install distca helm/distca "${settings[@]}"
"${release[@]}" test distca --timeout 5m
"${release[@]}" upgrade distca helm/distca "${settings[@]}" --set attentionNode.podAnnotations.rolled=yes
"${release[@]}" test distca --timeout 5m
"${release[@]}" uninstall distca --wait
# What belongs to objects that are gone follows within seconds.
for _ in {1..60}; do
    [[ $(objects) != "${before}" ]] || exit 0
    sleep 1
done
diff <(echo "${before}") <(objects)
