"""Checksums of messages: xxh3_64 over everything before the last 8 bytes, which hold it.

They find what TCP's 16 bits and a network card miss, and memory that fails between a sender's and a
receiver's use of it. They are seeded with the message's tag, so a message that was taken for
another one fails too.

The hash runs on the host, at memory speed. Messages on a GPU are copied there first, which waits
for their kernels and takes the time of the copy: see ``docs/integrity.md`` for what that costs.
"""

from __future__ import annotations

import struct

import torch
import xxhash

from core_attention.message import MessageLayout

_DIGEST = struct.Struct("<Q")


class ChecksumMismatch(ValueError):
    """A message's bytes are not those that its sender sealed; they must not be used."""


def seal(message: torch.Tensor, layout: MessageLayout, tag: int) -> None:
    """Writes the checksum, once all sections are complete; nothing in a layout without one.

    Args:
        message: 1-D uint8, ``layout.nbytes`` long. On a GPU, the current stream's work on it is
            waited for.
        layout: of the message.
        tag: under which it is sent.
    """
    if layout.has_checksum:
        digest = torch.frombuffer(bytearray(_digest(message, layout, tag)), dtype=torch.uint8)
        message[layout.checksum_begin :].copy_(digest)


def verify(message: torch.Tensor, layout: MessageLayout, tag: int) -> None:
    """Compares a received message with its checksum; nothing in a layout without one.

    Raises:
        ChecksumMismatch: they differ.
    """
    if not layout.has_checksum:
        return
    found, sealed = _digest(message, layout, tag), _bytes(message[layout.checksum_begin :])
    if found != sealed:
        raise ChecksumMismatch(
            f"a message of {layout.nbytes} bytes has checksum {found.hex()}, its sender sealed it "
            f"with {sealed.hex()}: memory or network changed it on the way"
        )


def _digest(message: torch.Tensor, layout: MessageLayout, tag: int) -> bytes:
    content = message[: layout.checksum_begin].cpu().numpy().data
    return _DIGEST.pack(xxhash.xxh3_64_intdigest(content, seed=tag))


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().numpy().tobytes())
