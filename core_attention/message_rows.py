"""Puts rows into messages and takes them out: one kernel a message on a GPU with Triton, one
library call a section elsewhere. Both give the same bits.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Protocol

import torch

from core_attention.message import MessageLayout
from core_attention.message_views import LibraryMessageRows, Tensors


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


@cache
def runs_triton(device: torch.device) -> bool:
    """Returns whether Triton's kernels can run on ``device``."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
