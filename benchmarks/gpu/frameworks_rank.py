"""A rank of ``benchmarks.gpu.frameworks``: steps of a framework, served or by its own attention.

torchrun --nproc-per-node 2 -m benchmarks.gpu.frameworks_rank SETTINGS OUTPUT
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.plain_packing import TOLERANCES, pipeline_seconds_lost, seconds_lost
from distca.apps.report.measurements import StepMeasurements
from trainer_client import Session

_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))

_ONE_LANE, _AT_DOCUMENTS = "-one-lane", "-at-documents"
"""Ends of the names of ways without ping-pong, and of those that cut no document."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is run.

    Attributes:
        framework: torchtitan or megatron.
        attention: served; served-one-lane: without ping-pong; served-at-documents, whose halves of
            a batch or microbatch have whole documents; plain: served by a plan that leaves all of
            it at home, of Megatron-core without ping-pong; or one of the framework's: varlen, flex
            and flex_flash of torchtitan, transformer-engine of Megatron-core.
        control_plane: its address, where a session is opened.
        job: its name, likewise.
        pp, tp: pipeline stages and tensor-parallel ranks; the other ranks are data-parallel.
        layers, tokens, steps, microbatches: of the model, of a microbatch, in all, and of a step of
            a pipeline.
        median: of the documents' lengths; None is a sixteenth of a microbatch.
        flavor, vocabulary: of torchtitan's Llama 3; None is the flavor's vocabulary.
        hidden, heads, heads_kv, ffn, dtype: of Megatron's model.
        session: further options of the session.
    """

    framework: str
    attention: str
    control_plane: str = ""
    job: str = ""
    pp: int = 1
    tp: int = 1
    layers: int = 8
    tokens: int = 131072
    steps: int = 20
    microbatches: int = 4
    median: int | None = None
    flavor: str = "8B"
    vocabulary: int | None = None
    hidden: int = 4096
    heads: int = 32
    heads_kv: int = 8
    ffn: int = 14336
    dtype: str = "bfloat16"
    session: dict[str, Any] = field(default_factory=dict)

    @property
    def is_planned(self) -> bool:
        """Whether a session's plans say where core attention runs."""
        return self._tolerance is not None

    @property
    def is_one_lane(self) -> bool:
        """Whether it is to be without ping-pong."""
        return self.attention.endswith(_ONE_LANE)

    @property
    def cuts_documents(self) -> bool:
        """Whether batches and microbatches are cut inside documents too."""
        return not self.attention.endswith(_AT_DOCUMENTS)

    @property
    def session_options(self) -> dict[str, Any]:
        return {"tolerance": self._tolerance, **self.session}

    @property
    def _tolerance(self) -> float | None:
        way = self.attention.removesuffix(_ONE_LANE).removesuffix(_AT_DOCUMENTS)
        return TOLERANCES.get(way)


@dataclass
class Measured:
    """What one rank saw.

    Attributes:
        seconds: of each step.
        losses: their sums by step: of torchtitan over all tokens' number, of Megatron as they are;
            0 where a rank has none.
        over: of each step, :func:`benchmarks.gpu.plain_packing.seconds_lost`, or
            :func:`benchmarks.gpu.plain_packing.pipeline_seconds_lost`; of planned ways only, and
            not of pipelines whose order is unknown.
        peak_bytes: the most memory in use, of the whole run.
    """

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    over: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def note_plan(
        self, session: Session, step: int, settings: Settings, *, wait_in_layers: bool
    ) -> None:
        pipelining = session.options.pipelining
        if settings.pp > 1 and pipelining is None:
            return
        seen = StepMeasurements.from_proto(session.fetch_step(step))
        if pipelining is None:
            lost = seconds_lost(seen, session.options.n_layers, wait_in_layers=wait_in_layers)
        else:
            lost = pipeline_seconds_lost(seen, pipelining, settings.tokens)
        self.over.append(lost)

    @contextmanager
    def step(self) -> Iterator[list[float]]:
        """Times the block, whose losses are appended to what it is given."""
        losses: list[float] = []
        _wait()
        begin = time.perf_counter()
        yield losses
        _wait()
        self.seconds.append(time.perf_counter() - begin)
        self.losses.append(sum(losses))
        self.note_peak()

    def note_peak(self) -> None:
        """Before anyone resets PyTorch's count, as torchtitan does when it logs a step."""
        if torch.cuda.is_available():
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated())


def torchtitan(settings: Settings) -> Measured:
    """Trains torchtitan's Llama 3 on random documents."""
    from torchtitan.components.loss import ChunkedLossWrapper

    from examples.torchtitan.llama3 import plain
    from trainer_client.frameworks.torchtitan import ServedTrainer, served

    own = "varlen" if settings.is_planned else settings.attention
    config = plain(
        settings.flavor,
        seq_len=settings.tokens,
        n_layers=settings.layers,
        attn_backend=own,
        vocabulary=settings.vocabulary,
    )
    # Before that torch FSDP2 frees the head's weights between the chunks' backward passes.
    if _TORCH >= (2, 13):
        config.loss = ChunkedLossWrapper.Config(loss_fn=config.loss)
    config.training.steps = settings.steps
    if settings.median:
        config.dataloader.median = settings.median
    config.training.mixed_precision_param = settings.dtype
    config.parallelism.tensor_parallel_degree = settings.tp
    config.parallelism.pipeline_parallel_degree = settings.pp
    config.parallelism.pipeline_parallel_first_stage_less_layers = 0
    config.parallelism.pipeline_parallel_last_stage_less_layers = 0
    config.debug.seed = 1
    if settings.pp > 1:
        config.training.local_batch_size = settings.microbatches
    if not torch.cuda.is_available() or _TORCH < (2, 14):
        config.parallelism.spmd_backend = "partial_dtensor"  # The other one needs that torch.
    session: Session | None = None
    if settings.is_planned:
        config = served(
            config,
            control_plane=settings.control_plane,
            job=settings.job,
            one_host=True,
            ping_pong=not settings.is_one_lane,
            cut_documents=settings.cuts_documents,
        )

        class Trainer(ServedTrainer):
            def more_session_options(self) -> dict[str, Any]:
                return settings.session_options

            @property
            def session(self) -> Session:
                return self._session

        trainer: Any = Trainer(config=config)
        session = trainer.session
    else:
        trainer = config.build()
    measured = Measured()
    run: Callable[..., torch.Tensor] = trainer.forward_backward_step
    batches = trainer.batch_generator(trainer.dataloader)
    for step in range(settings.steps):
        trainer.step += 1
        with measured.step() as losses:
            found: list[torch.Tensor] = []

            def noted(found: list[torch.Tensor] = found, **arguments: Any) -> torch.Tensor:
                found.append(run(**arguments).detach())
                measured.note_peak()
                return found[-1]

            trainer.forward_backward_step = noted
            trainer.train_step(batches)
            if settings.pp == 1 or trainer.pp_has_last_stage:
                losses += [float(loss) for loss in found]
        if session is not None:
            # FSDP2 gathers weights.
            measured.note_plan(session, step, settings, wait_in_layers=True)
    trainer.close()
    return measured


def megatron(settings: Settings) -> Measured:
    """Trains a GPT of Megatron-core on random documents."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from examples.megatron import train_gpt as example
    from trainer_client.frameworks.megatron import ServedSteps

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    parallel_state.initialize_model_parallel(settings.tp, settings.pp)
    torch.manual_seed(0)
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    shape = example.Shape(
        layers=settings.layers,
        hidden=settings.hidden,
        heads=settings.heads,
        heads_kv=settings.heads_kv,
        ffn=settings.ffn,
        dtype=settings.dtype,
    )
    parallelism = example.Parallelism(tp=settings.tp, pp=settings.pp)
    config = example.transformer_config(shape, parallelism)
    config.finalize_model_grads_func = finalize_model_grads
    if torch.cuda.is_available():
        config.recompute_granularity = "selective"
        config.recompute_modules = ["mlp"]  # That of norms needs TransformerEngine.
    model = example.build(config, _layer_spec(settings), settings.tokens)
    # Megatron-core clips gradients on GPUs only.
    clip = {} if torch.cuda.is_available() else {"clip_grad": 0.0}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=3e-4, bf16=config.bf16, **clip), model
    )
    replica = parallel_state.get_data_parallel_rank()
    loader = example.random_documents(
        settings.steps,
        settings.microbatches,
        settings.tokens,
        replica,
        device,
        median=settings.median,
    )
    steps: ServedSteps | None = None
    if settings.is_planned:
        steps = ServedSteps.open(
            model,
            n_microbatches=settings.microbatches,
            control_plane=settings.control_plane,
            job=settings.job,
            ping_pong=settings.attention != "plain" and not settings.is_one_lane,
            cut_documents=None if settings.cuts_documents else False,
            one_host=True,
            **settings.session_options,
        )
    measured = Measured()
    for step, microbatches in enumerate(loader):
        with measured.step() as losses:
            model[0].zero_grad_buffer()
            with steps.step(microbatches) if steps else nullcontext():
                found = get_forward_backward_func()(
                    forward_step_func=(
                        steps.numbered(example.forward_step) if steps else example.forward_step
                    ),
                    data_iterator=iter(microbatches),
                    model=model,
                    num_microbatches=settings.microbatches,
                    seq_length=settings.tokens,
                    micro_batch_size=1,
                    forward_only=False,
                )
            optimizer.step()
            losses += [float(each["loss"]) for each in found or ()]
        if steps is not None:
            # Replicas reduce gradients after the last microbatch.
            measured.note_plan(steps.session, step, settings, wait_in_layers=False)
    if steps is not None:
        steps.close()
    return measured


def _layer_spec(settings: Settings) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs

    from trainer_client.frameworks.megatron import serve

    if settings.attention == "transformer-engine":
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    return serve(gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm"))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


FRAMEWORKS = {"torchtitan": torchtitan, "megatron": megatron}


def main(settings: str, output: str) -> None:
    chosen = Settings(**json.loads(settings))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if chosen.framework == "megatron":
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    measured = FRAMEWORKS[chosen.framework](chosen)
    rank = int(os.environ["RANK"])
    Path(output, f"rank-{rank}.json").write_text(json.dumps(asdict(measured)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
