"""A rank of torchtitan on a CPU, twice for each case: with float64 attention, and served."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from core_attention.schedule import write_csv
from core_attention.schedule_orders import SCHEDULES
from core_attention.shape import parse_shape
from tests.cluster.frameworks.comparison import (
    assert_same,
    has_cut_documents,
    watched,
)
from tests.cluster.frameworks.cpu_devices import float32_experts, torchtitan_on_cpu
from tests.support.cluster import keep_profile
from tests.support.process_groups import process_group

STEPS = 3

torchtitan_on_cpu()

from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.models.deepseek_v3 import MTPLoss  # noqa: E402
from torchtitan.models.deepseek_v3 import model_registry as deepseek_v3  # noqa: E402
from torchtitan.models.gpt_oss import model_registry as gpt_oss  # noqa: E402
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts  # noqa: E402
from torchtitan.models.llama3 import model_registry as llama3  # noqa: E402
from torchtitan.models.qwen3 import model_registry as qwen3  # noqa: E402

from examples.torchtitan.llama3 import plain  # noqa: E402
from examples.torchtitan.random_documents import RandomDocuments  # noqa: E402
from trainer_client.frameworks.torchtitan import ServedTrainer, served  # noqa: E402

REFERENCE = "tests.cluster.frameworks.torchtitan_reference.reference_varlen"


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        name: of the job.
        model: a registry's function.
        layers: of the model.
        loss: of the model; None is cross entropy.
        seq_len: tokens of a row.
        median: of the documents' lengths.
        rows: of a batch.
        tp: tensor-parallel ranks; the others are data-parallel.
        accumulate: batches of a step.
        checkpointing: of activations.
        ping_pong: whether halves take turns.
        cut_documents: the setting.
        cuts: whether documents are cut by that.
        placement: of servers.
        pp: ranks of a pipeline, of which each microbatch is a row of the batch.
        order: of ``distca schedule``, which torchtitan reads from a file; empty: its own 1F1B.
        validated: whether torchtitan's validator runs after each step.
        mixes: whether the last stage has a module that looks at neighbouring tokens.
    """

    name: str
    model: Callable[..., Any] = llama3
    layers: int = 2
    loss: Any = None
    seq_len: int = 96
    median: int = 11
    rows: int = 1
    tp: int = 1
    accumulate: int = 1
    checkpointing: Any = None
    ping_pong: bool = True
    cut_documents: bool = True
    cuts: bool = True
    placement: str = "in-place"
    pp: int = 1
    order: str = ""
    validated: bool = True
    mixes: bool = False

    @property
    def n_lanes(self) -> int:
        """Nano-batches of a batch; one in pipelines of tensor-parallel ranks, and of models with
        experts whose documents are not cut."""
        has_experts = self.model is not llama3
        is_whole = self.pp > 1 and (self.tp > 1 or (has_experts and not self.cut_documents))
        return 2 if self.ping_pong and not is_whole else 1


ONE_DOCUMENT = 10**9
"""A median that makes every row of a batch a document."""

FULL: dict[str, Any] = {"checkpointing": FullAC}
SELECTIVE: dict[str, Any] = {"checkpointing": SelectiveAC}
WHOLE: dict[str, Any] = {"cut_documents": False, "cuts": False}
unvalidated = partial(Case, validated=False)
one_document = partial(unvalidated, median=ONE_DOCUMENT)
pipeline = partial(unvalidated, pp=2, rows=4)
windowed = partial(Case, model=gpt_oss, seq_len=384, median=100)
"""Its window is 128 tokens; documents are shorter and longer."""
two_tokens = partial(
    unvalidated, model=partial(deepseek_v3, num_mtp_layers=1), loss=MTPLoss, cuts=False
)
"""One dense layer, one with experts, and one that predicts a second token: at a cut inside a
document it would lack that token. torchtitan's validator gives its loss no positions."""

MODELS = (
    # A document begins in the middle of two rows.
    Case("llama3-full-ac", rows=2, cuts=False, **FULL),
    Case("qwen3-selective-ac", model=qwen3, accumulate=2, **SELECTIVE),
    Case("llama3-one-lane", ping_pong=False, cuts=False),
    Case("llama3-tp", tp=2),
    windowed("gpt-oss-full-ac", **FULL),
    windowed("gpt-oss-tp", tp=2, ping_pong=False, cuts=False),
    two_tokens("deepseek-v3"),
)

HALVES = (
    # Of 49 and 48 rows.
    one_document("one-document-full-ac", seq_len=97, validated=True, **FULL),
    one_document("one-document-pool", accumulate=2, placement="pool", **SELECTIVE),
    unvalidated("mixed-accumulate", rows=3, seq_len=43, accumulate=3, placement="mixed"),
    # Of three rows and two.
    one_document("of-three-rows-and-two", seq_len=5),
    unvalidated("many-tiny", median=1, accumulate=2),
    # Of 50 and 48 rows: two ranks share them.
    one_document("one-document-tp", seq_len=98, tp=2, validated=True, **FULL),
    unvalidated("cut-at-documents", accumulate=2, **WHOLE),
)

HALVES_OF_MODELS = (
    # Windows of 128 tokens reach over the cut, and in the second case over all that is before it.
    one_document("gpt-oss-long", model=gpt_oss, seq_len=300, accumulate=2, **SELECTIVE),
    one_document("gpt-oss-short-tp", model=gpt_oss, seq_len=98, tp=2, **FULL),
    one_document("deepseek-v3-one-document", model=deepseek_v3, seq_len=97, **FULL),
    # A half of padding.
    two_tokens("multi-token-prediction-one-document", median=ONE_DOCUMENT),
)

PIPELINES = (
    pipeline("llama3-pp", validated=True),
    pipeline("llama3-pp-zero-bubble", order="zero-bubble", **FULL),
    pipeline("llama3-pp-split", rows=5, order="1f1b-split"),
    pipeline("llama3-pp-interleaved", layers=4, order="interleaved", **FULL),
    pipeline("llama3-pp-one-lane", cuts=False, ping_pong=False),
    # Of 49 and 48 rows.
    pipeline(
        "llama3-pp-one-document",
        seq_len=97,
        median=ONE_DOCUMENT,
        order="1f1b-split",
        validated=True,
        **FULL,
    ),
    pipeline("llama3-pp-cut-at-documents", validated=True, **WHOLE),
    # The second half of each microbatch is padding alone.
    pipeline("llama3-pp-whole", median=ONE_DOCUMENT, order="1f1b-split", **WHOLE, **FULL),
    # What the last stage cannot, the first one does not.
    pipeline("llama3-pp-convolution", cuts=False, mixes=True),
    # In each stage one layer with a window of 128 tokens, which reaches over the cut.
    windowed("gpt-oss-pp", layers=4, rows=4, pp=2, **FULL),
    pipeline("deepseek-v3-pp", model=deepseek_v3, **FULL),
    pipeline("deepseek-v3-pp-cut-at-documents", model=deepseek_v3, **WHOLE),
)

PIPELINES_OF_REPLICAS = (
    pipeline("llama3-pp-fsdp-zero-bubble", order="zero-bubble", validated=True, **FULL),
    pipeline("llama3-pp-tp", tp=2, cuts=False),
)

GROUPS = {
    "models": MODELS,
    "halves": HALVES,
    "halves-of-models": HALVES_OF_MODELS,
    "pipelines": PIPELINES,
    "pipelines-of-replicas": PIPELINES_OF_REPLICAS,
}

SHAPES = ("16:16:16", "8:8:16", "16:8:128", "64:8:64", "32:4:64", "16:16:192/128")


class Rank(ServedTrainer):
    """Of a job of tests, which measures nothing."""

    folder: Path
    mixes: bool

    def _why_documents_stay_whole(self) -> str | None:
        if self.mixes and self.pp_has_last_stage:
            convolution = torch.nn.Conv1d(1, 1, 1, bias=False)
            # Without parameters, it has no gradients to compare.
            del convolution.weight
            self.model_parts[-1].convolution = convolution
        return super()._why_documents_stay_whole()

    def has_cut_documents(self) -> bool:
        """Whether any document of what was submitted lies in both halves; these have equally many
        rows then."""
        cut = list(filter(has_cut_documents, self.submitted))
        for manifest in cut:
            rows = [manifest.tokens(lane) for lane in range(manifest.n_nano_batches)]
            most = self._cutting.multiple
            assert all(
                0 <= first - second <= most
                for first, second in zip(rows[::2], rows[1::2], strict=True)
            ), rows
        return bool(cut)

    def knows_the_order(self) -> bool:
        """Whether plans give idle stages more."""
        return self._session.options.pipelining is not None

    def _wire(self) -> None:
        self.submitted = watched(self._session)
        super()._wire()

    def more_session_options(self) -> dict[str, Any]:
        return {
            "data_host": "127.0.0.1",
            "profile_dir": self.folder,
            "probe_bytes": 0,
            "plan_timeout_seconds": 60.0,
            "tick_timeout_seconds": 60.0,
        }


def configuration(case: Case, folder: Path) -> Any:
    config = plain("debugmodel", seq_len=case.seq_len)
    spec = case.model("debugmodel", attn_backend="varlen")
    interleaved = case.order == "interleaved"
    spec.model.layers = spec.model.layers[: case.layers]
    config.model_spec = spec
    for _, experts, *_ in spec.model.traverse(GptOssGroupedExperts.Config):
        experts.hidden_dim = 64
    if case.loss:
        config.loss = case.loss.Config()
    config.loss.global_vocab_size = spec.model.vocab_size
    config.dataloader = RandomDocuments.Config(vocabulary=spec.model.vocab_size, median=case.median)
    config.training.local_batch_size = case.rows
    replicas = int(os.environ["WORLD_SIZE"]) // case.tp // case.pp
    config.training.global_batch_size = case.rows * case.accumulate * replicas
    config.training.steps = STEPS
    config.training.mixed_precision_param = "float32"
    # Weights stay, so that every step is compared by itself.
    config.optimizer.param_groups[0].optimizer_kwargs["lr"] = 0.0
    config.training.max_norm = 1e9
    config.parallelism.tensor_parallel_degree = case.tp
    config.parallelism.pipeline_parallel_degree = case.pp
    config.parallelism.pipeline_parallel_first_stage_less_layers = 0
    config.parallelism.pipeline_parallel_last_stage_less_layers = 0
    if interleaved:
        config.parallelism.pipeline_parallel_schedule = "Interleaved1F1B"
    if case.order:
        order = folder / os.environ["RANK"] / f"{case.name}.csv"
        order.parent.mkdir(exist_ok=True)
        order.write_text(write_csv(SCHEDULES[case.order](case.pp, case.rows)))
        config.parallelism.pipeline_parallel_schedule_csv = str(order)
    config.validator.enable = case.validated
    config.validator.steps = 2
    config.validator.dataloader = replace(config.dataloader, seed=1)
    # On a CPU of torch 2.13; torchtitan's default asks FSDP2 for what came later.
    config.parallelism.spmd_backend = "partial_dtensor"
    config.activation_checkpoint = case.checkpointing and case.checkpointing.Config()
    config.debug.seed = 1
    return config


def train(trainer: Any) -> Iterator[dict[str, torch.Tensor]]:
    """The loss and all gradients (this rank's part) of each step, and the loss of a validation."""
    losses: list[torch.Tensor] = []
    validations: list[float] = []
    trainer.metrics_processor.log_validation = lambda loss, step: validations.append(loss)
    step = trainer.forward_backward_step

    def forward_backward_step(**arguments: Any) -> torch.Tensor:
        losses.append(step(**arguments).detach())
        return losses[-1]

    trainer.forward_backward_step = forward_backward_step
    batches = trainer.batch_generator(trainer.dataloader)
    for _ in range(STEPS):
        trainer.step += 1
        trainer.train_step(batches)
        found = {"loss": torch.stack(losses).sum()}
        losses.clear()
        for part in trainer.model_parts:
            for name, parameter in part.named_parameters():
                gradient = parameter.grad
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                found[name] = local.double().clone()
        if trainer.config.validator.enable:
            trainer.validator.validate(trainer.model_parts, trainer.step)
            found["validation"] = torch.tensor(validations.pop())
        yield found


def run(case: Case, control_plane: str) -> None:
    reference = configuration(case, Rank.folder)
    # In an order of PyTorch's: its backwards in two parts lose gradients of recomputed layers.
    reference.parallelism.pipeline_parallel_schedule_csv = None
    reference.override.imports = [REFERENCE]
    plain_trainer = reference.build()
    expected = list(train(plain_trainer))
    plain_trainer.close()
    config = served(
        configuration(case, Rank.folder),
        control_plane=control_plane,
        job=case.name,
        ping_pong=case.ping_pong,
        cut_documents=case.cut_documents,
        placement=case.placement,
        one_host=True,
    )
    Rank.mixes = case.mixes
    trainer = Rank(config=replace(config))
    try:
        for step, (found, right) in enumerate(zip(train(trainer), expected, strict=True)):
            assert_same(found, right, case.name, step)
        assert trainer.has_cut_documents() is case.cuts, case.name
        assert trainer.knows_the_order() is (case.pp > 1), case.name
        (n_lanes,) = {manifest.n_nano_batches for manifest in trainer.submitted}
        batches = case.rows if case.pp > 1 else case.accumulate
        assert n_lanes == case.n_lanes * batches, case.name
    finally:
        trainer.close()


def run_group(folder: Path, control_plane: str, group: str, rank: int, n_ranks: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n_ranks))
    float32_experts()
    Rank.folder = folder
    for shape in SHAPES:
        keep_profile(folder, parse_shape(f"{shape}:float32"))
    with process_group(folder, rank, n_ranks):
        for case in GROUPS[group]:
            run(case, control_plane)
