"""A full disk where checkpoints go, and clocks that jump."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.chaos.processes import Job, JobSettings
from tests.cluster.chaos.scenario import References, disturbed
from tests.support.programs import ran

SHORT = JobSettings(steps=60, n_nodes=2)
FAKETIME = importlib.util.find_spec("libfaketime")
FAKETIME_FOLDER = Path(FAKETIME.origin).parent if FAKETIME and FAKETIME.origin else Path()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = ran("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk))
    if mounted.returncode:
        pytest.skip(f"no file system of its own: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.timeout(900)
def test_a_full_disk_where_checkpoints_go(
    tmp_path: Path, references: References, small_disk: Path
) -> None:
    """Training goes on without them, and saves again when there is room."""
    settings = JobSettings(steps=60, n_nodes=2, more=("--checkpoint-every=5",))
    job = Job(tmp_path / "job", settings, run_dir=small_disk / "run")
    with disturbed(job, references, seed=1) as disturbance:
        disturbance.wait_for_step(12)
        free = os.statvfs(small_disk)
        ballast = small_disk / "ballast"
        disturbance.note("filled the disk", 5.0)
        with ballast.open("wb", buffering=0) as filler:
            filler.write(bytes(free.f_bavail * free.f_frsize - 4096))
        disturbance.wait_for_step(40)
        ballast.unlink()
    checkpoints = sorted((small_disk / "run" / "checkpoints").glob("*.pt"))
    assert checkpoints[-1].name == "step-00000060.pt"
    assert "No space left" in job.processes["trainer-0"].log.read_text()


@pytest.mark.timeout(900)
@pytest.mark.skipif(FAKETIME is None, reason="needs pip install libfaketime")
@pytest.mark.parametrize("jump", ["+3h", "-3h"])
def test_clocks_that_jump(tmp_path: Path, references: References, jump: str) -> None:
    """The wall clocks of a node, of a trainer and of the control plane jump, one after the other,
    while the others' do not."""
    library = FAKETIME_FOLDER / "vendor/libfaketime/src/libfaketime.so.1"
    names = ("node-1", "trainer-1", "control-plane")
    environ = {}
    for name in names:
        (tmp_path / f"{name}.clock").write_text("+0\n")
        environ[name] = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(tmp_path / f"{name}.clock"),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }
    with disturbed(Job(tmp_path, SHORT, environ=environ), references, seed=2) as disturbance:
        for step, name in zip((10, 25, 40), names, strict=True):
            disturbance.wait_for_step(step)
            disturbance.note(f"the clock of {name} jumped by {jump}", 2.0)
            (tmp_path / f"{name}.clock").write_text(f"{jump}\n")
    assert "recovery" not in disturbance.job.processes["control-plane"].log.read_text()
