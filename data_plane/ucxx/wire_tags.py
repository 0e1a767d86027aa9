"""Tags on the wire that nobody can foresee but the two ends of a connection.

UCX matches messages by a 64-bit tag, for all connections of a process together, and does not say
which of them one came over. So the tag has to say it: it is a keyed function of what the message is
to its connection, and a sender without the key meets an expected one with a chance of
2**-64 for each.
"""

from __future__ import annotations

import hashlib
from typing import Final

from data_plane.proof import derived_key

NEWS_CHANNEL: Final = 2
"""Small messages of the transport itself, numbered from 0 in each direction."""

NEWS_CODE_BYTES: Final = 16

_PLACE_BYTES = 9


class WireTags:
    """The tags of one direction of a connection.

    Args:
        direction_key: of ``data_plane.proof.connection_keys``.
    """

    def __init__(self, direction_key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=derived_key(direction_key, "wire tags"), digest_size=8)
        self._news_key = derived_key(direction_key, "news")

    def of(self, channel: int, number: int) -> int:
        """The tag of a message.

        Args:
            channel: 0 to 127.
            number: its tag or number on the channel, below 2**63.
        """
        keyed = self._keyed.copy()
        keyed.update((channel << 64 | number).to_bytes(_PLACE_BYTES))
        return int.from_bytes(keyed.digest())

    def news_code(self, wire: int, news: bytes) -> bytes:
        """NEWS_CODE_BYTES that show that ``news`` are what the peer sends under the tag ``wire``,
        which a reader of the network sees before they arrive."""
        whole = wire.to_bytes(8) + news
        return hashlib.blake2b(whole, key=self._news_key, digest_size=NEWS_CODE_BYTES).digest()
