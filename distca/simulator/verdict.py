"""The verdict: whether core attention disaggregation is worth it for a user's lengths, plainly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from distca.simulator.errors import require_positive

WORTH_MENTIONING = 1.02
"""A speed-up below it is within what the model leaves out."""

EXPOSED_TOO_MUCH = 0.1
"""Share of the step waiting for communication above which links are the first thing to change."""

SLOWER_THAN = 0.995
"""Speed relative to plain packing below which CAD counts as slower."""


_GIGA = 1e9


class Kind(StrEnum):
    """What the verdict amounts to."""

    ONE_SERVER = "one server"
    SLOWER = "slower than plain packing"
    NOTHING_TO_GAIN = "nothing to gain"
    LITTLE_TO_GAIN = "little to gain"
    LINKS_TOO_SLOW = "links too slow"
    GAIN = "gain"


class Remedy(StrEnum):
    """What shortens the wait for communication, most useful first."""

    PLANNED_HOMES = "planned homes (--homes planned)"
    BYTE_BUDGET = "a byte budget (--byte-budget 1.5)"
    TOLERANCE = "a larger tolerance (--tolerance 0.1)"
    FASTER_LINKS = "faster links"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the verdict rests on: means over the batches that were planned.

    Attributes:
        n_servers: attention servers.
        heaviest_document_share: attention seconds of the heaviest document of any batch / those
            of a mean rank.
        attention_share: of the step, if it were perfectly balanced; 0 to 1.
        exposed_share: of the step with disaggregation, waiting for communication; 0 to 1.
        plain_seconds: a step with plain packing.
        repacked_seconds: whole documents re-packed, T tokens on each rank.
        context_parallel_seconds: the best of re-packing and per-document context parallelism at
            equal memory, its gather waited for.
        hidden_gather_seconds: the same with 20% more tokens on a rank and the gather hidden.
        disaggregated_seconds: under the plan.
        remedies: those that are not in use yet.
        network_bytes_per_second: of one GPU, in each direction; None leaves the network out of the
            verdict.
        pays_from_bytes_per_second: of one GPU, from which the same plans are a gain; None if no
            network makes them one.
    """

    n_servers: int
    heaviest_document_share: float
    attention_share: float
    exposed_share: float
    plain_seconds: float
    repacked_seconds: float
    context_parallel_seconds: float
    hidden_gather_seconds: float
    disaggregated_seconds: float
    remedies: tuple[Remedy, ...] = tuple(Remedy)
    network_bytes_per_second: float | None = None
    pays_from_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.endswith("_seconds"):
                require_positive(name, value)

    @property
    def whole_seconds(self) -> float:
        """Whole documents, as they come or re-packed, whichever is faster."""
        return min(self.plain_seconds, self.repacked_seconds)

    @property
    def unexposed_seconds(self) -> float:
        """Under the plan, without waiting for communication."""
        return self.disaggregated_seconds * (1 - self.exposed_share)


@dataclass(frozen=True)
class Verdict:
    """A verdict in one word and in a few sentences."""

    kind: Kind
    text: str


def judge(evidence: Evidence) -> Verdict:
    """The verdict on ``evidence``."""
    kind = kind_of(evidence)
    sentences = {
        Kind.ONE_SERVER: _one_server,
        Kind.SLOWER: _slower,
        Kind.NOTHING_TO_GAIN: _nothing_to_gain,
        Kind.LITTLE_TO_GAIN: _little_to_gain,
        Kind.LINKS_TOO_SLOW: _links_too_slow,
        Kind.GAIN: _gain,
    }
    return Verdict(kind, sentences[kind](evidence) + _network(evidence))


def kind_of(evidence: Evidence) -> Kind:
    """What the verdict on ``evidence`` amounts to: by speeds alone. There is nothing to gain where
    nothing that was compared, not even without waiting for communication, is faster than whole
    documents."""
    if evidence.n_servers == 1:
        return Kind.ONE_SERVER
    fastest = min(
        evidence.unexposed_seconds,
        evidence.context_parallel_seconds,
        evidence.hidden_gather_seconds,
    )
    if evidence.whole_seconds / fastest < WORTH_MENTIONING:
        return Kind.NOTHING_TO_GAIN
    if _is_slower(evidence):
        return Kind.SLOWER
    if evidence.exposed_share > EXPOSED_TOO_MUCH:
        return Kind.LINKS_TOO_SLOW
    if evidence.whole_seconds / evidence.disaggregated_seconds < WORTH_MENTIONING:
        return Kind.LITTLE_TO_GAIN
    return Kind.GAIN


def _is_slower(evidence: Evidence) -> bool:
    return evidence.plain_seconds / evidence.disaggregated_seconds < SLOWER_THAN


def _network(evidence: Evidence) -> str:
    """From which network on it pays."""
    here = evidence.network_bytes_per_second
    if _pays_nowhere(evidence):
        return " With these plans it pays on no network, however fast."
    if here is None or evidence.pays_from_bytes_per_second is None:
        return ""
    return (
        f" With these plans it pays from {evidence.pays_from_bytes_per_second / _GIGA:.3g} GB/s of "
        f"network a GPU (here {here / _GIGA:.3g})."
    )


def _pays_nowhere(evidence: Evidence) -> bool:
    known = evidence.network_bytes_per_second is not None
    return known and evidence.pays_from_bytes_per_second is None


def _one_server(evidence: Evidence) -> str:
    return (
        "You will gain nothing from CAD here, because there is only one attention server: nothing "
        "can be balanced."
    )


def _slower(evidence: Evidence) -> str:
    text = (
        "CAD is slower than plain packing here, so do not use it like this: it runs at "
        f"{_times(evidence.plain_seconds, evidence.disaggregated_seconds)} the speed of plain "
        f"packing. {evidence.exposed_share:.0%} of the step is spent waiting for communication, "
        f"and attention is {evidence.attention_share:.0%} of a balanced step."
    )
    if evidence.exposed_share > WORTH_MENTIONING - 1:
        text += _shorter_wait(evidence)
    return text


def _shorter_wait(evidence: Evidence) -> str:
    """What to try, without faster links where the plans pay on no network."""
    useless = {Remedy.FASTER_LINKS} if _pays_nowhere(evidence) else set()
    useful = [remedy for remedy in evidence.remedies if remedy not in useless]
    return f" {shorter_wait(useful)}" if useful else ""


def shorter_wait(remedies: Sequence[Remedy]) -> str:
    """What to try where links hold a job back."""
    return f"What shortens the wait, most useful first: {', '.join(remedies)}."


def _nothing_to_gain(evidence: Evidence) -> str:
    if evidence.heaviest_document_share <= 1:
        why = (
            "no document outweighs a mean rank: the heaviest has "
            f"{evidence.heaviest_document_share:.0%} of a mean rank's attention"
        )
    else:
        why = (
            "even without waiting for communication it would run at "
            f"{_times(evidence.whole_seconds, evidence.unexposed_seconds)} the speed of whole "
            f"documents; attention is {evidence.attention_share:.0%} of a balanced step"
        )
    text = f"You will gain nothing from CAD here, because {why}."
    if evidence.repacked_seconds < evidence.plain_seconds:
        text += (
            " Arranging whole documents so that ranks get equal work does as well: "
            f"{_times(evidence.plain_seconds, evidence.repacked_seconds)} of plain packing's "
            "speed, without moving anything between ranks."
        )
    else:
        text += " Plain packing does as well, without moving anything between ranks."
    if _is_slower(evidence):
        text += (
            " CAD is slower: "
            f"{_times(evidence.plain_seconds, evidence.disaggregated_seconds)} the speed of plain "
            "packing."
        )
    return text


def _little_to_gain(evidence: Evidence) -> str:
    return (
        "You will gain little from CAD here: "
        f"{_times(evidence.plain_seconds, evidence.disaggregated_seconds)} of plain packing's "
        f"speed, {_times(evidence.repacked_seconds, evidence.disaggregated_seconds)} of that of "
        f"re-packing whole documents. Attention is {evidence.attention_share:.0%} of a balanced "
        "step."
    )


def _links_too_slow(evidence: Evidence) -> str:
    return (
        f"The links hold CAD back here: {evidence.exposed_share:.0%} of the step is spent waiting "
        f"for communication, and it runs at {_comparison(evidence)}{_shorter_wait(evidence)}"
    )


def _gain(evidence: Evidence) -> str:
    return f"CAD is worth it here: it runs at {_comparison(evidence)}"


def _comparison(evidence: Evidence) -> str:
    took = evidence.disaggregated_seconds
    hidden = evidence.hidden_gather_seconds / took
    text = (
        f"{_times(evidence.plain_seconds, took)} the speed of plain packing and "
        f"{_times(evidence.context_parallel_seconds, took)} that of the best re-packing with "
        "context parallelism at equal memory."
    )
    if hidden < WORTH_MENTIONING:
        how = "matches" if hidden > 2 - WORTH_MENTIONING else "beats"
        text += (
            f" Context parallelism that hides its gather completely and may put 20% more tokens on "
            f"a rank {how} it ({hidden:.2f}x)."
        )
    return text


def _times(slower_seconds: float, faster_seconds: float) -> str:
    return f"{slower_seconds / faster_seconds:.2f}x"
