"""Triton kernel that moves the rows of all sections of a message at once.

Rows are copied as 32-bit words, whatever they hold; only gradients that are summed are read as
numbers. A launch has no more arguments than it needs to be cheap: where the rows are, and how wide,
stands in a table on the device that is made once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from core_attention.host_copies import on_device
from core_attention.message import MessageLayout
from core_attention.message_views import LibraryMessageRows, Tensors, section_rows
from core_attention.shape import DTYPE_BYTES

BLOCK_ROWS = 4
BLOCK_COLUMNS = 512
WORD_BYTES = 4
MAX_SECTIONS = 6
ALIGNED_WORDS = 16
"""Widths that are multiples of it let the compiler read 16 bytes at a time."""

_ENTRIES = 4


@dataclass(frozen=True, eq=False)
class RowTable:
    """The arguments of a launch besides addresses.

    Attributes:
        entries: int64 on the device, ``[n_sections, 4]``: rows, words (or numbers, of a sum) in a
            row, first entry in ``rows``, and whether the rows are summed.
        rows: int64 on the device: the sections' indices, one after the other.
        max_rows: of any section.
        aligned: whether every width is a multiple of ALIGNED_WORDS.
    """

    entries: torch.Tensor
    rows: torch.Tensor
    max_rows: int
    aligned: bool


class FusedMessageRows:
    """Implements :class:`core_attention.message_rows.MessageRows` with one kernel a message.

    Args:
        request, reply: layouts.
        q_rows, kv_rows: int64 packed rows in message order, on the GPU.
    """

    def __init__(
        self,
        request: MessageLayout,
        reply: MessageLayout,
        q_rows: torch.Tensor,
        kv_rows: torch.Tensor,
    ) -> None:
        self._request = request
        self._reply = reply
        self._library = LibraryMessageRows(request, reply, q_rows, kv_rows)
        # Two copies, for which no kernel has to be loaded, as it would for torch.cat.
        rows = q_rows.new_empty(len(q_rows) + len(kv_rows))
        rows[: len(q_rows)].copy_(q_rows)
        rows[len(q_rows) :].copy_(kv_rows)
        self._pack_table = _table(request, rows, len(q_rows), summed=False)
        self._unpack_table = _table(reply, rows, len(q_rows), summed=True)

    def pack(self, message: torch.Tensor, inputs: Tensors) -> None:
        """See :class:`core_attention.message_rows.MessageRows`."""
        table = self._pack_table
        sources = [inputs[section.name] for section in self._request.sections]
        if table is None or not all(_is_plain(source) for source in sources):
            self._library.pack(message, inputs)
            return
        targets = [message.data_ptr() + s.begin_bytes for s in self._request.sections]
        _launch([source.data_ptr() for source in sources], targets, table, gather=True)

    def unpack(self, message: torch.Tensor, outputs: Tensors, gradients: Tensors) -> None:
        """See :class:`core_attention.message_rows.MessageRows`."""
        table = self._unpack_table
        names = [section.name for section in self._reply.sections]
        targets = [gradients[name] if name in gradients else outputs[name] for name in names]
        as_planned = all((name in gradients) == (name in _SUMMED) for name in names)
        if table is None or not as_planned or not all(_is_plain(each) for each in targets):
            self._library.unpack(message, outputs, gradients)
            return
        sources = [message.data_ptr() + s.begin_bytes for s in self._reply.sections]
        dtype = self._reply.sections[-1].dtype
        _launch(sources, [each.data_ptr() for each in targets], table, gather=False, dtype=dtype)


_SUMMED = frozenset({"dk", "dv"})
_TRITON_DTYPES = {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32}


def move_rows(
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
    source_rows: torch.Tensor,
    target_rows: torch.Tensor,
) -> None:
    """Copies rows of several tensors to rows of others, all by the same indices.

    Args:
        copies: pairs of source and target, of equal dtype and row shape.
        source_rows, target_rows: int64 of equal length, on the GPU; no target row twice.
    """
    n_rows = len(source_rows)
    if n_rows == 0:
        return
    for source, target in copies:
        width = source[0].numel() * source.element_size()
        if width % WORD_BYTES or not (_is_plain(source) and _is_plain(target)):
            target.index_copy_(0, target_rows, source.index_select(0, source_rows))
            continue
        with torch.cuda.device_of(source):
            _copy_by_rows[(triton.cdiv(n_rows, BLOCK_ROWS),)](
                source.flatten(1).view(torch.int32),
                target.flatten(1).view(torch.int32),
                source_rows,
                target_rows,
                n_rows,
                width // WORD_BYTES,
                block_rows=BLOCK_ROWS,
                block_columns=BLOCK_COLUMNS,
            )


def _table(
    layout: MessageLayout, rows: torch.Tensor, n_q_rows: int, *, summed: bool
) -> RowTable | None:
    """The table of a layout; None if its rows are not whole words."""
    n_kv_rows = len(rows) - n_q_rows
    entries, widths = [], []
    for section in layout.sections:
        of_keys = section_rows(section.name, rows[:0], rows) is rows
        adds = summed and section.name in _SUMMED
        width = math.prod(section.shape[1:])
        if not adds:
            nbytes = width * DTYPE_BYTES[section.dtype]
            if nbytes % WORD_BYTES:
                return None
            width = nbytes // WORD_BYTES
        widths.append(width)
        first = n_q_rows if of_keys else 0
        entries.append([n_kv_rows if of_keys else n_q_rows, width, first, int(adds)])
    return RowTable(
        entries=on_device(torch.tensor(entries, dtype=torch.int64), rows.device),
        rows=rows,
        max_rows=max((entry[0] for entry in entries), default=0),
        aligned=all(width % ALIGNED_WORDS == 0 for width in widths),
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a kernel can read or write it by address, 16 bytes at a time."""
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def _launch(
    sources: list[int],
    targets: list[int],
    table: RowTable,
    *,
    gather: bool,
    dtype: str = "bfloat16",
) -> None:
    if table.max_rows == 0:
        return
    n_sections = len(sources)
    # Addresses, too: Triton compiles anew for other types of arguments.
    padding = sources[:1] * (MAX_SECTIONS - n_sections)
    grid = (triton.cdiv(table.max_rows, BLOCK_ROWS), n_sections)
    with torch.cuda.device_of(table.rows):
        _move_sections[grid](
            *sources,
            *padding,
            *targets,
            *padding,
            table.entries,
            table.rows,
            gather=gather,
            aligned=ALIGNED_WORDS if table.aligned else 1,
            summed_dtype=_TRITON_DTYPES[dtype],
            n_entries=_ENTRIES,
            block_rows=BLOCK_ROWS,
            block_columns=BLOCK_COLUMNS,
        )


@triton.jit  # type: ignore[misc,untyped-decorator,unused-ignore]
def _move_sections(  # type: ignore[no-untyped-def]
    source_0,
    source_1,
    source_2,
    source_3,
    source_4,
    source_5,
    target_0,
    target_1,
    target_2,
    target_3,
    target_4,
    target_5,
    entries,
    rows,
    gather: tl.constexpr,
    aligned: tl.constexpr,
    summed_dtype: tl.constexpr,
    n_entries: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    section = tl.program_id(1)
    entry = entries + n_entries * section
    n_rows, width = tl.load(entry), tl.load(entry + 1)
    first, summed = tl.load(entry + 2), tl.load(entry + 3)
    begin = tl.program_id(0) * block_rows
    if begin < n_rows:
        source, target = source_0.to(tl.int64), target_0.to(tl.int64)
        source = tl.where(section == 1, source_1, source)
        source = tl.where(section == 2, source_2, source)
        source = tl.where(section == 3, source_3, source)
        source = tl.where(section == 4, source_4, source)
        source = tl.where(section == 5, source_5, source)
        target = tl.where(section == 1, target_1, target)
        target = tl.where(section == 2, target_2, target)
        target = tl.where(section == 3, target_3, target)
        target = tl.where(section == 4, target_4, target)
        target = tl.where(section == 5, target_5, target)
        in_message = begin + tl.arange(0, block_rows).to(tl.int64)
        inside = in_message < n_rows
        packed = tl.load(rows + first + in_message, mask=inside, other=0)
        if gather:
            source_row, target_row = packed, in_message
        else:
            source_row, target_row = in_message, packed
        width = tl.multiple_of(width, aligned)
        if summed == 0:
            words_in = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
            words_out = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
            for column in range(0, width, block_columns):
                columns = column + tl.arange(0, block_columns)
                mask = inside[:, None] & (columns < width)[None, :]
                word = tl.load(words_in + source_row[:, None] * width + columns[None, :], mask=mask)
                tl.store(
                    words_out + target_row[:, None] * width + columns[None, :], word, mask=mask
                )
        else:
            terms = tl.multiple_of(source.to(tl.pointer_type(summed_dtype)), 16)
            sums = tl.multiple_of(target.to(tl.pointer_type(tl.float32)), 16)
            for column in range(0, width, block_columns):
                columns = column + tl.arange(0, block_columns)
                mask = inside[:, None] & (columns < width)[None, :]
                term = tl.load(terms + source_row[:, None] * width + columns[None, :], mask=mask)
                at = sums + target_row[:, None] * width + columns[None, :]
                total = tl.load(at, mask=mask) + term.to(tl.float32)
                tl.store(at, total, mask=mask)


@triton.jit(do_not_specialize=["n_rows"])  # type: ignore[misc,untyped-decorator,unused-ignore]
def _copy_by_rows(  # type: ignore[no-untyped-def]
    source,
    target,
    source_rows,
    target_rows,
    n_rows,
    width,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    place = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    inside = place < n_rows
    source_row = tl.load(source_rows + place, mask=inside, other=0)[:, None]
    target_row = tl.load(target_rows + place, mask=inside, other=0)[:, None]
    for column in range(0, width, block_columns):
        columns = column + tl.arange(0, block_columns)
        mask = inside[:, None] & (columns < width)[None, :]
        word = tl.load(source + source_row * width + columns[None, :], mask=mask)
        tl.store(target + target_row * width + columns[None, :], word, mask=mask)
