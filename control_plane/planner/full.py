"""Plans under the full mask: every query of a document sees all of its keys.

The work of a piece is its queries times the document's length, wherever in the document it lies,
so a server's surplus is cut off in one step: no cut is cheaper than another. Every segment begins
at home, or on the least busy server where its rank has none. Then the busiest server gives to the
least busy one, from its longest documents first, whose queries carry the most work for the bytes
that they move, until it is within the tolerance or no piece is long enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from control_plane.planner.forecast import row_bytes
from control_plane.planner.planning import (
    PlanningOptions,
    PlanningServer,
    refuse_carried_keys,
)
from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import MaskKind, Phase, TaskTable
from core_attention.errors import PlanError
from core_attention.manifest import Manifest
from core_attention.plan import PhaseForecast, Plan
from core_attention.routing import derive_routes
from core_attention.shape import AttentionShape

CUT_TOKENS = 128
"""Cuts lie at multiples of it in their segment: the tile of the kernels."""


@dataclass
class _Piece:
    """Queries ``[begin, end)`` of a document of ``length`` tokens."""

    document: int
    begin: int
    end: int
    length: int


def plan(
    manifest: Manifest,
    servers: Sequence[PlanningServer],
    shape: AttentionShape,
    options: PlanningOptions,
    *,
    epoch: int = 0,
) -> Plan:
    """Plans one step; see :class:`~control_plane.planner.planning.Planner`."""
    if options.pipelining is not None:
        raise PlanError("pipelines of ranks are planned under the causal mask only")
    refuse_carried_keys(manifest, "under the full mask its queries would need keys behind them")
    tables, forecasts, reasons = {}, {}, []
    for phase in Phase:
        tables[phase], reason = _plan_phase(manifest, servers, options, phase)
        forecasts[phase] = forecast(manifest, tables[phase], servers, shape, phase)
        reasons.append(f"{phase}: {reason}")
    return Plan(
        manifest=manifest,
        epoch=epoch,
        servers=tuple(server.server for server in servers),
        forward=tables[Phase.FORWARD],
        backward=tables[Phase.BACKWARD],
        mask=MaskKind.FULL,
        planner="full",
        reason="; ".join(reasons),
        forward_forecast=forecasts[Phase.FORWARD],
        backward_forecast=forecasts[Phase.BACKWARD],
    )


def _plan_phase(
    manifest: Manifest, servers: Sequence[PlanningServer], options: PlanningOptions, phase: Phase
) -> tuple[TaskTable, str]:
    rows: list[tuple[int, int, int, int]] = []
    stopped = 0
    for nano_batch in range(manifest.n_nano_batches):
        board = _Board(manifest, servers, options, phase, nano_batch)
        stopped += not board.balance()
        rows += board.tasks()
    rows.sort()
    table = TaskTable(*np.array(rows, dtype=np.int64).reshape(-1, 4).T, mask=MaskKind.FULL)
    shown = f"{stopped} nano-batches of {manifest.n_nano_batches} ended above the tolerance"
    if not stopped:
        shown = f"every server is within {options.tolerance:g} of the target load"
    return table, shown


class _Board:
    """The assignment of one nano-batch and phase, while it is planned."""

    def __init__(
        self,
        manifest: Manifest,
        servers: Sequence[PlanningServer],
        options: PlanningOptions,
        phase: Phase,
        nano_batch: int,
    ) -> None:
        self._servers, self._phase, self._tolerance = servers, phase, options.tolerance
        forward = phase is Phase.FORWARD
        self._shortest = options.min_forward_tokens if forward else options.min_backward_tokens
        self._receives = [s.receives and s.speed > 0 for s in servers]
        self._pieces: list[list[_Piece]] = [[] for _ in servers]
        self._seconds = [0.0] * len(servers)
        at_home = {s.server.in_place_rank: i for i, s in enumerate(servers) if s.speed > 0}
        its = np.flatnonzero(manifest.document_nano_batch[manifest.segment_document] == nano_batch)
        document, begin = manifest.segment_document[its], manifest.segment_offset[its]
        queries, length = manifest.segment_length[its], manifest.document_length[document]
        # At once, as one by one it would take seconds for a step of short documents.
        profiles = {id(s.profile): s.profile for s in servers}
        seconds = {
            name: profile.seconds(queries, length, phase) for name, profile in profiles.items()
        }
        columns = (document, begin, begin + queries, length, manifest.segment_rank[its])
        for at, (*piece, rank) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            server = at_home[rank] if rank in at_home else self._least_busy()
            self._pieces[server].append(_Piece(*piece))
            cost = float(seconds[id(servers[server].profile)][at])
            self._seconds[server] += cost / self._speed(server)

    def balance(self) -> bool:
        """Moves work until no server is above the target load and the tolerance; whether it got
        there."""
        work = sum(seconds * self._speed(server) for server, seconds in enumerate(self._seconds))
        able = [i for i, seconds in enumerate(self._seconds) if seconds or self._receives[i]]
        target_load = work / sum(self._speed(i) for i in able) if able else 0.0
        for _ in range(16 * len(able) * len(able)):
            giver = max(able, key=lambda i: (self._seconds[i], -i), default=0)
            if not able or self._seconds[giver] <= target_load * (1 + self._tolerance):
                return True
            if not self._give(giver, target_load):
                return False
        return False

    def tasks(self) -> list[tuple[int, int, int, int]]:
        """(document, q_begin, q_end, server) of every piece."""
        return [
            (piece.document, piece.begin, piece.end, server)
            for server, pieces in enumerate(self._pieces)
            for piece in pieces
        ]

    def _give(self, giver: int, target_load: float) -> bool:
        """Moves one piece from ``giver``; False if there is none to move or nobody to take it."""
        takers = [i for i in range(len(self._servers)) if self._receives[i] and i != giver]
        taker = min(takers, key=lambda i: (self._seconds[i], i), default=giver)
        surplus, room = self._seconds[giver] - target_load, target_load - self._seconds[taker]
        if taker == giver or room <= 0:
            return False
        for piece in sorted(self._pieces[giver], key=lambda p: (-p.length, p.document, p.begin)):
            length = piece.end - piece.begin
            by_giver = self._cost(giver, piece) / length
            by_taker = self._cost(taker, piece) / length
            wanted = min(surplus / by_giver, room / by_taker)
            n = min(int(wanted) // CUT_TOKENS * CUT_TOKENS, length)
            if n < min(self._shortest, length) or length - n < self._shortest:
                n = length if wanted >= length else 0
            if not n:
                continue
            self._pieces[giver].remove(piece)
            self._seconds[giver] -= self._cost(giver, piece)
            given = _Piece(piece.document, piece.end - n, piece.end, piece.length)
            if n < length:
                self._add(giver, _Piece(piece.document, piece.begin, piece.end - n, piece.length))
            self._add(taker, given)
            return True
        return False

    def _add(self, server: int, piece: _Piece) -> None:
        self._pieces[server].append(piece)
        self._seconds[server] += self._cost(server, piece)

    def _cost(self, server: int, piece: _Piece) -> float:
        seconds = self._servers[server].profile.seconds(
            piece.end - piece.begin, piece.length, self._phase
        )
        return float(seconds) / self._speed(server)

    def _speed(self, server: int) -> float:
        return self._servers[server].speed

    def _least_busy(self) -> int:
        able = [i for i, receives in enumerate(self._receives) if receives]
        if not able:
            raise PlanError(
                "no server may take work, and a rank has no server of its own; start attention "
                "nodes, or open the job in-place"
            )
        return min(able, key=lambda i: (self._seconds[i], i))


def forecast(
    manifest: Manifest,
    tasks: TaskTable,
    servers: Sequence[PlanningServer],
    shape: AttentionShape,
    phase: Phase,
) -> PhaseForecast:
    """The costs of ``tasks`` for each server; see
    :func:`control_plane.planner.forecast.forecast`."""
    return PhaseForecast(
        home_seconds=_home_seconds(manifest, servers, phase),
        seconds=_seconds(manifest, tasks, servers, phase),
        **rows_and_bytes(manifest, tasks, servers, shape, phase),
    )


def rows_and_bytes(
    manifest: Manifest,
    tasks: TaskTable,
    servers: Sequence[PlanningServer],
    shape: AttentionShape,
    phase: Phase,
) -> dict[str, Int64Array]:
    """The columns of :class:`PhaseForecast` that routes say, by which keys count once a server
    however many documents carry them."""
    n_nano, n_servers = manifest.n_nano_batches, len(servers)
    q_rows, kv_rows, q_moved, kv_moved = (
        np.zeros((n_nano, n_servers), dtype=np.int64) for _ in range(4)
    )
    for nano_batch in range(n_nano):
        for (rank, server), route in derive_routes(manifest, tasks, nano_batch).items():
            q_rows[nano_batch, server] += route.n_q_rows
            kv_rows[nano_batch, server] += route.n_kv_rows
            if servers[server].server.in_place_rank != rank:
                q_moved[nano_batch, server] += route.n_q_rows
                kv_moved[nano_batch, server] += route.n_kv_rows
    per_row = row_bytes(shape, phase)
    return {
        "q_rows": q_rows,
        "kv_rows": kv_rows,
        "bytes_in": q_moved * per_row.q_request + kv_moved * per_row.kv_request,
        "bytes_out": q_moved * per_row.q_reply + kv_moved * per_row.kv_reply,
    }


def _seconds(
    manifest: Manifest, tasks: TaskTable, servers: Sequence[PlanningServer], phase: Phase
) -> Float64Array:
    """``[n_nano_batches, n_servers]``."""
    seconds = np.zeros((manifest.n_nano_batches, len(servers)))
    k_end, nano = tasks.k_end(manifest), manifest.document_nano_batch[tasks.document]
    for index, server in enumerate(servers):
        its = np.flatnonzero(tasks.server == index)
        if its.size:
            cost = server.profile.seconds(tasks.q_end[its] - tasks.q_begin[its], k_end[its], phase)
            with np.errstate(divide="ignore"):
                np.add.at(seconds[:, index], nano[its], cost / np.float64(server.speed))
    return seconds


def _home_seconds(
    manifest: Manifest, servers: Sequence[PlanningServer], phase: Phase
) -> Float64Array:
    """``[n_nano_batches, n_ranks]`` on each rank's own server, or the first one's profile."""
    seconds = np.zeros((manifest.n_nano_batches, manifest.n_ranks))
    own = {server.server.in_place_rank: server for server in servers if server.speed > 0}
    length: Int64Array = manifest.document_length[manifest.segment_document]
    nano = manifest.document_nano_batch[manifest.segment_document]
    for rank in range(manifest.n_ranks):
        its = np.flatnonzero(manifest.segment_rank == rank)
        server = own.get(rank)
        profile, speed = (server.profile, server.speed) if server else (servers[0].profile, 1.0)
        cost = profile.seconds(manifest.segment_length[its], length[its], phase)
        np.add.at(seconds[:, rank], nano[its], cost / speed)
    return seconds
