"""Keys of jobs outlive the process, and belong to one job of one owner."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from control_plane.access.job_keys import MIN_SECRET_BYTES, JobKeys, job_keys
from core_attention.whole_file import write_whole
from distca.contract.rpc_errors import Reason
from distca.contract.tokens import KEY_BYTES, rank_token
from distca.machine_errors import PathError
from tests.support.errors import fails


def test_the_same_secret_gives_the_same_keys(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_whole(path, b"s" * MIN_SECRET_BYTES, mode=0o600)
    first, second = (JobKeys.from_file(path) for _ in range(2))
    assert first.key_of("job-1", "team-a") == second.key_of("job-1", "team-a")
    assert len(first.key_of("job-1", "team-a")) == KEY_BYTES


def test_every_job_and_owner_has_its_own() -> None:
    keys = JobKeys()
    pairs = [("job-1", "team-a"), ("job-2", "team-a"), ("job-1", "team-b"), ("job-1team-a", "")]
    assert len({keys.key_of(*pair) for pair in pairs}) == len(pairs)
    assert JobKeys().key_of(*pairs[0]) != keys.key_of(*pairs[0]), "its process has its own secret"


def test_a_rank_that_comes_back_proves_itself_to_a_new_process() -> None:
    secret = b"s" * MIN_SECRET_BYTES
    token = rank_token(JobKeys(secret).key_of("job-1", "team-a"), 3)
    restarted = JobKeys(secret)
    key = restarted.proved("job-1", owner="team-a", rank=3, token=token)
    assert key == restarted.key_of("job-1", "team-a")
    for wrong in (
        {"job_id": "job-2"},
        {"owner": "team-b"},
        {"rank": 2},
        {"token": b"guessed"},
    ):
        claim: dict[str, Any] = {"job_id": "job-1", "owner": "team-a", "rank": 3, "token": token}
        with fails(Reason.WRONG_TOKEN):
            restarted.proved(**(claim | wrong))
    with fails(Reason.MISSING_TOKEN):
        restarted.proved("job-1", owner="team-a", rank=3, token=None)
    with fails(Reason.WRONG_TOKEN):
        JobKeys().proved("job-1", owner="team-a", rank=3, token=token)
    with fails(Reason.WRONG_TOKEN):
        JobKeys().proved("job-1", owner="", rank=3, token=token)


def test_a_disk_without_room_for_the_secret_is_named_and_left_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(PathError) as failed:
            job_keys(None, tmp_path)
    assert (failed.value.field, failed.value.errno) == ("state_dir", errno.ENOSPC)
    assert not list(tmp_path.iterdir())
    keys = job_keys(None, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["token-secret"]
    assert job_keys(None, tmp_path).key_of("x", "") == keys.key_of("x", "")


def test_a_secret_has_its_bytes_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash in between would leave a file that no control plane starts with."""
    calls: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        call = getattr(os, name)

        def note(*arguments: Any) -> None:
            calls.append(name)
            call(*arguments)

        return note

    for name in ("fsync", "link"):
        monkeypatch.setattr(os, name, noted(name))
    job_keys(None, tmp_path)
    assert calls == ["fsync", "fsync", "link", "fsync"]


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_whole(path, b"short", mode=0o600)
    with pytest.raises(ValueError, match="5 bytes"):
        JobKeys.from_file(path)
