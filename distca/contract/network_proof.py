"""How a member proves that it has the private key of the public key that it names.

Public keys are no secret. Without a proof, whoever knows one could join with it first and so keep
its owner out.
"""

from __future__ import annotations

import hmac

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

KEY_BYTES = 32

_LABEL = b"distca data network"


def member_proof(own: X25519PrivateKey, other: bytes, member: bytes) -> bytes:
    """The proof, which the member and the control plane alone can make.

    Args:
        own: the private key of the one of the two who makes it.
        other: the public key of the other one, :data:`KEY_BYTES` long.
        member: the public key of the member.

    Raises:
        ValueError: ``other`` is no key.
    """
    shared = own.exchange(X25519PublicKey.from_public_bytes(other))
    return hmac.digest(shared, _LABEL + member, "sha256")
