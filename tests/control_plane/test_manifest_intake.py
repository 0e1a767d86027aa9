"""Large manifests are read off the event loop, in bounded number, and small ones at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from control_plane.access.fair_slots import FairThreads
from control_plane.errors import QuotaError
from control_plane.jobs import requests
from control_plane.service import manifest_intake
from control_plane.service.manifest_intake import LARGE_BYTES, ManifestIntake
from core_attention.manifest import RankManifest
from distca.contract.codec import rank_manifest_to_proto
from distca.v1 import plan_pb2

SMALL = RankManifest.from_lengths(3, 0, [[5, 7], [12]])
LARGE = RankManifest.from_lengths(3, 0, [[1] * 20_000, [20_000]])
DEADLINE_SECONDS = 30.0


@pytest.fixture
def threads() -> Iterator[FairThreads]:
    running = FairThreads(1, "messages")
    yield running
    running.close()


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that manifests were read on."""
    seen: list[threading.Thread] = []
    read = requests.manifest_from_proto

    def noted(message: plan_pb2.RankManifest) -> RankManifest:
        seen.append(threading.current_thread())
        return read(message)

    monkeypatch.setattr(manifest_intake, "manifest_from_proto", noted)
    return seen


def read(intake: ManifestIntake, manifest: RankManifest, owner: str = "a") -> RankManifest:
    message = rank_manifest_to_proto(manifest)

    async def once() -> RankManifest:
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await intake.read(message, owner, message.ByteSize())

    return asyncio.run(once())


def test_a_small_one_is_read_at_once(threads: FairThreads, readers: list[threading.Thread]) -> None:
    assert read(ManifestIntake(threads, lambda owner, nbytes: None), SMALL) == SMALL
    assert readers == [threading.current_thread()]


def test_a_large_one_is_read_off_the_event_loop(
    threads: FairThreads, readers: list[threading.Thread]
) -> None:
    assert rank_manifest_to_proto(LARGE).ByteSize() > LARGE_BYTES
    assert read(ManifestIntake(threads, lambda owner, nbytes: None), LARGE) == LARGE
    assert [thread.name.partition("_")[0] for thread in readers] == ["messages"]


def test_what_is_being_read_counts_as_kept(
    threads: FairThreads, readers: list[threading.Thread]
) -> None:
    message = rank_manifest_to_proto(LARGE)
    nbytes = message.ByteSize()
    asked: list[tuple[str, int]] = []

    def check_room(owner: str, wanted: int) -> None:
        asked.append((owner, wanted))
        if wanted > 2 * nbytes:
            raise QuotaError("no room")

    async def three_at_once() -> list[RankManifest | BaseException]:
        intake = ManifestIntake(threads, check_room)
        async with asyncio.timeout(DEADLINE_SECONDS):
            read_together = await asyncio.gather(
                *(intake.read(message, "a", nbytes) for _ in range(3)), return_exceptions=True
            )
            await intake.read(message, "a", nbytes)
        return read_together

    first, second, third = asyncio.run(three_at_once())
    assert first == second == LARGE
    assert isinstance(third, QuotaError)
    assert asked == [("a", nbytes), ("a", 2 * nbytes), ("a", 3 * nbytes), ("a", nbytes)]
