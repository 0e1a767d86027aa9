"""Checkpoints are whole or absent, the last two are kept, and belong to their run."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from distca.apps.train.checkpoint import Checkpoint, KeptCheckpoints
from distca.errors import DistcaError
from distca.run_folder import list_checkpoints

IDENTITY = {"documents": "abc", "ranks": 2}


def checkpoint(steps_done: int, n_weights: int = 4) -> Checkpoint:
    weights = torch.arange(n_weights) * 1.5 + steps_done
    return Checkpoint(steps_done, IDENTITY, {"weight": weights}, {"state": {0: {"step": 3.0}}})


@contextmanager
def files_limited_to(nbytes: int) -> Iterator[None]:
    """As on a full disk, writes fail, here beyond a file size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Saved, or the error."""
    checkpoints = KeptCheckpoints(folder)
    checkpoints.save(checkpoint)
    checkpoints.require_last()
    return folder / f"step-{checkpoint.steps_done:08d}.pt"


def load_newest(folder: Path, identity: dict[str, object]) -> Checkpoint:
    return KeptCheckpoints(folder).load_newest(identity)


def set_aside(folder: Path) -> None:
    KeptCheckpoints(folder).set_aside()


def test_newest_checkpoint_comes_back_equal_and_two_are_kept(tmp_path: Path) -> None:
    for steps_done in (2, 4, 10):
        save_checkpoint(tmp_path, checkpoint(steps_done))
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step-00000004.pt",
        "step-00000010.pt",
    ]
    loaded = load_newest(tmp_path, IDENTITY)
    expected = checkpoint(10)
    assert loaded.steps_done == 10
    assert torch.equal(loaded.model["weight"], expected.model["weight"])
    assert loaded.optimizer == expected.optimizer


FIELDS = {"identity": "abc"}, {"model": None}, {"steps_done": 2.5}, {"seed": 1}
"""Of which each is none of a checkpoint's."""


def with_names_that_are_no_text(path: Path) -> None:
    torch.save(vars(checkpoint(2)), path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes().replace(b"documents", b"docu\xffents"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"garbage"),
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        *(
            lambda path, fields=fields: torch.save({**vars(checkpoint(2)), **fields}, path)
            for fields in FIELDS
        ),
        with_names_that_are_no_text,
    ],
)
def test_what_is_no_checkpoint_of_this_run_is_refused(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    path = save_checkpoint(tmp_path, checkpoint(2))
    for folder, identity in ((tmp_path / "absent", IDENTITY), (tmp_path, {**IDENTITY, "ranks": 4})):
        with pytest.raises(DistcaError):
            load_newest(folder, identity)
    damage(path)
    with pytest.raises(DistcaError):
        load_newest(tmp_path, IDENTITY)
    with pytest.raises(DistcaError):
        save_checkpoint(path / "checkpoints", checkpoint(2))


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "step-00000001.pt.partial").touch()
    path = save_checkpoint(tmp_path, checkpoint(2))
    assert list(tmp_path.iterdir()) == [path]


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def test_checkpoint_just_written_is_never_removed_for_those_of_higher_numbers(
    tmp_path: Path,
) -> None:
    for steps_done in (25, 30):
        save_checkpoint(tmp_path, checkpoint(steps_done))
    for steps_done in (5, 10, 12):
        assert save_checkpoint(tmp_path, checkpoint(steps_done)).exists()
    assert names(tmp_path) == [f"step-{n:08d}.pt" for n in (10, 12, 25, 30)]


def test_training_that_begins_anew_sets_the_checkpoints_of_an_earlier_one_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier = tmp_path / "earlier"
    set_aside(tmp_path / "absent")
    set_aside(tmp_path)
    assert not list(tmp_path.iterdir())
    # A run that is started again and again does not cost the longest one its last checkpoint.
    for first, last, aside in ((25, 30, [30]), (5, 12, [12, 30]), (6, 10, [10, 30])):
        for steps_done in (first, last):
            save_checkpoint(tmp_path, checkpoint(steps_done))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            set_aside(tmp_path)
        assert names(tmp_path) == []
        assert names(earlier) == [f"step-{n:08d}.pt" for n in aside]
        assert f"set aside as {earlier / names(earlier)[0]}" in caplog.text
    # Nothing is left of the run that began and wrote none: what is aside stays.
    set_aside(tmp_path)
    assert load_newest(earlier, IDENTITY).steps_done == 30
    with pytest.raises(DistcaError):
        load_newest(tmp_path, IDENTITY)
    save_checkpoint(tmp_path, checkpoint(2))
    assert load_newest(tmp_path, IDENTITY).steps_done == 2


@pytest.mark.parametrize("n_calls", range(4))
def test_process_that_dies_while_it_sets_aside_loses_no_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_calls: int
) -> None:
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    for steps_done in (35, 40):
        save_checkpoint(earlier, checkpoint(steps_done))
    for steps_done in (25, 30):
        save_checkpoint(tmp_path, checkpoint(steps_done))
    calls = 0

    def dying(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            nonlocal calls
            if calls == n_calls:
                raise KeyboardInterrupt
            calls += 1
            return real(*arguments, **named)

        return call

    with monkeypatch.context() as patched:
        for name in ("unlink", "mkdir", "replace"):
            patched.setattr(Path, name, dying(getattr(Path, name)))
        with pytest.raises(KeyboardInterrupt):
            set_aside(tmp_path)
    assert "step-00000030.pt" in (names(tmp_path) or names(earlier))
    set_aside(tmp_path)
    assert names(tmp_path) == []
    assert {"step-00000030.pt", "step-00000040.pt"} <= set(names(earlier))


def test_checkpoints_that_cannot_be_set_aside_stay(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(30))
    (tmp_path / "earlier").touch()
    with pytest.raises(DistcaError):
        set_aside(tmp_path)
    assert list_checkpoints(tmp_path) == [path]


def test_run_on_a_full_disk_goes_on_and_saves_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = KeptCheckpoints(tmp_path)
    keeper.save(checkpoint(2))
    with files_limited_to(64 * 1024), caplog.at_level(logging.WARNING):
        for steps_done in (4, 6):
            keeper.save(checkpoint(steps_done, n_weights=20_000))
    assert len(caplog.records) == 2
    assert "step-00000006.pt cannot be written: File too large" in caplog.text
    assert load_newest(tmp_path, IDENTITY).steps_done == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002.pt"]
    with pytest.raises(DistcaError):
        keeper.require_last()
    keeper.save(checkpoint(8, n_weights=20_000))
    keeper.require_last()
    assert load_newest(tmp_path, IDENTITY).steps_done == 8
