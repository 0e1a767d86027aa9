"""The example job, as JobSet and as TrainJob, and the pod of `helm test`."""

from __future__ import annotations

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


def test_both_kinds_run_the_same_command_on_this_releases_control_plane() -> None:
    jobset = container(job_pod("example-jobset-values.yaml"), "node")
    trainjob = container(job_pod("example-jobset-values.yaml", "exampleJob.kind=TrainJob"), "node")
    assert (jobset["command"], jobset["args"]) == (trainjob["command"], trainjob["args"])
    assert environment(jobset)["DISTCA_CONTROL_PLANE"] == (
        "rel-distca-control-plane.research.svc:7700"
    )


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


def test_trainers_use_the_network_devices_that_nodes_use() -> None:
    node = container(job_pod("rdma-values.yaml", "exampleJob.enabled=true"), "node")
    assert node["resources"]["limits"]["rdma/hca_shared_devices_a"] == 1
    assert node["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert environment(node)["UCX_TLS"] == "rc,tcp,self"
