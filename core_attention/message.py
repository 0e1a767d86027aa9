"""The bytes of a tick's messages: sections of rows, laid out alike by trainer and server.

Sections follow one another, each beginning at a multiple of 256 bytes (what GPU copy engines and
wide loads want), so a receiver can use them in place as tensors:

=========  ===================================================================================
message    sections
=========  ===================================================================================
forward    request: q, k, v.                            reply: o, lse
backward   request: q, k, v, do, lse, delta.            reply: dq, dk, dv
=========  ===================================================================================

``delta`` is the row sum of dO * O, which is all that the backward pass needs of O
(FlashAttention-2, section 3.1); ``lse`` and ``delta`` are float32, everything else has the job's
dtype. The last 32 bytes are for a checksum (``core_attention.checksum``).
"""

from __future__ import annotations

from dataclasses import dataclass

from core_attention.ca_task import Phase
from core_attention.routing import PairRoute
from core_attention.shape import DTYPE_BYTES, AttentionShape

SECTION_ALIGNMENT_BYTES = 256
CHECKSUM_BYTES = 32

_REQUEST = {
    Phase.FORWARD: ("q", "k", "v"),
    Phase.BACKWARD: ("q", "k", "v", "do", "lse", "delta"),
}
_REPLY = {Phase.FORWARD: ("o", "lse"), Phase.BACKWARD: ("dq", "dk", "dv")}


@dataclass(frozen=True)
class Section:
    """One tensor inside a message.

    Attributes:
        name: of the tensor: q, k, v, o, lse, do, delta, dq, dk or dv.
        shape: rows, heads and (but for lse and delta) head dim.
        dtype: torch name of the dtype.
        begin_bytes, end_bytes: its half-open byte range in the message.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    begin_bytes: int
    end_bytes: int


@dataclass(frozen=True)
class MessageLayout:
    """The sections of one message, in order, and its size.

    An exchange of no rows has an empty message (``nbytes`` 0), which is not sent.

    Attributes:
        sections: in order.
        nbytes: of the whole message; the last CHECKSUM_BYTES are a checksum of those before,
            where the connection has one.
    """

    sections: tuple[Section, ...]
    nbytes: int


def request_layout(route: PairRoute, shape: AttentionShape, phase: Phase) -> MessageLayout:
    """The layout of what ``route.rank`` sends to ``route.server`` in a tick of ``phase``."""
    return _layout(_REQUEST[phase], route.n_q_rows, route.n_kv_rows, shape)


def reply_layout(route: PairRoute, shape: AttentionShape, phase: Phase) -> MessageLayout:
    """The layout of what ``route.server`` sends back; empty for a rank that gave only K/V in a
    forward tick."""
    return _layout(_REPLY[phase], route.n_q_rows, route.n_kv_rows, shape)


def _layout(
    names: tuple[str, ...],
    n_q_rows: int,
    n_kv_rows: int,
    shape: AttentionShape,
) -> MessageLayout:
    sections = []
    end = 0
    for name in names:
        section_shape, dtype = _section_shape(name, n_q_rows, n_kv_rows, shape)
        nbytes = DTYPE_BYTES[dtype]
        for size in section_shape:
            nbytes *= size
        # A section of no bytes lies at 0, the one offset that is aligned and inside every message.
        begin = _aligned(end, SECTION_ALIGNMENT_BYTES) if nbytes else 0
        end = max(end, begin + nbytes)
        sections.append(Section(name, section_shape, dtype, begin, begin + nbytes))
    nbytes = _aligned(end, CHECKSUM_BYTES) + CHECKSUM_BYTES if end else 0
    return MessageLayout(tuple(sections), nbytes)


def _aligned(nbytes: int, alignment: int) -> int:
    """``nbytes`` rounded up to a multiple of ``alignment``."""
    return -(-nbytes // alignment) * alignment


def _section_shape(
    name: str, n_q_rows: int, n_kv_rows: int, shape: AttentionShape
) -> tuple[tuple[int, ...], str]:
    match name:
        case "q" | "dq":
            return (n_q_rows, shape.num_heads, shape.head_dim), shape.dtype
        case "o" | "do":
            return (n_q_rows, shape.num_heads, shape.head_dim_v), shape.dtype
        case "k" | "dk":
            return (n_kv_rows, shape.num_heads_kv, shape.head_dim), shape.dtype
        case "v" | "dv":
            return (n_kv_rows, shape.num_heads_kv, shape.head_dim_v), shape.dtype
        case "lse" | "delta":
            return (n_q_rows, shape.num_heads), "float32"
        case _:
            raise AssertionError(f"no such section: {name}")
