"""What makes a member the same one when its process starts again: its key, and the address that it
was given."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from core_attention.whole_file import write_whole
from distca.contract.network_proof import member_proof


class StateFileError(ValueError):
    """The state file is not what this program wrote, or others can read it."""


@dataclass(frozen=True)
class MemberState:
    """A member's key and address.

    Attributes:
        private_key: never shown.
        address: that it was given; empty at first.
        ticket: shows that it was.
    """

    private_key: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    address: str = ""
    ticket: bytes = field(default=b"", repr=False)

    @property
    def public_key(self) -> bytes:
        """What others know it by, 32 bytes."""
        return self.private_key.public_key().public_bytes_raw()

    @property
    def private_text(self) -> str:
        """The private key as WireGuard's tools take it. For their standard input alone."""
        return base64.b64encode(self.private_key.private_bytes_raw()).decode()

    def proof(self, control_plane_key: bytes) -> bytes:
        """Shows to who has ``control_plane_key`` that the private key is here.

        Raises:
            ValueError: that is no key.
        """
        return member_proof(self.private_key, control_plane_key, self.public_key)

    def at(self, address: str, ticket: bytes) -> MemberState:
        """The same member, with the address that it was given."""
        return replace(self, address=address, ticket=ticket)

    @classmethod
    def load(cls, path: Path | None) -> MemberState:
        """The member in ``path``; a new one if there is no such file, or no path.

        Raises:
            OSError: it cannot be read.
            StateFileError: it is of no use, or not for this user alone.
        """
        if path is None or not path.exists():
            return cls()
        if path.stat().st_mode & 0o077:
            raise StateFileError(
                f"{path} holds a private key and is open to other users: chmod 600 {path}"
            )
        try:
            kept = json.loads(path.read_text())
            private_key = base64.b64decode(kept["private_key"], validate=True)
            return cls(
                X25519PrivateKey.from_private_bytes(private_key),
                str(kept["address"]),
                base64.b64decode(kept["ticket"], validate=True),
            )
        except (ValueError, KeyError, TypeError):
            # Without the cause, which may show what is in the file.
            raise StateFileError(
                f"{path} is no state of 'distca wireguard'; remove it to join as a new member"
            ) from None

    def save(self, path: Path) -> None:
        """Writes it whole or not at all, for this user alone.

        Raises:
            OSError: it cannot be written.
        """
        kept = {
            "private_key": self.private_text,
            "address": self.address,
            "ticket": base64.b64encode(self.ticket).decode(),
        }
        write_whole(path, json.dumps(kept), mode=0o600)
