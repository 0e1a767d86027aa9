"""Checksums of messages: Poly1305 under a key of the connection that a message travels on.

They find what TCP's 16 bits and a network card miss, memory that fails between a sender's and a
receiver's use of it, and rows that somebody else has changed, made up, or recorded and sent again:
who does not hold the key cannot make the checksum of other rows.

The last CHECKSUM_BYTES of a message are a nonce, new for each message, and the code of all bytes
before them: Poly1305 with a key r of the connection's direction, plus a pad that HMAC-SHA256 makes
of that direction's key, the message's tag and the nonce. This is the construction of D. J.
Bernstein, "The Poly1305-AES message-authentication code" (FSE 2005), with HMAC in the place of
AES. Its section 3 bounds a forger's chance, whatever messages and codes he has seen: per attempt at
most ``8 * ceil(L / 16) / 2**106`` for messages of L bytes, beside breaking HMAC. That is 2**-77 for
1 GiB, and an attempt that fails ends its connection, and with it the key. Keys are of one
connection and one direction, the tag names step, layer, nano-batch and phase, and a tag is used
once on a connection; so a recorded message is good nowhere else.

On the host OpenSSL computes it, on a GPU a kernel, at the memory's speed each.
"""

from __future__ import annotations

import hmac
import secrets
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305

from core_attention.host_copies import HostCopy, on_host
from core_attention.message import CHECKSUM_BYTES
from core_attention.message_rows import runs_triton

if TYPE_CHECKING:
    from core_attention.gpu_checksum import GpuPolynomial

_NONCE_BYTES = 16
_CODE_BYTES = 16
_TAG_BYTES = 8
_MODULUS = 2**128
_CLAMP = 0x0FFFFFFC_0FFFFFFC_0FFFFFFC_0FFFFFFF
"""Bits of r that Poly1305 uses (RFC 8439, section 2.5)."""
_CHUNK_BYTES = 2**19
"""OpenSSL holds the interpreter's lock for 0.1 ms of it at a time."""
_MOST_KEYS = 4096
"""That a GPU keeps powers of, 20 KiB and more of each."""


class ChecksumMismatch(ValueError):
    """A message's bytes are not those that its sender sealed; they must not be used."""


def seal(message: torch.Tensor, tag: int, key: bytes) -> None:
    """Writes the checksum of a message whose sections are complete.

    Args:
        message: 1-D uint8; an empty one has no checksum. On a GPU, the current stream writes it
            behind what it has, and nobody waits.
        tag: under which it is sent, below 2**63.
        key: 32 bytes, ``Connection.sending_key``.
    """
    if not len(message):
        return
    content, checksum = message[:-CHECKSUM_BYTES], message[-CHECKSUM_BYTES:]
    nonce = secrets.token_bytes(_NONCE_BYTES)
    pad = _pad(key, tag, nonce)
    if runs_triton(message.device):
        polynomial = _on_gpu(key, message.device)
        polynomial.write(content, checksum, pad=pad, nonce=int.from_bytes(nonce, "little"))
        return
    sealed = bytearray(nonce + _code(_polynomial(content, key), pad))
    checksum.copy_(torch.frombuffer(sealed, dtype=torch.uint8))


def verify(message: torch.Tensor, tag: int, key: bytes) -> None:
    """Compares a received message with its checksum.

    Args:
        message: complete; on a GPU, it is read on a stream of its own, behind no kernel.
        tag: as for :func:`seal`.
        key: 32 bytes, ``Connection.receiving_key``.

    Raises:
        ChecksumMismatch: they differ.
    """
    if not len(message):
        return
    content, checksum = message[:-CHECKSUM_BYTES], message[-CHECKSUM_BYTES:]
    if runs_triton(message.device):
        with torch.cuda.stream(_stream(message.device)):
            found = torch.empty_like(checksum)
            _on_gpu(key, message.device).write(content, found)
            copies = HostCopy(checksum), HostCopy(found)
        sealed, value = (copy.wait().numpy().tobytes() for copy in copies)
        polynomial = int.from_bytes(value[_NONCE_BYTES:], "little")
    else:
        sealed = on_host(checksum).numpy().tobytes()
        polynomial = _polynomial(content, key)
    nonce, code = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
    if not hmac.compare_digest(_code(polynomial, _pad(key, tag, nonce)), code):
        raise ChecksumMismatch(
            f"a message of {len(message)} bytes does not have its sender's checksum: it was "
            "changed on the way, or somebody else sent it"
        )


def _pad(key: bytes, tag: int, nonce: bytes) -> int:
    whole = b"pad" + tag.to_bytes(_TAG_BYTES, "big") + nonce
    return int.from_bytes(hmac.digest(key, whole, "sha256")[:_CODE_BYTES], "little")


def _r(key: bytes) -> bytes:
    return hmac.digest(key, b"r", "sha256")[:_CODE_BYTES]


def _code(polynomial: int, pad: int) -> bytes:
    return ((polynomial + pad) % _MODULUS).to_bytes(_CODE_BYTES, "little")


def _polynomial(content: torch.Tensor, key: bytes) -> int:
    """The code of ``content`` without a pad."""
    computed = Poly1305(_r(key) + bytes(_CODE_BYTES))
    whole = on_host(content).numpy().data
    for begin in range(0, len(whole), _CHUNK_BYTES):
        computed.update(whole[begin : begin + _CHUNK_BYTES])
    return int.from_bytes(computed.finalize(), "little")


@lru_cache(_MOST_KEYS)
def _on_gpu(key: bytes, device: torch.device) -> GpuPolynomial:
    from core_attention.gpu_checksum import GpuPolynomial

    return GpuPolynomial(int.from_bytes(_r(key), "little") & _CLAMP, device)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
