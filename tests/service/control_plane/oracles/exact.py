"""The least bytes that any plan can move: an exact model of small in-place steps, solved by HiGHS.

Documents lie whole on one rank and are cut on a grid of tokens; every block runs on one server. A
block away from home moves its Q and O rows; a server that runs blocks of another home's document
fetches the K and V rows up to the end of the last of them, once. No server runs longer than a cap.
The planner cuts at the same multiples of 128 tokens, so both choose among the same plans, with
one exception for the solver's sake: servers above the cap only give, those below it only take.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from control_plane.planner import balanced
from control_plane.planner.forecast import row_bytes
from control_plane.planner.planning import PlanningOptions
from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase
from core_attention.manifest import Manifest, RankManifest
from tests.support.planning_cases import SHAPE, in_place, uniform_profile

GRID_TOKENS = 128
LIMIT_SECONDS = 60.0
"""For the solver, which takes a few on a machine that has nothing else to do."""


@dataclass(frozen=True)
class ExactPlan:
    """What the solver found.

    Attributes:
        moved_bytes: of the best plan.
        proven: whether no plan moves less, but for the solver's relative gap.
    """

    moved_bytes: float
    proven: bool


def least_bytes(
    lengths: Int64Array,
    home: Int64Array,
    n_servers: int,
    cap_pairs: float,
    q_bytes: float,
    kv_bytes: float,
    *,
    at_most_bytes: float = np.inf,
) -> ExactPlan:
    """The least bytes such that no server runs more than ``cap_pairs`` query-key pairs.

    Args:
        lengths: ``[n_documents]`` tokens.
        home: ``[n_documents]`` the rank and server of each.
        q_bytes, kv_bytes: per row that moves.
        at_most_bytes: of a plan that is known, which lets the solver skip worse ones.
    """
    blocks = _Blocks.of(lengths)
    load = np.bincount(home[blocks.document], weights=blocks.pairs, minlength=n_servers)
    gives, takes = load > cap_pairs, np.flatnonzero(load <= cap_pairs)
    moving = np.flatnonzero(gives[home[blocks.document]])
    document, n_takes = blocks.document[moving], len(takes)
    begin, end, pairs = (column[moving] for column in (blocks.begin, blocks.end, blocks.pairs))
    documents, document = np.unique(document, return_inverse=True)
    # Variables: does block b run on taker t; up to where does t have the keys of document d.
    n_moves, n_keys = len(moving) * n_takes, len(documents) * n_takes
    n = n_moves + n_keys
    move = np.arange(n_moves)
    of_move, to_move = move // n_takes, move % n_takes
    key_of_move = n_moves + document[of_move] * n_takes + to_move
    cost = np.concatenate([q_bytes * (end - begin)[of_move], np.full(n_keys, kv_bytes)])
    once = _rows(of_move, move, n)
    taken = _rows(to_move, move, n, pairs[of_move])
    source = np.flatnonzero(gives)
    index_of_source = np.cumsum(gives) - 1
    given = _rows(index_of_source[home[documents[document[of_move]]]], move, n, pairs[of_move])
    reach = _rows(
        np.tile(move, 2),
        np.concatenate([move, key_of_move]),
        n,
        np.concatenate([-end[of_move].astype(float), np.ones(n_moves)]),
    )
    result = milp(
        cost,
        constraints=[
            LinearConstraint(once, 0, 1),
            LinearConstraint(taken, -np.inf, cap_pairs - load[takes]),
            LinearConstraint(given, load[source] - cap_pairs, np.inf),
            LinearConstraint(reach, 0, np.inf),
            LinearConstraint(cost[None, :], -np.inf, at_most_bytes),
        ],
        integrality=np.concatenate([np.ones(n_moves), np.zeros(n_keys)]),
        bounds=Bounds(
            0,
            np.concatenate(
                [np.ones(n_moves), np.repeat(lengths[documents], n_takes).astype(float)]
            ),
        ),
        options={"time_limit": LIMIT_SECONDS, "mip_rel_gap": 0.002},
    )
    # 2: nothing below `at_most_bytes` exists, up to rounding.
    found = at_most_bytes if result.x is None else float(result.fun)
    return ExactPlan(found, result.status in (0, 2))


@dataclass(frozen=True)
class _Blocks:
    document: Int64Array
    begin: Int64Array
    end: Int64Array
    pairs: Float64Array

    @classmethod
    def of(cls, lengths: Int64Array) -> _Blocks:
        begin = [np.arange(0, length, GRID_TOKENS) for length in lengths]
        document = np.repeat(np.arange(len(lengths)), [len(b) for b in begin])
        first = np.concatenate(begin)
        last = np.minimum(first + GRID_TOKENS, lengths[document])
        return cls(document, first, last, 0.5 * (last - first) * (first + last + 1.0))


def _rows(
    row: Int64Array,
    column: Int64Array,
    n_columns: int,
    values: Float64Array | Int64Array | None = None,
) -> coo_matrix:
    """A constraint matrix from its entries, all 1 if no values are given."""
    data = np.ones(len(row)) if values is None else values
    return coo_matrix((data, (row, column)), shape=(int(row.max()) + 1, n_columns))


@dataclass(frozen=True)
class SmallStep:
    """A step small enough to solve, drawn from a seed: ranks of equal tokens, some of them with
    one long document, the others with short ones.

    Attributes:
        lengths: of the documents of each rank.
    """

    lengths: tuple[tuple[int, ...], ...]

    @classmethod
    def draw(cls, n_ranks: int, n_blocks: int, seed: int) -> SmallStep:
        """Ranks of ``n_blocks`` grid blocks."""
        generator = np.random.default_rng(seed)
        ranks = []
        for _ in range(n_ranks):
            left = n_blocks
            longest = generator.choice(
                [n_blocks, n_blocks * 3 // 4, 3, 2], p=[0.25, 0.15, 0.3, 0.3]
            )
            held: list[int] = []
            while left:
                wanted = int(generator.integers(1, 4)) if held else longest
                blocks = min(wanted, left)
                held.append(blocks * GRID_TOKENS)
                left -= blocks
            ranks.append(tuple(held))
        return cls(tuple(ranks))

    @property
    def flat_lengths(self) -> Int64Array:
        return np.array([length for rank in self.lengths for length in rank], dtype=np.int64)

    @property
    def home(self) -> Int64Array:
        counts = [len(rank) for rank in self.lengths]
        return np.repeat(np.arange(len(counts)), counts)


SECONDS_PER_PAIR = 1e-9


def gap_to_optimum(step: SmallStep, tolerance: float) -> float | None:
    """Bytes of the balanced planner's forward pass / the least bytes at the cap that it keeps.

    Returns:
        None if nothing need move, or if the solver could not prove the least in its time.
    """
    n = len(step.lengths)
    ranks = [RankManifest.from_lengths(0, rank, [held]) for rank, held in enumerate(step.lengths)]
    options = PlanningOptions(
        tolerance=tolerance, min_forward_tokens=GRID_TOKENS, finest_cut_tokens=GRID_TOKENS
    )
    servers = in_place(n, profile=uniform_profile(SECONDS_PER_PAIR))
    plan = balanced.plan(Manifest.merge(ranks, n), servers, SHAPE, options)
    forecast = plan.forward_forecast
    assert forecast is not None
    moved = float(forecast.bytes_in.sum() + forecast.bytes_out.sum())
    if moved == 0:
        return None
    per_row = row_bytes(SHAPE, Phase.FORWARD)
    cap_seconds = max((1 + tolerance) * forecast.home_seconds.mean(), forecast.seconds.max())
    exact = least_bytes(
        step.flat_lengths,
        step.home,
        n,
        # Float sums of the same pairs in another order.
        cap_seconds / SECONDS_PER_PAIR * (1 + 1e-9),
        float(per_row.q_request + per_row.q_reply),
        float(per_row.kv_request),
        at_most_bytes=moved * (1 + 1e-9),
    )
    return moved / exact.moved_bytes if exact.proven else None
