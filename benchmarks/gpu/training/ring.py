"""PyTorch's own context parallelism, as the end-to-end benchmark runs it.

``torch.distributed.tensor.experimental`` has a ring of flash attention: rank r holds pieces r and
2 n - 1 - r of one sequence, and keys and values of the others come to it in turn. What computes one
layer is called here directly, as its dispatcher would, so that the model, the checkpoints and the
timing are those of the other ways. Options are as PyTorch ships them: all keys and values are
gathered at once ("allgather"), partial results and gradients are summed in float32.

The sequence has one causal mask, without documents inside it.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.gpu.training.attention import BACKWARD, FORWARD, Grads
from benchmarks.gpu.training.batches import Batch, CannotRun
from benchmarks.gpu.training.stopwatch import Stopwatch

_MODULES = (
    "torch.distributed.tensor.experimental._context_parallel._attention",
    # Before torch 2.10.
    "torch.distributed.tensor.experimental._attention",
)
_FORWARD = "_scaled_dot_product_ring_flash_attention"
_BACKWARD = "_scaled_dot_product_ring_flash_attention_backward"
_OPTIONS = "_cp_options"


def require_one_document(batch: Batch) -> None:
    """Raises CannotRun unless ``batch`` is a single document that 2 n equal pieces make up."""
    n_ranks, n_documents = len(batch.ranks), len(batch.lengths)
    if n_documents != 1:
        raise CannotRun(
            f"PyTorch's context parallelism knows no documents inside a sequence, and the batch of "
            f"seed {batch.seed} has {n_documents}; give it --lengths one-document"
        )
    (length,) = batch.lengths.tolist()
    if length % (2 * n_ranks):
        raise CannotRun(
            f"PyTorch's context parallelism cuts a sequence into {2 * n_ranks} equal pieces on "
            f"{n_ranks} ranks, and the document has {length} tokens; give an even number of tokens "
            "a rank"
        )


def ring_module() -> ModuleType:
    """Where this PyTorch has the ring.

    Raises:
        CannotRun: nowhere, or under other names.
    """
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if all(hasattr(module, wanted) for wanted in (_FORWARD, _BACKWARD, _OPTIONS)):
            return module
    raise CannotRun(
        f"torch {torch.__version__} has no {_FORWARD}, {_BACKWARD} and {_OPTIONS} in "
        f"{' or '.join(_MODULES)}: leave out pytorch-context-parallel"
    )


class RingAttention:
    """One document over all ranks by PyTorch's ring; see ``attention.Attention``.

    Key heads may be fewer than query heads: flash attention takes them as they are. Of the
    log-sum-exp the backward pass wants ``[1, heads, rows]``.

    Args:
        device: of the tensors.
        watch: times a whole call, in which kernels take turns with waiting for other ranks.
        group: process group of its own, so that its messages do not queue behind weights.
    """

    def __init__(self, device: torch.device, watch: Stopwatch, group: dist.ProcessGroup) -> None:
        module = ring_module()
        # As for sequences that its load balancer has laid out.
        getattr(module, _OPTIONS).enable_load_balance = True
        self._forward, self._backward = getattr(module, _FORWARD), getattr(module, _BACKWARD)
        self._mesh = DeviceMesh.from_group(group, device.type)
        self._watch = watch
        self._rest: tuple[Any, ...] = ()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``attention.Attention``."""
        with self._watch.timed(FORWARD):
            o, lse, *rest = self._forward(
                self._mesh,
                *map(_as_batch, (q, k, v)),
                is_causal=True,
                scale=q.shape[-1] ** -0.5,
            )
            # Bounds of sequences and the state of a random generator: without dropout and with one
            # sequence the same in every call.
            self._rest = tuple(rest[:6])
            return _as_rows(o), lse

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        do: torch.Tensor,
    ) -> Grads:
        """See ``attention.Attention``."""
        cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset = self._rest
        with self._watch.timed(BACKWARD):
            dq, dk, dv, *_ = self._backward(
                self._mesh,
                *map(_as_batch, (do, q, k, v, o)),
                lse,
                cum_seq_q,
                cum_seq_k,
                max_q,
                max_k,
                0.0,
                True,
                philox_seed,
                philox_offset,
                scale=q.shape[-1] ** -0.5,
            )
            return _as_rows(dq), _as_rows(dk), _as_rows(dv)


def _as_batch(rows: torch.Tensor) -> torch.Tensor:
    """``[rows, heads, dim]`` as ``[1, heads, rows, dim]``."""
    return rows.transpose(0, 1)[None]


def _as_rows(batch: torch.Tensor) -> torch.Tensor:
    """``[1, heads, rows, dim]`` as ``[rows, heads, dim]``, contiguous."""
    return batch[0].transpose(0, 1).contiguous()
