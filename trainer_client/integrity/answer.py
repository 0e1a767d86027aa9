"""A server's reply with all that is needed to judge it: the plan, the rows, and what was sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from core_attention.arrays import Int64Array, runs_to_rows
from core_attention.host_copies import on_device
from core_attention.plan import Plan
from core_attention.routing import PairRoute
from core_attention.score_rule import PLAIN, ScoreRule
from core_attention.tick import Tick

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class Answer:
    """One server's part of one tick.

    Attributes:
        tick: which exchange.
        server_id: the server.
        plan: this rank's slice of the plan in force.
        route: which rows were exchanged.
        inputs: q, k, v, and for backward also do, lse, delta, by packed row of this rank, with
            carried keys behind the others.
        results: o and lse, or dq, dk and dv, by row of the route.
        rule: for the scores.
    """

    tick: Tick
    server_id: str
    plan: Plan
    route: PairRoute
    inputs: Tensors
    results: Tensors
    rule: ScoreRule = PLAIN

    def inputs_of(self, document: int) -> dict[str, torch.Tensor]:
        """The inputs of ``document`` (an index of the plan's manifest) alone."""
        queries, carried = self._rows_of("segment", document), self._rows_of("carried", document)
        rows_of = dict.fromkeys(self.inputs, queries)
        rows_of["k"] = rows_of["v"] = np.concatenate([queries, carried])
        return {
            name: tensor[on_device(torch.from_numpy(rows_of[name]), tensor.device)]
            for name, tensor in self.inputs.items()
        }

    def _rows_of(self, kind: str, document: int) -> Int64Array:
        """Packed rows on this rank."""
        its, length, rank, row = (
            getattr(self.plan.manifest, f"{kind}_{name}")
            for name in ("document", "length", "rank", "row")
        )
        mine = (its == document) & (rank == self.route.rank)
        return runs_to_rows(row[mine], length[mine])

    def spans_ranks(self, document: int) -> bool:
        """Return whether other ranks hold rows of ``document``."""
        held = self.plan.manifest.held
        ranks = held.rank[held.document == document]
        return bool((ranks != self.route.rank).any())

    def readers(self, document: int) -> dict[int, int]:
        """The documents that read keys of ``document`` on the server, itself among them, and where
        in both the last of these ends. Gradients are sums over all of them."""
        route = self.route
        mine, end = route.kv_document == document, route.kv_offset + route.kv_length
        own_ends = dict(zip(route.kv_row[mine].tolist(), end[mine].tolist(), strict=True))
        found: dict[int, int] = {}
        shared = np.isin(route.kv_row, route.kv_row[mine])
        runs = (column[shared].tolist() for column in (route.kv_document, route.kv_row, end))
        for each, row, its_end in zip(*runs, strict=True):
            found[each] = max(found.get(each, 0), min(its_end, own_ends[row]))
        return found

    def key_rows(self, document: int, k_end: int) -> Int64Array | None:
        """Packed rows of the keys ``[0, k_end)`` of ``document`` that the server was sent, by
        position; None if other ranks hold some of them."""
        runs = np.flatnonzero(self.route.kv_document == document)
        lengths = self.route.kv_length[runs]
        begins = np.cumsum(lengths) - lengths
        if (self.route.kv_offset[runs] != begins).any() or lengths.sum() < k_end:
            return None
        return runs_to_rows(self.route.kv_row[runs], lengths)[:k_end]
