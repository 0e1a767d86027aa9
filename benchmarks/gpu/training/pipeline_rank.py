"""One way of training a pipeline, as one of its ranks runs it."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import AutoModelForCausalLM

from benchmarks.gpu.training import attention, batches
from benchmarks.gpu.training.batches import Batch
from benchmarks.gpu.training.layers import checkpoint_layers, compile_layers
from benchmarks.gpu.training.methods import (
    RankSettings,
    keep_profile,
    pool_bytes,
    predicted_tokens,
)
from benchmarks.gpu.training.microbatches import Layout, cut_in_halves, in_halves
from benchmarks.gpu.training.pipeline_ways import Way, in_flight, stage_layers
from benchmarks.gpu.training.stages import StageModule
from benchmarks.gpu.training.stopwatch import Stopwatch
from core_attention.arrays import Int64Array
from core_attention.kernels.select import select_kernel
from core_attention.manifest import RankManifest, Segment
from distca.apps.report.measurements import StepMeasurements
from distca.contract.rpc import Reason, RpcError
from trainer_client import (
    Pipeline,
    Pipelining,
    Session,
    SessionOptions,
    defer_weights,
    measure_stages,
)
from trainer_client.hooks.pipelining_dry_run import for_shapes
from trainer_client.models.transformers import IMPLEMENTATION, check_documents
from trainer_client.pipelines.deferred_weights import DeferredWeights
from trainer_client.pipelines.pipelining import runtime_of
from trainer_client.pipelines.stage_seconds import StageSeconds

N_HALVES = 2
"""Nano-batches of a microbatch in DistCA's ways."""
_REPORT_SECONDS = 5.0
_PLAN_SECONDS = 120.0
_REHEARSED = 10
"""Of the nano-batches' lengths, so many are rehearsed: kernels are chosen by ranges of them."""
MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Built:
    """The stages of this rank, with random weights that are the same in every run.

    Attributes:
        layers: of each stage of the model.
        modules: by stage, those of this rank.
        optimizer: of them. Its learning rate is 0, so that all ways see the same weights in all
            steps; it does its work nevertheless.
        deferred: by stage, what computes gradients of weights apart; empty where nothing does.
        seconds: of a token in each stage beside core attention.
        rehearsed: numbers of tokens that the stages have run on.
    """

    layers: tuple[int, ...]
    modules: dict[int, StageModule]
    optimizer: torch.optim.AdamW
    deferred: dict[int, DeferredWeights]
    seconds: StageSeconds
    rehearsed: set[int]


class Stages:
    """Builds stages, and keeps the last ones for the next way that has the same.

    Args:
        settings: of the rank.
    """

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._key: bool | None = None
        self._built: Built | None = None

    def of(self, way: Way) -> Built:
        """The stages of ``way``. All ranks call it."""
        key = way.defers_weights
        if self._built is None or self._key != key:
            self._built = None
            gc.collect()
            if self._settings.device.type == "cuda":
                torch.cuda.empty_cache()
            self._key, self._built = key, self._build(way)
        return self._built

    def _build(self, way: Way) -> Built:
        settings = self._settings
        layers = stage_layers(settings.model.layers, settings.n_ranks)
        modules = {settings.rank: self._module(layers, settings.rank)}
        deferred = {}
        if way.defers_weights:
            deferred = {stage: defer_weights(module) for stage, module in modules.items()}
        tokens = settings.tokens_per_rank
        runs = {
            stage: (module, partial(self._run_alone, module, stage, tokens))
            for stage, module in modules.items()
        }
        seconds = measure_stages(runs, settings.n_ranks, tokens)
        parameters = [p for module in modules.values() for p in module.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=settings.device.type == "cuda")
        return Built(
            layers=layers,
            modules=modules,
            optimizer=optimizer,
            deferred=deferred,
            seconds=seconds,
            rehearsed={tokens},
        )

    def rehearse(self, built: Built, sizes: Iterable[int]) -> None:
        """Runs the stages on nano-batches of some of ``sizes`` that they have not run on, with core
        attention left out.

        A kernel that is launched for the first time waits for all that runs on the device; in a
        step that may be a receive, whose sender waits for this rank's server.
        """
        new = sorted(set(sizes) - built.rehearsed)
        for tokens in new[:: max(1, -(-len(new) // _REHEARSED))]:
            for stage, module in built.modules.items():
                with for_shapes():
                    output = self._run_alone(module, stage, tokens)
                    output.backward(torch.zeros_like(output))
            built.rehearsed.add(tokens)
        built.optimizer.zero_grad(set_to_none=True)

    def _module(self, layers: tuple[int, ...], stage: int) -> StageModule:
        settings = self._settings
        auto: Any = AutoModelForCausalLM
        torch.manual_seed(0)
        with settings.device:
            model = auto.from_config(
                settings.model.config(settings.longest_document),
                attn_implementation=IMPLEMENTATION,
                dtype=getattr(torch, settings.model.dtype),
            )
        model.train()
        # While it is whole.
        check_documents(model)
        begin = sum(layers[:stage])
        module = StageModule(model, range(begin, begin + layers[stage]))
        if settings.compiled:
            compile_layers(module.layers)
        checkpoint_layers(module.layers)
        return module

    def _run_alone(self, module: StageModule, stage: int, tokens: int) -> torch.Tensor:
        settings, shape = self._settings, (1, tokens)
        ids = torch.zeros(shape, dtype=torch.int64, device=settings.device)
        positions = torch.arange(shape[1], device=settings.device)[None]
        given = ids
        if stage:
            given = torch.zeros(
                (*shape, settings.model.hidden),
                dtype=getattr(torch, settings.model.dtype),
                device=settings.device,
                requires_grad=True,
            )
        output: torch.Tensor = module(given, positions, ids)
        return output


@dataclass(frozen=True)
class StepInput:
    """A step's tensors, ``[n_microbatches, tokens]``, and how many tokens all ranks predict."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    predicted: int


@dataclass(frozen=True)
class StepOfRank:
    """What one rank saw in one step.

    Attributes:
        loss: of its stage, 0 but for the last.
        norm: of the gradients of all stages.
        actions: stage, kind, microbatch, begin and end in seconds since the step began.
        attention_seconds: device seconds of core attention at home; None where it is served.
        served: what a session reports; empty where attention is at home.
    """

    loss: float
    norm: float
    actions: list[tuple[int, str, int, float, float]]
    attention_seconds: float | None
    served: dict[str, Any] = field(default_factory=dict)


class PipelineWay:
    """A way on one rank, ready to run the steps of ``drawn``, one after the other.

    Args:
        way: which.
        name: of its job, if it is one of DistCA's.
        settings: of the rank; ``tokens_per_rank`` are those of a microbatch.
        stages: builds what it trains.
        n_microbatches: of a step.
        drawn: each step's documents, and which microbatch holds which.

    """

    def __init__(
        self,
        way: Way,
        name: str,
        settings: RankSettings,
        stages: Stages,
        n_microbatches: int,
        drawn: Sequence[tuple[Batch, Layout]],
    ) -> None:
        self._way, self._settings, self._n = way, settings, n_microbatches
        self._built = stages.of(way)
        self._kernel = select_kernel(settings.device)
        if not way.served:
            self._kernel.warm_up(settings.model.attention)
        self._table = way.table(settings.n_ranks, n_microbatches)
        self._watch, self._clock = Stopwatch(settings.device), ActionClock(settings.device)
        self._exits = ExitStack()
        self._steps: list[StepInput] = []
        self._runners: list[list[attention.Attention]] = []
        self._scale, self._last = 1.0, -1
        self._losses: list[torch.Tensor] = []
        self._running: Any = None
        for module in self._built.modules.values():
            module.model.config._attn_implementation = (
                IMPLEMENTATION if way.served else attention.IMPLEMENTATION
            )
        self._stages = [
            PipelineStage(
                module,
                stage,
                len(self._built.layers),
                settings.device,
                dw_builder=self._built.deferred.get(stage),
            )
            for stage, module in self._built.modules.items()
        ]
        self._schedule = self._make_schedule()
        for stage in self._stages:
            if not way.served:
                _choose_before(stage, self._choose)
                if deferred := self._built.deferred.get(stage.stage_index):
                    deferred.watch(stage)
            # Before what else waits around an action: it is no part of it.
            self._clock.watch(stage)
        self._session = self._open(name) if way.served else None
        self._pipeline = Pipeline(self._session, *self._stages) if self._session else None
        sizes: set[int] = set()
        for step, (batch, layout) in enumerate(drawn):
            sizes |= self._prepare(step, batch, layout)
        if self._session is not None:
            stages.rehearse(self._built, sizes)
            self._wait_for_plans(self._session)

    @property
    def in_flight(self) -> list[float]:
        """By rank, microbatches whose activations the schedule keeps at most."""
        return in_flight(self._table)

    @property
    def linear_seconds(self) -> list[float]:
        """By stage, of one microbatch, forward and backward beside core attention, as measured
        before the first step."""
        tokens, seconds = self._settings.tokens_per_rank, self._built.seconds
        both = zip(seconds.forward_seconds, seconds.backward_seconds, strict=True)
        return [tokens * (forward + backward) for forward, backward in both]

    @property
    def buffer_bytes(self) -> float:
        """Memory of message buffers, which is not PyTorch's."""
        return 0.0 if self._session is None else pool_bytes(self._session)

    def run(self, step: int) -> float:
        """Runs a step up to the weights' update; returns the gradients' norm."""
        self._last = step
        given = self._steps[step]
        self._scale = 1.0 / given.predicted
        self._built.optimizer.zero_grad(set_to_none=True)
        if not self._way.served:
            # For PyTorch's run of a stage by which it finds shapes.
            self._choose(0)
        self._clock.begin()
        with ExitStack() as block:
            if self._pipeline is not None:
                self._running = block.enter_context(self._pipeline.step(step))
            self._schedule.step(
                *([given.input_ids] if 0 in self._built.modules else []),
                target=given.labels,
                losses=self._losses,
                return_outputs=False,
                position_ids=given.position_ids,
                labels=given.labels,
            )
        return self._update()

    def finish(self, norm: float) -> StepOfRank:
        """What this rank saw in the last step; the device must have finished it."""
        loss = sum(float(loss.detach()) for loss in self._losses)
        self._losses.clear()
        seconds = self._watch.read()
        home = None if self._way.served else sum(seconds.values())
        return StepOfRank(loss, norm, self._clock.read(), home, self._served())

    def slots(self) -> dict[str, Any] | None:
        """Of the last step of one of DistCA's ways: what was planned and measured in each slot of
        the schedule. Called on one rank."""
        if self._session is None:
            return None
        deadline = time.monotonic() + _REPORT_SECONDS
        while True:
            found = StepMeasurements.from_proto(self._session.fetch_step(self._last))
            if found.measured_seconds is not None or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        slots = found.plan.slots
        assert slots is not None
        told: dict[str, Any] = {
            "plan_seconds": found.plan_seconds,
            "reason": found.plan.reason,
            "predicted": slots.imbalance.tolist(),
            "predicted_step": slots.step_imbalance,
        }
        if found.measured_seconds is not None:
            measured = slots.measured(found.measured_seconds.sum(axis=0))
            told |= {
                "measured": measured.imbalance.tolist(),
                "measured_step": measured.step_imbalance,
                "server_seconds": found.measured_seconds.sum(axis=0).tolist(),
            }
        return told

    def close(self) -> None:
        """Ends what it started."""
        self._exits.close()
        attention.use(None)
        self._built.optimizer.zero_grad(set_to_none=True)

    def _open(self, name: str) -> Session:
        settings, built = self._settings, self._built
        keep_profile(settings)
        pipelining = Pipelining(
            schedule=self._table,
            pipeline_ranks=range(settings.n_ranks),
            layers=built.layers,
            forward_seconds=built.seconds.forward_seconds,
            backward_seconds=built.seconds.backward_seconds,
        )
        options = SessionOptions(
            control_plane=settings.control_plane,
            job=name,
            rank=settings.rank,
            n_ranks=settings.n_ranks,
            n_layers=pipelining.max_layers,
            n_nano_batches=N_HALVES * self._n,
            pipelining=pipelining,
            shape=settings.model.attention,
            tolerance=settings.tolerance,
            device=str(settings.device),
            data_host="127.0.0.1",
            one_host=True,
            profile_dir=settings.folder,
        )
        return self._exits.enter_context(Session.open(options))

    def _make_schedule(self) -> Any:
        stages, name = self._stages, self._way.schedule
        options: dict[str, Any] = {
            "loss_fn": lambda losses, _: losses.sum() * self._scale,
            "scale_grads": False,
        }
        if name == "1f1b":
            return Schedule1F1B(stages[0], self._n, **options)
        return runtime_of(self._table, stages, **options)

    def _wait_for_plans(self, session: Session) -> None:
        """Until the last step is planned: a job plans ahead of use, and a control plane that has
        just started may still compile its planner."""
        deadline = time.monotonic() + _PLAN_SECONDS
        while self._settings.rank == 0:
            try:
                session.fetch_step(len(self._steps) - 1)
                break
            except RpcError as error:
                late = time.monotonic() > deadline
                if late or error.reason is not Reason.UNKNOWN_STEP:
                    raise
            time.sleep(0.1)
        dist.barrier()

    def _prepare(self, step: int, batch: Batch, layout: Layout) -> set[int]:
        """Makes a step's tensors; hands in what this rank holds in it. Returns the lengths of its
        nano-batches."""
        settings = self._settings
        lengths = batch.lengths
        halves = [self._halves(held, lengths) for held in layout]
        rows = [[segment for half in held for segment in half] for held in halves]
        made = [
            batches.tokens_of(batch.seed, held, settings.model.vocabulary, settings.device)
            for held in rows
        ]
        columns = {
            name: torch.cat([getattr(each, name) for each in made])
            for name in ("input_ids", "position_ids", "labels")
        }
        self._steps.append(StepInput(**columns, predicted=predicted_tokens(batch)))
        if self._session is not None:
            # A document's copies on the other stages have other ids.
            first_id = settings.rank << 32
            nano = [
                [replace(segment, document_id=first_id + segment.document_id) for segment in half]
                for held in halves
                for half in held
            ]
            self._session.submit(RankManifest(step, settings.rank, nano))
            return {sum(segment.length for segment in half) for half in nano if half}
        self._runners.append(
            [
                attention.WholeDocuments(
                    self._kernel,
                    RankManifest.from_lengths(
                        step, settings.rank, [[segment.length for segment in held]]
                    ),
                    settings.device,
                    self._watch,
                )
                for held in rows
            ]
        )
        return set()

    def _halves(self, held: Sequence[int], lengths: Int64Array) -> Sequence[Sequence[Segment]]:
        """The nano-batches of a microbatch."""
        if self._way.served and self._settings.cuts_documents:
            return cut_in_halves(held, lengths)
        halves = in_halves(held, lengths) if self._way.served else (held,)
        return [[Segment(d, int(lengths[d]), 0, int(lengths[d])) for d in half] for half in halves]

    def _choose(self, microbatch: int) -> None:
        attention.use(self._runners[self._last][microbatch])

    def _update(self) -> float:
        parameters = [p for group in self._built.optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        own = nn.utils.get_total_norm(gradients)
        squares = torch.tensor(float(own) ** 2, dtype=torch.float64)
        dist.all_reduce(squares)
        norm = math.sqrt(squares)
        # By a number of Python: a tensor of the host would be copied to the device.
        factor = min(1.0, MAX_GRADIENT_NORM / (norm + 1e-6))
        for gradient in gradients:
            gradient.mul_(factor)
        self._built.optimizer.step()
        return norm

    def _served(self) -> dict[str, Any]:
        if self._running is None:
            return {}
        report = self._running.report
        later = self._running.began_seconds - self._clock.began_seconds
        return {
            "kernels": [
                (event.begin_seconds + later, event.end_seconds + later)
                for event in self._running.trace
                if event.name == "kernel"
            ],
            "exposed_seconds": report.exposed_seconds,
            "wait_seconds": report.wait_seconds,
            "plan_wait_seconds": report.plan_wait_seconds,
            "sent_bytes": report.sent_bytes,
            "received_bytes": report.received_bytes,
            "replayed_ticks": report.replayed_ticks,
        }


class ActionClock:
    """When a rank's actions begin and end, on its device.

    Args:
        device: of the stages.

    Attributes:
        began_seconds: when the step began, on the clock of ``time.perf_counter``.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.began_seconds = 0.0
        self._origin: Any = None
        self._seen: list[tuple[int, str, int, Any, Any]] = []

    def begin(self) -> None:
        """A step begins."""
        self._seen.clear()
        self.began_seconds = time.perf_counter()
        self._origin = self._now()

    def watch(self, stage: Any) -> None:
        """Has the actions of a stage timed: its methods are replaced on the object."""
        index = stage.stage_index
        for name, kind in (
            ("forward_one_chunk", "F"),
            ("backward_one_chunk", "B"),
            ("backward_weight_one_chunk", "W"),
        ):
            setattr(stage, name, self._timed(getattr(stage, name), index, kind))

    def read(self) -> list[tuple[int, str, int, float, float]]:
        """Stage, kind, microbatch, begin and end in seconds since the step began; the device must
        have finished."""
        return [
            (stage, kind, microbatch, self._since(begin), self._since(end))
            for stage, kind, microbatch, begin, end in self._seen
        ]

    def _timed(self, method: Callable[..., Any], stage: int, kind: str) -> Callable[..., Any]:
        def timed(chunk: int, *args: Any, **kwargs: Any) -> Any:
            begin = self._now()
            result = method(chunk, *args, **kwargs)
            # A backward of gradients of inputs alone is one part of two.
            own = "I" if kind == "B" and not kwargs.get("full_backward", True) else kind
            self._seen.append((stage, own, chunk, begin, self._now()))
            return result

        return timed

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, moment: Any) -> float:
        if not self._on_gpu:
            return float(moment - self._origin)
        return float(self._origin.elapsed_time(moment)) / 1e3


def _choose_before(stage: Any, choose: Callable[[int], None]) -> None:
    """Has ``choose`` called with each microbatch before the stage runs it forward."""
    forward = stage.forward_one_chunk

    def forward_one_chunk(chunk: int, *args: Any, **kwargs: Any) -> Any:
        choose(chunk)
        return forward(chunk, *args, **kwargs)

    stage.forward_one_chunk = forward_one_chunk
