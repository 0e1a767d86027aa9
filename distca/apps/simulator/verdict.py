"""The verdict: whether core attention disaggregation is worth it for a user's lengths, plainly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from distca.apps.simulator.comparison import PLAIN, REPACKED, SHARED, Comparison

WORTH_MENTIONING = 1.02
"""A speed-up below it is within what the model leaves out."""

EXPOSED_TOO_MUCH = 0.1
"""Share of the step waiting for communication above which links are the first thing to change."""

SLOWER_THAN = 0.995
"""Speed relative to plain packing below which CAD counts as slower."""


_GIGA = 1e9


class Worth(StrEnum):
    """The kinds of verdicts."""

    ONE_SERVER = "one server"
    SLOWER = "slower than plain packing"
    NOTHING_TO_GAIN = "nothing to gain"
    LITTLE_TO_GAIN = "little to gain"
    LINKS_TOO_SLOW = "links too slow"
    GAIN = "gain"


class Remedy(StrEnum):
    """Ways to shorten the wait for communication, most useful first."""

    PLANNED_HOMES = "planned homes (--homes planned)"
    TOLERANCE = "a larger tolerance (--tolerance 0.1)"
    FASTER_LINKS = "faster links"


@dataclass(frozen=True)
class Network:
    """Bytes/s of one GPU in each direction.

    Attributes:
        here: what there is.
        pays_from: from which the same plans are a gain; None if no network makes them one.
    """

    here: float
    pays_from: float | None


@dataclass(frozen=True)
class Judgement:
    """A verdict in one word and in a few sentences."""

    kind: Worth
    text: str


def judge(
    found: Comparison,
    remedies: Sequence[Remedy] = tuple(Remedy),
    network: Network | None = None,
) -> Judgement:
    """The verdict on a comparison.

    Args:
        found: what is judged.
        remedies: those that are not in use yet.
        network: None leaves the network out of the verdict.
    """
    kind = kind_of(found)
    sentences = {
        Worth.ONE_SERVER: _one_server,
        Worth.SLOWER: _slower,
        Worth.NOTHING_TO_GAIN: _nothing_to_gain,
        Worth.LITTLE_TO_GAIN: _little_to_gain,
        Worth.LINKS_TOO_SLOW: _links_too_slow,
        Worth.GAIN: _gain,
    }
    text = sentences[kind](found)
    waits = kind is Worth.SLOWER and found.exposed_share > WORTH_MENTIONING - 1
    if waits or kind is Worth.LINKS_TOO_SLOW:
        # Where no network pays, faster links are no remedy.
        nowhere = network is not None and network.pays_from is None
        useful = [each for each in remedies if not (nowhere and each is Remedy.FASTER_LINKS)]
        text += f" {shorter_wait(useful)}" if useful else ""
    return Judgement(kind, text + _where_it_pays(network))


def judge_sizes(
    sizes: Sequence[Comparison], remedies: Sequence[Remedy] = tuple(Remedy)
) -> list[Judgement]:
    """A verdict on each number of GPUs, which it names."""
    verdicts = [judge(found, remedies) for found in sizes]
    return [
        Judgement(verdict.kind, f"On {found.n_gpus} GPUs: {verdict.text}")
        for found, verdict in zip(sizes, verdicts, strict=True)
    ]


def kind_of(found: Comparison) -> Worth:
    """The kind of a verdict: by speeds alone. There is nothing to gain where nothing that was
    compared, not even without waiting for communication, is faster than whole documents."""
    if found.n_servers == 1:
        return Worth.ONE_SERVER
    step, others = found.disaggregated, found.baseline_seconds
    fastest = min(step.seconds - step.exposed_seconds, others[SHARED])
    if found.whole_seconds / fastest < WORTH_MENTIONING:
        return Worth.NOTHING_TO_GAIN
    if found.speedup(PLAIN) < SLOWER_THAN:
        return Worth.SLOWER
    if found.exposed_share > EXPOSED_TOO_MUCH:
        return Worth.LINKS_TOO_SLOW
    if found.whole_seconds / step.seconds < WORTH_MENTIONING:
        return Worth.LITTLE_TO_GAIN
    return Worth.GAIN


def shorter_wait(remedies: Sequence[Remedy]) -> str:
    """A sentence on what to try where links hold a job back."""
    return f"What shortens the wait, most useful first: {', '.join(remedies)}."


def _where_it_pays(network: Network | None) -> str:
    if network is None:
        return ""
    if network.pays_from is None:
        return " With these plans it pays on no network, however fast."
    return (
        f" With these plans it pays from {network.pays_from / _GIGA:.3g} GB/s of network a GPU "
        f"(here {network.here / _GIGA:.3g})."
    )


def _one_server(found: Comparison) -> str:
    return (
        "You will gain nothing from CAD here, because there is only one attention server: nothing "
        "can be balanced."
    )


def _slower(found: Comparison) -> str:
    return (
        "CAD is slower than plain packing here, so do not use it like this: it runs at "
        f"{found.speedup(PLAIN):.2f}x the speed of plain packing. {found.exposed_share:.0%} of the "
        "step is spent waiting for communication, and attention is "
        f"{found.attention_share:.0%} of a balanced step."
    )


def _nothing_to_gain(found: Comparison) -> str:
    step, others = found.disaggregated, found.baseline_seconds
    if found.heaviest_document_share <= 1:
        why = (
            "no document outweighs a mean rank: the heaviest has "
            f"{found.heaviest_document_share:.0%} of a mean rank's attention"
        )
    else:
        unexposed = step.seconds - step.exposed_seconds
        why = (
            "even without waiting for communication it would run at "
            f"{found.whole_seconds / unexposed:.2f}x the speed of whole documents; attention is "
            f"{found.attention_share:.0%} of a balanced step"
        )
    text = f"You will gain nothing from CAD here, because {why}."
    if others[REPACKED] < others[PLAIN]:
        text += (
            " Arranging whole documents so that ranks get equal work does as well: "
            f"{others[PLAIN] / others[REPACKED]:.2f}x of plain packing's speed, without moving "
            "anything between ranks."
        )
    else:
        text += " Plain packing does as well, without moving anything between ranks."
    if found.speedup(PLAIN) < SLOWER_THAN:
        text += f" CAD is slower: {found.speedup(PLAIN):.2f}x the speed of plain packing."
    return text


def _little_to_gain(found: Comparison) -> str:
    return (
        f"You will gain little from CAD here: {found.speedup(PLAIN):.2f}x of plain packing's "
        f"speed, {found.speedup(REPACKED):.2f}x of that of re-packing whole documents. Attention "
        f"is {found.attention_share:.0%} of a balanced step."
    )


def _links_too_slow(found: Comparison) -> str:
    return (
        f"The links hold CAD back here: {found.exposed_share:.0%} of the step is spent waiting "
        f"for communication, and it runs at {_against_baselines(found)}"
    )


def _gain(found: Comparison) -> str:
    return f"CAD is worth it here: it runs at {_against_baselines(found)}"


def _against_baselines(found: Comparison) -> str:
    return (
        f"{found.speedup(PLAIN):.2f}x the speed of plain packing and {found.speedup(SHARED):.2f}x "
        "that of the best re-packing with context parallelism at equal memory."
    )
