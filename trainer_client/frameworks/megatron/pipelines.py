"""The base of plans for Megatron-core's pipelines: its 1F1B order, and how long its stages take
beside core attention."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils
from torch import nn

from core_attention.pipelining import Pipelining
from core_attention.schedule_orders import one_f_one_b
from trainer_client.frameworks.megatron.attention import ServedCoreAttention
from trainer_client.frameworks.megatron.refusals import reasons_against_turns, unwrapped
from trainer_client.pipelines.stage_seconds import MEASURED_TOKENS, measured_pipelining

logger = logging.getLogger(__name__)


def pipelining_of(chunks: Sequence[nn.Module], n_microbatches: int) -> Pipelining | None:
    """Facts of Megatron's pipelines for the session, the same on all ranks, which call it
    together; None without pipelines, or with a line in the log if the order is not known, or stages
    cannot be timed: attention is then spread evenly over all ranks.

    Args:
        chunks: of the model on this rank, wrapped or not.
        n_microbatches: of a step.
    """
    n_stages = parallel_state.get_pipeline_model_parallel_world_size()
    if n_stages == 1:
        return None
    if unknown := list(_why_unknown(chunks, n_microbatches)):
        logger.warning(
            "attention of all stages is spread evenly over all ranks: %s", "; ".join(unknown)
        )
        return None
    stage = parallel_state.get_pipeline_model_parallel_rank()
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    tokens = MEASURED_TOKENS // tensor_parallel * tensor_parallel
    (chunk,) = chunks
    ranks_of_stage = parallel_state.get_data_parallel_world_size() * tensor_parallel
    served = sum(isinstance(module, ServedCoreAttention) for module in chunk.modules())
    with _no_trace(chunk):
        model = unwrapped(chunk)
        runs = {stage: (model, _alone(model, tokens))}
        order = one_f_one_b(n_stages, n_microbatches)
        return measured_pipelining(order, runs, {stage: served}, tokens, ranks_of_stage)


def _why_unknown(chunks: Sequence[nn.Module], n_microbatches: int) -> Iterator[str]:
    """Reasons why a rank does not run 1F1B, or cannot be timed without a trace; the same on all
    ranks."""
    if len(chunks) > 1:
        yield "virtual pipeline stages run in an order that plans do not know"
    if getattr(unwrapped(chunks[0]).config, "overlap_moe_expert_parallel_comm", False):
        yield "overlap_moe_expert_parallel_comm is True: microbatches are run two at a time"
    yield from reasons_against_turns(chunks, n_microbatches)


def _alone(model: Any, n_tokens: int) -> Callable[[], torch.Tensor]:
    """A forward of a stage, on one document."""
    device = next(model.parameters()).device
    ids = torch.zeros(1, n_tokens, dtype=torch.int64, device=device)
    positions = torch.arange(n_tokens, device=device)[None]
    bounds = torch.tensor([0, n_tokens], dtype=torch.int32, device=device)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=n_tokens,
        max_seqlen_kv=n_tokens,
    )
    config = model.config
    rows = n_tokens // (config.tensor_model_parallel_size if config.sequence_parallel else 1)

    def run() -> torch.Tensor:
        if not model.pre_process:
            hidden = torch.zeros(
                rows,
                1,
                config.hidden_size,
                dtype=config.pipeline_dtype,
                device=device,
                requires_grad=True,
            )
            model.set_input_tensor(hidden)
        output: torch.Tensor = model(
            ids,
            positions,
            None,
            labels=ids if model.post_process else None,
            packed_seq_params=packed,
        )
        return output

    return run


@contextmanager
def _no_trace(chunk: nn.Module) -> Iterator[None]:
    """Run the block forward and backward without leaving gradients, anything in Megatron's logs of
    experts, and its random states as they were; nothing is reduced."""
    tracker, scaler = megatron_random.get_cuda_rng_tracker(), moe_utils.MoEAuxLossAutoScaler
    states = {
        name: state.clone_state() if isinstance(state, torch.Generator) else state
        for name, state in tracker.get_states().items()
    }
    scale = scaler.main_loss_backward_scale
    model: Any = unwrapped(chunk)
    with ExitStack() as stack:
        if isinstance(chunk, DistributedDataParallel):
            stack.enter_context(chunk.no_sync())
        try:
            yield
        finally:
            tracker.set_states(states)
            scaler.main_loss_backward_scale = scale
            if isinstance(chunk, DistributedDataParallel):
                # Losses of experts have gradients of their own.
                chunk.zero_grad_buffer()
            model.set_input_tensor(None)
            moe_utils.clear_aux_losses_tracker()
