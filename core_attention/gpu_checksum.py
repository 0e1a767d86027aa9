"""Triton kernels of a message's checksum: the polynomial of Poly1305 at the memory's speed.

Poly1305 reads a message as blocks of 16 bytes, each a number c with 2**128 added, and evaluates
``sum(c[i] * r**(n - i))`` modulo ``2**130 - 5``. One program takes a chunk of LANES * STRIDES
blocks, lane ``l`` of it every LANES-th block from ``l`` on; powers of r that are made once for each
key put them together. A number is five limbs of 26 bits. The 2**128 of all blocks are a constant,
which the host knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from core_attention.host_copies import on_device

PRIME: Final = 2**130 - 5
BLOCK_BYTES: Final = 16
LANES: Final = 256
STRIDES: Final = 16
"""Sums of so many products, of 4 words of 32 bits with limbs of 26 each, fit into 64 bits, with
what is carried into them."""

_LIMBS = 5
_LIMB_BITS = 26
_LIMB_MASK = 2**_LIMB_BITS - 1
_FEWEST_CHUNKS = 256


class GpuPolynomial:
    """The powers of one r on a GPU. Thread-safe: two threads may make the same ones.

    Args:
        r: below PRIME.
        device: of the messages.
    """

    def __init__(self, r: int, device: torch.device) -> None:
        self._r = r
        self._device = device
        of_stride = pow(r, LANES, PRIME)
        self._stride_powers = self._upload(
            power * 2 ** (32 * word) % PRIME
            for power in _powers(of_stride, STRIDES)[::-1]
            for word in range(4)
        )
        self._lane_powers = self._upload(_powers(r, LANES + 1)[:0:-1])
        # All that were ever made, as kernels under way may read them; the last one is the longest.
        self._chunk_powers: list[torch.Tensor] = []

    def write(
        self, content: torch.Tensor, out: torch.Tensor, *, pad: int = 0, nonce: int = 0
    ) -> None:
        """Writes ``nonce`` and the code of ``content``, little-endian, behind what the current
        stream has.

        Args:
            content: 1-D uint8, a multiple of BLOCK_BYTES long.
            out: 1-D uint8, 32 bytes.
            pad: 128 bits, added to the polynomial.
            nonce: 128 bits.
        """
        n_blocks = content.numel() // BLOCK_BYTES
        n_chunks = triton.cdiv(n_blocks, LANES * STRIDES)
        powers = self._powers_of(n_chunks)
        sums = torch.empty((_LIMBS, n_chunks), dtype=torch.uint64, device=self._device)
        with torch.cuda.device_of(content):
            _sum_chunks[(n_chunks,)](
                content.view(torch.uint32),
                self._stride_powers,
                self._lane_powers,
                powers,
                sums,
                n_blocks,
                powers.shape[1],
                lanes=LANES,
                strides=STRIDES,
            )
            _finish[(1,)](
                sums,
                out.view(torch.uint32),
                n_chunks,
                *_limbs(self._of_ones(n_blocks)),
                *_limbs(pad),
                *_limbs(nonce),
                block=1024,
            )

    def _powers_of(self, n_chunks: int) -> torch.Tensor:
        if not self._chunk_powers or self._chunk_powers[-1].shape[1] < n_chunks:
            wanted = max(triton.next_power_of_2(n_chunks), _FEWEST_CHUNKS)
            of_chunk = pow(self._r, LANES * STRIDES, PRIME)
            self._chunk_powers.append(self._upload(_powers(of_chunk, wanted)))
        return self._chunk_powers[-1]

    def _of_ones(self, n_blocks: int) -> int:
        """The polynomial of the 2**128 that each block has added."""
        if self._r == 1:
            return n_blocks * 2**128 % PRIME
        total = (pow(self._r, n_blocks + 1, PRIME) - self._r) * pow(self._r - 1, -1, PRIME)
        return total * 2**128 % PRIME

    def _upload(self, numbers: Iterable[int]) -> torch.Tensor:
        """Limbs of ``numbers``, ``[_LIMBS, n]`` uint32, there for every stream."""
        rows = np.array([_limbs(each) for each in numbers], dtype=np.uint32)
        limbs = np.ascontiguousarray(rows.T)
        # It has nothing else to do, so nobody waits for what other streams do.
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            uploaded = on_device(torch.from_numpy(limbs), self._device)
        stream.synchronize()
        return uploaded


def _powers(base: int, count: int) -> list[int]:
    """The powers of ``base`` from 0 on."""
    found = [1]
    for _ in range(count - 1):
        found.append(found[-1] * base % PRIME)
    return found


def _limbs(number: int) -> list[int]:
    return [number >> _LIMB_BITS * limb & _LIMB_MASK for limb in range(_LIMBS)]


@triton.jit  # type: ignore[misc,untyped-decorator,unused-ignore]
def _carried(a, b, c, d, e):  # type: ignore[no-untyped-def]
    """A number in limbs of 26 bits, the second one a little more; modulo the prime."""
    b += a >> 26
    c += b >> 26
    d += c >> 26
    e += d >> 26
    a = (a & 0x3FFFFFF) + (e >> 26) * 5
    b = (b & 0x3FFFFFF) + (a >> 26)
    return a & 0x3FFFFFF, b, c & 0x3FFFFFF, d & 0x3FFFFFF, e & 0x3FFFFFF


@triton.jit  # type: ignore[misc,untyped-decorator,unused-ignore]
def _product(a, b, c, d, e, powers, stride):  # type: ignore[no-untyped-def]
    """The product of a number with the one at ``powers``, whose limbs lie ``stride`` apart."""
    # From 32 bits, so that each product is one instruction.
    a, b, c = (
        a.to(tl.uint32).to(tl.uint64),
        b.to(tl.uint32).to(tl.uint64),
        c.to(tl.uint32).to(tl.uint64),
    )
    d, e = d.to(tl.uint32).to(tl.uint64), e.to(tl.uint32).to(tl.uint64)
    r0 = tl.load(powers).to(tl.uint64)
    r1 = tl.load(powers + stride).to(tl.uint64)
    r2 = tl.load(powers + 2 * stride).to(tl.uint64)
    r3 = tl.load(powers + 3 * stride).to(tl.uint64)
    r4 = tl.load(powers + 4 * stride).to(tl.uint64)
    return _carried(
        a * r0 + (b * r4 + c * r3 + d * r2 + e * r1) * 5,
        a * r1 + b * r0 + (c * r4 + d * r3 + e * r2) * 5,
        a * r2 + b * r1 + c * r0 + (d * r4 + e * r3) * 5,
        a * r3 + b * r2 + c * r1 + d * r0 + e * r4 * 5,
        a * r4 + b * r3 + c * r2 + d * r1 + e * r0,
    )


@triton.jit(do_not_specialize=["n_blocks", "n_powers"])  # type: ignore[misc,untyped-decorator,unused-ignore]
def _sum_chunks(  # type: ignore[no-untyped-def]
    words,
    stride_powers,
    lane_powers,
    chunk_powers,
    sums,
    n_blocks,
    n_powers,
    lanes: tl.constexpr,
    strides: tl.constexpr,
):
    # Chunks are counted from the end, so that only the first one lacks blocks: as zeros they
    # change nothing.
    chunk = tl.program_id(0)
    lane = tl.arange(0, lanes)
    word = tl.arange(0, 4)
    a = tl.zeros([lanes], dtype=tl.uint64)
    b = tl.zeros([lanes], dtype=tl.uint64)
    c = tl.zeros([lanes], dtype=tl.uint64)
    d = tl.zeros([lanes], dtype=tl.uint64)
    e = tl.zeros([lanes], dtype=tl.uint64)
    begin = n_blocks - (chunk + 1) * lanes * strides
    for stride in range(strides):
        block = begin + stride * lanes + lane
        at = words + block[:, None] * 4 + word[None, :]
        value = tl.load(at, mask=(block >= 0)[:, None], other=0).to(tl.uint64)
        power = (stride_powers + stride * 4 + word)[None, :]
        a += tl.sum(value * tl.load(power).to(tl.uint64), axis=1)
        b += tl.sum(value * tl.load(power + 4 * strides).to(tl.uint64), axis=1)
        c += tl.sum(value * tl.load(power + 8 * strides).to(tl.uint64), axis=1)
        d += tl.sum(value * tl.load(power + 12 * strides).to(tl.uint64), axis=1)
        e += tl.sum(value * tl.load(power + 16 * strides).to(tl.uint64), axis=1)
    a, b, c, d, e = _carried(a, b, c, d, e)
    a, b, c, d, e = _product(a, b, c, d, e, lane_powers + lane, lanes)
    a, b, c, d, e = _carried(
        tl.sum(a, axis=0),
        tl.sum(b, axis=0),
        tl.sum(c, axis=0),
        tl.sum(d, axis=0),
        tl.sum(e, axis=0),
    )
    a, b, c, d, e = _product(a, b, c, d, e, chunk_powers + chunk, n_powers)
    n_chunks = tl.num_programs(0)
    tl.store(sums + chunk, a)
    tl.store(sums + n_chunks + chunk, b)
    tl.store(sums + 2 * n_chunks + chunk, c)
    tl.store(sums + 3 * n_chunks + chunk, d)
    tl.store(sums + 4 * n_chunks + chunk, e)


@triton.jit  # type: ignore[misc,untyped-decorator,unused-ignore]
def _total(sums, n_chunks, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, block)
    total = tl.zeros([block], dtype=tl.uint64)
    for begin in range(0, n_chunks, block):
        at = begin + place
        total += tl.load(sums + at, mask=at < n_chunks, other=0)
    return tl.sum(total, axis=0)


@triton.jit  # type: ignore[misc,untyped-decorator,unused-ignore]
def _store_words(out, a, b, c, d, e):  # type: ignore[no-untyped-def]
    """The lowest 128 bits of a number whose limbs have 26 bits."""
    tl.store(out, (a | b << 26).to(tl.uint32))
    tl.store(out + 1, (b >> 6 | c << 20).to(tl.uint32))
    tl.store(out + 2, (c >> 12 | d << 14).to(tl.uint32))
    tl.store(out + 3, (d >> 18 | e << 8).to(tl.uint32))


_SCALARS = [f"{name}_{limb}" for name in ("ones", "pad", "nonce") for limb in range(_LIMBS)]


@triton.jit(do_not_specialize=["n_chunks", *_SCALARS])  # type: ignore[misc,untyped-decorator,unused-ignore]
def _finish(  # type: ignore[no-untyped-def]
    sums,
    out,
    n_chunks,
    ones_0,
    ones_1,
    ones_2,
    ones_3,
    ones_4,
    pad_0,
    pad_1,
    pad_2,
    pad_3,
    pad_4,
    nonce_0,
    nonce_1,
    nonce_2,
    nonce_3,
    nonce_4,
    block: tl.constexpr,
):
    a = _total(sums, n_chunks, block) + ones_0.to(tl.uint64)
    b = _total(sums + n_chunks, n_chunks, block) + ones_1.to(tl.uint64)
    c = _total(sums + 2 * n_chunks, n_chunks, block) + ones_2.to(tl.uint64)
    d = _total(sums + 3 * n_chunks, n_chunks, block) + ones_3.to(tl.uint64)
    e = _total(sums + 4 * n_chunks, n_chunks, block) + ones_4.to(tl.uint64)
    a, b, c, d, e = _carried(a, b, c, d, e)
    a, b, c, d, e = _carried(a, b, c, d, e)
    a, b, c, d, e = _carried(a, b, c, d, e)
    # Less than twice the prime: subtract it where it fits, which is where 5 more reach 2**130.
    carry = a + 5 >> 26
    carry = b + carry >> 26
    carry = c + carry >> 26
    carry = d + carry >> 26
    a += (e + carry >> 26) * 5
    a += pad_0.to(tl.uint64)
    b += pad_1.to(tl.uint64) + (a >> 26)
    c += pad_2.to(tl.uint64) + (b >> 26)
    d += pad_3.to(tl.uint64) + (c >> 26)
    e += pad_4.to(tl.uint64) + (d >> 26)
    _store_words(out + 4, a & 0x3FFFFFF, b & 0x3FFFFFF, c & 0x3FFFFFF, d & 0x3FFFFFF, e)
    _store_words(
        out,
        nonce_0.to(tl.uint64),
        nonce_1.to(tl.uint64),
        nonce_2.to(tl.uint64),
        nonce_3.to(tl.uint64),
        nonce_4.to(tl.uint64),
    )
