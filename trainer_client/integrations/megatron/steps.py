"""Steps of a Megatron-core training loop: manifests ahead of use, and microbatches by number."""

from __future__ import annotations

import functools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from core_attention.errors import ManifestError
from core_attention.host_copies import on_host
from trainer_client.errors import SessionError
from trainer_client.integrations.frameworks import UnsupportedSetting
from trainer_client.integrations.megatron.attention import ServedCoreAttention
from trainer_client.options import SessionOptions
from trainer_client.session import Session
from trainer_client.step.lane import current_step, in_nano_batch, require_step
from trainer_client.step.manifests import manifest_from_cu_seqlens
from trainer_client.step.running_step import RunningStep

logger = logging.getLogger(__name__)

Microbatch = Mapping[str, Any]
"""What a forward step takes; ``packed_seq_params`` or ``cu_seqlens`` tells of its documents."""

ForwardStep = Callable[..., Any]
"""Megatron's ``forward_step_func``: of a data iterator and a model."""


class ServedSteps:
    """Numbers the steps and microbatches of one rank.

    A microbatch is a nano-batch of the job: Megatron's schedules run each as a whole, in an order
    of their own, so that its rank waits while the rows of one travel.
    Every process is a rank of the job, and has its share of the heads under tensor parallelism.

    Args:
        session: of this rank, with ``n_nano_batches`` as the microbatches of a step.
        n_chunks: model chunks of this rank: 1, or more with virtual pipeline stages.
    """

    def __init__(self, session: Session, *, n_chunks: int = 1) -> None:
        self.session = session
        self._n_chunks = n_chunks
        self._started: Counter[int] = Counter()
        self._returned: Counter[int] = Counter()

    @classmethod
    def open(
        cls,
        model: nn.Module | Sequence[nn.Module],
        *,
        n_microbatches: int,
        control_plane: str,
        job: str = "megatron",
        **options: Any,
    ) -> ServedSteps:
        """Joins the job, on all ranks together, after Megatron's parallel state and model are made.

        Args:
            model: of this rank, or its chunks; wrapped or not.
            n_microbatches: of a step.
            control_plane: ``host:port``.
            job: its name.
            options: further :class:`trainer_client.SessionOptions`.

        Raises:
            UnsupportedSetting: the ranks have different numbers of served layers.
            SessionError: the model has none, or they differ.
        """
        chunks = [model] if isinstance(model, nn.Module) else list(model)
        layers = [
            module
            for chunk in chunks
            for module in chunk.modules()
            if isinstance(module, ServedCoreAttention)
        ]
        _check_layers(layers)
        device = next(parameter.device for chunk in chunks for parameter in chunk.parameters())
        tp = parallel_state.get_tensor_model_parallel_world_size()
        dp = parallel_state.get_data_parallel_world_size()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        first = (stage * dp + parallel_state.get_data_parallel_rank()) * tp
        logger.info(
            "a microbatch is one lane, without ping-pong: Megatron's schedules run it whole"
        )
        session = Session.open(
            SessionOptions(
                control_plane=control_plane,
                job=job,
                rank=first + parallel_state.get_tensor_model_parallel_rank(),
                n_ranks=dp * parallel_state.get_pipeline_model_parallel_world_size() * tp,
                tensor_parallel_ranks=range(first, first + tp) if tp > 1 else (),
                n_layers=len(layers),
                n_nano_batches=n_microbatches,
                shape=layers[0].shape,
                softmax_scale=layers[0].softmax_scale,
                device=str(device),
                **options,
            )
        )
        return cls(session, n_chunks=len(chunks))

    def ahead(
        self,
        loader: Iterable[Sequence[Microbatch]],
        *,
        steps_ahead: int = 3,
        forward_only: bool = False,
    ) -> Iterator[tuple[int, Sequence[Microbatch]]]:
        """The steps of ``loader``, each submitted while earlier ones run, so that plans are ready.

        Args:
            loader: each item is the microbatches of a step. All stages of a pipeline, and all ranks
                of a tensor-parallel group, must be given the same.
            steps_ahead: how many steps beyond the yielded one are submitted.
            forward_only: the steps have no backward pass (evaluation).

        Yields:
            The number of a step, for :meth:`step`, and its microbatches.

        Raises:
            ManifestError: a microbatch does not tell of its documents.
            ValueError: a step has another number of microbatches than the job.
        """
        if steps_ahead < 0:
            raise ValueError(f"steps_ahead is {steps_ahead}; it must be 0 or more")
        submitted: deque[tuple[int, Sequence[Microbatch]]] = deque()
        for microbatches in loader:
            step = self.session.next_step
            bounds = [_bounds(step, each) for each in microbatches]
            manifest = manifest_from_cu_seqlens(step, self.session.options.rank, bounds)
            self.session.submit(manifest, forward_only=forward_only)
            submitted.append((step, microbatches))
            if len(submitted) > steps_ahead:
                yield submitted.popleft()
        yield from submitted

    @contextmanager
    def step(self, number: int) -> Iterator[RunningStep]:
        """Around one call of Megatron's ``forward_backward_func``.

        Raises:
            SessionError: a microbatch was not run to its end, or a layer not reached.
        """
        self._started.clear()
        self._returned.clear()
        with self.session.step(number) as running:
            yield running

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
            with in_nano_batch(microbatch):
                output = forward_step(data_iterator, model, *args, **kwargs)
            self._returned[microbatch] += 1
            if self._returned[microbatch] == self._n_chunks:
                require_step().lane_returned(microbatch)
            return output

        return in_its_lane

    def close(self, error: str = "") -> None:
        """As :meth:`trainer_client.Session.close`."""
        self.session.close(error)

    def __enter__(self) -> ServedSteps:
        return self

    def __exit__(self, *error: Any) -> None:
        self.session.__exit__(*error)


def _bounds(step: int, microbatch: Microbatch) -> torch.Tensor:
    """``[documents + 1]`` from 0 up."""
    if (bounds := microbatch.get("cu_seqlens")) is not None:
        return on_host(torch.as_tensor(bounds).flatten())
    if (packed := microbatch.get("packed_seq_params")) is not None:
        return on_host(packed.cu_seqlens_q.flatten())
    raise ManifestError(
        f"a microbatch of step {step} holds {sorted(microbatch)}; it must have packed_seq_params "
        "(thd), or cu_seqlens, on every stage: in Megatron's own loop, by --sft or "
        "--dataloader-inter-document-masking"
    )


def _check_layers(layers: Sequence[ServedCoreAttention]) -> None:
    """Checks that there are layers, of one kind, and equally many on all ranks."""
    # Ranks without layers come too, so that none waits for them.
    counts: list[Any] = [len(layers)]
    if dist.is_initialized():
        counts = [None] * dist.get_world_size()
        dist.all_gather_object(counts, len(layers))
    if not any(counts):
        raise SessionError(
            "no layer of the model is served; build it of serve(spec) "
            "(trainer_client.integrations.megatron), on every stage"
        )
    if len(set(counts)) > 1:
        raise UnsupportedSetting(
            f"ranks have {counts} served layers; every rank must have equally many: set "
            "num_layers to a multiple of the pipeline stages, and neither "
            "num_layers_in_first_pipeline_stage nor account_for_embedding_in_pipeline_split; of a "
            "hybrid model, give every stage's part of the pattern equally many attention layers; "
            "build all stages of serve(spec)"
        )
    kinds = {(layer.shape, layer.softmax_scale) for layer in layers}
    if len(kinds) > 1:
        raise SessionError(f"all layers of a job have one shape and scale; these differ: {kinds}")
