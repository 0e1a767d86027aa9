"""A trainer process from its settings to its report."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from distca.apps.report.display import TrainingDisplay
from distca.apps.report.observer import Observer
from distca.apps.report.page import write_report
from distca.apps.report.record import RunRecord, TrainingStep
from distca.apps.report.step_log import StepLog
from distca.apps.report.summary import show_paths, summary_table
from distca.apps.train.checkpoint import Checkpoint, KeptCheckpoints
from distca.apps.train.corpus import Corpus, open_corpus
from distca.apps.train.packing import Packer, batch_of, predicted_tokens
from distca.apps.train.ranks import (
    check_agreement,
    choose_device,
    number_of,
    process_group,
    sum_over_ranks,
)
from distca.apps.train.settings import (
    DataSettings,
    ModelSettings,
    ServiceSettings,
    Sharding,
    TrainingSettings,
)
from distca.apps.train.trainer import Trainer, build_model
from distca.apps.train.verify import WIDER, Verifier
from distca.contract.settings import (
    ClientTls,
    IntegritySettings,
    PlanRequest,
    RankTimeouts,
    values_of,
)
from distca.errors import DistcaError
from distca.process.interrupt import StopRequest
from distca.run_folder import RunFolder, list_checkpoints

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainerRun:
    """All settings of one trainer process."""

    service: ServiceSettings
    data: DataSettings
    model: ModelSettings
    training: TrainingSettings
    plan: PlanRequest
    integrity: IntegritySettings
    tls: ClientTls


def run_trainer(run: TrainerRun, console: Console) -> bool:
    """Trains to the end of the run, or until a signal asks to stop; saves and reports.

    Returns:
        Whether all steps were done.

    Raises:
        DistcaError, SessionError, distca.contract.rpc.RpcError: what went wrong, in words.
    """
    began = datetime.now().isoformat(timespec="seconds")
    corpus = open_corpus(run.data.data)
    device = choose_device(run.service.device, number_of("LOCAL_RANK", os.environ, "0"))
    folder = RunFolder(run.service.run_dir)
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        timeout = run.service.collective_timeout_seconds
        stack.enter_context(process_group(run.service.rendezvous, timeout, device))
        if dist.get_rank() == 0:
            folder.open()
        loop = _Loop(run, corpus, device, console)
        stack.enter_context(loop.trainer.attached)
        finished = loop.train(stop)
    if loop.rank == 0:
        record = loop.record(began, finished=finished)
        _write_report(record, folder)
        console.print(summary_table(record))
        show_paths(console, Report=folder.report)
        loop.checkpoints.require_last()
    verified = loop.verifier.result if loop.verifier else None
    if verified is not None and not verified.passed:
        raise DistcaError(
            f"local attention differs by {verified.loss:.1e} of the loss (allowed "
            f"{verified.loss_tolerance:.0e}) and {verified.gradient:.1e} of gradients (allowed "
            f"{verified.gradient_tolerance:.0e}), in {verified.parameter}"
        )
    return finished


def _write_report(record: RunRecord, folder: RunFolder) -> None:
    """Writes record and report; that they cannot be written does not undo the training."""
    try:
        folder.record.write_text(record.to_json())
        write_report(record, folder.report, folder.figures)
    except OSError as error:
        logger.warning("the report in %s cannot be written: %s", folder.root, error)


def _options_of_attach(run: TrainerRun) -> dict[str, Any]:
    """The job has the run's name."""
    service = run.service
    return {
        "control_plane": service.control_plane,
        "job": RunFolder(service.run_dir).name,
        "placement": service.placement,
        "data_host": service.rows_host,
        "transport": service.transport,
        "one_host": service.one_host,
        "replace": service.replace,
        "collective_timeout_seconds": service.collective_timeout_seconds,
        "min_gigabytes_per_second": service.min_gigabytes_per_second,
        "metrics_port": service.metrics_port,
        **values_of(RankTimeouts, service),
        **values_of(PlanRequest, run.plan),
        **values_of(IntegritySettings, run.integrity),
        **values_of(ClientTls, run.tls),
    }


class _Loop:
    """The steps of one process, and what is kept of them."""

    def __init__(
        self, run: TrainerRun, corpus: Corpus, device: torch.device, console: Console
    ) -> None:
        self.rank, self._n_ranks = dist.get_rank(), dist.get_world_size()
        self._run, self._corpus, self._device = run, corpus, device
        tokens = run.training.tokens_per_rank
        self._packer = Packer(
            corpus.lengths,
            self._n_ranks,
            tokens,
            seed=run.data.seed,
            max_document_tokens=run.data.max_document_tokens,
        )
        self._identity = {
            "documents": corpus.fingerprint,
            "ranks": self._n_ranks,
            "tokens_per_rank": tokens,
            "max_document_tokens": self._packer.limit,
            "seed": run.data.seed,
            "model": str(run.model),
        }
        on_gpu = device.type == "cuda"
        sharding = run.training.sharding or (Sharding.FSDP if on_gpu else Sharding.REPLICATED)
        check_agreement(
            self._identity
            | {"steps": run.training.steps, "device": device.type, "sharding": str(sharding)}
        )
        torch.manual_seed(run.data.seed)
        self.trainer = Trainer(
            run.model, self._packer.limit, sharding, device, **_options_of_attach(run)
        )
        self.verifier: Verifier | None = None
        if run.training.verify:
            dtype = run.model.dtype.value
            local = build_model(
                run.model, self._packer.limit, attention="sdpa", dtype=WIDER[dtype], device=device
            )
            self.verifier = Verifier(local, dtype)
        self._folder = RunFolder(run.service.run_dir)
        self._log = StepLog(self._folder.step_log)
        self.checkpoints = KeptCheckpoints(self._folder.checkpoints)
        title = f"training ({run.service.placement})"
        self._display = TrainingDisplay(console, title, run.training.steps)
        self._observer: Observer | None = None

    def train(self, stop: StopRequest) -> bool:
        """Runs all steps that are left; returns False when it was stopped before the last."""
        done = first = self._resume()
        if self.rank == 0:
            if not first:
                self.checkpoints.set_aside()
            self._log.forget_from(first)
        for step in range(first, self._run.training.steps):
            self._train_step(step, first)
            done = step + 1
            # All ranks stop after the same step once any of them was asked to.
            if sum_over_ranks(float(stop.requested)):
                break
            if done % self._run.training.checkpoint_every == 0:
                self._save(done)
        self._save(done)
        # A run that is resumed may have gone further than it is asked to.
        return done >= self._run.training.steps

    def record(self, began: str, *, finished: bool) -> RunRecord:
        """The record of the run; complete on rank 0 only."""
        run, sizes = self._run, self._run.model
        return RunRecord(
            name=self._folder.name,
            mode=run.service.placement,
            finished=finished,
            began=began,
            model=f"llama, {sizes.layers} layers, hidden {sizes.hidden_size}, {sizes.heads} heads, "
            f"{sizes.kv_heads} kv heads",
            parameters=sum(weight.numel() for weight in self.trainer.model.parameters()),
            dtype=sizes.dtype,
            data=str(self._corpus),
            n_ranks=self._n_ranks,
            tokens_per_rank=run.training.tokens_per_rank,
            steps=self._log.read(),
            detail=self._observer.detail if self._observer else None,
            verification=self.verifier.result if self.verifier else None,
        )

    def _train_step(self, step: int, first: int) -> None:
        by_rank = self._packer.pack(step)
        predicted = sum(map(predicted_tokens, by_rank))
        if not predicted:
            raise DistcaError(f"all documents of step {step} have one token; give longer ones")
        batch = batch_of(self._corpus, by_rank[self.rank], self._device)
        began = time.perf_counter()
        own_loss = self.trainer.run(batch, predicted / self._n_ranks)
        loss = sum_over_ranks(own_loss) / self._n_ranks
        seconds = time.perf_counter() - began
        if self.verifier is not None and self._run.training.is_verified(step):
            documents = batch["input_ids"][0].split([one.length for one in by_rank[self.rank]])
            weights, gradients = self.trainer.weights(), self.trainer.gradients()
            self.verifier.compare(documents, predicted, loss, weights, gradients)
        began = time.perf_counter()
        norm = self.trainer.update(self._run.training.learning_rate_at(step))
        seconds += time.perf_counter() - began
        if self.rank == 0:
            record = TrainingStep(
                step=step,
                loss=loss,
                gradient_norm=norm,
                tokens=batch["input_ids"].numel() * self._n_ranks,
                step_seconds=seconds,
            )
            self._watch(first).step_done(record)

    def _watch(self, first: int) -> Observer:
        """The observer, once there is a session."""
        if self._observer is None:
            session = self.trainer.attached.session
            assert session is not None
            self._observer = Observer(session, first, self._write)
        return self._observer

    def _write(self, step: TrainingStep) -> None:
        self._log.append(step)
        self._display.show(step)

    def _resume(self) -> int:
        """Takes up the newest checkpoint if one is asked for; returns the step to go on with. Ranks
        whose folders hold other checkpoints than the first one's are named."""
        training = self._run.training
        if training.resume_or_start and not training.resume:
            found = bool(list_checkpoints(self._folder.checkpoints))
            check_agreement({"has a checkpoint": found})
        else:
            found = training.resume
        if not found:
            return 0
        checkpoint = self.checkpoints.load_newest(self._identity)
        check_agreement({"checkpoint": checkpoint.steps_done})
        self.trainer.load_state(checkpoint.model, checkpoint.optimizer)
        logger.info("resumed after %d steps", checkpoint.steps_done)
        return checkpoint.steps_done

    def _save(self, steps_done: int) -> None:
        if self._observer is not None:
            # A step before a checkpoint is not run again.
            self._observer.finish()
        model, optimizer = self.trainer.state()
        if self.rank == 0:
            self.checkpoints.save(Checkpoint(steps_done, self._identity, model, optimizer))
        # Nobody goes on, or leaves, before it is written.
        dist.barrier()
