"""Takes manifests in: small ones at once, large ones off the event loop.

A million documents take seconds to unpack and to hash. On the event loop every other tenant's calls
would wait for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from control_plane.access.fair_slots import FairThreads
from control_plane.jobs.requests import manifest_from_proto
from core_attention.manifest import RankManifest
from distca.v1 import plan_pb2

LARGE_BYTES = 64 * 2**10
"""From here on reading takes longer than to hand it to a thread: some milliseconds."""


class ManifestIntake:
    """Reads manifests; on one event loop.

    Args:
        threads: read large ones.
        check_room: raises if more bytes cannot be kept for an owner; called with the owner and the
            bytes of all its requests that are being read, the new one among them.
    """

    def __init__(self, threads: FairThreads, check_room: Callable[[str, int], None]) -> None:
        self._threads = threads
        self._check_room = check_room
        self._in_hand: Counter[str] = Counter()

    async def read(self, message: plan_pb2.RankManifest, owner: str, nbytes: int) -> RankManifest:
        """The manifest in ``message``, which came from ``owner`` in a request of ``nbytes``.

        Raises:
            InvalidRequestError: it is malformed.
            QuotaError: too much is kept for the owner, or being read.
        """
        if nbytes < LARGE_BYTES:
            return manifest_from_proto(message)
        self._check_room(owner, self._in_hand[owner] + nbytes)
        self._in_hand[owner] += nbytes
        try:
            return await self._threads.run(owner, _read, message)
        finally:
            self._in_hand[owner] -= nbytes
            if not self._in_hand[owner]:
                del self._in_hand[owner]


def _read(message: plan_pb2.RankManifest) -> RankManifest:
    manifest = manifest_from_proto(message)
    # Goes through all segments, and is kept.
    _ = manifest.fingerprint
    return manifest
