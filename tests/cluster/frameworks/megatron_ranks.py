"""A rank of Megatron-core on a CPU, twice for each case: with float64 attention, and served."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.cluster.frameworks.comparison import (
    assert_same,
    has_cut_documents,
    watched,
)
from tests.cluster.frameworks.cpu_devices import megatron_on_cpu
from tests.support.cluster import keep_profile, on_this_host
from tests.support.process_groups import process_group
from tests.support.reference import packed_attention

megatron_on_cpu()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed.finalize_model_grads import finalize_model_grads  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import initialize_rng_tracker  # noqa: E402
from megatron.core.transformer import (  # noqa: E402
    MLATransformerConfig,
    multi_latent_attention,
)

from examples.megatron import train_gpt  # noqa: E402
from examples.megatron.train_gpt import (  # noqa: E402
    Parallelism,
    Shape,
    build,
    forward_step,
    random_documents,
    transformer_config,
)
from tests.cluster.frameworks.megatron_hybrid import hybrid_model, hybrid_spec  # noqa: E402
from trainer_client.frameworks.megatron import (  # noqa: E402
    ServedCoreAttention,
    ServedSteps,
    serve,
)
from trainer_client.hooks.checkpointing import checkpoint  # noqa: E402
from trainer_client.step.running_step import RunningStep  # noqa: E402

STEPS, MICROBATCHES, TOKENS = 2, 4, 96
FOLDER = Path()


class ReferenceAttention(ServedCoreAttention):
    """At the same hook."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        o, _ = packed_attention(query, key, value, lengths, self.softmax_scale)
        return o.to(query.dtype)


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        name: of the job.
        shape: of the model.
        parallelism: of the ranks.
        experts_apart: ranks that share experts.
        pattern: layers of a hybrid stack; none: a GPT.
        settings: further ones of the model's configuration.
        chosen: whether the documents are those of ``DOCUMENTS``; else they are random.
        ping_pong: whether halves of microbatches take turns.
        overlap: whether gradients are summed while the last microbatch's backward pass runs.
        own: whether the served run is compared with Megatron's own attention, which cannot run
            packed documents: it has as many rows of full length. Else with float64 attention.
        packed: whether the documents of the served run are packed.
        like: settings of another served run, with which this one is compared instead.
        cut_documents: the setting.
        cuts: whether documents lie in both halves by that.
        latent: whether attention is multi-head latent, whose layers have rotary embeddings of their
            own.
        checkpointed: whether layers are recomputed, by a checkpoint around each.
    """

    name: str
    shape: Shape = field(default_factory=Shape)
    parallelism: Parallelism = field(default_factory=Parallelism)
    experts_apart: int = 1
    pattern: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    chosen: bool = False
    ping_pong: bool = True
    overlap: bool = False
    own: bool = False
    packed: bool = True
    like: Mapping[str, Any] | None = None
    cut_documents: bool | None = None
    cuts: bool = True
    latent: bool = False
    checkpointed: bool = False


RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]}
SEQUENCE_PARALLEL = {"sequence_parallel": True}
ALL_TO_ALL = {"moe_token_dispatcher_type": "alltoall"}
DROPOUT = {"hidden_dropout": 0.2}
FREED = {"deallocate_pipeline_outputs": True}
UNEQUAL = {"num_layers_in_first_pipeline_stage": 1}
# Its layers ask whether they are of a kind that TransformerEngine brings, which is not there.
multi_latent_attention.TELinear = torch.nn.Identity

LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
    "rope_type": "yarn",
}
BALANCED = {"moe_aux_loss_coeff": 0.01}
SMALL, EXPERTS = Shape(layers=2), Shape(layers=2, experts=4)
TP, PP, VIRTUAL = Parallelism(tp=2), Parallelism(pp=2), Parallelism(pp=2, chunks=2)

GROUPS = {
    "dense": (
        Case("dp"),
        Case("one-lane", ping_pong=False, cuts=False),
        Case("documents", SMALL, chosen=True),
        Case("whole-documents", SMALL, chosen=True, cut_documents=False, cuts=False),
        Case("asked-for", SMALL, chosen=True, cut_documents=True),
        Case("latent", SMALL, chosen=True, latent=True),
        Case("latent-checkpoints", SMALL, chosen=True, latent=True, checkpointed=True),
        Case("overlap", SMALL, chosen=True, overlap=True),
        Case("recompute", settings=RECOMPUTE),
        Case("dropout", SMALL, settings=DROPOUT, like=DROPOUT | RECOMPUTE),
        # In documents of a quarter each.
        Case("own-attention", SMALL, own=True, cuts=False),
        Case("own-attention-rows", SMALL, own=True, packed=False, cuts=False),
    ),
    "tensor parallelism": (
        Case("tp", parallelism=TP),
        Case("tp-one-key-head", Shape(layers=2, heads_kv=1), TP),
        Case("tp-documents", SMALL, TP, chosen=True),
        Case("sequence-parallel", SMALL, TP, settings=SEQUENCE_PARALLEL),
        Case("sequence-documents", SMALL, TP, settings=SEQUENCE_PARALLEL, chosen=True),
    ),
    "pipelines": (
        Case("pp", parallelism=PP),
        Case("pp-one-lane", parallelism=PP, ping_pong=False, cuts=False),
        Case("pp-documents", parallelism=PP, chosen=True, settings=RECOMPUTE | FREED),
        Case("pp-virtual", parallelism=VIRTUAL),
        Case("pp-unequal", Shape(layers=3), PP, settings=UNEQUAL, chosen=True),
        Case("pp-moe", EXPERTS, PP, settings=BALANCED, ping_pong=False, cuts=False),
    ),
    "experts and hybrid stacks": (
        Case("moe", EXPERTS),
        Case("experts-apart", EXPERTS, experts_apart=2, settings=ALL_TO_ALL, chosen=True),
        Case("hybrid", pattern="*-M*", cuts=False),
        Case("hybrid-moe", Shape(layers=4, experts=4), pattern="*EM*", cuts=False),
        Case("hybrid-pp", Shape(layers=6), PP, pattern="M*--M*", chosen=True, cuts=False),
    ),
    "both": (
        Case(
            "sequence-pipeline",
            parallelism=Parallelism(tp=2, pp=2),
            settings=SEQUENCE_PARALLEL | FREED,
            chosen=True,
        ),
    ),
}

OWN_LENGTH = 24
"""Of each document where Megatron's own attention runs."""

DOCUMENTS = ((TOKENS,), (1,) * TOKENS, (1, TOKENS - 1), (7, 33, 1, 55))
"""Lengths in the microbatches of a replica; others have them in another order."""


def train(
    case: Case, spec: Any, control_plane: str = "", job: str = ""
) -> list[dict[str, torch.Tensor]]:
    """The loss and all gradients of each step; served if there is a control plane."""
    torch.manual_seed(5)
    config: Any = transformer_config(case.shape, case.parallelism)
    if case.latent:
        given = {each.name: getattr(config, each.name) for each in fields(config) if each.init}
        config = MLATransformerConfig(**given | LATENT)
    config.finalize_model_grads_func = finalize_model_grads
    config.expert_model_parallel_size = case.experts_apart
    for name, value in case.settings.items():
        setattr(config, name, value)
    make = partial(hybrid_model, case.pattern) if case.pattern else GPTModel
    model = build(config, spec, TOKENS, make)
    for layer in model[0].module.decoder.layers if case.checkpointed else ():
        layer.forward = partial(checkpoint, layer.forward)
    if case.overlap:
        config.no_sync_func = model[0].no_sync
    loader = random_documents(
        STEPS,
        MICROBATCHES,
        TOKENS,
        parallel_state.get_data_parallel_rank(),
        torch.device("cpu"),
    )
    if case.own:
        loader = of_equal_length(loader, in_one_row=bool(control_plane) and case.packed)
    if case.chosen:
        loader = of_chosen_lengths(loader, parallel_state.get_data_parallel_rank())
    steps: ServedSteps | None = None
    if control_plane:
        steps = open_steps(case, job, model, control_plane)
        submitted = watched(steps.session)
    results = []
    for microbatches in loader:
        for chunk in model:
            chunk.zero_grad_buffer()
        function = steps.numbered(forward_step) if steps else forward_step
        with steps.step(microbatches) if steps else nullcontext() as running:
            losses = schedule(function, model, microbatches, forward_only=False)
        if running is not None:
            layers = sum(len(served_layers(chunk)) for chunk in model)
            assert_turns(running, layers, ping_pong=case.ping_pong)
        found = {name: each.main_grad.double().clone() for name, each in named(model)}
        # Validation, outside of a step.
        with torch.no_grad():
            unplanned = schedule(function, model, microbatches, forward_only=True)
        for name, each in (("loss", losses), ("validation", unplanned)):
            if each:
                found[name] = torch.stack([one["loss"] for one in each]).sum().double()
        results.append(found)
    with torch.no_grad():
        evaluated = evaluate(steps, function, model, microbatches)
    if evaluated:
        found["evaluation"] = torch.stack([one["loss"] for one in evaluated]).sum().double()
    if steps is not None:
        steps.close()
        assert any(map(has_cut_documents, submitted)) is case.cuts, case.name
    return results


def served_layers(chunk: Any) -> list[ServedCoreAttention]:
    return [each for each in chunk.modules() if isinstance(each, ServedCoreAttention)]


def assert_turns(running: RunningStep, layers: int, *, ping_pong: bool) -> None:
    """In every layer, forward and backward, both halves of a microbatch have sent their rows before
    either waits; a half that is alone waits for its own."""
    together, alone = ["send", "send", "wait", "wait"], ["send", "wait"]
    n_lanes, seen = 2 if ping_pong else 1, defaultdict(list)
    for event in running.trace:
        if event.name in together:
            microbatch = int(event.lane.removeprefix("nano-batch ")) // n_lanes
            seen[microbatch, event.detail].append(event.name)
    assert len(seen) == 2 * MICROBATCHES * layers
    assert all(order in (together, alone) for order in seen.values()), seen
    assert (together in seen.values()) == ping_pong, seen


def of_chosen_lengths(
    loader: Iterator[list[dict[str, Any]]], replica: int
) -> Iterator[list[dict[str, Any]]]:
    """The same tokens in the documents of ``DOCUMENTS``."""
    for microbatches in loader:
        yield [
            batch
            | {
                "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
                "packed_seq_params": packed(lengths),
            }
            for batch, lengths in zip(
                microbatches, DOCUMENTS[replica:] + DOCUMENTS[:replica], strict=True
            )
        ]


def packed(lengths: Sequence[int]) -> PackedSeqParams:
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def of_equal_length(
    loader: Iterator[list[dict[str, Any]]], *, in_one_row: bool
) -> Iterator[list[dict[str, Any]]]:
    """The same tokens in documents of equal length: packed, or each in a row of its own."""
    documents = packed([OWN_LENGTH] * (TOKENS // OWN_LENGTH))
    shape = (1, TOKENS) if in_one_row else (-1, OWN_LENGTH)
    for microbatches in loader:
        yield [
            {
                "tokens": batch["tokens"].reshape(shape),
                "labels": batch["labels"].reshape(shape),
                "position_ids": torch.arange(TOKENS).view(shape) % OWN_LENGTH,
                "packed_seq_params": documents if in_one_row else None,
                "cu_seqlens": documents.cu_seqlens_q,
            }
            for batch in microbatches
        ]


def schedule(
    function: Any, model: Sequence[Any], data: Sequence[Any], *, forward_only: bool
) -> Any:
    """Megatron's, over the microbatches ``data``: their losses, on the last stage."""
    return get_forward_backward_func()(
        forward_step_func=function,
        data_iterator=[iter(data) for _ in model],
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=TOKENS,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def named(model: Sequence[Any]) -> list[tuple[str, Any]]:
    return [
        (f"chunk {chunk} {name}", each)
        for chunk, part in enumerate(model)
        for name, each in part.named_parameters()
        if each.requires_grad
    ]


def ddp_config(*, overlap: bool, **settings: Any) -> DistributedDataParallelConfig:
    """The example's, with gradients summed during the backward pass or after it."""
    return DistributedDataParallelConfig(**settings | {"overlap_grad_reduce": overlap})


def evaluate(
    steps: ServedSteps | None, function: Any, model: Sequence[Any], microbatches: Sequence[Any]
) -> Any:
    """A step without a backward pass; planned if there are servers."""
    if steps is None:
        return schedule(function, model, microbatches, forward_only=True)
    with steps.step(microbatches, forward_only=True):
        return schedule(function, model, microbatches, forward_only=True)


def open_steps(case: Case, job: str, model: Any, control_plane: str) -> ServedSteps:
    keep_profile(FOLDER, served_layers(model[0])[0].shape)
    before = state_of(model)
    steps = ServedSteps.open(
        model,
        n_microbatches=MICROBATCHES,
        control_plane=control_plane,
        job=job,
        ping_pong=case.ping_pong,
        cut_documents=case.cut_documents,
        **on_this_host(FOLDER),
        plan_timeout_seconds=60.0,
        tick_timeout_seconds=60.0,
    )
    # Stages of pipelines have been run for their time.
    for name, value in state_of(model).items():
        assert torch.equal(value, before[name]), name
    knows_the_order = case.parallelism.pp > 1 and case.parallelism.chunks == 1
    assert (steps.session.options.pipelining is not None) is knows_the_order
    return steps


def state_of(model: Any) -> dict[str, torch.Tensor]:
    """Gradients, buffers and random numbers to come."""
    found = {"random": torch.get_rng_state()}
    for name, parameter in named(model):
        assert parameter.grad is None, name
        found[f"gradient of {name}"] = parameter.main_grad.clone()
    for index, chunk in enumerate(model):
        for name, buffer in chunk.module.named_buffers():
            found[f"buffer {name} of {index}"] = buffer.clone()
    return found


def run(case: Case, control_plane: str) -> None:
    example: Any = train_gpt
    example.DistributedDataParallelConfig = partial(ddp_config, overlap=case.overlap)
    parallel_state.initialize_model_parallel(
        case.parallelism.tp,
        case.parallelism.pp,
        case.parallelism.virtual,
        expert_model_parallel_size=case.experts_apart,
    )
    experts = case.shape.experts
    spec = get_gpt_layer_local_spec(
        normalization="RMSNorm", num_experts=experts, multi_latent_attention=case.latent
    )
    if case.pattern:
        spec = hybrid_spec(experts)
    served = serve(spec)
    found = train(case, served, control_plane, case.name)
    if case.like is not None:
        other = replace(case, settings=case.like)
        expected = train(other, served, control_plane, f"{case.name}-other")
    else:
        if not case.own:
            layer = served.submodules.attention_layer if case.pattern else served
            layer.submodules.self_attention.submodules.core_attention = ReferenceAttention
            spec = served
        expected = train(case, spec)
    for step, (own, right) in enumerate(zip(found, expected, strict=True)):
        assert_same(own, right, case.name, step)
    parallel_state.destroy_model_parallel()


def run_group(folder: Path, control_plane: str, group: str, rank: int, n_ranks: int) -> None:
    global FOLDER
    FOLDER = folder
    # Megatron's own attention takes a generator for dropout, which it makes on GPUs alone; the
    # tracker of its inference has none.
    initialize_rng_tracker(inference_rng_tracker=True)
    with process_group(folder, rank, n_ranks):
        for case in GROUPS[group]:
            run(case, control_plane)
