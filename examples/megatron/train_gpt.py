"""A GPT of Megatron-core on packed random documents, with served core attention:

    torchrun --nproc-per-node 2 -m examples.megatron.train_gpt --control-plane localhost:7700

The training loop is Megatron-core's: its parallel state, DistributedDataParallel, optimizer and
``get_forward_backward_func``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from trainer_client.frameworks.megatron import ServedSteps, serve

VOCABULARY = 512


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of the model; the defaults are small, for a CPU."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    heads_kv: int = 2
    ffn: int = 128
    experts: int | None = None
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How ranks share the model.

    Attributes:
        tp: ranks of a tensor-parallel group.
        pp: ranks of a pipeline; data-parallel are the others.
        chunks: of the model on each rank, virtual stages if there are several.
    """

    tp: int = 1
    pp: int = 1
    chunks: int = 1

    @property
    def virtual(self) -> int | None:
        """As Megatron-core calls it: the chunks, None if there is one."""
        return self.chunks if self.chunks > 1 else None


def transformer_config(shape: Shape, parallelism: Parallelism) -> TransformerConfig:
    """Megatron-core's, as plain as it can be."""
    dtype: torch.dtype = getattr(torch, shape.dtype)
    experts_on_cpu = shape.experts is not None and not torch.cuda.is_available()
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.heads_kv,
        ffn_hidden_size=shape.ffn,
        num_moe_experts=shape.experts,
        moe_token_dispatcher_type="allgather" if experts_on_cpu else "alltoall",
        tensor_model_parallel_size=parallelism.tp,
        pipeline_model_parallel_size=parallelism.pp,
        virtual_pipeline_model_parallel_size=parallelism.virtual,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=shape.dtype == "bfloat16",
        # Microbatches may have lengths of their own, where the dispatcher of experts lets them.
        variable_seq_lengths=not experts_on_cpu,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not torch.cuda.is_available(),
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )


def build(
    config: TransformerConfig, spec: Any, max_tokens: int, make: Callable[..., Any] = GPTModel
) -> list[DistributedDataParallel]:
    """This rank's part of the model, chunk by chunk; ``make`` takes the arguments of GPTModel."""
    virtual = config.virtual_pipeline_model_parallel_size
    chunks = range(virtual) if virtual else [None]
    return [_chunk(config, spec, max_tokens, chunk, make) for chunk in chunks]


def _chunk(
    config: TransformerConfig,
    spec: Any,
    max_tokens: int,
    chunk: int | None,
    make: Callable[..., Any],
) -> DistributedDataParallel:
    of_chunk = {"ignore_virtual": False, "vp_stage": chunk}
    model = make(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=max_tokens,
        pre_process=parallel_state.is_pipeline_first_stage(**of_chunk),
        post_process=parallel_state.is_pipeline_last_stage(**of_chunk),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        vp_stage=chunk,
    )
    if torch.cuda.is_available():
        model.cuda(torch.cuda.current_device())
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
    )
    return DistributedDataParallel(config, settings, model)


def random_documents(
    steps: int,
    microbatches: int,
    tokens: int,
    replica: int,
    device: torch.device,
    *,
    median: float | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """Microbatches of packed documents with log-normal lengths, for each step.

    Args:
        median: of the lengths; None is a sixteenth of a microbatch.
    """
    median = median or tokens / 16
    for step in range(steps):
        generator = torch.Generator().manual_seed(1009 * step + replica)
        yield [_microbatch(tokens, median, generator, device) for _ in range(microbatches)]


def _microbatch(
    tokens: int, median: float, generator: torch.Generator, device: torch.device
) -> dict[str, Any]:
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = median * torch.empty(()).normal_(0, 1.3, generator=generator).exp()
        lengths.append(min(left, max(1, int(drawn))))
    bounds = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    ids = torch.randint(VOCABULARY, (1, tokens + 1), generator=generator).to(device)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    return {
        "tokens": ids[:, :-1],
        "labels": ids[:, 1:],
        "position_ids": positions,
        "packed_seq_params": packed,
    }


def forward_step(data: Iterator[dict[str, Any]], model: Any) -> tuple[torch.Tensor, Any]:
    """Megatron's ``forward_step_func``: the losses of a microbatch's tokens, and their sum."""
    batch = next(data)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        packed_seq_params=batch["packed_seq_params"],
    )

    def summed(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        total = losses.float().sum()
        count = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
        return total, count, {"loss": total.detach(), "tokens": count}

    return output, summed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--control-plane", required=True, help="host:port")
    parser.add_argument("--placement", default="in-place", help="in-place, pool or mixed")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of a microbatch")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="ranks of a pipeline")
    parser.add_argument("--chunks", type=int, default=1, help="of the model on a rank (virtual)")
    parser.add_argument("--no-ping-pong", action="store_true", help="run microbatches whole")
    chosen = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    parallelism = Parallelism(tp=chosen.tp, pp=chosen.pp, chunks=chosen.chunks)
    parallel_state.initialize_model_parallel(chosen.tp, chosen.pp, parallelism.virtual)
    torch.manual_seed(0)
    if on_gpu:
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    shape = Shape(dtype="bfloat16" if on_gpu else "float32")
    config = transformer_config(shape, parallelism)
    config.finalize_model_grads_func = finalize_model_grads
    model = build(config, serve(get_gpt_layer_local_spec(normalization="RMSNorm")), chosen.tokens)
    # Megatron-core clips gradients on GPUs only.
    clip = {} if on_gpu else {"clip_grad": 0.0}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, bf16=config.bf16, **clip), model
    )
    loader = random_documents(
        chosen.steps,
        chosen.microbatches,
        chosen.tokens,
        parallel_state.get_data_parallel_rank(),
        device,
    )
    schedule = get_forward_backward_func()
    with ServedSteps.open(
        model,
        n_microbatches=chosen.microbatches,
        control_plane=chosen.control_plane,
        placement=chosen.placement,
        ping_pong=False if chosen.no_ping_pong else None,
        one_host=True,
    ) as steps:
        for step, microbatches in enumerate(loader):
            began = time.perf_counter()
            for chunk in model:
                chunk.zero_grad_buffer()
            with steps.step(microbatches):
                found = schedule(
                    forward_step_func=steps.numbered(forward_step),
                    data_iterator=[iter(microbatches) for _ in model],
                    model=model,
                    num_microbatches=chosen.microbatches,
                    seq_length=chosen.tokens,
                    micro_batch_size=1,
                    forward_only=False,
                )
            optimizer.step()
            if found:
                loss = sum(float(each["loss"]) for each in found)
                tokens = sum(int(each["tokens"]) for each in found)
                seconds = time.perf_counter() - began
                print(f"step {step} loss {loss / tokens:.4f} {tokens / seconds:,.0f} tokens/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
