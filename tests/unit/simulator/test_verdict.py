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


def test_nothing_to_gain_where_no_document_outweighs_a_mean_rank() -> None:
    verdict = judge(changed(heaviest_document_share=0.4, repacked=1.0))
    assert verdict.kind is Worth.NOTHING_TO_GAIN
    assert verdict.text.startswith(
        "You will gain nothing from CAD here, because no document outweighs a mean rank"
    )
    assert "40% of a mean rank's attention" in verdict.text


def test_speeds_decide_not_the_heaviest_document() -> None:
    """Light documents that cannot be arranged evenly: ten on two ranks."""
    verdict = judge(
        changed(
            heaviest_document_share=0.99,
            plain=1.125,
            repacked=1.119,
            shared=1.04,
            seconds=1.019,
        )
    )
    assert verdict.kind is Worth.GAIN
    assert "1.10x the speed of plain packing" in verdict.text


def test_nothing_to_gain_is_said_of_a_heavy_document_too() -> None:
    verdict = judge(changed(repacked=1.02))
    assert verdict.kind is Worth.NOTHING_TO_GAIN
    assert "no document outweighs" not in verdict.text
    assert "would run at 1.01x the speed of whole documents" in verdict.text


def test_where_the_plans_alone_gain_nothing_a_slower_step_has_no_remedies() -> None:
    """Two ranks of 4096 tokens: perfectly balanced attention would gain 0.7%."""
    verdict = judge(
        changed(
            heaviest_document_share=0.79,
            exposed_share=0.021,
            plain=1.007,
            repacked=1.007,
            shared=1.007,
            seconds=1.024,
        )
    )
    assert verdict.kind is Worth.NOTHING_TO_GAIN
    assert verdict.text.endswith(
        "Plain packing does as well, without moving anything between ranks. CAD is slower: 0.98x "
        "the speed of plain packing."
    )


@pytest.mark.parametrize("seconds", [2.45, 5.0])
def test_faster_links_are_not_advised_where_no_network_pays(seconds: float) -> None:
    never, network = changed(exposed_share=0.4, seconds=seconds), Network(50e9, None)
    text = judge(never, network=network).text
    assert "faster links" not in text
    assert "--homes planned" in text
    alone = judge(never, (Remedy.FASTER_LINKS,), network)
    assert "What shortens the wait" not in alone.text


def test_one_server_has_nothing_to_balance() -> None:
    verdict = judge(changed(n_servers=1))
    assert verdict.kind is Worth.ONE_SERVER
    assert "only one attention server" in verdict.text


def test_little_to_gain_where_attention_hardly_counts() -> None:
    verdict = judge(
        changed(
            plain=1.03,
            repacked=1.025,
            exposed_share=0.02,
            attention_share=0.02,
        )
    )
    assert verdict.kind is Worth.LITTLE_TO_GAIN
    assert "Attention is 2% of a balanced step" in verdict.text


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


def test_slow_links_are_named_with_what_helps() -> None:
    verdict = judge(changed(exposed_share=0.4, seconds=1.9))
    assert verdict.kind is Worth.LINKS_TOO_SLOW
    assert "40% of the step is spent waiting" in verdict.text
    assert "--homes planned" in verdict.text


def test_the_network_from_which_it_pays_is_told() -> None:
    text = judge(GAIN, network=Network(50e9, 123.4e9)).text
    assert text.endswith("from 123 GB/s of network a GPU (here 50).")
    never = judge(GAIN, network=Network(50e9, None)).text
    assert never.endswith("it pays on no network, however fast.")


def test_each_number_of_gpus_has_a_verdict() -> None:
    verdicts = judge_sizes([GAIN, replace(changed(seconds=5.0), n_gpus=128)])
    assert [verdict.kind for verdict in verdicts] == [Worth.GAIN, Worth.SLOWER]
    assert verdicts[1].text.startswith("On 128 GPUs: ")
