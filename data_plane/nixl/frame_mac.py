"""Codes that show that a frame is the next one of a connection, and of nobody else.

Each direction of a connection numbers its frames; the code of a frame is a keyed hash of its number
and all of it. So a frame that is made up, changed, left out, sent twice or sent back fails.
"""

from __future__ import annotations

import hashlib
from typing import Final

from data_plane.proof import derived_key, same

MAC_BYTES: Final = 16


class FrameMac:
    """The codes of one direction of a connection, in the order of its frames.

    Args:
        direction_key: of ``data_plane.proof.connection_keys``.
    """

    def __init__(self, direction_key: bytes) -> None:
        key = derived_key(direction_key, "frames")
        self._keyed = hashlib.blake2b(key=key, digest_size=MAC_BYTES)
        self._number = 0

    def next(self, head: bytes, payload: bytes) -> bytes:
        """The code of the next frame.

        Args:
            head: its kind and length, of a fixed size.
            payload: what it says.
        """
        keyed = self._keyed.copy()
        keyed.update(self._number.to_bytes(8, "big") + head)
        keyed.update(payload)
        self._number += 1
        return keyed.digest()

    def is_next(self, head: bytes, payload: bytes, mac: bytes) -> bool:
        """Returns whether ``mac`` is the code of the next frame, which it then is."""
        return same(self.next(head, payload), mac)
