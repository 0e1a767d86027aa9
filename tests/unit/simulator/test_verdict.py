"""The verdict: each case, in plain words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distca.simulator.errors import InputError
from distca.simulator.verdict import Evidence, Kind, Remedy, judge

GAIN = Evidence(
    n_servers=64,
    heaviest_document_share=9.0,
    attention_share=0.3,
    exposed_share=0.01,
    plain_seconds=2.5,
    repacked_seconds=2.4,
    context_parallel_seconds=1.3,
    hidden_gather_seconds=1.02,
    disaggregated_seconds=1.02,
)


def test_a_gain_is_told_with_the_baselines_and_the_tie() -> None:
    verdict = judge(GAIN)
    assert verdict.kind is Kind.GAIN
    assert "2.45x the speed of plain packing" in verdict.text
    assert "1.27x that of the best re-packing with context parallelism" in verdict.text
    assert "matches it (1.00x)" in verdict.text


def test_a_baseline_that_is_faster_is_named() -> None:
    verdict = judge(replace(GAIN, hidden_gather_seconds=0.9))
    assert "beats it (0.88x)" in verdict.text


def test_a_clear_gain_over_everything_needs_no_caveat() -> None:
    assert "hides its gather" not in judge(replace(GAIN, hidden_gather_seconds=1.3)).text


def test_nothing_to_gain_where_no_document_outweighs_a_mean_rank() -> None:
    verdict = judge(replace(GAIN, heaviest_document_share=0.4, repacked_seconds=1.0))
    assert verdict.kind is Kind.NOTHING_TO_GAIN
    assert verdict.text.startswith(
        "You will gain nothing from CAD here, because no document outweighs a mean rank"
    )
    assert "40% of a mean rank's attention" in verdict.text


def test_speeds_decide_not_the_heaviest_document() -> None:
    """Light documents that cannot be arranged evenly: ten on two ranks."""
    verdict = judge(
        replace(
            GAIN,
            heaviest_document_share=0.99,
            plain_seconds=1.125,
            repacked_seconds=1.119,
            context_parallel_seconds=1.04,
            hidden_gather_seconds=1.001,
            disaggregated_seconds=1.019,
        )
    )
    assert verdict.kind is Kind.GAIN
    assert "1.10x the speed of plain packing" in verdict.text


def test_nothing_to_gain_is_said_of_a_heavy_document_too() -> None:
    verdict = judge(replace(GAIN, repacked_seconds=1.02))
    assert verdict.kind is Kind.NOTHING_TO_GAIN
    assert "no document outweighs" not in verdict.text
    assert "would run at 1.01x the speed of whole documents" in verdict.text


def test_where_the_plans_alone_gain_nothing_a_slower_step_has_no_remedies() -> None:
    """Two ranks of 4096 tokens: perfectly balanced attention would gain 0.7%."""
    verdict = judge(
        replace(
            GAIN,
            heaviest_document_share=0.79,
            exposed_share=0.021,
            plain_seconds=1.007,
            repacked_seconds=1.007,
            context_parallel_seconds=1.007,
            hidden_gather_seconds=1.005,
            disaggregated_seconds=1.024,
        )
    )
    assert verdict.kind is Kind.NOTHING_TO_GAIN
    assert verdict.text.endswith(
        "Plain packing does as well, without moving anything between ranks. CAD is slower: 0.98x "
        "the speed of plain packing."
    )


@pytest.mark.parametrize("seconds", [2.45, 5.0])
def test_faster_links_are_not_advised_where_no_network_pays(seconds: float) -> None:
    never = replace(
        GAIN, exposed_share=0.4, disaggregated_seconds=seconds, network_bytes_per_second=50e9
    )
    text = judge(never).text
    assert "faster links" not in text
    assert "--homes planned" in text
    alone = judge(replace(never, remedies=(Remedy.FASTER_LINKS,)))
    assert "What shortens the wait" not in alone.text


def test_one_server_has_nothing_to_balance() -> None:
    verdict = judge(replace(GAIN, n_servers=1))
    assert verdict.kind is Kind.ONE_SERVER
    assert "only one attention server" in verdict.text


def test_little_to_gain_where_attention_hardly_counts() -> None:
    verdict = judge(
        replace(
            GAIN,
            plain_seconds=1.03,
            repacked_seconds=1.025,
            hidden_gather_seconds=1.0,
            attention_share=0.02,
        )
    )
    assert verdict.kind is Kind.LITTLE_TO_GAIN
    assert "Attention is 2% of a balanced step" in verdict.text


def test_slower_than_plain_packing_is_a_verdict_of_its_own() -> None:
    slow = replace(GAIN, exposed_share=0.6, disaggregated_seconds=5.0)
    verdict = judge(slow)
    assert verdict.kind is Kind.SLOWER
    assert "0.50x the speed of plain packing" in verdict.text
    assert "60% of the step is spent waiting" in verdict.text
    assert "What shortens the wait" not in judge(replace(slow, exposed_share=0.0)).text


def test_the_most_useful_remedy_comes_first_and_none_that_is_in_use() -> None:
    slow = replace(GAIN, exposed_share=0.4, disaggregated_seconds=1.9)
    text = judge(slow).text
    assert text.index("--homes planned") < text.index("--byte-budget") < text.index("--tolerance")
    left = judge(replace(slow, remedies=(Remedy.TOLERANCE, Remedy.FASTER_LINKS))).text
    assert "--homes planned" not in left
    assert left.endswith("first: a larger tolerance (--tolerance 0.1), faster links.")


def test_slow_links_are_named_with_what_helps() -> None:
    verdict = judge(replace(GAIN, exposed_share=0.4, disaggregated_seconds=1.9))
    assert verdict.kind is Kind.LINKS_TOO_SLOW
    assert "40% of the step is spent waiting" in verdict.text
    assert "--homes planned" in verdict.text


def test_the_network_from_which_it_pays_is_told() -> None:
    network: dict[str, Any] = {
        "network_bytes_per_second": 50e9,
        "pays_from_bytes_per_second": 123.4e9,
    }
    assert judge(replace(GAIN, **network)).text.endswith(
        "from 123 GB/s of network a GPU (here 50)."
    )
    never = replace(GAIN, **{**network, "pays_from_bytes_per_second": None})
    assert judge(never).text.endswith("it pays on no network, however fast.")


def test_seconds_must_be_positive() -> None:
    with pytest.raises(InputError, match="plain_seconds is 0"):
        replace(GAIN, plain_seconds=0)
