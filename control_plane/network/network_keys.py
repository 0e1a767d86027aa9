"""What shows that a member of the data network has its key, and was given its address.

All is derived from the token secret, so that it outlives the process: a member that comes back
after a restart, or to a standby, keeps its address, and nobody else can ask for it.
"""

from __future__ import annotations

import hmac
from ipaddress import IPv4Address

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from control_plane.access.job_keys import JobKeys
from control_plane.errors import InvalidRequestError, WrongProofError
from distca.contract.identity import Identity
from distca.contract.network_proof import KEY_BYTES, member_proof


class NetworkKeys:
    """Checks proofs and tickets.

    Args:
        secret: that everything is derived from.

    Attributes:
        public_key: X25519, which members prove their own with.
    """

    def __init__(self, secret: JobKeys) -> None:
        self._private = X25519PrivateKey.from_private_bytes(secret.key_for("data network"))
        self._tickets = secret.key_for("data network tickets")
        self._places = secret.key_for("data network places")
        self.public_key = self._private.public_key().public_bytes_raw()

    def check_proof(self, public_key: bytes, proof: bytes) -> None:
        """Checks that who made ``proof`` has the private key of ``public_key``.

        Raises:
            InvalidRequestError: ``public_key`` is no key.
            WrongProofError: it has not.
        """
        if len(public_key) != KEY_BYTES:
            raise InvalidRequestError(
                f"public_key has {len(public_key)} bytes; a WireGuard key has {KEY_BYTES}"
            )
        try:
            expected = member_proof(self._private, public_key, public_key)
        except ValueError as error:
            raise InvalidRequestError(f"public_key is no WireGuard key: {error}") from error
        if not hmac.compare_digest(expected, proof):
            raise WrongProofError(
                "the proof does not show the private key of public_key; describe the network again "
                "if the control plane has another token secret now"
            )

    def ticket(self, owner: Identity, public_key: bytes, address: IPv4Address) -> bytes:
        """Shows that the member ``public_key`` of ``owner`` was given ``address``."""
        # Key and address have fixed lengths: no two different members give the same bytes.
        message = public_key + address.packed + owner.uri.encode()
        return hmac.digest(self._tickets, message, "sha256")

    def is_ticket(
        self, ticket: bytes, owner: Identity, public_key: bytes, address: IPv4Address
    ) -> bool:
        """Whether ``ticket`` is that of the member and the address."""
        return hmac.compare_digest(self.ticket(owner, public_key, address), ticket)

    def place(self, public_key: bytes, n_places: int) -> int:
        """Where the search for a free address begins, 0 or more and less than ``n_places``: the
        same for a key each time, and not to be foretold, so that nobody can make a key whose place
        is another member's."""
        digest = hmac.digest(self._places, public_key, "sha256")
        return int.from_bytes(digest, "big") % n_places
