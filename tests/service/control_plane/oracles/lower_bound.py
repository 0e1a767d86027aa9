"""What no plan can undercut: bytes of the greedy, of the balanced planner, and a proven bound.

Kernels run at one rate here, so that work is query-key pairs and the bound is exact; documents lie
whole on one rank, forward pass. Let C be the pairs that the busiest server of the greedy's plan
runs. Whoever holds more at home must give the rest away, S in total; a server with H < C at home
can take C - H (it may take more by giving up its own, which only adds to what must move).

A server that receives x pairs of one document, up to key e, gets at least the q rows that hold the
most pairs, those just below e: ``c(x) = w_q (e - sqrt(e^2 - 2 x)) + w_kv e`` bytes, least at the e
of ``control_plane.planner.chunk``, where c grows with the square root of x, until that e is the end
of the longest document. From there on c is convex, so above its tangent in that point. Let g be c
up to there and the tangent after it: nowhere above c, and concave with g(0) = 0. So x pairs spread
over several documents cost no less than g(x), and a sum of g over servers is least when the widest
rooms are filled and the others stay empty.

For one rank's rows the same holds with room C on every server.
"""

from __future__ import annotations

import numpy as np

from benchmarks import greedy
from benchmarks.planner import GREEDY_TOLERANCE, Case, Planned, draw
from control_plane.planner import balanced
from core_attention.arrays import Float64Array
from core_attention.ca_task import Phase, causal_qk_pairs
from core_attention.manifest import Manifest
from core_attention.shape import AttentionShape
from tests.service.control_plane.oracles.exact import uniform_servers

GRID = 4000
"""Points at which bytes per pair are evaluated; between them the lower neighbour counts."""


class LeastBytes:
    """The function g: least bytes for a server that receives pairs of documents up to a length."""

    def __init__(self, shape: AttentionShape, longest: int) -> None:
        w_q, w_kv = float(shape.q_row_bytes + shape.o_row_bytes), float(shape.kv_row_bytes)
        kappa = w_q / (w_q + w_kv)
        # Rows [a, b) hold ((b + 1/2)^2 - (a + 1/2)^2) / 2 pairs.
        last = longest + 0.5
        self._pairs = np.linspace(0.0, last * last / 2, GRID + 1)[1:]
        bend = (1 - kappa * kappa) * last * last / 2
        below = np.minimum(self._pairs, bend)
        end = np.sqrt(2 * below / (1 - kappa * kappa))
        rows = end - np.sqrt(end * end - 2 * below)
        moved = w_q * rows + w_kv * (end - 0.5)
        moved += w_q / (kappa * last) * (self._pairs - below)
        self._per_pair = np.minimum.accumulate(moved / self._pairs)

    def __call__(self, pairs: float) -> float:
        at = min(int(np.searchsorted(self._pairs, pairs)), GRID - 1)
        return pairs * float(self._per_pair[at])

    def over(self, headroom: Float64Array, pairs: float) -> float:
        """Least bytes to put ``pairs`` into ``headroom``."""
        total = 0.0
        for room in np.sort(headroom)[::-1]:
            taken = min(float(room), pairs)
            if taken <= 0:
                break
            total += self(taken)
            pairs -= taken
        return total


def least_bytes(manifest: Manifest, shape: AttentionShape, cap: float) -> tuple[float, float]:
    """Bytes that any plan moves in which no server runs more than ``cap`` pairs: of all ranks, and
    because of the rows of the busiest rank."""
    length = manifest.segment_length
    held = np.bincount(
        manifest.segment_rank,
        weights=causal_qk_pairs(np.zeros_like(length), length),
        minlength=manifest.n_ranks,
    )
    surplus, room = np.maximum(held - cap, 0.0), np.maximum(cap - held, 0.0)
    total = LeastBytes(shape, int(length.max())).over(room, float(surplus.sum()))
    busiest = 0.0
    for rank in np.flatnonzero(surplus):
        longest = int(length[manifest.segment_rank == rank].max())
        everyone = np.full(manifest.n_ranks - 1, cap)
        least = LeastBytes(shape, longest).over(everyone, float(surplus[rank]))
        busiest = max(busiest, least)
    return total, busiest


def measure(case: Case, seed: int) -> Float64Array:
    """Gigabytes of the greedy, the balanced planner at the same imbalance, and the bound: each in
    total and of the busiest rank."""
    manifest, servers = draw(case, seed), uniform_servers(case.n)
    base = Planned.by(greedy.plan, manifest, servers, GREEDY_TOLERANCE)
    imbalance = base.imbalance(Phase.FORWARD)
    ours = Planned.by(balanced.plan, manifest, servers, max(imbalance - 1, 0.0))
    # A thousandth more than the greedy's cap, which is the precision that the planner keeps.
    imbalance = max(imbalance, ours.imbalance(Phase.FORWARD))
    pairs = float(causal_qk_pairs(np.zeros_like(manifest.document_length),
                                  manifest.document_length).sum())  # fmt: skip
    total, busiest = least_bytes(manifest, servers[0].profile.shape, imbalance * pairs / case.n)
    return np.array(
        [
            *(base.moved_gb(servers), base.busiest_gb(servers)),
            *(ours.moved_gb(servers), ours.busiest_gb(servers)),
            *(total / 1e9, busiest / 1e9),
        ]
    )
