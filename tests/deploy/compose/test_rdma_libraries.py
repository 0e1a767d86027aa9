"""The CUDA images hold both transports, and what nixl needs for InfiniBand and RoCE."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from tests import ROOT
from tests.deploy import stand_ins
from tests.deploy.conftest import BUILD_SECONDS, build
from tests.deploy.docker_engine import Docker
from tests.support.rdma_libraries import MISSING_LIBRARIES, RDMA_MODULES

PACKAGES = "distca-test/node-packages"

OPENS = """
import nixl_cu13
agent = nixl_cu13.nixl_agent("a", nixl_cu13.nixl_agent_config(backends=[]))
agent.create_backend("UCX", {})
loaded = open("/proc/self/maps").read()
print("libuct_ib_mlx5.so" in loaded, "libefa" in loaded)
"""
"""Starts nixl, whose UCX then loads what carries InfiniBand and RoCE, and not what carries EFA."""


def cuda_packages() -> list[str]:
    """Requirements of the transports that the Dockerfile puts into the CUDA images."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    extras = re.search(r'AS packages-cuda\nENV EXTRAS="([^"]+)"', text)
    assert extras is not None
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    wanted = [name for name in extras[1].split() if name.startswith(("ucxx", "nixl"))]
    return [requirement for name in wanted for requirement in optional[name]]


def test_cuda_images_hold_both_transports_at_fixed_versions() -> None:
    names = {re.split(r"[<>=]", requirement)[0] for requirement in cuda_packages()}
    assert names == {"ucxx-cu13", "nixl-cu13"}
    fixed = (ROOT / "docker" / "constraints.txt").read_text()
    assert all(f"\n{name}==" in fixed for name in names)


@pytest.mark.timeout(4 * BUILD_SECONDS)
def test_what_carries_infiniband_and_roce_is_complete(
    docker: Docker, checkout: Path, base_image: str
) -> None:
    """In an image of the CPU, with the transports of CUDA: they bring all that they need but the
    driver's libraries, so nothing of the base counts, and rdma-core must not be needed."""
    constraints = checkout / "docker" / "constraints.txt"
    stand_ins.fetch_torch(checkout / "docker" / "wheels", constraints)
    build(docker, checkout, "packages-attention-node", PACKAGES, CPU_BASE_IMAGE=base_image)
    python = "/opt/distca/bin/python"
    script = "\n".join(
        [
            "set -eu",
            f"pip install --quiet --no-deps {shlex.join(cuda_packages())} >&2",
            f"{python} -c {shlex.quote(MISSING_LIBRARIES)}",
            f"{python} -c 'import ucxx; print(ucxx.__name__)'",
            f"UCX_MODULES=^efa {python} -c {shlex.quote(OPENS)} | tail -n 1",
        ]
    )
    mounted = f"--volume={constraints}:/build/constraints.txt:ro"
    options = ("--rm", "--user=0", "--entrypoint=sh", mounted)
    said = docker("run", *options, PACKAGES, "-c", script, timeout_seconds=300).splitlines()
    missing = json.loads(said[0])
    assert {name: missing[name] for name in RDMA_MODULES} == {name: [] for name in RDMA_MODULES}
    assert said[1:] == ["ucxx", "True False"]
