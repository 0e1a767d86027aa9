"""The check of queries: it must not let pass what Prometheus would answer with nothing."""

from __future__ import annotations

import pytest

from tests.unit.monitoring.promql import QueryError, labels_of

SERIES = {
    "up": frozenset[str](),
    "calls_total": frozenset({"server", "phase"}),
    "limit": frozenset({"server"}),
    "seconds_bucket": frozenset({"phase", "le"}),
}


@pytest.mark.parametrize(
    ("expression", "labels"),
    [
        ("sum by (server) (rate(calls_total[5m]))", {"server"}),
        ("sum(calls_total)", set()),
        ('sum by (instance) (calls_total{phase=~"$phase", job="x"})', {"instance"}),
        ("histogram_quantile(0.9, sum by (le, phase) (rate(seconds_bucket[5m])))", {"phase"}),
        ("sum by (server, phase) (calls_total) > on (server) group_left () limit * 2", None),
        ("sum by (server) (calls_total) / on (server) sum by (server) (limit)", {"server"}),
        ("sum by (server) (calls_total) or vector(0)", {"server"}),
        ("60 * sum by (phase) (calls_total)", {"phase"}),
        ("topk(3, sum by (server) (calls_total))", {"server"}),
        ("sum without (phase, job, instance, namespace, pod) (calls_total)", {"server"}),
    ],
)
def test_labels_of_results(expression: str, labels: set[str] | None) -> None:
    assert labels_of(expression, SERIES) == ({"server", "phase"} if labels is None else labels)


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("rate(call_total[5m])", "call_total"),
        ('calls_total{sever="a"}', "sever"),
        ("sum by (host) (calls_total)", "host"),
        ("histogram_quantile(0.9, sum by (phase) (seconds_bucket))", "le"),
        ("sum by (phase) (calls_total) / on (server) limit", "server"),
        ("calls_total / limit", "say on which"),
        ("predict_linear(calls_total[5m], 60)", "predict_linear"),
    ],
)
def test_what_does_not_exist_is_named(expression: str, named: str) -> None:
    with pytest.raises(QueryError, match=named):
        labels_of(expression, SERIES)


def test_what_is_no_promql_is_refused() -> None:
    with pytest.raises(ValueError, match="right parenthesis"):
        labels_of("sum by server (calls_total))", SERIES)
