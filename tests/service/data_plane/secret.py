"""What tests' clients and listeners prove to one another."""

from __future__ import annotations

from collections.abc import Callable

from data_plane.transport import AcceptCallback, Claim, Connection

SECRET = bytes(range(36))


def proven(
    answer: Callable[[bytes, Connection], bytes] = lambda hello, connection: b"",
) -> AcceptCallback:
    """An accept callback that takes in whoever knows SECRET, and says what ``answer`` gives."""

    def accept(claim: Claim, connection: Connection) -> bytes:
        claim.check(SECRET)
        return answer(claim.hello, connection)

    return accept
