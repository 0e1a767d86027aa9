"""The verdict: each case, in plain words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distca.apps.simulator.comparison import PLAIN, REPACKED, SHARED, Comparison
from distca.apps.simulator.disaggregated import DisaggregatedStep
from distca.apps.simulator.verdict import Network, Remedy, Worth, judge, judge_sizes

GAIN = Comparison(
    n_gpus=64,
    n_servers=64,
    heaviest_document_share=9.0,
    balanced_seconds=1.0,
    attention_share=0.3,
    baseline_seconds={PLAIN: 2.5, REPACKED: 2.4, SHARED: 1.3},
    disaggregated=DisaggregatedStep(1.02, 0.01 * 1.02, 1.03, 10**9),
)
NAMES = {"plain": PLAIN, "repacked": REPACKED, "shared": SHARED}


def changed(*, seconds: float = 1.02, exposed_share: float = 0.01, **others: float) -> Comparison:
    """The same with other seconds by the short names of baselines, or other fields."""
    baselines = {NAMES[name]: others.pop(name) for name in NAMES if name in others}
    fields: dict[str, Any] = others
    return replace(
        GAIN,
        baseline_seconds={**GAIN.baseline_seconds, **baselines},
        disaggregated=DisaggregatedStep(seconds, exposed_share * seconds, 1.03, 10**9),
        **fields,
    )


LIGHT = changed(
    heaviest_document_share=0.99, plain=1.125, repacked=1.119, shared=1.04, seconds=1.019
)
"""Documents that cannot be arranged evenly all the same: ten on two ranks."""

EVEN = changed(
    heaviest_document_share=0.79,
    exposed_share=0.021,
    plain=1.007,
    repacked=1.007,
    shared=1.007,
    seconds=1.024,
)
"""Two ranks of 4096 tokens: perfectly balanced attention would gain 0.7%."""


@pytest.mark.parametrize(
    ("comparison", "kind"),
    [
        (GAIN, Worth.GAIN),
        (LIGHT, Worth.GAIN),
        (changed(heaviest_document_share=0.4, repacked=1.0), Worth.NOTHING_TO_GAIN),
        (changed(repacked=1.02), Worth.NOTHING_TO_GAIN),
        (EVEN, Worth.NOTHING_TO_GAIN),
        (changed(n_servers=1), Worth.ONE_SERVER),
        (
            changed(plain=1.03, repacked=1.025, exposed_share=0.02, attention_share=0.02),
            Worth.LITTLE_TO_GAIN,
        ),
        (changed(exposed_share=0.4, seconds=1.9), Worth.LINKS_TOO_SLOW),
        (changed(exposed_share=0.6, seconds=5.0), Worth.SLOWER),
    ],
)
def test_speeds_decide_what_it_is_worth(comparison: Comparison, kind: Worth) -> None:
    assert judge(comparison).kind is kind


def test_the_most_useful_remedy_comes_first_and_none_that_is_in_use() -> None:
    slow = changed(exposed_share=0.4, seconds=1.9)
    text = judge(slow).text
    assert text.index("--homes planned") < text.index("--tolerance")
    left = judge(slow, (Remedy.TOLERANCE, Remedy.FASTER_LINKS)).text
    assert "--homes planned" not in left
    assert left.index("--tolerance") < left.index("faster links")
    # Where no network pays, faster links are none.
    never = judge(slow, network=Network(50e9, None)).text
    assert "faster links" not in never
    assert "--homes planned" in never
    assert "--homes planned" not in judge(changed(exposed_share=0.0, seconds=5.0)).text


def test_each_number_of_gpus_has_a_verdict() -> None:
    verdicts = judge_sizes([GAIN, replace(changed(seconds=5.0), n_gpus=128)])
    assert [verdict.kind for verdict in verdicts] == [Worth.GAIN, Worth.SLOWER]
    assert verdicts[1].text.startswith("On 128 GPUs: ")
