"""Stages of ``torch.distributed.pipelining`` whose core attention is served.

A rank of the pipeline is a rank of the job; a microbatch is one of the job's nano-batches, or
several, which take turns (ping-pong). Microbatches may run in any order, so every schedule works.
Their attention is spread over all ranks, so ranks whose stage idles serve the others
(arXiv 2510.18121, section 4.4): more of it where the session knows the schedule
(``SessionOptions.pipelining``), else evenly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from tempfile import NamedTemporaryFile
from typing import Any, Protocol

import torch
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.parallel import DistributedDataParallel

from core_attention.schedule import Kind, Schedule, is_cell_of_actions, read_csv, write_csv
from core_attention.schedule_orders import Order, gpipe, one_f_one_b
from trainer_client.errors import SessionError
from trainer_client.hooks.compile_boundary import outside_graphs
from trainer_client.hooks.pipelining_dry_run import for_shapes
from trainer_client.hooks.sharded_weights import check_backward_in_parts
from trainer_client.pipelines.deferred_weights import DeferredWeights
from trainer_client.pipelines.schedule_check import ScheduleCheck
from trainer_client.pipelines.stage_messages import StageMessages
from trainer_client.session import Session
from trainer_client.step.fsdp import prepare_turns
from trainer_client.step.lane import (
    current_step,
    in_nano_batch,
    is_unplanned_evaluation,
    require_step,
)
from trainer_client.step.ping_pong import Call, run_in_turns
from trainer_client.step.running_step import RunningStep
from trainer_client.turns.microbatch_rows import cut_of

_IN_ITS_LANE = "_distca_in_its_lane"
"""Marks methods that were replaced."""

_SINGLE: Mapping[str, Order] = {"Schedule1F1B": one_f_one_b, "ScheduleGPipe": gpipe}
"""Schedules of one stage a rank."""

_microbatch: ContextVar[int | None] = ContextVar("distca_microbatch", default=None)


class MicrobatchCut(Protocol):
    """A microbatch of a stage, cut into its nano-batches."""

    @property
    def first(self) -> int:
        """How many nano-batches without rows come before those that run."""

    def calls(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Call]:
        """The arguments of each nano-batch that runs, of those of the microbatch."""

    def joined(self, outputs: list[Any]) -> Any:
        """Their outputs as one."""


Cutter = Callable[[Any, int], MicrobatchCut]
"""Says how a stage's module runs the microbatch of that number."""


class Pipeline:
    """The stages of this rank.

    Open the session with ``n_nano_batches`` as the microbatches of a step, and ``n_layers`` as the
    calls of core attention in all stages of the rank that has most; without
    ``SessionOptions.pipelining`` all ranks must have equally many. Submit for
    each step what every microbatch holds, on every rank of a pipeline the same documents; then run
    ``schedule.step(...)`` in ``pipeline.step(n)``.

    With ``SessionOptions.pipelining``, ``n_nano_batches`` may be a multiple of the schedule's
    microbatches, 2 for ping-pong: then each microbatch has as many rows, tensors of shape
    ``[rows, ...]``, and each row is a nano-batch; documents do not go over from one to the next. Or
    it has one packed row, ``[1, tokens, ...]``, which holds its nano-batches one after another, of
    the lengths that were submitted: for documents that are longer than a nano-batch would be.

    Args:
        session: of this rank.
        stages: its ``PipelineStage`` objects, those of lower layers first; their
            ``forward_one_chunk`` is replaced on the objects, and ``forward`` of their modules
            where a microbatch has several nano-batches.
        meet_on_host: whether stages announce on the host what they send, see
            :mod:`trainer_client.pipelines.stage_messages`; None: on GPUs and with a schedule. Then
            all ranks of ``torch.distributed`` make their ``Pipeline`` together.
        cut_by: how a microbatch with several nano-batches is cut into them; None: as above.
    """

    def __init__(
        self,
        session: Session,
        *stages: Any,
        meet_on_host: bool | None = None,
        cut_by: Cutter | None = None,
    ) -> None:
        if not stages:
            raise SessionError("no stages were given; a pipeline has one or more on every rank")
        self._session = session
        for stage in stages:
            forward = getattr(stage, "forward_one_chunk", None)
            if forward is None:
                raise SessionError(
                    f"{type(stage).__name__} has no forward_one_chunk; give stages of "
                    "torch.distributed.pipelining, such as PipelineStage"
                )
            if getattr(forward, _IN_ITS_LANE, False):
                raise SessionError(
                    f"stage {getattr(stage, 'stage_index', '?')} is in a Pipeline already; make "
                    "one for all stages of the rank, and keep it"
                )
        self._replicated = [
            stage.submod for stage in stages if isinstance(stage.submod, DistributedDataParallel)
        ]
        self._unsynced = ExitStack()
        options = session.options
        n_rows = 1
        layers: Sequence[int] | None = None
        self._check: ScheduleCheck | None = None
        if options.pipelining is not None:
            schedule = options.pipelining.schedule
            n_rows = options.n_nano_batches // schedule.n_microbatches
            layers = options.pipelining.layers
            pipeline_rank = options.pipelining.pipeline_ranks[options.rank]
            _check_stages(stages, schedule, pipeline_rank, options.rank)
            self._check = ScheduleCheck(schedule, pipeline_rank)
            if any(a.kind is Kind.BACKWARD_INPUT for a in schedule.order(pipeline_rank)):
                for stage in stages:
                    if not isinstance(getattr(stage, "dw_builder", None), DeferredWeights):
                        check_backward_in_parts(stage.submod)
        device = torch.device(options.device)
        if meet_on_host is None:
            # With a schedule, all ranks of the pipeline are the job's, and have a Pipeline.
            meet_on_host = device.type != "cpu" or options.pipelining is not None
        self._messages: StageMessages | None = None
        if meet_on_host:
            self._messages = StageMessages(
                options.collective_timeout_seconds,
                stages,
                options.n_nano_batches // n_rows,
                device,
            )
        for stage in stages:
            for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                if method := getattr(stage, name, None):
                    setattr(stage, name, _with_its_own_errors(method))
            for name in ("_prepare_forward_infra", "_prepare_backward_infra"):
                if method := getattr(stage, name, None):
                    setattr(stage, name, _on_garbage(method))
            is_last = stage is stages[-1]
            stage.forward_one_chunk = self._in_its_lane(stage, n_rows, layers, is_last=is_last)
            if isinstance(getattr(stage, "dw_builder", None), DeferredWeights):
                stage.dw_builder.watch(stage)
            if self._check is not None:
                self._check.watch(stage)
            if n_rows > 1:
                run_rows_in_turns(stage.submod, n_rows, cut_by)

    @contextmanager
    def step(self, step: int) -> Iterator[RunningStep]:
        """As :meth:`Session.step`, for one ``schedule.step`` or ``eval``.

        Where PyTorch runs stages to find out shapes (at first, and where training and evaluation
        alternate), core attention gives zeros, and is not served.

        What a stage's module raises comes out of the block as it is, with a note of PyTorch's that
        names the stage.
        """
        if self._check is not None:
            self._check.begin_step()
        messages = nullcontext() if self._messages is None else self._messages.step()
        with (
            self._session.step(step) as running,
            messages,
            self._unsynced,
        ):
            for module in self._replicated:
                # Else DDP awaits gradients of the run on garbage, and takes the first microbatch's.
                self._unsynced.enter_context(module.no_sync())
            yield running

    def _in_its_lane(
        self, stage: Any, n_rows: int, layers: Sequence[int] | None, *, is_last: bool
    ) -> Callable[..., Any]:
        """``forward_one_chunk`` of a stage, which runs each microbatch in its own lane, or has its
        module do so with each of its rows.

        Args:
            stage: which.
            n_rows: of each microbatch.
            layers: calls of core attention in each stage; None: it is not known.
            is_last: of the stages of this rank.
        """
        forward = stage.forward_one_chunk

        @functools.wraps(forward)
        def forward_one_chunk(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            if is_unplanned_evaluation():
                return forward(fwd_chunk_id, *args, **kwargs)
            self._unsynced.close()
            running = require_step()
            nano_batches = range(fwd_chunk_id * n_rows, (fwd_chunk_id + 1) * n_rows)
            if layers is not None:
                for nano_batch in nano_batches:
                    index = stage.stage_index
                    running.stage_begins(nano_batch, index, layers[index])
            with in_microbatch(fwd_chunk_id, n_rows):
                output = forward(fwd_chunk_id, *args, **kwargs)
            if is_last or layers is not None:
                for nano_batch in nano_batches:
                    running.lane_returned(nano_batch)
            return output

        setattr(forward_one_chunk, _IN_ITS_LANE, True)
        return forward_one_chunk


def _check_stages(stages: Sequence[Any], schedule: Schedule, pipeline_rank: int, rank: int) -> None:
    given = [stage.stage_index for stage in stages]
    own = [stage for stage, at in enumerate(schedule.rank_of_stage) if at == pipeline_rank]
    if given != own:
        raise SessionError(
            f"stages {given} were given, and schedule {schedule.name} runs stages {own} on rank "
            f"{rank} (rank {pipeline_rank} of a pipeline); give these, lower layers first"
        )


def _with_its_own_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` of a stage, which raises what its module did. PyTorch puts a RuntimeError in its
    place that names shapes alone: callers that catch errors by class would not know them, and other
    ranks would see no reason."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            cause = error.__cause__
            if type(error) is not RuntimeError or not isinstance(cause, Exception):
                raise
            cause.add_note(" ".join(str(error).split()))
        # Out here, so that what caused it stays with it.
        raise cause

    return run


def _on_garbage(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` of a stage, by which PyTorch finds out shapes: in a step, what it runs is not
    served."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if current_step.get() is None else for_shapes():
            return method(*args, **kwargs)

    return run


def schedule_of(schedule: Any) -> Schedule:
    """The order that a schedule of ``torch.distributed.pipelining`` runs, for
    ``SessionOptions.pipelining``.

    Raises:
        SessionError: it does not say what it runs.
        ScheduleError: what it says is no valid order.
    """
    name, orders = type(schedule).__name__, getattr(schedule, "pipeline_order", None)
    if not orders:
        raise SessionError(
            f"{name} has no pipeline_order that says what it runs; read its order from a CSV file "
            "by core_attention.schedule.read_csv"
        )
    texts = [list(filter(is_cell_of_actions, map(str, orders[rank]))) for rank in sorted(orders)]
    if name in _SINGLE:
        # PyTorch runs these by loops of their own, and 2.13's list of 1F1B is not what they run.
        n_microbatches = sum("B" in text for text in texts[0])
        return _SINGLE[name](len(texts), n_microbatches)
    return read_csv(name, "\n".join(map(",".join, texts)))


def runtime_of(schedule: Schedule, stages: Sequence[Any], **options: Any) -> Any:
    """The runtime of ``torch.distributed.pipelining`` for ``schedule``: the reverse of
    :func:`schedule_of`.

    Args:
        schedule: all of the pipeline.
        stages: of this rank, those of lower layers first.
        options: of PyTorch's schedules, such as ``loss_fn``.
    """
    runtime = _PipelineScheduleRuntime(list(stages), schedule.n_microbatches, **options)
    # Files are all that it reads orders from.
    with NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(write_csv(schedule))
        file.flush()
        runtime._load_csv(file.name)
    return runtime


@contextmanager
def in_microbatch(microbatch: int, n_nano_batches: int) -> Iterator[None]:
    """Modules run the microbatch of that number in the block: see :func:`run_rows_in_turns`, or if
    it is one nano-batch, at once."""
    if n_nano_batches == 1:
        with in_nano_batch(microbatch):
            yield
        return
    token = _microbatch.set(microbatch)
    try:
        yield
    finally:
        _microbatch.reset(token)


def run_rows_in_turns(
    module: torch.nn.Module, n_nano_batches: int, cut_by: Cutter | None = None
) -> None:
    """Has ``module`` run the nano-batches of a microbatch one by one, in turns, inside
    :func:`in_microbatch`; elsewhere it runs as before.

    ``forward`` is replaced on the object: hooks of wrappers and of sharding stay around it.
    """
    if isinstance(module, DistributedDataParallel):
        module = module.module
    prepare_turns(module)
    # The module may have been in a Pipeline that has ended.
    forward = getattr(module.forward, "of_whole_rows", module.forward)

    @outside_graphs
    def in_turns(*args: Any, **kwargs: Any) -> Any:
        microbatch = _microbatch.get()
        if microbatch is None:
            return forward(*args, **kwargs)
        cut: MicrobatchCut
        if cut_by is None:
            cut = cut_of(args, kwargs, microbatch, n_nano_batches)
        else:
            cut = cut_by(module, microbatch)
        first = microbatch * n_nano_batches + cut.first
        calls = cut.calls(args, kwargs)
        return cut.joined(run_in_turns(forward, calls, first))

    untyped: Any = in_turns
    untyped.of_whole_rows = forward
    module.forward = untyped
