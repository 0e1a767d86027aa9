"""Tensors inside a message buffer."""

from __future__ import annotations

import torch

from core_attention.message import MessageLayout


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
