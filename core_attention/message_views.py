"""Tensors inside a message, and the rows that library calls put there and take out."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from core_attention.message import MessageLayout

Tensors = Mapping[str, torch.Tensor]

_OF_KEYS = frozenset({"k", "v", "dk", "dv"})
"""Sections with the rows of keys; the others have those of queries."""


def message_views(buffer: torch.Tensor, layout: MessageLayout) -> dict[str, torch.Tensor]:
    """The sections of a message as tensors that share ``buffer``'s memory.

    Args:
        buffer: 1-D uint8, ``layout.nbytes`` long, its memory aligned to 16 bytes or more.
        layout: of the message.

    Returns:
        By section name, a tensor of the section's shape and dtype.
    """
    if buffer.numel() != layout.nbytes:
        raise AssertionError(f"buffer of {buffer.numel()} bytes, message of {layout.nbytes}")
    views = {}
    for section in layout.sections:
        dtype = getattr(torch, section.dtype)
        if section.begin_bytes == section.end_bytes:
            views[section.name] = torch.empty(section.shape, dtype=dtype, device=buffer.device)
        else:
            raw = buffer[section.begin_bytes : section.end_bytes]
            views[section.name] = raw.view(dtype).view(section.shape)
    return views


def section_rows(name: str, q_rows: torch.Tensor, kv_rows: torch.Tensor) -> torch.Tensor:
    """The packed rows of a section."""
    return kv_rows if name in _OF_KEYS else q_rows


class LibraryMessageRows:
    """Implements ``message_rows.MessageRows`` with calls of the tensor library, on any device.

    Args:
        request, reply: layouts.
        q_rows, kv_rows: int64 packed rows in message order, on the device of the tensors.
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
        self._q_rows = q_rows
        self._kv_rows = kv_rows

    def pack(self, message: torch.Tensor, inputs: Tensors) -> None:
        """See ``message_rows.MessageRows``."""
        for name, view in message_views(message, self._request).items():
            rows = section_rows(name, self._q_rows, self._kv_rows)
            torch.index_select(inputs[name], 0, rows, out=view)

    def unpack(self, message: torch.Tensor, outputs: Tensors, gradients: Tensors) -> None:
        """See ``message_rows.MessageRows``."""
        for name, view in message_views(message, self._reply).items():
            rows = section_rows(name, self._q_rows, self._kv_rows)
            if name in gradients:
                gradients[name].index_add_(0, rows, view.to(torch.float32))
            else:
                outputs[name].index_copy_(0, rows, view)
