"""The jobs of ``examples/kubernetes`` join a release as the README installs it."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from distca.apps.train.run import TrainerRun
from tests import ROOT
from tests.deploy.helm.chart import (
    CHART,
    NAMESPACE,
    Manifest,
    container,
    environment,
    helm,
    only,
    pod_specs,
    rendered,
)
from tests.deploy.helm.test_arguments import expanded, plain_environment, settings_of
from tests.service.deploy.test_versions import image_names
from trainer_client.environment import options_of_environment

JOBS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))

MODELS = {
    "JobSet": "jobset_v1alpha2_job_set",
    "TrainJob": "trainer_v1alpha1_train_job",
    "TrainingRuntime": "trainer_v1alpha1_training_runtime",
}
"""Of the packages of JobSet and Kubeflow Trainer."""


def manifests(path: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(path.read_text()))


def pod(path: Path) -> tuple[Manifest, Manifest]:
    """Labels and spec of its pods."""
    owner = next(each for each in manifests(path) if each["kind"] in ("JobSet", "TrainingRuntime"))
    spec = owner["spec"]["template"]["spec"] if owner["kind"] != "JobSet" else owner["spec"]
    (job,) = spec["replicatedJobs"]
    template = job["template"]["spec"]["template"]
    return template["metadata"]["labels"], template["spec"]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_it_matches_its_definitions(path: Path) -> None:
    """The models drop unknown fields, so what comes back is compared with what went in."""
    for manifest in manifests(path):
        module = import_module(f"kubeflow_trainer_api.models.{MODELS[manifest['kind']]}")
        model = next(
            each
            for name, each in vars(module).items()
            if name.lower() == module.__name__.rpartition(".")[2].replace("_", "")
        )
        assert lost(manifest, model.from_dict(manifest).to_dict(), "$") == []


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_it_joins_the_release(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels, spec = pod(path)
    node = container(spec, "node")
    release = rendered("rdma-values.yaml" if "gpu" in path.stem else "cpu-values.yaml")
    variant = "cuda" if "gpu" in path.stem else "cpu"
    assert node["image"] in image_names(f"VARIANT={variant}")
    (policy,) = (each for each in release if each["metadata"]["name"].endswith("-jobs"))
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    server = container(
        dict(pod_specs(release))["StatefulSet rel-distca-attention-node"], "server-0"
    )
    for name in ("UCX_TCP_PORT_RANGE", "UCX_TLS", "UCX_IB_ADDR_TYPE"):
        assert environment(node).get(name) == environment(server).get(name), name

    ranks = len(node["ports"])
    assert [port["name"] for port in node["ports"]] == [f"metrics-{rank}" for rank in range(ranks)]
    for name, number in node["resources"]["limits"].items():
        assert "/" not in name or number == ranks, name
    env = {**plain_environment(node), "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    arguments = [expanded(text, node) for text in node["args"][2:]]
    run = settings_of(
        arguments, {**env, "MASTER_ADDR": "a"}, "distca.apps.train.run.run_trainer", monkeypatch
    )
    assert isinstance(run, TrainerRun)
    service = only(rendered("", release="distca"), "Service", "control-plane")
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    assert run.service.control_plane == f"{name}.distca.svc:{port}"
    assert run.service.metrics_port == node["ports"][0]["containerPort"]
    if "PET_NPROC_PER_NODE" in env:
        assert int(env["PET_NPROC_PER_NODE"]) == ranks


def test_sessions_read_each_variable_that_the_releases_notes_name() -> None:
    settings = ("--set=tls.mode=certManager", f"--namespace={NAMESPACE}", "--dry-run=client")
    shown = helm("install", "rel", str(CHART), *settings, version="new").stdout
    notes = shown.partition("NOTES:")[2]
    named = set(re.findall(r"\bDISTCA_\w+", notes))
    assert len(named) == 5
    assert all(len(options_of_environment({name: "1"})) == 1 for name in named)


def lost(given: Any, kept: Any, path: str) -> list[str]:
    """Paths of ``given`` that are not in ``kept``."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [
            each
            for key, value in given.items()
            for each in (
                lost(value, kept[key], f"{path}.{key}") if key in kept else [f"{path}.{key}"]
            )
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [
            each
            for index, (one, other) in enumerate(zip(given, kept, strict=True))
            for each in lost(one, other, f"{path}[{index}]")
        ]
    return [] if given == kept else [f"{path} is {given!r}, read as {kept!r}"]
