"""The inputs and outputs of planners: the interface between the control plane and its planners.

A planner is a pure function ``(manifest, servers, shape, options) -> Plan``: no I/O, no clock, no
randomness, the same input giving the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from core_attention.cost_model import CostProfile
from core_attention.errors import PlanError
from core_attention.manifest import OWN_ROWS, Manifest
from core_attention.pipelining import Pipelining
from core_attention.plan import Plan, PlanServer
from core_attention.shape import AttentionShape

NO_BASE = (0.0, 0.0)
"""``base_seconds`` of a server that does nothing but attention, or whose like all do the same."""


@dataclass(frozen=True, kw_only=True)
class PlanningServer:
    """An attention server as a planner sees it.

    Attributes:
        server: its name, place and address, copied into the plan.
        host: name of its machine; servers and ranks of one host share fast links.
        profile: its measured kernel cost.
        speed: correction from measured step times; 1.0 as profiled, 0.5 half as fast, 0.0 takes
            no work.
        capacity_rows: q plus k/v rows it can hold in one tick; None without limit.
        receives: whether it may be given work of other homes. An in-place server that does not
            still runs its own rank's tasks.
        base_seconds: seconds, forward and backward, that it computes beside attention in one
            nano-batch of one layer: the linear part of an in-place server's rank, nothing where
            a pipeline stage idles. Who has less of it is given more attention.
    """

    server: PlanServer
    host: str
    profile: CostProfile
    speed: float = 1.0
    capacity_rows: int | None = None
    receives: bool = True
    base_seconds: tuple[float, float] = NO_BASE

    def __post_init__(self) -> None:
        if not (math.isfinite(self.speed) and self.speed >= 0):
            raise PlanError(
                f"server {self.server.server_id}: speed is {self.speed}; it must be 0 or more"
            )
        if self.capacity_rows is not None and self.capacity_rows < 0:
            raise PlanError(
                f"server {self.server.server_id}: capacity_rows is {self.capacity_rows}; it must "
                "be 0 or more"
            )
        if not all(math.isfinite(seconds) and seconds >= 0 for seconds in self.base_seconds):
            raise PlanError(
                f"server {self.server.server_id}: base_seconds are {self.base_seconds}; they must "
                "be finite and 0 or more"
            )


def equal_servers(n_ranks: int, profile: CostProfile) -> list[PlanningServer]:
    """One in-place server a rank, all alike, each on a host of its own."""
    return [
        PlanningServer(
            server=PlanServer(server_id=f"rank-{rank}", in_place_rank=rank, address=""),
            host=f"host-{rank}",
            profile=profile,
        )
        for rank in range(n_ranks)
    ]


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """The user's choices about plans.

    Attributes:
        tolerance: eps, by which the busiest server may exceed the mean load, base loads included;
            0 or more.
        min_forward_tokens: shortest piece that a document is cut into, forward.
        min_backward_tokens: the same, backward, where short pieces run slowly. Half of either
            counts where the tolerance could not be kept otherwise; less only where it would be
            exceeded by 1%.
        finest_cut_tokens: cuts lie at multiples of 128 tokens in the document, the tile of the
            kernels; of a smaller power of two, down to this one, where 128 queries are too much
            work to balance with.
        host_bytes_per_second: bandwidth between two processes of one host. Only its ratio to the
            next counts: moving work inside a host is preferred by that ratio.
        network_bytes_per_second: bandwidth between two hosts, a process.
        rank_hosts: host name of every rank. Needed only for ranks without an in-place server,
            which otherwise count as being on a host of their own.
        pipelining: of ranks that form pipelines: each slot of the schedule is balanced by itself,
            on top of what its ranks compute beside attention.
    """

    tolerance: float = 0.03
    min_forward_tokens: int = 128
    min_backward_tokens: int = 1024
    finest_cut_tokens: int = 16
    host_bytes_per_second: float = 300e9
    network_bytes_per_second: float = 50e9
    rank_hosts: tuple[str, ...] | None = None
    pipelining: Pipelining | None = None

    def __post_init__(self) -> None:
        if not (_is_number(self.tolerance) and self.tolerance >= 0):
            raise PlanError(f"tolerance is {self.tolerance}; it must be 0 or more")
        for name in ("host_bytes_per_second", "network_bytes_per_second"):
            value = getattr(self, name)
            if not (_is_number(value) and value > 0):
                raise PlanError(
                    f"{name} is {value}; it must be a number above 0: measure it, or leave the "
                    "default"
                )
        for name in ("min_forward_tokens", "min_backward_tokens", "finest_cut_tokens"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}; it must be 1 or more")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def refuse_carried_keys(manifest: Manifest, why: str, *, handed_over: bool = False) -> None:
    """Refuse documents that are cut between nano-batches or have parents; with ``handed_over``
    only where that is in another nano-batch."""
    its = manifest.carried_document
    if handed_over:
        its = its[manifest.carried_origin != OWN_ROWS]
    if len(its):
        document = int(its[0])
        raise PlanError(
            f"document {manifest.document_id[document]} carries "
            f"{manifest.document_begin[document]} keys into nano-batch "
            f"{manifest.document_nano_batch[document]}, and {why}: keep documents whole there, "
            "without a parent"
        )


class Planner(Protocol):
    """A pure function from a step's manifest and the servers at hand to a plan."""

    def __call__(
        self,
        manifest: Manifest,
        servers: Sequence[PlanningServer],
        shape: AttentionShape,
        options: PlanningOptions,
        *,
        epoch: int = 0,
    ) -> Plan:
        """Plans one step.

        Args:
            manifest: the whole step.
            servers: at least one that may receive, or an in-place one for every rank.
            shape: heads, head dims and dtype, for the bytes.
            options: tolerance and cuts.
            epoch: copied into the plan.

        Returns:
            A plan that names every server of ``servers``, in their order, with its forecasts.

        Raises:
            PlanError: no server can take the work, or capacity is short (the message says which
                number is short by how much).
        """
