"""Checks of the tensors a caller hands in, before any byte leaves or any kernel runs.

Kernels and messages take rows as flat memory. A tensor with other strides than they assume does
not fail there, it gives wrong numbers or NaN gradients; so it is refused here, by name.
"""

from __future__ import annotations

import torch

from core_attention.errors import TensorError
from core_attention.shape import AttentionShape


def check_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: AttentionShape, n_rows: int
) -> None:
    """Checks Q, K and V of one rank's nano-batch.

    Args:
        q: ``[n_rows, num_heads, head_dim]``.
        k: ``[n_rows, num_heads_kv, head_dim]``, on q's device.
        v: ``[n_rows, num_heads_kv, head_dim_v]``, on q's device.
        shape: heads, head dims and dtype of the job.
        n_rows: rows that the manifest gives this rank in this nano-batch.
    """
    check_rows("q", q, (n_rows, shape.num_heads, shape.head_dim), shape.dtype, q.device)
    check_rows("k", k, (n_rows, shape.num_heads_kv, shape.head_dim), shape.dtype, q.device)
    check_rows("v", v, (n_rows, shape.num_heads_kv, shape.head_dim_v), shape.dtype, q.device)


def check_rows(
    name: str,
    tensor: torch.Tensor,
    expected_shape: tuple[int, ...],
    dtype: str,
    device: torch.device,
) -> None:
    """Checks one tensor of packed rows.

    Args:
        name: what the caller calls it.
        tensor: the tensor.
        expected_shape: rows first, then what a row holds.
        dtype: torch name of the dtype, for example ``"bfloat16"``.
        device: where it must lie.
    """
    came = tuple(tensor.shape)
    if tensor.dim() != len(expected_shape):
        raise TensorError(
            f"{name} has shape {came}; it must have {len(expected_shape)} dimensions "
            f"{expected_shape}: rows, heads, head dim{_batch_hint(came, expected_shape)}"
        )
    if came[1:] != expected_shape[1:]:
        raise TensorError(
            f"{name} has shape {came}; each row must be {expected_shape[1:]} (heads, head dim), as "
            f"the job's attention shape says{_transpose_hint(came, expected_shape)}"
        )
    if came[0] != expected_shape[0]:
        raise TensorError(
            f"{name} has {came[0]} rows; the manifest gives this rank {expected_shape[0]} in this "
            "nano-batch: pass its packed rows without padding"
        )
    if tensor.dtype is not getattr(torch, dtype):
        raise TensorError(
            f"{name} is {tensor.dtype}; the job was registered with {dtype}: convert it with "
            f".to(torch.{dtype}), or register the job with the other dtype"
        )
    if tensor.device != device:
        raise TensorError(
            f"{name} is on {tensor.device}; it must be on {device}, with the other tensors of the "
            f"call: move it with .to({str(device)!r})"
        )
    check_contiguous(name, tensor)


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Checks that the rows of ``tensor`` lie one after another in memory, without gaps."""
    if not tensor.is_contiguous():
        wanted = torch.empty(tensor.shape, device="meta").stride()
        raise TensorError(
            f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}, not {wanted}: "
            f"pass {name}.contiguous()"
        )


def _batch_hint(came: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Advice about a leading batch dimension, the usual mistake."""
    if len(came) != len(expected) + 1:
        return ""
    return "; documents are packed, not batched: drop the batch dimension with .flatten(0, 1)"


def _transpose_hint(came: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Advice about heads before rows, the layout of scaled_dot_product_attention."""
    if (came[1], came[0], *came[2:]) != expected:
        return ""
    return "; its heads come before its rows: pass .transpose(0, 1).contiguous()"
