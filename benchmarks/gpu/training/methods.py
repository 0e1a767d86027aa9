"""The ways of spreading core attention that are compared, each as one rank runs it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

import trainer_client.models.transformers
from benchmarks.gpu.training import attention, batches
from benchmarks.gpu.training.batches import Batch, CannotRun, require_whole_documents
from benchmarks.gpu.training.ring import RingAttention, require_one_document, ring_module
from benchmarks.gpu.training.signal import one_byte_messages
from benchmarks.gpu.training.stack import ModelShape, TrainingStack
from benchmarks.gpu.training.stopwatch import Stopwatch
from control_plane.planner.planning import PlanningOptions
from core_attention.cost_model import CostProfile
from core_attention.kernels.select import select_kernel
from core_attention.manifest import RankManifest
from core_attention.profiling import device_name, profile_file_name
from core_attention.shape import AttentionShape
from distca.apps.report.measurements import StepMeasurements, tick_imbalance
from trainer_client import Placement, Session, SessionOptions, StepReport

logger = logging.getLogger(__name__)

PROFILE = Path(__file__).parents[3] / "distca/apps/simulator/profiles/h200-llama3-8b.json"
KEPT_FORWARD_TICKS = 3
ADDRESS_FILE = "control-plane.address"
POOL_METRIC = "distca_data_plane_buffer_pool_bytes"
START_SECONDS = 200.0
"""The first control plane on a machine compiles its planner."""


def await_address(file: Path) -> str:
    """Of the control plane that writes it to ``file``, once it has one."""
    deadline = time.monotonic() + START_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the control plane did not start within {START_SECONDS:.0f} s")
        time.sleep(0.1)
    return str(json.loads(file.read_text())["grpc"])


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """What a rank needs to know.

    Attributes:
        rank: this one.
        n_ranks: all.
        device: of this rank.
        model: sizes.
        tokens_per_rank: of a step.
        longest_document: tokens of it.
        n_nano_batches: of DistCA's ways.
        cuts_documents: whether a document may begin in one and go on in the other.
        tolerance: eps of the planner.
        compiled: whether parts of the layers are compiled.
        learning_rate: of AdamW.
        folder: where cost profiles are, and the control plane's address in ADDRESS_FILE.
    """

    rank: int
    n_ranks: int
    device: torch.device
    model: ModelShape
    tokens_per_rank: int
    longest_document: int
    n_nano_batches: int
    cuts_documents: bool
    tolerance: float
    compiled: bool
    learning_rate: float
    folder: Path

    @property
    def control_plane(self) -> str:
        """Its address, once it has one."""
        return await_address(self.folder / ADDRESS_FILE)


@dataclass
class Measured:
    """What one rank saw in one step.

    Attributes:
        loss: this rank's part of the mean.
        seconds: by name, see :class:`Stopwatch`.
        extra: what only one way knows.
    """

    loss: torch.Tensor
    seconds: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


class Method(Protocol):
    """A way of spreading core attention, on one rank."""

    def prepare(self, drawn: Sequence[Batch]) -> None:
        """Told of all batches before the first step."""

    def run(self, step: int) -> Measured:
        """Runs one step up to the weights' update; returns without waiting for the device."""

    def finish(self, step: int, measured: Measured) -> None:
        """Adds what is known once the step is over on all ranks."""

    def close(self) -> None:
        """Ends what it started."""


def predicted_tokens(batch: Batch) -> int:
    """All tokens but each document's last."""
    return int(batch.lengths.sum()) - len(batch.lengths)


class AtHome:
    """The baselines: every rank computes what its rows need.

    Args:
        settings: of the rank.
        name: of the way, one of AT_HOME.
    """

    def __init__(self, settings: RankSettings, name: str) -> None:
        self._settings, self._name = settings, name
        self._watch = Stopwatch(settings.device)
        self._kernel = select_kernel(settings.device)
        self._kernel.warm_up(settings.model.attention)
        self._group: Any = None if name in ("plain", "repacked") else dist.new_group()
        self.stack = _stack(settings, attention.IMPLEMENTATION, n_lanes=1)
        self._steps: list[tuple[Any, list[Any], int]] = []

    def prepare(self, drawn: Sequence[Batch]) -> None:
        """See :class:`Method`."""
        settings = self._settings
        for batch in drawn:
            manifests = AT_HOME[self._name](batch)
            mine = manifests[settings.rank]
            tensors = _tensors(settings, batch, mine)
            self._steps.append((self._runner(manifests), tensors, predicted_tokens(batch)))

    def run(self, step: int) -> Measured:
        """See :class:`Method`."""
        runner, tensors, predicted = self._steps[step]
        attention.use(runner)
        loss = self.stack.forward_backward(tensors, predicted)
        self.stack.update()
        return Measured(loss)

    def finish(self, step: int, measured: Measured) -> None:
        """See :class:`Method`."""
        measured.seconds = self._watch.read()

    def close(self) -> None:
        """See :class:`Method`."""
        attention.use(None)

    def _runner(self, manifests: list[RankManifest]) -> attention.Attention:
        settings, mine = self._settings, manifests[self._settings.rank]
        if self._name == PYTORCH:
            return RingAttention(settings.device, self._watch, self._group)
        if self._name in (CONTEXT_PARALLEL, UNSENT):
            keys = attention.UnsentKeys if self._name == UNSENT else attention.GatheredKeys
            return keys(
                self._kernel, manifests, settings.rank, settings.device, self._watch, self._group
            )
        return attention.WholeDocuments(self._kernel, mine, settings.device, self._watch)


class Disaggregated:
    """DistCA in place: a session of a real control plane, ping-pong, UCX.

    Args:
        settings: of the rank.
        name: of the job.
        interleave: False is without ping-pong.
        homes: ``"planned"`` or ``"packed"``.
        signal: messages have one byte; see :mod:`benchmarks.gpu.training.signal`.
        placement: in place, or on attention nodes.
        checksums: messages carry one.
    """

    def __init__(
        self,
        settings: RankSettings,
        name: str = "disaggregated",
        *,
        interleave: bool = True,
        homes: str = "planned",
        signal: bool = False,
        placement: Placement = Placement.IN_PLACE,
        checksums: bool = False,
    ) -> None:
        self._settings, self._homes = settings, homes
        self._exits = ExitStack()
        if signal:
            self._exits.enter_context(one_byte_messages(settings.device))
        keep_profile(settings)
        self.session = self._exits.enter_context(
            Session.open(
                SessionOptions(
                    control_plane=settings.control_plane,
                    job=name,
                    rank=settings.rank,
                    n_ranks=settings.n_ranks,
                    n_layers=settings.model.layers,
                    n_nano_batches=settings.n_nano_batches,
                    shape=settings.model.attention,
                    placement=placement,
                    tolerance=settings.tolerance,
                    checksums=checksums,
                    device=str(settings.device),
                    data_host="127.0.0.1",
                    one_host=True,
                    kept_forward_ticks=KEPT_FORWARD_TICKS,
                    profile_dir=settings.folder,
                )
            )
        )
        self.stack = _stack(
            settings,
            trainer_client.models.transformers.IMPLEMENTATION,
            n_lanes=settings.n_nano_batches,
            interleave=interleave,
        )
        self._steps: list[tuple[list[Any], int]] = []
        self._report: StepReport | None = None

    def prepare(self, drawn: Sequence[Batch]) -> None:
        """See :class:`Method`."""
        settings = self._settings
        profile = CostProfile.load(profile_path(settings))
        options = PlanningOptions(tolerance=settings.tolerance)
        for step, batch in enumerate(drawn):
            if self._homes == "planned":
                manifests = batches.planned(
                    batch,
                    step,
                    profile,
                    options,
                    settings.n_nano_batches,
                    cuts_documents=settings.cuts_documents,
                )
            else:
                manifests = batches.in_pairs(batch, step)
            mine = manifests[settings.rank]
            self.session.submit(mine)
            self._steps.append((_tensors(settings, batch, mine), predicted_tokens(batch)))

    def run(self, step: int) -> Measured:
        """See :class:`Method`."""
        tensors, predicted = self._steps[step]
        with self.session.step(step) as running:
            if step == 0:
                # All are connected before a collective runs on a GPU.
                dist.all_reduce(torch.zeros(1))
            loss = self.stack.forward_backward(tensors, predicted)
            self.stack.update()
        self._report = running.report
        return Measured(loss)

    def finish(self, step: int, measured: Measured) -> None:
        """See :class:`Method`."""
        assert self._report is not None
        report = self._report
        measured.seconds = {"wait": report.wait_seconds, "send": report.send_seconds}
        measured.extra = {
            "sent_bytes": report.sent_bytes,
            "received_bytes": report.received_bytes,
            "plan_wait_seconds": report.plan_wait_seconds,
            "replayed_ticks": report.replayed_ticks,
        }
        if self._settings.rank == 0:
            measured.extra |= self._planned(step)

    @property
    def buffer_bytes(self) -> float:
        """Memory of message buffers, in use or idle, which is not PyTorch's."""
        return pool_bytes(self.session)

    def close(self) -> None:
        """See :class:`Method`."""
        self._exits.close()

    def _planned(self, step: int) -> dict[str, Any]:
        found = StepMeasurements.from_proto(self.session.fetch_step(step))
        seconds = found.measured_seconds
        return {
            "plan_seconds": found.plan_seconds,
            "planned_imbalance": tick_imbalance(found.planned_seconds),
            "busy_seconds": None if seconds is None else seconds.sum(axis=0).tolist(),
            "measured_imbalance": found.measured_imbalance,
            "planned_seconds": (
                found.planned_seconds.sum(axis=0) * self._settings.model.layers
            ).tolist(),
        }


def pool_bytes(session: Session) -> float:
    """Memory of a session's message buffers, in use or idle."""
    registry = session.metrics_registry
    return sum(
        registry.get_sample_value(POOL_METRIC, {"pool": "messages", "state": state}) or 0.0
        for state in ("in_use", "idle")
    )


def make(name: str, settings: RankSettings) -> Method:
    """The way called ``name``; see METHODS."""
    if name in AT_HOME:
        return AtHome(settings, name)
    if name == "disaggregated":
        return Disaggregated(settings)
    if name == "disaggregated-packed":
        return Disaggregated(settings, name, homes="packed")
    if name == "sealed":
        return Disaggregated(settings, name, checksums=True)
    if name == "signal":
        return Disaggregated(settings, name, signal=True)
    if name == POOL:
        return Disaggregated(settings, name, placement=Placement.POOL)
    if name == "single-stream":
        return Disaggregated(settings, name, interleave=False)
    raise ValueError(f"method is {name!r}; valid are {METHODS}")


def require_runnable(name: str, batch: Batch, device_type: str) -> None:
    """Raises CannotRun, which says why, if the way called ``name`` cannot run ``batch`` on devices
    of that type, and ValueError if there is no such way."""
    if name not in METHODS:
        raise ValueError(f"way is {name!r}; valid are {', '.join(METHODS)}")
    if name == PYTORCH:
        require_one_document(batch)
        ring_module()
        if device_type != "cuda":
            raise CannotRun(
                f"{PYTORCH} is a ring of flash attention, which runs on CUDA devices, not on "
                f"{device_type!r}"
            )
    elif name in ("plain", "repacked", "disaggregated-packed"):
        require_whole_documents(batch, name)


POOL = "pool"
CONTEXT_PARALLEL = "context-parallel"
UNSENT = "context-parallel-unsent"
PYTORCH = "pytorch-context-parallel"
AT_HOME: dict[str, Callable[[Batch], list[RankManifest]]] = {
    "plain": batches.packed,
    "repacked": batches.repacked,
    CONTEXT_PARALLEL: batches.zigzag,
    UNSENT: batches.zigzag,
    # What PyTorch's load balancer makes of one document.
    PYTORCH: batches.zigzag,
}
"""Ways that need no service, with their layouts: which rank holds what."""
METHODS = (
    *AT_HOME,
    "disaggregated",
    "disaggregated-packed",
    "sealed",
    "signal",
    "single-stream",
    POOL,
)


def _stack(
    settings: RankSettings,
    implementation: str,
    *,
    n_lanes: int,
    interleave: bool = True,
) -> TrainingStack:
    return TrainingStack(
        settings.model,
        implementation,
        n_lanes=n_lanes,
        interleave=interleave,
        max_positions=settings.longest_document,
        compiled=settings.compiled,
        learning_rate=settings.learning_rate,
        device=settings.device,
        n_ranks=settings.n_ranks,
    )


def _tensors(settings: RankSettings, batch: Batch, mine: RankManifest) -> list[Any]:
    return [
        batches.tokens_of(batch.seed, segments, settings.model.vocabulary, settings.device)
        for segments in mine.nano_batches
    ]


def profile_path(settings: RankSettings) -> Path:
    """Where a rank's server finds its cost profile."""
    return _profile_path(settings.folder, settings.device, settings.model.attention)


def _profile_path(folder: Path, device: torch.device, shape: AttentionShape) -> Path:
    return folder / profile_file_name(device_name(device), select_kernel(device).name, shape)


def keep_profile(settings: RankSettings) -> None:
    """Gives servers on an H200 the profile that the simulator has, instead of a quick one."""
    if settings.rank == 0:
        ship_profile(settings.folder, settings.device, settings.model.attention)
    dist.barrier()


def ship_profile(folder: Path, device: torch.device, shape: AttentionShape) -> None:
    """Puts the simulator's profile into ``folder`` if it is of this device and shape."""
    shipped = CostProfile.load(PROFILE)
    path = _profile_path(folder, device, shape)
    if shipped.device == device_name(device) and shipped.shape == shape and not path.exists():
        replace(shipped, kernel=select_kernel(device).name).save(path)


def imbalance(seconds: Sequence[float]) -> float:
    """Max over mean."""
    return float(np.max(seconds) / np.mean(seconds)) if np.mean(seconds) > 0 else 1.0
