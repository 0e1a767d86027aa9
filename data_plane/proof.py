"""Proof of who speaks, without giving the secret away: what both ends of a handshake compute.

Either end shows with an HMAC-SHA256 under a shared secret that it knows the secret and has seen
the same handshake. The handshake holds a nonce of either end, so a proof is good for it alone, and
a recorded one is worth nothing. Keys for the connection come from the same secret and handshake:
a listener knows neither.

Every digest begins with a label of its own, so that none can be passed off as another.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from functools import cached_property
from typing import Final

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
KEY_BYTES: Final = 32

_LABEL: Final = b"distca data plane 4: "


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Both ends' socket addresses, as one of them sees them.

    Attributes:
        client, server: ``"<ip>:<port>"``; empty where the network does not say.
    """

    client: str
    server: str

    def differ(self, other: Ends) -> bool:
        """Returns whether an address that both sides know is not the same."""
        pairs = ((self.client, other.client), (self.server, other.server))
        return any(mine and theirs and mine != theirs for mine, theirs in pairs)

    @property
    def of_one_host(self) -> bool:
        """Returns whether both are known to be of one host: the same address, or both loopback."""
        client, server = (each.rpartition(":")[0] for each in (self.client, self.server))
        both_loopback = all(each.startswith("127.") for each in (client, server))
        return both_loopback or client == server != ""

    def __str__(self) -> str:
        return f"from {self.client or 'unknown'} to {self.server or 'unknown'}"


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """The words of both ends before either proves anything.

    Attributes:
        server_nonce, client_nonce: NONCE_BYTES of each end's choice.
        ends: as the client sees them.
        hello: the client's; names job, rank, epoch and server.
    """

    server_nonce: bytes
    client_nonce: bytes
    ends: Ends
    hello: bytes

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over all of it; no two transcripts share one."""
        fields = (
            self.server_nonce,
            self.client_nonce,
            self.ends.client.encode(),
            self.ends.server.encode(),
            self.hello,
        )
        whole = hashlib.sha256(_LABEL + b"transcript")
        for field in fields:
            whole.update(len(field).to_bytes(4, "big") + field)
        return whole.digest()


@dataclass(frozen=True, kw_only=True, repr=False)
class ConnectionKeys:
    """Secret keys of one connection, one for each direction, and where it leads.

    Attributes:
        to_server, to_client: KEY_BYTES each.
        leaves_host: unless both ends are known to be of one host; both of them find the same.
    """

    to_server: bytes
    to_client: bytes
    leaves_host: bool


def new_nonce() -> bytes:
    """NONCE_BYTES that nobody has foreseen."""
    return secrets.token_bytes(NONCE_BYTES)


def client_proof(secret: bytes, transcript: Transcript) -> bytes:
    """PROOF_BYTES that show that the client knows ``secret``."""
    return _digest(secret, b"client", transcript.digest)


def server_proof(secret: bytes, transcript: Transcript, status: int, answer: bytes) -> bytes:
    """PROOF_BYTES that show that the server knows ``secret``, and that this is its answer.

    Args:
        status: whether it accepts, 0 to 255.
        answer: what it says.
    """
    return _digest(secret, b"server", transcript.digest + bytes([status]) + answer)


def connection_keys(secret: bytes, transcript: Transcript) -> ConnectionKeys:
    """The keys of the connection that the handshake opens."""
    whole = transcript.digest
    return ConnectionKeys(
        to_server=_digest(secret, b"key to server", whole),
        to_client=_digest(secret, b"key to client", whole),
        leaves_host=not transcript.ends.of_one_host,
    )


def derived_key(key: bytes, purpose: str) -> bytes:
    """KEY_BYTES from a key of a direction, for one purpose alone."""
    return _digest(key, b"purpose", purpose.encode())


def same(proof: bytes, expected: bytes) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(proof, expected)


def _digest(key: bytes, label: bytes, content: bytes) -> bytes:
    return hmac.digest(key, _LABEL + label + b"\0" + content, "sha256")
