"""A cluster for the tests of the chart on a real Kubernetes API server and scheduler.

Those tests are marked ``cluster`` and run only when asked for by that name: ``make cluster-test``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helm.chart import TOOLS, tools_are_there
from tests.kubernetes.api import Api, pods_path
from tests.kubernetes.containers import ROOT, Image
from tests.kubernetes.control_plane import NODES, PROXY, Cluster, programs, running_cluster
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.network import own_network
from tests.kubernetes.release import Release, checkout_of, make_namespace, wait_until
from tests.kubernetes.services import ServiceProxy

_FOLDER = Path(__file__).parent

BEFORE = os.environ.get("DISTCA_CLUSTER_BEFORE", "7ba6839")
"""The commit of the version before: of 2026-11-22, as there is no release yet."""

BEFORE_TAG = "before"
"""Of images that hold the code of that commit."""

_NEEDED = ("bwrap", "ip", "nsenter", "setpriv", "unshare")
_END_SECONDS = 120.0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if _FOLDER in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.cluster)
    if "cluster" not in config.option.markexpr and ours:
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if item not in ours]


@dataclass
class Machines:
    """Two machines that run pods, under one control plane.

    Attributes:
        before: the project as it was before.
    """

    cluster: Cluster
    kubelets: list[Kubelet]
    before: Path
    names: list[str] = field(default_factory=list)

    @property
    def api(self) -> Api:
        """Of the administrator."""
        return self.cluster.api()

    def logs(self, namespace: str) -> str:
        """What the containers in a namespace wrote, the last of each."""
        uids = [pod["metadata"]["uid"] for pod in self.api.items(pods_path(namespace))]
        runs = [kubelet.find(uid) for kubelet in self.kubelets for uid in uids]
        return "\n".join(run.logs()[-3000:] for run in runs if run is not None)


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """A running cluster.

    Raises:
        FileNotFoundError: a program is not there.
    """
    programs()
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        raise FileNotFoundError(f"{missing} not found (Debian: iproute2, util-linux, bubblewrap)")
    if not tools_are_there():
        raise FileNotFoundError(f"no chart tools in {TOOLS}: python tools/fetch_chart_tools.py")
    folder = tmp_path_factory.mktemp("cluster")
    folder.chmod(0o755)
    before = checkout_of(BEFORE, folder / BEFORE_TAG)

    def image(name: str) -> Image:
        return Image(before if name.endswith(f":{BEFORE_TAG}") else ROOT)

    with ExitStack() as stack:
        stack.enter_context(own_network())
        cluster = stack.enter_context(running_cluster(folder))
        proxy = ServiceProxy(cluster.api(PROXY))
        kubelets = [
            Kubelet(
                cluster.api(f"system:node:{name}"),
                name,
                folder / name,
                image,
                proxy.names,
                {"cpu": "16", "memory": "64Gi"},
            )
            for name in NODES
        ]
        parts: list[ServiceProxy | Kubelet] = [proxy, *kubelets]
        for part in parts:
            stack.callback(part.close)
            part.start()
        yield Machines(cluster, kubelets, before)


@pytest.fixture
def release(machines: Machines, request: pytest.FixtureRequest) -> Iterator[Release]:
    """A release that may be installed, in a namespace that takes only restricted pods."""
    namespace = f"research-{len(machines.names)}"
    machines.names.append(namespace)
    api = machines.api
    make_namespace(api, namespace, restricted=True)
    failed_before = request.session.testsfailed
    yield Release(api, machines.cluster.kubeconfig(), namespace)
    if request.session.testsfailed > failed_before:
        print(machines.logs(namespace))
    api.delete(f"/api/v1/namespaces/{namespace}")
    gone = f"the end of namespace {namespace}"
    wait_until(gone, lambda: api.find(f"/api/v1/namespaces/{namespace}") is None, _END_SECONDS)
