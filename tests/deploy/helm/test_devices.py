"""Networks and devices that a cluster hands out: Multus, DRA, IMEX channels, groups of pods."""

from __future__ import annotations

from tests.deploy.helm.chart import (
    Manifest,
    container,
    containers,
    environment,
    only,
    pod_specs,
    rendered,
)

NETWORKS = "k8s.v1.cni.cncf.io/networks"


def specs(value_set: str, *settings: str) -> dict[str, Manifest]:
    """Pod specs by the kind of their owner."""
    manifests = rendered(value_set, *settings)
    return {owner.partition(" ")[0]: spec for owner, spec in pod_specs(manifests)}


def test_rows_travel_on_the_network_that_is_named_and_probes_do_not() -> None:
    manifests = rendered("data-network-values.yaml")
    pool = only(manifests, "StatefulSet")["spec"]["template"]
    job = only(manifests, "JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    for template in (pool, job):
        assert template["metadata"]["annotations"][NETWORKS] == "fabric/rows@net1"
        for each in containers(template["spec"]):
            assert {"--data-host=$(POD_IP)", "--data-interface=net1"} <= set(each["args"])
    plane = only(manifests, "Deployment")["spec"]["template"]
    assert NETWORKS not in plane["metadata"].get("annotations", {})
    assert "data-interface" not in str(rendered())


def test_own_annotations_stay_beside_the_network() -> None:
    settings = ["attentionNode.podAnnotations.a=b"]
    pool = only(rendered("data-network-values.yaml", *settings), "StatefulSet")
    assert pool["spec"]["template"]["metadata"]["annotations"] == {
        "a": "b",
        NETWORKS: "fabric/rows@net1",
    }


def test_each_server_claims_a_gpu_of_its_own_and_all_share_a_channel() -> None:
    pods = specs("dra-values.yaml")
    pool, job = pods["StatefulSet"], pods["JobSet"]
    claims = {each["name"]: each["resourceClaimTemplateName"] for each in pool["resourceClaims"]}
    gpu, imex = "rel-distca-attention-node-gpu", "rel-distca-imex"
    assert claims == {**{f"gpu-{index}": gpu for index in range(4)}, "imex": imex}
    for index in range(4):
        resources = container(pool, f"server-{index}")["resources"]
        assert resources["claims"] == [{"name": f"gpu-{index}"}, {"name": "imex"}]
        assert "nvidia.com/gpu" not in resources["limits"]
    assert [claim["name"] for claim in container(pool, "doctor")["resources"]["claims"]] == [
        *claims
    ]
    assert container(job, "node")["resources"]["claims"] == [{"name": "gpu"}, {"name": "imex"}]
    assert container(job, "node")["image"].endswith("-cuda")
    assert "resourceClaims" not in pods["Deployment"]


def test_claims_name_templates_that_the_release_or_the_driver_makes() -> None:
    manifests = rendered("dra-values.yaml")
    counts = {
        each["metadata"]["name"]: each["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"]
        for each in manifests
        if each["kind"] == "ResourceClaimTemplate"
    }
    assert counts == {"rel-distca-attention-node-gpu": 1, "rel-distca-trainer-gpu": 4}
    channel = only(manifests, "ComputeDomain")["spec"]["channel"]["resourceClaimTemplate"]["name"]
    for _, spec in pod_specs(manifests):
        for claim in spec.get("resourceClaims", []):
            assert claim["resourceClaimTemplateName"] in {*counts, channel}


def test_a_group_of_pods_has_a_part_of_the_cluster_to_itself() -> None:
    manifests = rendered("leader-worker-set-values.yaml")
    group = only(manifests, "LeaderWorkerSet")
    assert group["metadata"]["annotations"] == {
        "leaderworkerset.sigs.k8s.io/exclusive-topology": "nvidia.com/gpu.clique"
    }
    template = group["spec"]["leaderWorkerTemplate"]
    # A server that ends is no reason to end the others of its group.
    assert (template["size"], template["restartPolicy"]) == (4, "None")
    assert not {"StatefulSet", "Deployment"} & {
        each["kind"] for each in manifests if each["metadata"]["name"].endswith("attention-node")
    }
    server = container(template["workerTemplate"]["spec"], "server-1")
    assert "--server-id=$(POD_NAME)-1" in server["args"]
    assert environment(server)["POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
