"""The example job, as JobSet and as TrainJob, and the pod of `helm test`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.deploy.helm.chart import (
    CHART,
    NAMESPACE,
    RELEASE,
    Manifest,
    container,
    environment,
    helm,
    only,
    pod_specs,
    rendered,
)


def job_pod(value_set: str, *settings: str) -> Manifest:
    (spec,) = (
        spec
        for owner, spec in pod_specs(rendered(value_set, *settings))
        if owner.startswith(("JobSet", "TrainingRuntime"))
    )
    return spec


def test_a_job_set_tells_torchrun_where_its_pods_are() -> None:
    manifests = rendered("example-jobset-values.yaml")
    (job,) = only(manifests, "JobSet")["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (2, 2, "Indexed")
    env = environment(container(job_pod("example-jobset-values.yaml"), "node"))
    assert (env["PET_NNODES"], env["PET_NPROC_PER_NODE"]) == ("2", "2")
    name = only(manifests, "JobSet")["metadata"]["name"]
    assert re.fullmatch("rel-distca-example-[0-9a-f]{8}", name)
    assert env["PET_MASTER_ADDR"] == f"{name}-node-0-0.{name}"
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert env["PET_NODE_RANK"] == {"fieldRef": {"fieldPath": index}}


def test_a_train_job_leaves_that_to_kubeflow_and_goes_through_kueue() -> None:
    manifests = rendered("example-trainjob-values.yaml")
    job, runtime = only(manifests, "TrainJob"), only(manifests, "TrainingRuntime")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    assert job["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 1}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    label = "trainer.kubeflow.org/trainjob-ancestor-step"
    assert replicated["template"]["metadata"]["labels"][label] == "trainer"
    # Kubeflow looks for a container of this name to add its variables to.
    env = environment(container(job_pod("example-trainjob-values.yaml"), "node"))
    assert not [name for name in env if name.startswith("PET_")]


def test_both_kinds_run_the_same_command_on_this_releases_control_plane() -> None:
    jobset = container(job_pod("example-jobset-values.yaml"), "node")
    trainjob = container(job_pod("example-jobset-values.yaml", "exampleJob.kind=TrainJob"), "node")
    assert (jobset["command"], jobset["args"]) == (trainjob["command"], trainjob["args"])
    assert environment(jobset)["DISTCA_CONTROL_PLANE"] == (
        "rel-distca-control-plane.research.svc:7700"
    )


@pytest.mark.parametrize(
    "value_set", ["example-gpu-jobset-values.yaml", "example-gpu-trainjob-values.yaml"]
)
def test_a_job_on_gpus_asks_for_them_starts_again_and_goes_on(value_set: str) -> None:
    spec = job_pod(value_set)
    node = container(spec, "node")
    limits = node["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == node["resources"]["requests"]["nvidia.com/gpu"] == 8
    assert node["image"].endswith("-cuda")
    assert "--resume-or-start" in node["args"]
    job = next(each for each in rendered(value_set) if each["kind"] in ("JobSet", "TrainJob"))
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    # Kueue's webhook suspends what has its label; written here, upgrades would stop a running job.
    assert "suspend" not in job["spec"]
    (jobset,) = (
        each["spec"] if each["kind"] == "JobSet" else each["spec"]["template"]["spec"]
        for each in rendered(value_set)
        if each["kind"] in ("JobSet", "TrainingRuntime")
    )
    assert jobset["failurePolicy"]["maxRestarts"] == 5
    (rule,) = jobset["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    (replicated,) = jobset["replicatedJobs"]
    (taken,) = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    assert taken["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert spec["restartPolicy"] == "Never"


def job_set(*settings: str) -> Manifest:
    """The JobSet of the GPU example."""
    return only(rendered("example-gpu-jobset-values.yaml", *settings), "JobSet")


def pod_template(of: Manifest) -> Manifest:
    """Of a JobSet's pods."""
    (replicated,) = of["spec"]["replicatedJobs"]
    template: Manifest = replicated["template"]["spec"]["template"]
    return template


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
def test_a_job_stays_as_it_is_when_the_chart_is_of_another_version(
    kind: str, tmp_path: Path
) -> None:
    """JobSet refuses changes to a job that runs, and an upgrade with them."""
    newer = tmp_path / "distca"
    shutil.copytree(CHART, newer)
    about = yaml.safe_load((newer / "Chart.yaml").read_text())
    (newer / "Chart.yaml").write_text(
        yaml.safe_dump({**about, "version": "9.9.9", "appVersion": "9.9.9"})
    )

    def job_of(chart: Path) -> list[Manifest]:
        done = helm(
            *("template", RELEASE, str(chart), f"--namespace={NAMESPACE}", "--set=image.tag=a"),
            *("--set=exampleJob.enabled=true", f"--set=exampleJob.kind={kind}"),
        )
        assert done.returncode == 0, done.stderr
        manifests = [each for each in yaml.safe_load_all(done.stdout) if each]
        return [each for each in manifests if each["kind"] in (kind, "TrainingRuntime")]

    before, after = job_of(CHART), job_of(newer)
    assert len(before) == {"JobSet": 1, "TrainJob": 2}[kind]
    for one, other in zip(before, after, strict=True):
        assert one["metadata"]["labels"]["helm.sh/chart"] == "distca-0.1.0"
        assert other["metadata"]["labels"]["helm.sh/chart"] == "distca-9.9.9"
        assert one["metadata"]["name"] == other["metadata"]["name"]
        assert one["spec"] == other["spec"]


@pytest.mark.parametrize(
    "setting",
    [
        "image.tag=other",
        "logLevel=debug",
        "exampleJob.nodes=3",
        "exampleJob.ranksPerNode=4",
        "exampleJob.args={--steps=7}",
        "exampleJob.restarts=0",
        "exampleJob.queueName=other",
        r"exampleJob.labels.kueue\.x-k8s\.io/priority-class=other",
        "commonLabels.team=other",
        "ucx.tcpPortRange=9000-9099",
    ],
)
def test_what_cannot_be_changed_makes_another_job_set_of_the_same_run(setting: str) -> None:
    before, after = job_set(), job_set(setting)
    assert before["metadata"]["name"] != after["metadata"]["name"]
    folders = [
        [arg for arg in pod_template(each)["spec"]["containers"][0]["args"] if "run-dir" in arg]
        for each in (before, after)
    ]
    assert folders == [["--run-dir=/runs/rel-distca-example"]] * 2


@pytest.mark.parametrize(
    "setting",
    [
        "exampleJob.labels.team=other",
        "controlPlane.resources.requests.cpu=2",
        "monitoring.podMonitor.enabled=true",
        "networkPolicy.jobRanksPerPod=16",
    ],
)
def test_other_changes_leave_a_job_set_that_runs(setting: str) -> None:
    before, after = job_set(), job_set(setting)
    assert before["metadata"]["name"] == after["metadata"]["name"]
    assert before["spec"] == after["spec"]


def test_pods_of_a_job_set_wait_for_the_end_of_those_before() -> None:
    """Two jobs of one name would not go together, nor write into one folder."""
    job = job_set("exampleJob.affinity.podAntiAffinity.x=y", "exampleJob.affinity.nodeAffinity.a=b")
    template = pod_template(job)
    affinity = template["spec"]["affinity"]
    assert affinity["nodeAffinity"] == {"a": "b"}
    assert affinity["podAntiAffinity"]["x"] == "y"
    (term,) = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    # The same on all machines.
    assert term["topologyKey"] == "kubernetes.io/os"
    labels = template["metadata"]["labels"]
    selector = term["labelSelector"]
    assert selector["matchLabels"].items() <= labels.items()
    assert selector["matchLabels"]["app.kubernetes.io/instance"] == "rel"
    (others,) = selector["matchExpressions"]
    assert labels["distca.dev/job-set"] == job["metadata"]["name"]
    assert others == {
        "key": "distca.dev/job-set",
        "operator": "NotIn",
        "values": [job["metadata"]["name"]],
    }


def test_a_train_job_keeps_its_name_whatever_changes() -> None:
    for setting in ("image.tag=a", "exampleJob.nodes=3"):
        manifests = rendered("example-gpu-trainjob-values.yaml", setting)
        assert only(manifests, "TrainJob")["metadata"]["name"] == "rel-distca-example"
        (job,) = only(manifests, "TrainingRuntime")["spec"]["template"]["spec"]["replicatedJobs"]
        assert "distca.dev/job-set" not in job["template"]["spec"]["template"]["metadata"]["labels"]


def test_without_restarts_a_job_ends_with_its_first_failure() -> None:
    spec = only(rendered("example-jobset-values.yaml"), "JobSet")["spec"]
    assert "failurePolicy" not in spec
    assert "podFailurePolicy" not in spec["replicatedJobs"][0]["template"]["spec"]
    node = container(job_pod("example-jobset-values.yaml"), "node")
    assert "--resume-or-start" not in node["args"]


def test_trainers_use_the_network_devices_that_nodes_use() -> None:
    node = container(job_pod("rdma-values.yaml", "exampleJob.enabled=true"), "node")
    assert node["resources"]["limits"]["rdma/hca_shared_devices_a"] == 1
    assert node["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert environment(node)["UCX_TLS"] == "rc,tcp,self"


@pytest.mark.parametrize(
    ("value_set", "servers"),
    [
        ("default-values.yaml", 2),
        ("in-place-only-values.yaml", 0),
        ("daemonset-values.yaml", 8),
        ("autoscaling-hpa-values.yaml", 2),
        ("join-elsewhere-values.yaml", 4),
        ("leader-worker-set-values.yaml", 32),
    ],
)
def test_helm_test_expects_the_servers_that_the_values_describe(
    value_set: str, servers: int
) -> None:
    pod = only(rendered(value_set), "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert f"--expect-servers={servers}" in container(pod["spec"], "servers")["args"]
    assert container(pod["spec"], "health")["args"][0] == "health"
