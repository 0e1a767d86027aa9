"""Documents' bounds on the host, for rotary embeddings that would read them from the GPU.

Megatron's rotary embeddings of packed rows, if they are not fused, call ``cu_seqlens.tolist()`` for
queries and keys of each layer. On a GPU the thread then waits for all that it has launched, and
holds a lock of CUDA's meanwhile: halves of a microbatch no longer overlap, and if the GPU waits for
another rank, the server in this process cannot launch the kernel that this rank waits for. The
bounds are known on the host, since the step was planned by them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from trainer_client.frameworks.megatron.attention import ServedCoreAttention, check_packed
from trainer_client.frameworks.megatron.halves import with_bounds
from trainer_client.models.documents import Documents


def are_read_on_host(model: nn.Module) -> bool:
    """Return whether a model chunk reads the bounds on the host alone: its rotary embeddings are
    not fused, and core attention is served in all layers.

    Args:
        model: a chunk without Megatron's wrappers.
    """
    config = getattr(model, "config", None)
    if config is None or config.apply_rope_fusion or config.mtp_num_layers:
        return False
    return rotates(model) and not any(
        type(module).__module__.startswith("megatron.core.ssm")
        or not isinstance(getattr(module, "core_attention", None), ServedCoreAttention | None)
        for module in model.modules()
    )


def rotates(model: nn.Module) -> bool:
    """Return whether a model chunk has rotary embeddings: of its own, or in its layers of
    multi-head latent attention, whatever its own positions are."""
    is_latent = getattr(getattr(model, "config", None), "multi_latent_attention", False)
    return is_latent or getattr(model, "position_embedding_type", None) in ("rope", "yarn")


def with_planned_bounds(
    packed: Any,
    bounds: Sequence[int],
    where: str,
    check_later: Callable[[Callable[[], None]], None],
) -> Any:
    """A copy of Megatron's ``PackedSeqParams`` with ``bounds``, of the CPU.

    Args:
        packed: as a forward step gives it to the model.
        bounds: ``[documents + 1]`` what was planned.
        where: names the microbatch in errors.
        check_later: takes what compares both, if that would have to wait for the GPU now.
    """
    planned = torch.tensor(bounds, dtype=torch.int32)
    documents = Documents(where, [(begin, 0, end - begin) for begin, end in pairwise(bounds)])

    def compared(name: str, given: torch.Tensor) -> torch.Tensor:
        documents.check({"cu_seq_lens_q": given})
        return planned

    check_later(documents.check_all)
    own = with_bounds(packed, compared)
    check_packed(own)
    return own
