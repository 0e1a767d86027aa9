"""One phase of one nano-batch, from segments and servers to tasks: the steps in their order."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from control_plane.planner.board import (
    BYTES,
    CHUNKS,
    COST,
    MOVED_WHOLE,
    Board,
    Segments,
)
from control_plane.planner.candidates import Variant
from control_plane.planner.chunk import CutRules, with_alignment
from control_plane.planner.compiled import compiled, compiled_inner, compiled_into, compiled_leaf
from control_plane.planner.costs import pace_seconds
from control_plane.planner.exports import export_surplus, most_chunks_of
from control_plane.planner.fleet import Fleet, pace_of
from control_plane.planner.links import Links
from control_plane.planner.memory import relieve_memory
from control_plane.planner.opening import (
    Opening,
    hold_home_work,
    open_board,
    prepare_opening,
)
from control_plane.planner.placement import place_homeless
from control_plane.planner.splitting import split_surplus
from control_plane.planner.survey import HomeWork
from control_plane.planner.target_load import Work, expected_growth, target_load_of_growth, weigh
from control_plane.planner.tasks import Cuts, collect_cuts
from core_attention.arrays import Float64Array

CORRECTIONS = 2
"""How often the target load is corrected for the rates of the pieces."""
MOST_SHIFTS = 2
"""Shifts of each cut that are tried for small fleets, which are planned several times anyway."""
LARGEST_CORRECTION = 0.1
"""The share by which the target load may fall below an estimate before senders are looked up
again."""
URGENCIES = (1.0, 2.0, 4.0, 0.0)
"""How much more chunks of the sender with the most to give count; large fleets use the first."""
LARGEST_DRIFT = 1e-2
SMALL_FLEET_DRIFT = 5e-3
"""Relative error of the target load that is left uncorrected: time counts more for large fleets."""
FEW = 64
"""Pieces that are quickly found, however few servers there are."""
MOST_VARIED = 3
"""Pieces for each server above which no variants are tried: one more or less weighs little then."""
SAMPLED_SERVERS = 48
"""Receivers whose chunks give the rates of the pieces of fleets several times as large."""
MOST_MISSED = 1e-2
"""Share of the target load by which a plan may miss the tolerance before documents are split
instead."""
GIVE_UP = 0.1
"""Share of the cap by which it may rise while chunks are searched for, where splitting is left."""
SAND_SHARE = 1.0 / 32.0
"""The share of the cap up to which all documents of senders must be to be split at once:
whole ones fill any room, and a search for each would take long."""
WASTES = (0.5, 0.05)
"""Shares by which split pieces may run slower before servers must give away documents of their own
for longer ones: tried one after the other where the tolerance is missed."""
SPLITTINGS = 8
"""Target loads at which documents are split, to find the least."""
SPLIT_DRIFT = 2e-3
"""Relative change of the target load below which it is found."""
FINEST_RUNG = 0.01
"""Small fleets are planned at several tolerances, the *rungs*: the one that is asked for, and those
of 0, this and its doubles that are tighter. Searches are full of accidents: in wider rooms one may
end busier and with more bytes. A rung's search is the same whatever is asked for, so that what is
found for a tighter tolerance of these is found for a looser one, too."""
MOST_RUNG_SERVERS = 16
"""Servers of a fleet that is planned so: in larger ones a search takes longer, and with lengths as
they are in training the others save no bytes."""
RUNG_SHARE = 4
"""A rung gets one in so many of the variants: two or three rungs are planned before one is dear."""
DEAR = 1.03
"""Cost of a rung's plan, over that of the best one, above which tighter rungs are not looked at."""
MOST_SEGMENTS = 1 << 14
"""Segments of a nano-batch above which only the asked tolerance is planned: a search takes long."""
CHALLENGES = 2
"""How often a small fleet's documents are split after a search: where giants must be divided, that
is often cheaper, by a tenth and more."""
LEAST_RELIEF = 8e-3
"""The share by which a target load must rise for a search that gave up to be made again: of 1,000
random kinds of steps none came to its end that had less."""


class Outcome(NamedTuple):
    """The outcome of planning a phase of a nano-batch.

    Attributes:
        target_load: seconds, base loads included, in which all servers would finish if work could
            be divided at will.
        scale: factor on the target load, for the rates at which pieces run.
        work_ratio: seconds of the plan's tasks to those of the uncut segments at home.
        raised: by how many seconds the cap was raised above (1 + eps) x target load, or would have
            had to be where documents were split; infinite if some server stayed above it.
        excess: by how many seconds the busiest server is above (1 + eps) x the target load of the
            tasks as they were cut.
        busiest: seconds of that server, base load included.
        spent_bytes: bytes moved, beyond what documents that span ranks need anyway.
        spent_cost: the same, weighted by link.
        n_chunks: pieces that left their home.
        stuck_segment, stuck_end: the first part that fits on no server, else -1.
        stuck_server: a server whose own rank's rows exceed its memory and fit nowhere, else -1.
    """

    target_load: float
    scale: float
    work_ratio: float
    raised: float
    excess: float
    busiest: float
    spent_bytes: float
    spent_cost: float
    n_chunks: int
    stuck_segment: int
    stuck_end: int
    stuck_server: int


class Setting(NamedTuple):
    """The inputs of planning a phase of a nano-batch; see :func:`plan_phase`."""

    segments: Segments
    home: HomeWork
    fleet: Fleet
    rules: CutRules
    links: Links
    tolerance: float


class Way(NamedTuple):
    """The way in which one plan is made. A tuple, because a function is compiled again for every
    constant that it is called with.

    Attributes:
        every: 1; or more for a sample of the exports, whose ``work_ratio`` is what all of them
            would give.
        give_up: share of the cap by which it may rise.
        splits: by splitting, not by a search for chunks.
        waste: of splitting: finite if a server may get a piece for which documents of its own must
            go.
    """

    every: int
    give_up: float
    splits: bool
    waste: float


@compiled
def plan_phase(
    segments: Segments,
    home: HomeWork,
    fleet: Fleet,
    rules: CutRules,
    links: Links,
    tolerance: float,
    n_variants: int,
    expected_ratio: float,
) -> tuple[Cuts, Outcome]:
    """Plans one phase of one nano-batch.

    Args:
        home: what they take in this phase at home.
        n_variants: plans to make; the cheapest that keeps the tolerance best is returned.
        expected_ratio: ``Outcome.work_ratio`` of a plan of such work; 0 where there is none.
    """
    work = weigh(segments, home, fleet, rules.phase)
    is_small = n_variants > 1
    has_rungs = is_small and len(work.load) <= MOST_RUNG_SERVERS
    has_rungs = has_rungs and len(segments.begin) <= MOST_SEGMENTS
    n_tried = max(n_variants // RUNG_SHARE, 1) if has_rungs else n_variants
    is_unknown = expected_ratio == 0.0
    scale = expected_growth(work, fleet, rules) if is_unknown else expected_ratio
    searches = True
    for rung in _rungs(tolerance, has_rungs):
        setting = Setting(segments, home, fleet, rules, links, rung)
        is_asked = rung == tolerance
        if rung < tolerance and not searches:
            # Where the search fails it fails at lower caps, too, and takes long for it.
            break
        other_board, other, is_searched = _plan_rung(
            setting, work, scale, is_asked, is_small, n_tried, is_unknown
        )
        if is_asked:
            board, outcome, searches = other_board, other, is_searched
            if _is_final(outcome) or outcome.n_chunks > max(MOST_VARIED * len(work.load), FEW):
                break
            continue
        other = _seen_from(other, rung, tolerance)
        is_dear = rung < tolerance and other.spent_cost > DEAR * outcome.spent_cost
        if _undercuts(other, outcome):
            board, outcome = other_board, other
        if is_dear or math.isinf(other.raised):
            break
    may_stay = outcome.n_chunks > 0 and len(work.homeless) == 0 and not fleet.is_limited
    if may_stay and _highest(work.load, work.base) <= outcome.busiest:
        # What moves relieves only servers that do not end last.
        nothing = np.empty((0, 4), dtype=np.int64)
        return Cuts(nothing, board.server, len(segments.begin)), _at_home(work, tolerance)
    return collect_cuts(board, segments, fleet), outcome


@compiled_inner
def _rungs(tolerance: float, has_others: bool) -> Float64Array:
    """The tolerances at which a phase is planned, the asked one first."""
    rungs = [tolerance]
    if has_others and tolerance < 2.0 * FINEST_RUNG:
        # Pieces run at rates that change with their number: a looser plan may end no later.
        rungs.append(FINEST_RUNG if tolerance < FINEST_RUNG else 2.0 * FINEST_RUNG)
    if has_others and tolerance > 0.0:
        rung = FINEST_RUNG
        while 2.0 * rung < tolerance:
            rung *= 2.0
        while rung >= FINEST_RUNG:
            if rung < tolerance:
                rungs.append(rung)
            rung *= 0.5
        rungs.append(0.0)
    return np.array(rungs)


@compiled_leaf
def _seen_from(outcome: Outcome, rung: float, tolerance: float) -> Outcome:
    """The outcome at ``rung``, as judged by ``tolerance``."""
    reached = (outcome.busiest - outcome.excess) / (1.0 + rung)
    raised = outcome.raised
    if math.isfinite(raised):
        over = outcome.busiest - outcome.target_load * (1.0 + tolerance)
        raised = max(min(raised + outcome.target_load * (rung - tolerance), over), 0.0)
    excess = outcome.busiest - reached * (1.0 + tolerance)
    return _judged(outcome, outcome.scale, raised, excess)


@compiled_leaf
def _judged(outcome: Outcome, scale: float, raised: float, excess: float) -> Outcome:
    """The same plan by other measures."""
    return Outcome(
        outcome.target_load,
        scale,
        outcome.work_ratio,
        raised,
        excess,
        outcome.busiest,
        outcome.spent_bytes,
        outcome.spent_cost,
        outcome.n_chunks,
        outcome.stuck_segment,
        outcome.stuck_end,
        outcome.stuck_server,
    )


@compiled_inner
def _at_home(work: Work, tolerance: float) -> Outcome:
    """The outcome where nothing moves."""
    busiest = _highest(work.load, work.base)
    excess = busiest - work.target_load * (1.0 + tolerance)
    return Outcome(
        work.target_load, 1.0, 1.0, max(excess, 0.0), excess, busiest, 0.0, 0.0, 0, -1, 0, -1
    )


@compiled_into
def _plan_rung(
    setting: Setting,
    work: Work,
    scale: float,
    is_asked: bool,
    is_small: bool,
    n_variants: int,
    may_sample: bool,
) -> tuple[Board, Outcome, bool]:
    """A plan at one tolerance, and whether a search has found it.

    Args:
        is_asked: whether this tolerance must be kept; others are worth a search and no more.
        scale, is_small, n_variants, may_sample: of :func:`_search`.
    """
    is_hopeless = is_asked and _needs_too_many(setting, work, scale)
    if is_hopeless or (is_asked and _is_sand(setting, work, scale)):
        # Most of what moves then moves whole, and runs as it did.
        scale = 1.0
        board, outcome = _split(setting, work, scale, Way(1, 0.0, True, np.inf))
        if _keeps(outcome):
            return board, outcome, False
    if is_hopeless:
        split_board, split = board, outcome
    else:
        board, outcome = _search(setting, work, scale, is_small, n_variants, may_sample)
        if _is_stuck(outcome) or _keeps(outcome) or not is_asked:
            return board, outcome, True
        way = Way(1, 0.0, True, np.inf)
        split_board, split = _split(setting, work, outcome.work_ratio, way)
    for waste in WASTES:
        if _keeps(split) or setting.fleet.is_limited:
            break
        way = Way(1, 0.0, True, waste)
        other_board, other = _split(setting, work, split.work_ratio, way)
        if other.busiest < split.busiest:
            split_board, split = other_board, other
    if is_hopeless:
        return split_board, split, False
    if split.busiest < outcome.busiest:
        searches_again = _may_search_again(outcome, split)
        board, outcome = split_board, split
        if not searches_again:
            return board, outcome, False
        # From the beginning within the cap that can be kept, chunks may do with fewer bytes.
        way = Way(1, MOST_MISSED, False, np.inf)
        opening = _opening(setting, work, split.scale, way)
        plain = Variant(0, 0.0, 0, URGENCIES[0])
        again_board, again = _attempt(setting, work, opening, split.scale, plain, way)
        if _better(again, split):
            board, outcome = again_board, again
    return board, outcome, False


@compiled_into
def _search(
    setting: Setting,
    work: Work,
    scale: float,
    is_small: bool,
    n_variants: int,
    may_sample: bool,
) -> tuple[Board, Outcome]:
    """A plan by the search for the best chunks: the cheapest of ``n_variants``.

    Args:
        scale: of the target load, estimated.
        is_small: whether splitting is tried as well, and the target load found more precisely.
        may_sample: whether a large fleet may improve it by a sample.
    """
    fleet, tolerance = setting.fleet, setting.tolerance
    n = len(fleet.rank)
    n_shifts = MOST_SHIFTS if is_small else 0
    plain = Variant(0, 0.0, n_shifts, URGENCIES[0])
    give_up = np.inf if setting.fleet.is_limited else GIVE_UP
    way = Way(1, give_up, False, np.inf)
    # Who may come to give is looked up, and that takes long, only once someone has to.
    lowest = np.inf
    opening = prepare_opening(
        setting.segments, len(fleet.server_of_rank), fleet, work, np.inf, False
    )
    is_large = n >= 4 * SAMPLED_SERVERS and may_sample and len(work.homeless) == 0
    if is_large and not _gives(setting, work, scale):
        scale = 1.0
    elif is_large:
        lowest = scale * (1.0 - LARGEST_CORRECTION)
        opening = _opening(setting, work, lowest, way)
        every = n // SAMPLED_SERVERS
        board, outcome = _attempt(
            setting, work, opening, scale, plain, Way(every, give_up, False, np.inf)
        )
        scale = outcome.work_ratio
        n_chunks = every * board.used[CHUNKS]
        if np.isfinite(give_up) and outcome.raised == 0.0 and n_chunks > most_chunks_of(n):
            return board, _given_up(outcome)
    largest_drift = SMALL_FLEET_DRIFT if is_small else LARGEST_DRIFT
    corrections = 0
    while True:
        if scale < lowest and _gives(setting, work, scale):
            lowest = scale * (1.0 - LARGEST_CORRECTION)
            opening = _opening(setting, work, lowest, way)
        other_board, other = _attempt(setting, work, opening, scale, plain, way)
        if corrections == 0 or not _undercuts(outcome, other):
            board, outcome = other_board, other
        # Pieces run at other rates than whole documents, so cutting changes the mean load.
        drift = abs(other.work_ratio / scale - 1.0)
        if corrections == CORRECTIONS or drift < largest_drift or _is_final(other):
            break
        if not np.isfinite(other.raised):
            break
        corrections += 1
        scale = other.work_ratio
    highest = target_load_of_growth(work, fleet, scale) * (1.0 + tolerance)
    senders = _highest(work.load, work.base) > highest and np.isfinite(outcome.raised)
    senders = senders and outcome.n_chunks <= MOST_VARIED * n
    for seed in range(1, n_variants):
        if _is_final(outcome) or not senders:
            break
        variant = Variant(
            seed,
            0.05 * (1 + seed % 6),
            seed % (n_shifts + 1),
            URGENCIES[seed % len(URGENCIES)],
        )
        other_board, other = _attempt(setting, work, opening, scale, variant, way)
        if other.stuck_server < 0 and _better(other, outcome):
            board, outcome = other_board, other
    if is_small and np.isfinite(outcome.raised) and not _is_final(outcome):
        board, outcome = _challenge(setting, work, board, outcome)
    return board, outcome


@compiled_inner
def _challenge(
    setting: Setting, work: Work, board: Board, outcome: Outcome
) -> tuple[Board, Outcome]:
    """A plan by splitting where that undercuts the one that a search has found, else this one."""
    plain = Variant(0, 0.0, 0, URGENCIES[0])
    way = Way(1, 0.0, True, np.inf)
    scale = outcome.work_ratio
    opening = _opening(setting, work, scale * (1.0 - LARGEST_CORRECTION), way)
    for _ in range(CHALLENGES):
        other_board, other = _attempt(setting, work, opening, scale, plain, way)
        if _undercuts(other, outcome):
            board, outcome = other_board, other
        drift = other.work_ratio / scale - 1.0
        if abs(drift) < SPLIT_DRIFT or drift < -LARGEST_CORRECTION or _is_stuck(other):
            break
        scale = other.work_ratio
    return board, outcome


@compiled_inner
def _gives(setting: Setting, work: Work, scale: float) -> bool:
    """Return whether something may have to move."""
    if setting.fleet.is_limited or len(work.homeless) > 0:
        return True
    target_load = target_load_of_growth(work, setting.fleet, scale)
    return _is_anyone_above(target_load * (1.0 + setting.tolerance), work, setting.fleet)


@compiled_leaf
def _is_anyone_above(cap: float, work: Work, fleet: Fleet) -> bool:
    """Return whether a rank's own work and what its server computes beside it take longer than
    ``cap`` seconds."""
    for server in range(len(work.load)):
        if fleet.rank[server] >= 0 and work.load[server] > cap - work.base[server]:
            return True
    return False


@compiled_leaf
def _given_up(outcome: Outcome) -> Outcome:
    """The outcome of a search with this sample: it would need too many chunks."""
    return _judged(outcome, outcome.work_ratio, math.inf, outcome.excess)


@compiled_inner
def _is_sand(setting: Setting, work: Work, scale: float) -> bool:
    """Return whether all documents of those who must give are short next to the cap, and some
    must."""
    fleet = setting.fleet
    target_load = target_load_of_growth(work, fleet, scale)
    gives = False
    if setting.fleet.is_limited or len(work.homeless) > 0:
        return False
    for server in range(len(work.load)):
        cap = target_load * (1.0 + setting.tolerance) - work.base[server]
        if fleet.rank[server] < 0 or work.load[server] <= cap:
            continue
        gives = True
        end = work.longest[server]
        pace = pace_of(fleet, server, setting.rules.phase)
        if pace_seconds(pace, 0, int(end)) > SAND_SHARE * target_load:
            return False
    return gives


@compiled_inner
def _needs_too_many(setting: Setting, work: Work, scale: float) -> bool:
    """Return whether those who must give have more pieces to give than a search may take: a piece
    takes no more than the longest document, or than a receiver has room for."""
    fleet, n = setting.fleet, len(work.load)
    if setting.fleet.is_limited or len(work.homeless) > 0:
        return False
    target_load = target_load_of_growth(work, fleet, scale)
    most_speed = fleet.speed.max()
    n_pieces = 0.0
    for server in range(n):
        cap = target_load * (1.0 + setting.tolerance) - work.base[server]
        if fleet.rank[server] < 0 or work.load[server] <= cap:
            continue
        pace = pace_of(fleet, server, setting.rules.phase)
        longest = pace_seconds(pace, 0, int(work.longest[server]))
        room = target_load * (1.0 + setting.tolerance) * most_speed / pace.speed
        n_pieces += (work.load[server] - cap) / min(longest, room)
    return n_pieces > most_chunks_of(n)


@compiled_into
def _split(setting: Setting, work: Work, scale: float, way: Way) -> tuple[Board, Outcome]:
    """A plan by splitting, at the least target load that is found for it.

    Args:
        scale: of the target load, estimated.
        way: how.
    """
    plain = Variant(0, 0.0, 0, URGENCIES[0])
    scale = max(scale, _least_scale(setting, work))
    lowest = scale * (1.0 - LARGEST_CORRECTION)
    opening = _opening(setting, work, lowest, way)
    board, outcome = _attempt(setting, work, opening, scale, plain, way)
    too_low, enough, rise = 0.0, np.inf, 0.5
    best_board, best = board, outcome
    for _ in range(SPLITTINGS - 1):
        if _is_stuck(outcome):
            break
        if outcome.raised > 0.0:
            too_low = max(too_low, outcome.scale)
            rise *= 2.0
            scale = outcome.scale * (
                1.0 + rise * (SPLIT_DRIFT + outcome.raised / outcome.target_load)
            )
            bounded = scale >= enough
        else:
            enough = min(enough, outcome.scale)
            scale = outcome.work_ratio
            bounded = scale <= too_low
            rise = 0.5
            if abs(scale / outcome.scale - 1.0) < SPLIT_DRIFT:
                break
        if bounded:
            if enough <= too_low * (1.0 + SPLIT_DRIFT):
                break
            scale = 0.5 * (too_low + enough)
        if scale < lowest:
            lowest = scale * (1.0 - LARGEST_CORRECTION)
            opening = _opening(setting, work, lowest, way)
        board, outcome = _attempt(setting, work, opening, scale, plain, way)
        if _better(outcome, best) if _keeps(best) else _ends_earlier(outcome, best):
            best_board, best = board, outcome
    return best_board, best


@compiled_inner
def _least_scale(setting: Setting, work: Work) -> float:
    """The scale at which the last queries of every document that must be divided can run somewhere;
    0 where base loads make target loads no multiples of it."""
    fleet, rules = setting.fleet, setting.rules
    if fleet.is_based or work.target_load == 0.0:
        return 0.0
    end = 0.0
    for server in range(len(work.load)):
        if work.load[server] > work.target_load * (1.0 + setting.tolerance):
            end = max(end, work.longest[server])
    least = np.inf
    for server in range(len(work.load)):
        if fleet.speed[server] > 0.0:
            pace = pace_of(fleet, server, rules.phase)
            shortest = min(int(end), rules.finest_alignment)
            least = min(least, pace_seconds(pace, int(end) - shortest, int(end)))
    return float(least / (work.target_load * (1.0 + setting.tolerance)))


@compiled_inner
def _opening(setting: Setting, work: Work, scale: float, way: Way) -> Opening:
    """The opening for target loads of ``scale`` and higher."""
    segments, _, fleet, _, _, tolerance = setting
    lowest_cap = target_load_of_growth(work, fleet, scale) * (1.0 + tolerance)
    n_ranks = len(fleet.server_of_rank)
    everyone = fleet.is_limited or np.isfinite(way.waste)
    return prepare_opening(segments, n_ranks, fleet, work, lowest_cap, everyone)


@compiled_leaf
def _is_final(outcome: Outcome) -> bool:
    """Return whether planning again cannot help: nothing has moved, or something fits nowhere."""
    return outcome.n_chunks == 0 or _is_stuck(outcome)


@compiled_leaf
def _is_stuck(outcome: Outcome) -> bool:
    """Return whether something fits nowhere."""
    return outcome.stuck_segment >= 0 or outcome.stuck_server >= 0


@compiled_leaf
def _may_search_again(searched: Outcome, split: Outcome) -> bool:
    """Return whether a search may come to its end at the target load that splitting has found: one
    that gave up at about this target load would give up again."""
    gave_up = math.isinf(searched.raised)
    return not gave_up or split.scale >= searched.scale * (1.0 + LEAST_RELIEF)


@compiled_leaf
def _better(ours: Outcome, theirs: Outcome) -> bool:
    """Return whether a plan is cheaper without a busier server, or has a less busy one."""
    margin = 1e-3 * theirs.target_load
    our_miss, their_miss = _miss(ours), _miss(theirs)
    if our_miss > their_miss + margin:
        return False
    return our_miss < their_miss - margin or ours.spent_cost < theirs.spent_cost


@compiled_leaf
def _undercuts(ours: Outcome, theirs: Outcome) -> bool:
    """Return whether a plan is cheaper, and no busier by the tolerance or in seconds."""
    if _is_stuck(ours) or ours.spent_cost > theirs.spent_cost:
        return False
    if ours.spent_cost == theirs.spent_cost and ours.busiest >= theirs.busiest:
        return False
    if _miss(ours) <= _miss(theirs) + 1e-3 * theirs.target_load:
        return True
    return ours.busiest <= theirs.busiest and _keeps(ours)


@compiled_leaf
def _ends_earlier(ours: Outcome, theirs: Outcome) -> bool:
    """Return whether a plan's busiest server is less busy. Where pieces run slowly, the target load
    itself rises, and the plan nearest to its own target load may be the one that ends last."""
    return ours.busiest < theirs.busiest


@compiled_leaf
def _keeps(outcome: Outcome) -> bool:
    """Return whether a plan keeps the tolerance well enough."""
    return _miss(outcome) <= MOST_MISSED * outcome.target_load


@compiled_leaf
def _miss(outcome: Outcome) -> float:
    """The seconds by which a plan misses the tolerance; an error of the target load is not
    counted."""
    return max(outcome.raised, outcome.excess - SMALL_FLEET_DRIFT * outcome.target_load)


@compiled_inner
def _attempt(
    setting: Setting,
    work: Work,
    opening: Opening,
    scale: float,
    variant: Variant,
    way: Way,
) -> tuple[Board, Outcome]:
    """One plan, for a target load ``scale`` times as high as if pieces ran like whole documents."""
    segments, home, fleet, rules, links, tolerance = setting
    n_servers = len(fleet.rank)
    target_load = target_load_of_growth(work, fleet, scale)
    finest_pairs = (target_load - work.base.min()) / work.pair_rate.min()
    rules = with_alignment(rules, finest_pairs, home.longest.max())
    cap = np.full(n_servers, target_load * (1.0 + tolerance)) - work.base
    cap[fleet.speed == 0.0] = 0.0
    board = open_board(opening, work, fleet, len(segments.begin))
    if fleet.is_limited:
        hold_home_work(segments, fleet, board, work.is_homeless)
    first_cap = cap.max()
    stuck, stuck_end, stuck_server = -1, 0, -1
    raised = 0.0
    if len(work.homeless):
        if work.receives.any():
            stuck, stuck_end = place_homeless(
                board, segments, home.seconds, fleet, rules, links, cap, work
            )
        else:
            stuck, stuck_end = work.homeless[0], segments.end[work.homeless[0]]
    if stuck < 0 and fleet.is_limited:
        stuck_server = relieve_memory(board, segments, fleet, rules, links, cap, work.receives)
    before, over = work_of(board.load, work), _over(board.load, cap, fleet)
    if stuck < 0 and stuck_server < 0 and way.splits:
        rise = split_surplus(
            board, segments, fleet, rules, links, cap, work, home.seconds, way.waste
        )
        raised = cap.max() - first_cap + rise
    elif stuck < 0 and stuck_server < 0:
        raised = export_surplus(
            board, segments, fleet, rules, links, cap, work, variant, way.every, way.give_up
        )
        if np.isfinite(raised):
            raised = cap.max() - first_cap
    after = work_of(board.load, work)
    if way.every > 1:
        moved = over - _over(board.load, cap, fleet)
        after = before + (after - before) * (over / moved if moved > 0.0 else 0.0)
    ratio = after / work.pairs
    reached = target_load * ratio / scale
    if fleet.is_based:
        reached = target_load_of_growth(work, fleet, ratio)
    busiest = _highest(board.load, work.base)
    outcome = Outcome(
        target_load,
        scale,
        ratio,
        raised,
        busiest - reached * (1.0 + tolerance),
        busiest,
        board.spent[BYTES],
        board.spent[COST],
        board.used[CHUNKS] + board.used[MOVED_WHOLE],
        stuck,
        stuck_end,
        stuck_server,
    )
    return board, outcome


@compiled_leaf
def work_of(load: Float64Array, work: Work) -> float:
    """The load of all servers in query-key pairs at their typical rates."""
    pairs = 0.0
    for server in range(len(load)):
        if load[server] > 0.0:
            pairs += load[server] / work.pair_rate[server]
    return pairs


@compiled_leaf
def _highest(load: Float64Array, base: Float64Array) -> float:
    """The most seconds of a server that has attention to do, base load included."""
    highest = 0.0
    for server in range(len(load)):
        if load[server] > 0.0:
            highest = max(highest, base[server] + load[server])
    return highest


@compiled_leaf
def _over(load: Float64Array, cap: Float64Array, fleet: Fleet) -> float:
    """Seconds by which in-place servers are above their cap."""
    over = 0.0
    for server in range(len(load)):
        if fleet.rank[server] >= 0:
            over += max(load[server] - cap[server], 0.0)
    return over
