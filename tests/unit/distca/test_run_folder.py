"""A run's folder is never overwritten unasked, and never anything that is no run."""

from __future__ import annotations

from pathlib import Path

import pytest

from distca.errors import RunFolderError
from distca.run_folder import RunFolder


def earlier_run(root: Path) -> RunFolder:
    folder = RunFolder(root / "run")
    folder.prepare(resume=False, overwrite=False)
    folder.logs.mkdir()
    folder.checkpoints.mkdir()
    for name in ("step-00000008.pt", "step-00000012.pt", "step-00000016.pt.partial"):
        (folder.checkpoints / name).touch()
    folder.record.write_text("{}")
    return folder


def test_earlier_run_is_kept_unless_overwriting_is_asked_for(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path)
    with pytest.raises(RunFolderError):
        folder.prepare(resume=False, overwrite=False)
    folder.prepare(resume=False, overwrite=True)
    assert list(folder.root.iterdir()) == []


def test_folder_with_something_beside_a_run_or_without_one_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunFolderError):
        RunFolder(tmp_path).prepare(resume=False, overwrite=True)
    assert (tmp_path / "thesis.tex").exists()
    folder = earlier_run(tmp_path)
    (folder.root / "run.json.17.18.partial").touch()
    (folder.root / "thesis.tex").touch()
    with pytest.raises(RunFolderError):
        folder.prepare(resume=False, overwrite=True)
    assert folder.newest_checkpoint() is not None
    (folder.root / "thesis.tex").unlink()
    folder.prepare(resume=False, overwrite=True)
    assert list(folder.root.iterdir()) == []


def test_one_run_at_a_time_has_a_folder_that_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError):
        RunFolder(tmp_path / "file" / "run").prepare(resume=False, overwrite=False)
    folder = RunFolder(tmp_path / "runs" / "first")
    with folder.held(), pytest.raises(RunFolderError):
        folder.held().__enter__()
    with folder.held(), RunFolder(tmp_path / "runs" / "second").held():
        pass
    assert list((tmp_path / "runs").iterdir()) == []


def test_resuming_keeps_checkpoints_and_drops_the_old_report(tmp_path: Path) -> None:
    folder = earlier_run(tmp_path)
    folder.prepare(resume=True, overwrite=False)
    assert not folder.record.exists()
    newest = folder.newest_checkpoint()
    assert newest is not None
    assert newest.name == "step-00000012.pt"


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError):
        RunFolder(tmp_path / "absent").prepare(resume=True, overwrite=False)
    begun = RunFolder(tmp_path / "begun")
    (begun.checkpoints / "earlier").mkdir(parents=True)
    (begun.checkpoints / "step-00000005.pt.partial").touch()
    with pytest.raises(RunFolderError):
        begun.prepare(resume=True, overwrite=False)
