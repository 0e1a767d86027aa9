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


def test_a_gain_is_told_with_the_baselines() -> None:
    verdict = judge(GAIN)
    assert verdict.kind is Worth.GAIN
    assert "2.45x the speed of plain packing" in verdict.text
    assert "1.27x that of the best re-packing with context parallelism" in verdict.text


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
    ],
)
def test_speeds_decide_what_it_is_worth(comparison: Comparison, kind: Worth) -> None:
    assert judge(comparison).kind is kind


@pytest.mark.parametrize("seconds", [2.45, 5.0])
def test_faster_links_are_not_advised_where_no_network_pays(seconds: float) -> None:
    never, network = changed(exposed_share=0.4, seconds=seconds), Network(50e9, None)
    text = judge(never, network=network).text
    assert "faster links" not in text
    assert "--homes planned" in text
    alone = judge(never, (Remedy.FASTER_LINKS,), network)
    assert "What shortens the wait" not in alone.text


def test_slower_than_plain_packing_is_a_verdict_of_its_own() -> None:
    slow = changed(exposed_share=0.6, seconds=5.0)
    verdict = judge(slow)
    assert verdict.kind is Worth.SLOWER
    assert "0.50x the speed of plain packing" in verdict.text
    assert "60% of the step is spent waiting" in verdict.text
    assert "What shortens the wait" not in judge(changed(exposed_share=0.0, seconds=5.0)).text


def test_the_most_useful_remedy_comes_first_and_none_that_is_in_use() -> None:
    slow = changed(exposed_share=0.4, seconds=1.9)
    text = judge(slow).text
    assert text.index("--homes planned") < text.index("--byte-budget") < text.index("--tolerance")
    left = judge(slow, (Remedy.TOLERANCE, Remedy.FASTER_LINKS)).text
    assert "--homes planned" not in left
    assert left.endswith("first: a larger tolerance (--tolerance 0.1), faster links.")


def test_the_network_from_which_it_pays_is_told() -> None:
    text = judge(GAIN, network=Network(50e9, 123.4e9)).text
    assert text.endswith("from 123 GB/s of network a GPU (here 50).")
    never = judge(GAIN, network=Network(50e9, None)).text
    assert never.endswith("it pays on no network, however fast.")


def test_each_number_of_gpus_has_a_verdict() -> None:
    verdicts = judge_sizes([GAIN, replace(changed(seconds=5.0), n_gpus=128)])
    assert [verdict.kind for verdict in verdicts] == [Worth.GAIN, Worth.SLOWER]
    assert verdicts[1].text.startswith("On 128 GPUs: ")
