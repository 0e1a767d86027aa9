#!/usr/bin/env bash
# The chart in a cluster of kind's: installed as the release before, upgraded to this one, its pods
# replaced under a job that trains, and taken away: nothing may stay. Needs git, make, docker, kind,
# kubectl 1.31 or newer, and helm; `make kind-test` builds the images, whose names it gives.
set -euo pipefail
cd "$(dirname "$0")/.."

jobset=https://github.com/kubernetes-sigs/jobset/releases/download/v0.10.1/manifests.yaml
cluster=distca-test
steps=2000 # far more than an upgrade lasts
kube=(kubectl --context "kind-${cluster}" --namespace distca)
release=(helm --kube-context "kind-${cluster}" --namespace distca)
settings=(
    --set controlPlane.replicas=2 --set controlPlane.leaderElection.enabled=true
    --set attentionNode.replicas=2 --set attentionNode.resources.requests.cpu=100m
    --set controlPlane.resources.requests.cpu=100m --set attentionNode.drainSeconds=20
    --wait --timeout 15m
)

# The last release before this commit; while there is none, the state in which the chart last was another.
before() {
    git describe --tags --abbrev=0 --match 'v*' HEAD^ 2>/dev/null \
        || git rev-list --max-count=1 "$(git log -1 --format=%H -- helm/distca)^"
}

# Names of all objects in the namespace, but those that come and go by themselves.
objects() {
    "${kube[@]}" api-resources --namespaced --verbs=list --output=name | grep --invert-match '^events' \
        | paste --serial --delimiters=, | xargs -I KINDS "${kube[@]}" get KINDS --output=name | sort
}

# Which step rank 0 of the job has shown last.
step() {
    "${kube[@]}" logs --selector distca.dev/role=trainer --tail=-1 \
        | sed --quiet 's|.*step \([0-9]*\)/.*|\1|p' | sort --numeric-sort | tail --lines=1
}

# Waits until the job has done some steps more than it has.
more_steps() {
    local begun now
    begun=$(step)
    for _ in {1..300}; do
        now=$(step)
        ((${now:-0} < ${begun:-0} + 3)) || return 0
        sleep 1
    done
    echo "no step after ${begun:-none}" >&2
    return 1
}

scratch=$(mktemp --directory)
finish() {
    local code=$?
    ((code == 0)) || "${kube[@]}" describe pods || true
    ((code == 0)) || "${kube[@]}" logs --selector distca.dev/role=trainer --tail=50 --prefix || true
    kind delete cluster --name "${cluster}"
    rm --recursive --force "${scratch}"
    exit "${code}"
}

trap finish EXIT
git archive "$(before)" | tar --extract --directory "${scratch}"
make --directory "${scratch}" image-control-plane image-attention-node IMAGE_TAG=before
kind create cluster --name "${cluster}" --wait 3m
kind load docker-image --name "${cluster}" "$@" distca/control-plane:before distca/attention-node:before
kubectl --context "kind-${cluster}" apply --server-side --filename "${jobset}"
kubectl --context "kind-${cluster}" --namespace jobset-system rollout status deployment --timeout=5m
"${kube[@]}" create namespace distca
# Admits only pods of Pod Security Standard "restricted".
"${kube[@]}" label namespace distca pod-security.kubernetes.io/enforce=restricted
# Controllers put these into every namespace.
"${kube[@]}" wait --for=create serviceaccount/default configmap/kube-root-ca.crt --timeout=60s
there=$(objects)

echo "== install, as $(before)"
"${release[@]}" install distca "${scratch}/helm/distca" --set image.tag=before \
    --values "${scratch}/helm/distca/ci/cpu-values.yaml" "${settings[@]}"
"${release[@]}" test distca --timeout 5m
secret=$("${kube[@]}" get secrets --output=jsonpath='{.items[?(@.type=="Opaque")].data}')

echo "== upgrade"
settings+=(--values helm/distca/ci/cpu-values.yaml)
"${release[@]}" upgrade distca helm/distca "${settings[@]}"
"${release[@]}" test distca --timeout 5m
# Of which jobs' tokens are made.
[[ ${secret} == "$("${kube[@]}" get secrets --output=jsonpath='{.items[?(@.type=="Opaque")].data}')" ]]

echo "== a rolling update under a job"
sed --expression "s/--steps=12/--steps=${steps}/" --expression 's/cpu: "2"/cpu: 100m/; s/memory: 4Gi/memory: 1Gi/' \
    examples/kubernetes/jobset-cpu.yaml | "${kube[@]}" apply --filename -
"${kube[@]}" wait --for=create pod --selector distca.dev/role=trainer --timeout=60s
"${kube[@]}" wait --for=condition=Ready pod --selector distca.dev/role=trainer --timeout=5m
more_steps
"${release[@]}" upgrade distca helm/distca "${settings[@]}" \
    --set attentionNode.podAnnotations.rolled=yes --set controlPlane.podAnnotations.rolled=yes
more_steps
# It was never started again.
[[ $("${kube[@]}" get jobset distca-example --output=jsonpath='{.status.restarts}') =~ ^0?$ ]]
"${kube[@]}" delete jobset distca-example --wait
"${kube[@]}" wait --for=delete pod --selector distca.dev/role=trainer --timeout=3m

echo "== uninstall"
"${release[@]}" uninstall distca --wait
# What belongs to objects that are gone follows within seconds.
for _ in {1..60}; do
    [[ $(objects) != "${there}" ]] || exit 0
    sleep 1
done
diff <(echo "${there}") <(objects)
