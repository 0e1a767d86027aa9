"""Checksums of messages: xxh3_64 over everything before the last 8 bytes, which hold it.

They find what TCP's 16 bits and a network card miss, and memory that fails between a sender's and a
receiver's use of it. They are seeded with the message's tag, so a message that was taken for
another one fails too.

The hash runs on the host, at memory speed. Messages on a GPU are copied there first, through pinned
memory: see ``docs/integrity.md`` for what that costs.
"""

from __future__ import annotations

import struct
import threading

import torch
import xxhash

from core_attention.message import MessageLayout

_DIGEST = struct.Struct("<Q")
_STAGING_BYTES = 16 * 2**20


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

    Args:
        message: complete; on a GPU, it is copied on a stream of its own, behind no kernel.
        layout, tag: as for :func:`seal`.

    Raises:
        ChecksumMismatch: they differ.
    """
    if not layout.has_checksum:
        return
    if message.is_cuda:
        with torch.cuda.stream(_staging(message.device).stream):
            _compare(message, layout, tag)
    else:
        _compare(message, layout, tag)


def _compare(message: torch.Tensor, layout: MessageLayout, tag: int) -> None:
    found, sealed = _digest(message, layout, tag), _bytes(message[layout.checksum_begin :])
    if found != sealed:
        raise ChecksumMismatch(
            f"a message of {layout.nbytes} bytes has checksum {found.hex()}, its sender sealed it "
            f"with {sealed.hex()}: memory or network changed it on the way"
        )


def _digest(message: torch.Tensor, layout: MessageLayout, tag: int) -> bytes:
    content = message[: layout.checksum_begin]
    if not content.is_cuda:
        return _DIGEST.pack(xxhash.xxh3_64_intdigest(content.numpy().data, seed=tag))
    state = xxhash.xxh3_64(seed=tag)
    staging = _staging(content.device).memory
    for chunk in content.split(_STAGING_BYTES):
        host = staging[: len(chunk)]
        host.copy_(chunk, non_blocking=True)
        torch.cuda.current_stream(content.device).synchronize()
        state.update(host.numpy().data)
    return _DIGEST.pack(state.intdigest())


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().numpy().tobytes())


class _Staging:
    """What one thread copies messages of one GPU with: pinned memory, which the GPU reads forty
    times as fast as any other, and a stream."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        self.stream = torch.cuda.Stream(device)


_of_thread = threading.local()


def _staging(device: torch.device) -> _Staging:
    of_device: dict[torch.device, _Staging] = _of_thread.__dict__.setdefault("of_device", {})
    if device not in of_device:
        of_device[device] = _Staging(device)
    return of_device[device]
