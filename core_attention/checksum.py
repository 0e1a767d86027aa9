"""Checksums of messages: AES-GMAC under a key of the connection that a message travels on.

They find what TCP's 16 bits and a network card miss, memory that fails between a sender's and a
receiver's use of it, and rows that somebody in between has changed: who does not hold the key
cannot make the checksum of other rows. The message's tag is part of it, so a message that was taken
for another one fails too.

The last CHECKSUM_BYTES of a message are a nonce, new for each message, and the code of all bytes
before them. It runs on the host, at memory speed. Messages on a GPU are copied there first, through
pinned memory: see ``docs/integrity.md`` for what that costs.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Iterator

import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM

from core_attention.message import CHECKSUM_BYTES, MessageLayout

_NONCE_BYTES = 16
_TAG_BYTES = 8
_STAGING_BYTES = 16 * 2**20
_CHUNK_BYTES = 2**20
"""Of a message on the host: the cipher holds the interpreter's lock for 0.1 ms of it at a time."""


class ChecksumMismatch(ValueError):
    """A message's bytes are not those that its sender sealed; they must not be used."""


def seal(message: torch.Tensor, layout: MessageLayout, tag: int, key: bytes) -> None:
    """Writes the checksum, once all sections are complete; nothing in a layout without one.

    Args:
        message: 1-D uint8, ``layout.nbytes`` long. On a GPU, the current stream's work on it is
            waited for.
        layout: of the message.
        tag: under which it is sent, below 2**63.
        key: 32 bytes, ``Connection.sending_key``.
    """
    if layout.has_checksum:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        checksum = bytearray(nonce + _code(message, layout, tag, key, nonce))
        message[layout.checksum_begin :].copy_(torch.frombuffer(checksum, dtype=torch.uint8))


def verify(message: torch.Tensor, layout: MessageLayout, tag: int, key: bytes) -> None:
    """Compares a received message with its checksum; nothing in a layout without one.

    Args:
        message: complete; on a GPU, it is copied on a stream of its own, behind no kernel.
        layout, tag: as for :func:`seal`.
        key: 32 bytes, ``Connection.receiving_key``.

    Raises:
        ChecksumMismatch: they differ.
    """
    if not layout.has_checksum:
        return
    if message.is_cuda:
        with torch.cuda.stream(_staging(message.device).stream):
            _compare(message, layout, tag, key)
    else:
        _compare(message, layout, tag, key)


def _compare(message: torch.Tensor, layout: MessageLayout, tag: int, key: bytes) -> None:
    sealed = bytes(message[layout.checksum_begin :].cpu().numpy().tobytes())
    nonce, code = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
    found = _code(message, layout, tag, key, nonce)
    if not hmac.compare_digest(found, code):
        raise ChecksumMismatch(
            f"a message of {layout.nbytes} bytes does not have the checksum that its sender sealed "
            "it with: memory or network changed it on the way, or somebody in between did"
        )


def _code(
    message: torch.Tensor, layout: MessageLayout, tag: int, key: bytes, nonce: bytes
) -> bytes:
    cipher = Cipher(AES256(key), GCM(nonce)).encryptor()
    cipher.authenticate_additional_data(tag.to_bytes(_TAG_BYTES, "big"))
    for chunk in _on_host(message[: layout.checksum_begin]):
        cipher.authenticate_additional_data(chunk)
    cipher.finalize()
    code: bytes = cipher.tag
    assert len(code) == CHECKSUM_BYTES - _NONCE_BYTES
    return code


def _on_host(content: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of ``content``, piece by piece; each is good until the next one."""
    if not content.is_cuda:
        whole = content.numpy().data
        for begin in range(0, len(whole), _CHUNK_BYTES):
            yield whole[begin : begin + _CHUNK_BYTES]
        return
    staging = _staging(content.device).memory
    for chunk in content.split(_STAGING_BYTES):
        host = staging[: len(chunk)]
        host.copy_(chunk, non_blocking=True)
        torch.cuda.current_stream(content.device).synchronize()
        yield host.numpy().data


class _Staging:
    """What one thread copies messages of one GPU with: pinned memory, which the GPU reads forty
    times as fast as any other, and a stream."""

    def __init__(self, device: torch.device) -> None:
        # Kept for later messages, and a tensor of inference mode may not be written to after it.
        with torch.inference_mode(False):
            self.memory = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        self.stream = torch.cuda.Stream(device)


_of_thread = threading.local()


def _staging(device: torch.device) -> _Staging:
    of_device: dict[torch.device, _Staging] = _of_thread.__dict__.setdefault("of_device", {})
    if device not in of_device:
        of_device[device] = _Staging(device)
    return of_device[device]
