"""The caller: read from the connection, which the TLS handshake has vouched for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from cryptography import x509

from distca.contract.identity import Identity, Role, identity_of
from distca.contract.tokens import JOB_TOKEN_KEY


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The maker of a call.

    Attributes:
        identity: what the certificate says; None without one, or without an identity in it.
        expires: when the certificate ends; None without one.
        peer: its address, as gRPC names it.
        token: the job's token that came with the call, or None.
    """

    identity: Identity | None
    expires: datetime | None
    peer: str
    token: bytes | None

    @property
    def owner(self) -> str:
        """The tenant whose jobs it may use; empty without mTLS."""
        return self.identity.name if self.identity else ""

    @property
    def sees_addresses(self) -> bool:
        """Return whether it may learn where servers listen: the ranks of a job, operators, and
        without mTLS everybody."""
        return self.identity is None or self.identity.role in (Role.TRAINER, Role.OPERATOR)

    @property
    def label(self) -> str:
        """Names it in logs and limits: its identity, else the host that it calls from."""
        return self.identity.uri if self.identity else _host(self.peer)


def caller_of(context: Any) -> Caller:
    """The caller of the RPC whose ``grpc.aio.ServicerContext`` is given."""
    properties = context.auth_context()
    pem = properties.get("x509_pem_cert", (b"",))[0]
    uris = [uri.decode(errors="replace") for uri in properties.get("peer_uri", ())]
    metadata = dict(context.invocation_metadata() or ())
    return Caller(
        identity=identity_of(uris),
        expires=_expiry(pem) if pem else None,
        peer=context.peer(),
        token=metadata.get(JOB_TOKEN_KEY),
    )


@lru_cache(maxsize=1024)
def _expiry(pem: bytes) -> datetime:
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc


def _host(peer: str) -> str:
    """``ipv4:10.0.0.7`` of ``ipv4:10.0.0.7:41822``."""
    return peer.rpartition(":")[0] or peer
