"""Puts rows into messages and takes them out: one kernel a message on a GPU with Triton, one
library call a section elsewhere. Both give the same bits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from typing import Protocol

import torch

from core_attention.message import MessageLayout
from core_attention.message_views import message_views

Tensors = Mapping[str, torch.Tensor]

_OF_KEYS = frozenset({"k", "v", "dk", "dv"})
"""Sections with the rows of keys; the others have those of queries."""


class MessageRows(Protocol):
    """The rows of one exchange's messages. Made once, used by every layer's tick."""

    def pack(self, message: torch.Tensor, inputs: Tensors) -> None:
        """Writes every section of a request but its checksum.

        Args:
            message: 1-D uint8, of the request layout's size.
            inputs: by section name, by packed row.
        """

    def unpack(self, message: torch.Tensor, outputs: Tensors, gradients: Tensors) -> None:
        """Takes every section of a reply to its rows.

        Args:
            message: 1-D uint8, of the reply layout's size.
            outputs: by packed row; rows of the sections named here are written.
            gradients: by packed row, float32; rows of the sections named here are added to.
        """


class LibraryMessageRows:
    """Implements :class:`MessageRows` with calls of the tensor library, on any device.

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
        """See :class:`MessageRows`."""
        for name, view in message_views(message, self._request).items():
            torch.index_select(inputs[name], 0, self._rows(name), out=view)

    def unpack(self, message: torch.Tensor, outputs: Tensors, gradients: Tensors) -> None:
        """See :class:`MessageRows`."""
        for name, view in message_views(message, self._reply).items():
            if name in gradients:
                gradients[name].index_add_(0, self._rows(name), view.to(torch.float32))
            else:
                outputs[name].index_copy_(0, self._rows(name), view)

    def _rows(self, name: str) -> torch.Tensor:
        return self._kv_rows if name in _OF_KEYS else self._q_rows


def message_rows(
    request: MessageLayout, reply: MessageLayout, q_rows: torch.Tensor, kv_rows: torch.Tensor
) -> MessageRows:
    """The rows of an exchange.

    Args:
        request, reply: layouts.
        q_rows, kv_rows: int64 packed rows in message order, on the device of the tensors.
    """
    if runs_triton(q_rows.device):
        from core_attention.gpu_rows import FusedMessageRows

        return FusedMessageRows(request, reply, q_rows, kv_rows)
    return LibraryMessageRows(request, reply, q_rows, kv_rows)


def section_rows(name: str, q_rows: torch.Tensor, kv_rows: torch.Tensor) -> torch.Tensor:
    """The packed rows of a section."""
    return kv_rows if name in _OF_KEYS else q_rows


@cache
def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels can run on ``device``."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
