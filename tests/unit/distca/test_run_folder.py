"""A run's folder is never overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from distca.errors import DistcaError
from distca.run_folder import RunFolder


def earlier_run(root: Path) -> RunFolder:
    folder = RunFolder(root / "run")
    folder.prepare(resume=False)
    folder.logs.mkdir()
    folder.checkpoints.mkdir()
    for name in ("step-00000008.pt", "step-00000012.pt", "step-00000016.pt.partial"):
        (folder.checkpoints / name).touch()
    folder.record.write_text("{}")
    return folder


def test_a_folder_with_anything_in_it_is_kept_as_it_is(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path)
    with pytest.raises(DistcaError):
        folder.prepare(resume=False)
    assert folder.newest_checkpoint() is not None


def test_one_run_at_a_time_has_a_folder_that_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DistcaError):
        RunFolder(tmp_path / "file" / "run").prepare(resume=False)
    folder = RunFolder(tmp_path / "runs" / "first")
    with folder.held(), pytest.raises(DistcaError):
        folder.held().__enter__()
    with folder.held(), RunFolder(tmp_path / "runs" / "second").held():
        pass
    assert list((tmp_path / "runs").iterdir()) == []


def test_resuming_keeps_checkpoints_and_drops_the_old_report(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path)
    folder.prepare(resume=True)
    assert not folder.record.exists()
    newest = folder.newest_checkpoint()
    assert newest is not None
    assert newest.name == "step-00000012.pt"


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(DistcaError):
        RunFolder(tmp_path / "absent").prepare(resume=True)
    begun = RunFolder(tmp_path / "begun")
    (begun.checkpoints / "earlier").mkdir(parents=True)
    (begun.checkpoints / "step-00000005.pt.partial").touch()
    with pytest.raises(DistcaError):
        begun.prepare(resume=True)
