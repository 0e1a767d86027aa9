"""Steps of a Megatron-core training loop: manifests, and microbatches by number."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from core_attention.errors import ManifestError
from core_attention.host_copies import on_host
from core_attention.manifest import RankManifest
from trainer_client.environment import session_options
from trainer_client.errors import SessionError
from trainer_client.frameworks.megatron.attention import ServedCoreAttention
from trainer_client.frameworks.megatron.halves import Half
from trainer_client.frameworks.megatron.host_bounds import are_read_on_host, with_planned_bounds
from trainer_client.frameworks.megatron.inside_documents import why_documents_stay_whole
from trainer_client.frameworks.megatron.lanes import HalvesInTurns
from trainer_client.frameworks.megatron.pipelines import pipelining_of
from trainer_client.frameworks.megatron.refusals import reasons_against_turns, unwrapped
from trainer_client.frameworks.versions import UnsupportedSetting, rank_options
from trainer_client.session import Session
from trainer_client.step.lane import current_step, in_nano_batch, require_step
from trainer_client.step.running_step import RunningStep
from trainer_client.turns.manifests import lengths_between
from trainer_client.turns.parts import segments_of

logger = logging.getLogger(__name__)

Microbatch = Mapping[str, Any]
"""The input of a forward step; ``packed_seq_params`` or ``cu_seqlens`` shows its documents."""

ForwardStep = Callable[..., Any]
"""Megatron's ``forward_step_func``: of a data iterator and a model."""


class _Planned(NamedTuple):
    """A microbatch of a step that was submitted.

    Attributes:
        bounds: ``[documents + 1]`` cumulative lengths.
        halves: with ping-pong; else none.
    """

    bounds: Sequence[int]
    halves: Sequence[Half]


class ServedSteps:
    """Numbers the steps and microbatches of one rank.

    With ping-pong a microbatch is two nano-batches of the job, its halves, which take turns inside
    the model; without, it is one, and its rank waits while the rows travel. Megatron's schedules
    run each microbatch as a whole, in an order of their own.
    Every process is a rank of the job, and has its share of the heads under tensor parallelism.

    Args:
        session: of this rank, with ``n_nano_batches`` as the microbatches of a step, or with
            ping-pong twice as many.
        chunks: of the model on this rank: one, or more with virtual pipeline stages.
        ping_pong: whether the halves of a microbatch take turns.
        cut_documents: as of :meth:`open`, by which the model can run what it asks for.
    """

    def __init__(
        self,
        session: Session,
        chunks: Sequence[nn.Module],
        *,
        ping_pong: bool = True,
        cut_documents: bool | None = False,
    ) -> None:
        self.session = session
        self._started: Counter[int] = Counter()
        models: list[Any] = [unwrapped(chunk) for chunk in chunks] if ping_pong else []
        self._cut_documents = cut_documents
        inside_documents = cut_documents is not False
        self._turns = {
            id(model): HalvesInTurns(model, inside_documents=inside_documents) for model in models
        }
        self._running: list[_Planned] = []
        self._now: tuple[str, _Planned] | None = None
        self._hooks = [
            model.register_forward_pre_hook(self._bounds_to_host, with_kwargs=True)
            for model in map(unwrapped, chunks)
            if are_read_on_host(model)
        ]

    @classmethod
    def open(
        cls,
        model: nn.Module | Sequence[nn.Module],
        *,
        n_microbatches: int,
        control_plane: str | None = None,
        job: str = "megatron",
        ping_pong: bool | None = None,
        cut_documents: bool | None = None,
        **options: Any,
    ) -> ServedSteps:
        """Joins the job, on all ranks together, after Megatron's parallel state and model are made.

        Args:
            model: of this rank, or its chunks; wrapped or not.
            n_microbatches: of a step.
            control_plane: ``host:port``; None: ``DISTCA_CONTROL_PLANE``.
            job: its name.
            ping_pong: whether the two halves of each microbatch take turns, so that one computes
                while the other's rows travel; None: if the model's settings allow it.
            cut_documents: whether halves are cut in the middle, whatever document lies there; else
                at the begin of a document near it. None: where the model allows it, and a
                microbatch has ``packed_seq_params``; True: of those with ``cu_seqlens`` alone too,
                whose rows must be packed then.
            options: further :class:`trainer_client.SessionOptions`; others may come from the
                environment.
        """
        chunks = [model] if isinstance(model, nn.Module) else list(model)
        layers = [
            module
            for chunk in chunks
            for module in chunk.modules()
            if isinstance(module, ServedCoreAttention)
        ]
        counts = _check_layers(layers)
        device = next(parameter.device for chunk in chunks for parameter in chunk.parameters())
        takes_turns = _takes_turns(chunks, ping_pong, n_microbatches)
        cuts = _cuts_documents(chunks, cut_documents, takes_turns=takes_turns)
        pipelining = pipelining_of(chunks, n_microbatches)
        if pipelining is None:
            _check_equal(counts)
        session = Session.open(
            session_options(
                control_plane=control_plane,
                job=job,
                n_layers=pipelining.max_layers if pipelining else len(layers),
                pipelining=pipelining,
                n_nano_batches=n_microbatches * (2 if takes_turns else 1),
                shape=layers[0].shape,
                softmax_scale=layers[0].softmax_scale,
                device=str(device),
                **_rank_options(),
                **options,
            )
        )
        return cls(session, chunks, ping_pong=takes_turns, cut_documents=cuts)

    @contextmanager
    def step(
        self, microbatches: Sequence[Microbatch], *, forward_only: bool = False
    ) -> Iterator[RunningStep]:
        """Around one call of Megatron's ``forward_backward_func``.

        Args:
            microbatches: of the step. All stages of a pipeline, and all ranks of a tensor-parallel
                group, must be given the same.
            forward_only: the step has no backward pass (evaluation).
        """
        number = self.session.next_step
        expected = self.session.options.n_nano_batches // (2 if self._turns else 1)
        if len(microbatches) != expected:
            raise ValueError(
                f"step {number} has {len(microbatches)} microbatches, and ServedSteps.open was "
                f"given n_microbatches={expected}; fill it up, or leave it out (drop_last)"
            )
        self._started.clear()
        self.session.submit(self._manifest(number, microbatches), forward_only=forward_only)
        with self.session.step(number) as running:
            yield running

    def _manifest(self, step: int, microbatches: Sequence[Microbatch]) -> RankManifest:
        rank, bounds = self.session.options.rank, [_bounds(step, each) for each in microbatches]
        # Made in any case: it tells of bounds that are none.
        manifest = RankManifest.from_lengths(step, rank, list(map(lengths_between, bounds)))
        chunk = next(iter(self._turns.values()), None)
        self._running = planned = []
        for its, microbatch in zip((each.tolist() for each in bounds), microbatches, strict=True):
            halves = []
            if chunk is not None:
                halves = chunk.cut(its, inside_documents=self._is_cut_inside(microbatch))
            planned.append(_Planned(its, halves))
        if chunk is None:
            return manifest
        ids = count(rank << 32)
        lanes = [
            lane
            for each in planned
            for lane in segments_of(
                [end - begin for begin, end in pairwise(each.bounds)], each.halves, ids
            )
        ]
        return RankManifest(step, rank, lanes)

    def _is_cut_inside(self, microbatch: Microbatch) -> bool:
        """Return whether a document of it may lie in both halves."""
        if self._cut_documents is None:
            return microbatch.get("packed_seq_params") is not None
        return self._cut_documents

    def numbered(self, forward_step: ForwardStep) -> ForwardStep:
        """``forward_step`` with each call in its microbatch; outside of a step as it is.

        Megatron's schedules call it once for each microbatch and model chunk, microbatches in
        ascending order within a chunk.
        """

        @functools.wraps(forward_step)
        def in_its_lane(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            if current_step.get() is None:
                return forward_step(data_iterator, model, *args, **kwargs)
            microbatch = self._started[id(model)]
            self._started[id(model)] += 1
            with self._in_microbatch(microbatch), self._in_lanes(model, microbatch):
                return forward_step(data_iterator, model, *args, **kwargs)

        return in_its_lane

    @contextmanager
    def _in_microbatch(self, microbatch: int) -> Iterator[None]:
        """Around a forward step, whose microbatch is known by that."""

        step = require_step().step
        if microbatch < len(self._running):
            self._now = f"step {step} microbatch {microbatch}", self._running[microbatch]
        elif self._turns:
            raise SessionError(
                f"microbatch {microbatch} of step {step} was run, and {len(self._running)} were "
                "planned; run those that ServedSteps.step was given"
            )
        try:
            yield
        finally:
            self._now = None

    def _bounds_to_host(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before a chunk's forward: see :mod:`.host_bounds`."""
        packed = kwargs.get("packed_seq_params")
        if packed is None or self._now is None:
            return None
        where, planned = self._now
        check_later = require_step().check_at_end
        own = with_planned_bounds(packed, planned.bounds, where, check_later)
        return args, kwargs | {"packed_seq_params": own}

    def _in_lanes(self, model: nn.Module, microbatch: int) -> AbstractContextManager[None]:
        """Around a forward step of one chunk."""
        if not self._turns:
            return in_nano_batch(microbatch)
        turns = self._turns.get(id(unwrapped(model)))
        if turns is None:
            raise SessionError(
                f"a forward step was given {type(unwrapped(model)).__name__}, no model chunk of "
                "ServedSteps.open; give it all of them"
            )
        first, second = self._running[microbatch].halves
        # Without rows the second half is no call: other ranks do not await it.
        halves = [first, second] if second.n_rows or second.padding else [first]
        return turns.running(halves, 2 * microbatch)

    def close(self, error: str = "") -> None:
        """As :meth:`trainer_client.Session.close`; the model is as it was before."""
        self._leave_model()
        self.session.close(error)

    def __enter__(self) -> ServedSteps:
        return self

    def __exit__(self, *error: Any) -> None:
        self._leave_model()
        self.session.__exit__(*error)

    def _leave_model(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for turns in self._turns.values():
            turns.undo()


def _rank_options() -> dict[str, Any]:
    state = parallel_state
    return rank_options(
        (
            state.get_pipeline_model_parallel_rank(),
            state.get_pipeline_model_parallel_world_size(),
        ),
        (state.get_data_parallel_rank(), state.get_data_parallel_world_size()),
        (state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
    )


def _takes_turns(chunks: Sequence[nn.Module], asked: bool | None, n_microbatches: int) -> bool:
    """Return whether the halves of a microbatch take turns."""

    found = [] if asked is False else list(reasons_against_turns(chunks, n_microbatches))
    if asked and found:
        raise UnsupportedSetting(
            "the two halves of a microbatch cannot take turns: "
            + "; ".join(found)
            + ". Change that, or open the steps with ping_pong=False"
        )
    if found:
        logger.warning(
            "a microbatch is one nano-batch, without ping-pong, so that its rank waits while its "
            "rows travel: %s",
            "; ".join(found),
        )
    elif asked is False:
        logger.info("a microbatch is one nano-batch, without ping-pong")
    else:
        logger.info("a microbatch is two nano-batches, which take turns")
    return asked is not False and not found


def _cuts_documents(
    chunks: Sequence[nn.Module], asked: bool | None, *, takes_turns: bool
) -> bool | None:
    """``asked``, or False if the model cannot run the halves of a document. All ranks call it
    together.
    """
    if not takes_turns:
        found = ["the halves of a microbatch do not take turns"]
    elif asked is False:
        return False
    else:
        found = why_documents_stay_whole([unwrapped(chunk) for chunk in chunks])
    if asked and found:
        raise UnsupportedSetting(
            "microbatches cannot be cut inside documents: "
            + "; ".join(found)
            + ". Change that, or open the steps without cut_documents=True"
        )
    if found and takes_turns:
        logger.info(
            "microbatches are cut in two at the begin of a document, not inside one: %s",
            "; ".join(found),
        )
    return False if found else asked


def _bounds(step: int, microbatch: Microbatch) -> torch.Tensor:
    """``[documents + 1]`` from 0 up."""
    if (bounds := microbatch.get("cu_seqlens")) is not None:
        return on_host(torch.as_tensor(bounds).flatten())
    if (packed := microbatch.get("packed_seq_params")) is not None:
        return on_host(packed.cu_seqlens_q.flatten())
    raise ManifestError(
        f"a microbatch of step {step} holds {sorted(microbatch)}; give packed_seq_params (thd) or "
        "cu_seqlens on every stage (--sft, --dataloader-inter-document-masking)"
    )


def _check_layers(layers: Sequence[ServedCoreAttention]) -> list[int]:
    """Checks that every rank has layers, of one kind; returns how many each has."""
    # Ranks without layers come too, so that none waits for them.
    counts = [len(layers)]
    if dist.is_initialized():
        counts = [0] * dist.get_world_size()
        dist.all_gather_object(counts, len(layers))
    if not any(counts):
        raise SessionError(
            "no layer of the model is served; build it of serve(spec) "
            "(trainer_client.frameworks.megatron), on every stage"
        )
    if not all(counts):
        _check_equal(counts)
    kinds = {(layer.shape, layer.softmax_scale) for layer in layers}
    if len(kinds) > 1:
        raise SessionError(f"all layers of a job have one shape and scale; these differ: {kinds}")
    return counts


def _check_equal(counts: Sequence[int]) -> None:
    """Checks that ranks have equally many served layers, ``counts``."""
    if len(set(counts)) > 1:
        raise UnsupportedSetting(
            f"ranks have {counts} served layers; give every rank equally many: num_layers a "
            "multiple of the pipeline stages, all stages built of serve(spec)"
        )
