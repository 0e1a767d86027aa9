"""``distca train`` in the folder of an earlier run: it goes on with its own checkpoints only."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distca.run_folder import RunFolder
from tests.support.programs import ran
from tests.support.service_harness import running

pytestmark = pytest.mark.timeout(300)

RUN_SECONDS = 90.0


def train(folder: RunFolder, control_plane: str, *options: str) -> str:
    """Runs one rank, computing in place, to its end; what it has said."""
    command = [
        sys.executable, "-m", "distca", "--log-level=info", "train", *options,
        f"--control-plane={control_plane}", f"--run-dir={folder.root}",
        "--placement=in-place", "--one-host", "--data-host=127.0.0.1",
        f"--rendezvous=file://{folder.root}.rendezvous",
        "--layers=1", "--hidden-size=32", "--heads=4", "--kv-heads=2", "--tokens-per-rank=64",
        "--checkpoint-every=2",
    ]  # fmt: skip
    ended = ran(
        *command,
        env={
            "PATH": "/usr/bin:/bin",
            "RANK": "0",
            "WORLD_SIZE": "1",
            "OMP_NUM_THREADS": "1",
            "HOME": str(folder.root.parent),
        },
        timeout=RUN_SECONDS,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.pt"))


def test_run_that_begins_in_a_used_folder_keeps_its_checkpoints_and_goes_on_from_them(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path / "again")
    with running() as control_plane:
        train(folder, control_plane.address, "--steps=8")
        assert names(folder.checkpoints) == ["step-00000006.pt", "step-00000008.pt"]
        said = train(folder, control_plane.address, "--steps=3")
        assert "set aside as" in said
        assert names(folder.checkpoints) == ["step-00000002.pt", "step-00000003.pt"]
        assert names(folder.checkpoints / "earlier") == ["step-00000008.pt"]
        said = train(folder, control_plane.address, "--steps=4", "--resume")
        assert "resumed after 3 steps" in said
        assert "set aside as" not in said
