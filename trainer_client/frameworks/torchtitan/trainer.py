"""torchtitan's trainer, with its core attention served."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from itertools import count, islice
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.models.common.moe import MoE
from torchtitan.trainer import Trainer

from core_attention.host_copies import on_host
from core_attention.manifest import RankManifest, Segment
from core_attention.pipelining import Pipelining
from core_attention.schedule import Schedule
from trainer_client.environment import session_options
from trainer_client.errors import SessionError
from trainer_client.frameworks.torchtitan.attention import (
    SeenCalls,
    ServedAttention,
)
from trainer_client.frameworks.torchtitan.cutting import Cutting, why_documents_stay_whole
from trainer_client.frameworks.torchtitan.lanes import CutBatch, SubmittedBatch
from trainer_client.frameworks.torchtitan.pipelines import order_of, timed_run
from trainer_client.frameworks.torchtitan.refusals import problems
from trainer_client.frameworks.torchtitan.settings import DistcaSettings
from trainer_client.frameworks.versions import (
    UnsupportedSetting,
    of_all_ranks,
    rank_options,
    refuse,
)
from trainer_client.hooks.kept_state import untouched
from trainer_client.models.found_options import ServedCall, options_of_calls
from trainer_client.options import SessionOptions
from trainer_client.pipelines.deferred_weights import defer_weights
from trainer_client.pipelines.pipelining import Pipeline, in_microbatch, run_rows_in_turns
from trainer_client.pipelines.stage_seconds import MEASURED_TOKENS, measured_pipelining
from trainer_client.session import Session
from trainer_client.step.fsdp import prepare_turns
from trainer_client.turns.manifests import lengths_of_documents
from trainer_client.turns.parts import segments_of

logger = logging.getLogger(__name__)

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Model inputs, with ``input`` and ``positions`` ``[B, L]``, and labels."""

OVERRIDE = "trainer_client.frameworks.torchtitan.attention.served_varlen"
"""An entry of ``--override.imports``."""


class ServedTrainer(Trainer):
    """Trains with core attention spread over all ranks; what is not here is torchtitan's.

    Every process is a rank of the job, and has its share of the heads under tensor parallelism.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        distca: DistcaSettings = field(default_factory=DistcaSettings)

    def __init__(self, config: Config) -> None:
        refuse(problems(config, OVERRIDE), "torchtitan")
        super().__init__(config)
        self._running: list[SubmittedBatch] = []
        self._pipeline: Pipeline | None = None
        self._n_run = 0
        self._order = self._order_of_pipelines()
        self._cutting = self._how_to_cut()
        self._layers_of_parts: list[int] = []
        self._session = Session.open(self._session_options(self._calls_of_parts()))
        self._wire()

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """One optimizer step, within a step of the session."""
        # What the data end within is no step: torchtitan's iterator raises.
        batches = list(islice(data_iterator, self._batches_of_step))
        step = self._submit(batches)
        self._n_run = 0
        with (self._pipeline or self._session).step(step):
            super().train_step(iter(batches))

    def forward_backward_step(self, **arguments: Any) -> torch.Tensor:
        """A batch (or with pipelines, all microbatches), in its nano-batches."""
        with ExitStack() as stack:
            if self._pipeline is None:
                self._planned(self._n_run)
                stack.enter_context(in_microbatch(self._n_run, self._cutting.n_lanes))
                self._n_run += 1
            loss: torch.Tensor = super().forward_backward_step(**arguments)
        return loss

    def close(self) -> None:
        if hasattr(self, "_session"):
            self._session.close()
        super().close()

    def _planned(self, microbatch: int) -> SubmittedBatch:
        """A batch of the running step."""

        if microbatch >= len(self._running):
            raise SessionError(
                f"batch {microbatch} is trained on, and {len(self._running)} were submitted; call "
                "forward_backward_step within train_step, once for each batch"
            )
        return self._running[microbatch]

    def _wire(self) -> None:
        """Has the model run in lanes."""

        def cut_by(part: Any, microbatch: int) -> CutBatch:
            return CutBatch(part, self._planned(microbatch))

        for part in self.model_parts:
            prepare_turns(part)
        if self.parallel_dims.pp_enabled:
            stages = _stages_of(self.pp_schedule)
            self._pipeline = Pipeline(self._session, *stages, cut_by=cut_by)
            return
        for part in self.model_parts if self._cutting.n_lanes > 1 else ():
            run_rows_in_turns(part, self._cutting.n_lanes, cut_by)

    @property
    def _batches_of_step(self) -> int:
        batches: int = self.gradient_accumulation_steps * self.num_pipeline_parallel_microbatches
        return batches

    def _how_to_cut(self) -> Cutting:
        dims, settings = self.parallel_dims, self.config.distca
        n_lanes = 2 if settings.ping_pong else 1
        inside_documents = settings.cut_documents and n_lanes == 2
        if inside_documents and (why := self._why_documents_stay_whole()):
            logger.info(
                "batches are cut in two at the begin of a document, not inside one: %s", why
            )
            inside_documents = False
        if n_lanes == 2 and dims.pp_enabled:
            why = self._why_microbatches_stay_whole(inside_documents=inside_documents)
            if why:
                logger.info("a microbatch of the pipeline is one lane, without ping-pong: %s", why)
                n_lanes, inside_documents = 1, False
        sequence_parallel = self.config.parallelism.enable_sequence_parallel
        return Cutting(n_lanes, dims.tp if sequence_parallel else 1, inside_documents)

    def _why_documents_stay_whole(self) -> str | None:
        """The reason why the model cannot run the halves of a document, the same on all ranks,
        which call it together; None if it can."""
        found = [
            f"{type(part).__name__}: {why}"
            for part in self.model_parts
            if (why := why_documents_stay_whole(part))
        ]
        if self.parallel_dims.pp_enabled:
            # All stages run the same halves, and what stops one may not be in the others.
            found = of_all_ranks(found)
        return found[0] if found else None

    def _why_microbatches_stay_whole(self, *, inside_documents: bool) -> str | None:
        """The reason why those of a pipeline cannot be cut, the same on all ranks; None if they
        can."""
        if self._order is None:
            return "the order of its schedule is unknown"
        if self.parallel_dims.tp_enabled:
            return "tensor-parallel ranks pass on parts of it"
        has_experts = any(self.config.model_spec.model.traverse(MoE.Config))
        if has_experts and not inside_documents:
            # The second half of one long document is padding.
            return "experts would count tokens of padding"
        return None

    def _submit(self, batches: list[Batch]) -> int:
        """Submit the manifest of a step with these batches; returns its number."""
        step, rank = self._session.next_step, self._session.options.rank
        ids = count(rank << 32)
        planned: list[SubmittedBatch] = []
        nano_batches: list[list[Segment]] = []
        for inputs, _ in batches:
            positions = on_host(inputs["positions"])
            lengths = lengths_of_documents(positions.flatten())
            cuts = self._cutting.of(lengths)
            planned.append(SubmittedBatch(positions, cuts, first=len(nano_batches)))
            nano_batches += segments_of(lengths, cuts, ids)
        self._session.submit(RankManifest(step, rank, nano_batches))
        self._running = planned
        return step

    def _calls_of_parts(self) -> list[ServedCall]:
        """The calls that are served, found by a forward of a few tokens on all ranks."""
        tokens = torch.arange(4 * self._cutting.multiple, device=self.device).repeat(2)[None]
        calls: list[ServedCall] = []
        for part in self.model_parts:
            reached = [each for each in part.modules() if isinstance(each, ServedAttention)]
            seen = SeenCalls()
            inputs = tokens
            if part.tok_embeddings is None:
                inputs = self._hidden(tokens.numel())
            masks = part.get_attention_masks(positions=tokens)
            with self.train_context(), untouched(part), seen.recording():
                part(inputs, positions=tokens, attention_masks=masks)
            found = len(seen.served) + seen.n_at_home
            if found != len(reached):
                raise SessionError(
                    f"{len(reached)} attention layers of the model were replaced, and a forward "
                    f"reaches {found}; every layer must be run once"
                )
            if not seen.served:
                raise SessionError(
                    f"all {seen.n_at_home} attention layers of the model, or of a stage, have a "
                    "window, and servers would have nothing to do; train it without DistCA"
                )
            self._layers_of_parts.append(len(seen.served))
            calls += seen.served
        return calls

    def _hidden(self, n_tokens: int) -> torch.Tensor:
        """Hidden states ``[1, n_tokens, D]`` of zeros, as a stage passes them on: this rank's part
        of the sequence, and where tensors know of the other parts, as one that does."""
        dims, parallelism = self.parallel_dims, self.config.parallelism
        in_parts = dims.tp_enabled and parallelism.enable_sequence_parallel
        own = torch.zeros(
            (1, n_tokens // (dims.tp if in_parts else 1), self.model_config.dim),
            device=self.device,
            dtype=getattr(torch, self.config.training.mixed_precision_param),
        )
        if not dims.tp_enabled or parallelism.spmd_backend == "spmd_types":
            return own
        placement = Shard(1) if in_parts else Replicate()
        return DTensor.from_local(own, dims.get_mesh("tp"), [placement])

    def _order_of_pipelines(self) -> Schedule | None:
        """None without pipelines, and if their order is not known."""
        if not self.parallel_dims.pp_enabled:
            return None
        if self.gradient_accumulation_steps > 1:
            raise UnsupportedSetting(
                f"gradient accumulation of {self.gradient_accumulation_steps} steps with pipeline "
                "parallelism is not served; set --training.local_batch_size to the rank's whole "
                "batch"
            )
        csv = self.config.parallelism.pipeline_parallel_schedule_csv
        return order_of(self.pp_schedule, csv, self._batches_of_step)

    def _pipelining(self, order: Schedule, ranks_of_stage: int) -> Pipelining:
        """Facts of the pipelines for the session, the same on all ranks, which call it together.

        In orders with backwards in two parts, linear layers put off the gradients of their weights:
        PyTorch's own way leaves weights without gradients that are recomputed or sharded.
        """
        multiple = self._cutting.multiple
        n_tokens = min(self.config.training.seq_len, MEASURED_TOKENS // multiple * multiple)
        calls = {
            id(part): n for part, n in zip(self.model_parts, self._layers_of_parts, strict=True)
        }
        runs, layers = {}, {}
        for stage in _stages_of(self.pp_schedule):
            part, index = stage.submod, stage.stage_index
            if order.has_backwards_in_parts:
                stage.dw_builder = defer_weights(part)
            runs[index] = part, timed_run(part, n_tokens, self.device, self._hidden)
            layers[index] = calls[id(part)]
        with self.train_context():
            return measured_pipelining(order, runs, layers, n_tokens, ranks_of_stage)

    def _session_options(self, calls: list[ServedCall]) -> SessionOptions:
        dims, settings = self.parallel_dims, self.config.distca
        batch = dims.get_mesh("batch") if dims.dp_enabled else None
        batch_rank, batch_degree = (batch.get_local_rank(), batch.size()) if batch else (0, 1)
        stage = dims.get_mesh("pp").get_local_rank() if dims.pp_enabled else 0
        share, n_shares = 0, 1
        if dims.tp_enabled:
            share, n_shares = dims.get_mesh("tp").get_local_rank(), dims.tp
        pipelining = None
        if self._order is not None:
            pipelining = self._pipelining(self._order, batch_degree * n_shares)
        n_layers = None if pipelining is None else pipelining.max_layers
        options = {
            **settings.session_options(),
            "pipelining": pipelining,
            "job": settings.job,
            **rank_options((stage, dims.pp), (batch_rank, batch_degree), (share, n_shares)),
            "n_nano_batches": self._batches_of_step * self._cutting.n_lanes,
            **self.more_session_options(),
        }
        return session_options(**options_of_calls(calls, options, n_layers=n_layers))

    def more_session_options(self) -> dict[str, Any]:
        """Further :class:`trainer_client.SessionOptions`, for subclasses. TLS and
        timeouts may come from the environment, too."""
        return {}


def served(config: Trainer.Config, **settings: Any) -> ServedTrainer.Config:
    """``config`` with core attention served; the rest of it stays.

    Args:
        config: of torchtitan's own ``Trainer``, from a config registry, with
            ``attn_backend="varlen"``.
        settings: of :class:`DistcaSettings`; they may also be given on the command line.
    """
    if type(config) is not Trainer.Config:
        raise UnsupportedSetting(
            f"the configuration is of {type(config).__qualname__}; give that of torchtitan's "
            "Trainer, or derive your trainer from ServedTrainer"
        )
    kept = {each.name: getattr(config, each.name) for each in fields(config)}
    made = ServedTrainer.Config(**kept, distca=DistcaSettings(**settings))
    made.training.disable_cuda_graphs = True
    if OVERRIDE not in made.override.imports:
        made.override.imports = [*made.override.imports, OVERRIDE]
    return made


def _stages_of(schedule: Any) -> list[Any]:
    """The stages of a schedule of ``torch.distributed.pipelining``, lower layers first."""
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    return sorted(stages, key=lambda stage: stage.stage_index)
