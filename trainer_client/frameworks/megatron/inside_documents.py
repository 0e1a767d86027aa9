"""Halves of a microbatch that begin inside a document: which models can run them, and the rotary
embeddings of their rows.

Megatron's rotary embeddings are a table by position, which a layer reads from 0 on for each
document of ``cu_seqlens``; a table with as many rows as the batch it reads row by row. The second
half of a document gets such a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer_client.frameworks.megatron.attention import ServedCoreAttention
from trainer_client.frameworks.megatron.host_bounds import rotates
from trainer_client.frameworks.versions import convolutions, of_all_ranks
from trainer_client.hooks.checkpointing import recomputed_caller
from trainer_client.models.documents import documents_of
from trainer_client.step.lane import Lane, current_lane

_POSITIONS = ("rope", "yarn", "learned_absolute", "none")
"""Kinds of position embeddings whose positions are the rows' own."""


def why_documents_stay_whole(chunks: Sequence[nn.Module]) -> list[str]:
    """Reasons why the model cannot run the halves of a document; empty if it can. The same on all
    ranks, which call it together: all stages have the same halves.

    Between the halves only core attention passes anything on. Whatever else looks at neighbouring
    tokens would miss them at the cut.

    Args:
        chunks: of the model on this rank, without Megatron's wrappers.
    """
    return of_all_ranks(why for chunk in chunks for why in _reasons(chunk))


def _reasons(model: nn.Module) -> Iterator[str]:
    config: Any = getattr(model, "config", None)
    kind = getattr(model, "position_embedding_type", None)
    if kind not in _POSITIONS:
        yield f"its position embeddings are {kind!r}"
    if getattr(config, "mtp_num_layers", None):
        yield "its layers of multi-token prediction look at the tokens that follow"
    if getattr(config, "apply_rope_fusion", False):
        yield "apply_rope_fusion is True: fused rotary embeddings count from 0 in each half"
    elif config is not None and rotates(model) and not _reads_tables_by_row(config):
        yield "this megatron-core reads rotary embeddings from 0 on in each half"
    for name in convolutions(model):
        yield f"{name} is a convolution over tokens"
    for module in model.modules():
        name = type(module).__name__
        if type(module).__module__.startswith("megatron.core.ssm"):
            yield f"{name} mixes tokens by other means than core attention"
        elif not isinstance(getattr(module, "core_attention", None), ServedCoreAttention | None):
            yield f"core attention of {name} is not served"


def _reads_tables_by_row(config: Any) -> bool:
    """Return whether rows of several documents are turned by a table with as many rows, row by
    row."""
    rows, bounds = torch.ones(4, 1, 8), torch.tensor([0, 1, 4], dtype=torch.int32)
    table = torch.arange(32.0).view(4, 1, 1, 8)
    group = parallel_state.get_context_parallel_group(check_initialized=False)
    of_documents = apply_rotary_pos_emb(rows, table, config, cu_seqlens=bounds, cp_group=group)
    of_one = apply_rotary_pos_emb(rows[:, None], table, config, cp_group=group)
    return torch.equal(of_documents, of_one[:, 0])


def give_rows_their_positions(model: nn.Module) -> list[RemovableHandle]:
    """Have the rotary embeddings of ``model`` give rows of documents that began in another half the
    positions that they have in the document."""
    return [
        module.register_forward_hook(_of_rows)
        for module in model.modules()
        if isinstance(module, RotaryEmbedding)
    ]


def _of_rows(_: nn.Module, __: Any, table: Any) -> Any:
    """The table row by row: ``[rows, 1, 1, dim]`` of ``[longest, 1, 1, dim]``, or of a tuple with
    it; None, by which it stays, where all documents begin in this nano-batch."""
    # Layers with embeddings of their own ask for them when they are recomputed, too.
    lane = recomputed_caller() or current_lane.get()
    if not isinstance(lane, Lane):
        return None
    segments = documents_of(lane).segments
    if not any(offset for _, offset, _ in segments):
        return None
    given, *others = table if isinstance(table, tuple) else (table,)
    # Slices, since a list of rows would have to be copied to the GPU, for which the thread waits.
    rows = torch.cat([given[offset : offset + length] for _, offset, length in segments])
    return (rows, *others) if others else rows
