"""A crash or a full disk leaves damaged machine code; a control plane starts all the same."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from numba.core.caching import UserProvidedCacheLocator

from control_plane.planner import balanced
from control_plane.planner.planners import prepare
from distca.contract.codec import plan_from_proto
from tests.service.control_plane.cold_start.test_server import BUSY_SECONDS, planner_state
from tests.support import service_harness
from tests.support.service_harness import client_of, job_spec, rank_manifest
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(400)

FUNCTION = "survey.look"
"""Python calls it, so that it is loaded, and it is compiled in a second."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the planner's machine code: a copy of that beside its source."""
    prepare(balanced.plan)
    folder = tmp_path_factory.mktemp("numba")
    locator: Any = UserProvidedCacheLocator
    subfolder = locator.get_suitable_cache_subpath(balanced.__file__)
    shutil.copytree(Path(balanced.__file__).parent / "__pycache__", folder / subfolder)
    return folder


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def emptied(content: bytes) -> bytes:
    return b""


def zeroed(content: bytes) -> bytes:
    """As a crash leaves a file whose length was written, and not its blocks."""
    return bytes(len(content))


def flipped(content: bytes) -> bytes:
    """One bit in each 64 bytes of the second half, where machine code is."""
    begin = len(content) // 2
    changed = bytearray(content)
    for at in range(begin, len(content), 64):
        changed[at] ^= 4
    return bytes(changed)


def renamed(content: bytes) -> bytes:
    """Whole, and of a release whose modules had other names."""
    body = content[:-32].replace(b"control_plane.planner", b"control_plane.planned")
    return body + hashlib.sha256(body).digest()


@pytest.mark.parametrize(
    ("damage", "suffix"),
    [(truncated, "nbc"), (emptied, "nbi"), (zeroed, "nbi"), (flipped, "nbc"), (renamed, "nbi")],
)
def test_a_control_plane_with_a_damaged_cache_starts_and_plans(
    compiled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[bytes], bytes],
    suffix: str,
) -> None:
    monkeypatch.setattr(service_harness, "DEADLINE_SECONDS", BUSY_SECONDS)
    cache = tmp_path / "cache"
    shutil.copytree(compiled, cache)
    damaged = list(cache.rglob(f"{FUNCTION}-*.{suffix}"))
    assert damaged
    for file in damaged:
        file.write_bytes(damage(file.read_bytes()))
    address_file, log = tmp_path / "address.json", tmp_path / "log"
    with log.open("wb") as stderr:
        process = psutil.Popen(
            [
                *(sys.executable, "-m", "distca", "control-plane", "--listen=127.0.0.1:0"),
                *("--planner=balanced", "--metrics-listen=127.0.0.1:0"),
                f"--address-file={address_file}",
            ],
            env={**os.environ, "NUMBA_CACHE_DIR": str(cache)},
            stderr=stderr,
        )
    try:
        eventually(lambda: address_file.exists() or process.poll() is not None, BUSY_SECONDS)
        assert process.poll() is None, log.read_text()
        with client_of(json.loads(address_file.read_text())["grpc"]) as client:
            eventually(lambda: planner_state(client.channel) == "compiled", BUSY_SECONDS)
            client.register("s0")
            spec = job_spec(n_ranks=1)
            job_id, lease = client.open(0, spec)
            watcher = client.watch_rank(job_id, lease)
            watcher.next("job_opened")
            client.submit(job_id, lease, rank_manifest(0, 0))
            plan = plan_from_proto(watcher.next("step_planned").plan)
            watcher.cancel()
        assert plan.planner == "balanced"
        assert damage is renamed or str(cache) in log.read_text(), "it says which folder is damaged"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
