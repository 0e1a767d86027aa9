"""The verdict: whether core attention disaggregation is worth it for a user's lengths, plainly."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from distca.simulator.errors import require_positive

WORTH_MENTIONING = 1.02
"""A speed-up below it is within what the model leaves out."""

EXPOSED_TOO_MUCH = 0.1
"""Share of the step waiting for communication above which links are the first thing to change."""


class Kind(StrEnum):
    """What the verdict amounts to."""

    ONE_SERVER = "one server"
    NOTHING_TO_GAIN = "nothing to gain"
    LITTLE_TO_GAIN = "little to gain"
    LINKS_TOO_SLOW = "links too slow"
    GAIN = "gain"


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

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.endswith("_seconds"):
                require_positive(name, value)


@dataclass(frozen=True)
class Verdict:
    """A verdict in one word and in a few sentences."""

    kind: Kind
    text: str


def judge(evidence: Evidence) -> Verdict:
    """The verdict on ``evidence``."""
    kind = _kind(evidence)
    sentences = {
        Kind.ONE_SERVER: _one_server,
        Kind.NOTHING_TO_GAIN: _nothing_to_gain,
        Kind.LITTLE_TO_GAIN: _little_to_gain,
        Kind.LINKS_TOO_SLOW: _links_too_slow,
        Kind.GAIN: _gain,
    }
    return Verdict(kind, sentences[kind](evidence))


def _kind(evidence: Evidence) -> Kind:
    if evidence.n_servers == 1:
        return Kind.ONE_SERVER
    if evidence.heaviest_document_share <= 1:
        return Kind.NOTHING_TO_GAIN
    if evidence.exposed_share > EXPOSED_TOO_MUCH:
        return Kind.LINKS_TOO_SLOW
    alternative = min(evidence.plain_seconds, evidence.repacked_seconds)
    if alternative / evidence.disaggregated_seconds < WORTH_MENTIONING:
        return Kind.LITTLE_TO_GAIN
    return Kind.GAIN


def _one_server(evidence: Evidence) -> str:
    return (
        "You will gain nothing from CAD here, because there is only one attention server: nothing "
        "can be balanced."
    )


def _nothing_to_gain(evidence: Evidence) -> str:
    return (
        "You will gain nothing from CAD here, because no document outweighs a mean rank: the "
        f"heaviest has {evidence.heaviest_document_share:.0%} of a mean rank's attention. "
        "Arranging whole documents so that ranks get equal work does as well: "
        f"{_times(evidence.plain_seconds, evidence.repacked_seconds)} of plain packing's speed, "
        "without moving anything between ranks."
    )


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
        f"for communication, and it runs at {_comparison(evidence)} A byte budget "
        "(--byte-budget 1.5), planned homes (--homes planned), a larger tolerance or faster links "
        "reduce the wait."
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
