"""Tables of metrics, and what Prometheus sees of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from distca.metric_table import Label, Reading, ReadTable, Table, counter, gauge, histogram
from tests.support.errors import refused


class Fruit(Table):
    prefix = "shop"

    sold_total = counter("Fruit sold.", Label("kind", ("apple", "pear")))
    weight_grams = gauge("Weight now.", Label("shelf"), Label("kind", ("apple", "pear")))
    sale_seconds = histogram("Seconds of a sale.", buckets=(1.0, 2.0))


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def series_of(registry: CollectorRegistry) -> dict[str, list[dict[str, str]]]:
    """The labels of all series, by metric."""
    return {
        family.name: [s.labels for s in family.samples if not s.name.endswith("_created")]
        for family in registry.collect()
    }


def test_series_of_closed_sets_exist_from_the_start(registry: CollectorRegistry) -> None:
    Fruit(registry)
    series = series_of(registry)
    assert series["shop_sold"] == [{"kind": "apple"}, {"kind": "pear"}]
    assert series["shop_weight_grams"] == [], "its shelves are not known"
    assert {"le": "2.0"} in series["shop_sale_seconds"]


def test_given_labels_complete_the_closed_sets(registry: CollectorRegistry) -> None:
    table = Fruit(registry, shelf="top")
    assert series_of(registry)["shop_weight_grams"] == [
        {"shelf": "top", "kind": kind} for kind in ("apple", "pear")
    ]
    table.at(kind="pear").weight_grams.set(3)
    labels = {"shelf": "top", "kind": "pear"}
    assert registry.get_sample_value("shop_weight_grams", labels) == 3


def test_a_metric_without_all_labels_is_asked_by_them(registry: CollectorRegistry) -> None:
    table = Fruit(registry)
    table.weight_grams.labels("low", "apple").set(5)
    assert table.at(shelf="low").weight_grams is table.weight_grams
    assert registry.get_sample_value("shop_weight_grams", {"shelf": "low", "kind": "apple"}) == 5


def test_a_value_outside_its_closed_set_is_an_error(registry: CollectorRegistry) -> None:
    with refused():
        _ = Fruit(registry).at(kind="fig").sold_total


def test_forgotten_series_go_from_all_metrics_that_have_the_label(
    registry: CollectorRegistry,
) -> None:
    table = Fruit(registry)
    for shelf in ("top", "low"):
        table.at(shelf=shelf, kind="pear").weight_grams.set(1)
    table.forget(shelf="top")
    series = series_of(registry)
    assert series["shop_weight_grams"] == [{"shelf": "low", "kind": "pear"}]
    assert len(series["shop_sold"]) == 2


def test_values_that_are_kept_elsewhere_are_read_when_scraped(registry: CollectorRegistry) -> None:
    sold = {"apple": 1.0}

    def read() -> Iterator[Reading]:
        for kind, count in sold.items():
            yield Fruit.sold_total, (kind,), count

    class Sold(Table):
        prefix = "shop"
        sold_total = Fruit.sold_total
        weight_grams = Fruit.weight_grams

    registry.register(ReadTable(Sold, read))
    sold["apple"] = 7.0
    assert registry.get_sample_value("shop_sold_total", {"kind": "apple"}) == 7.0
    assert {family.name: family.type for family in registry.collect()} == {
        "shop_sold": "counter",
        "shop_weight_grams": "gauge",
    }


def test_no_series_tells_when_another_began(registry: CollectorRegistry) -> None:
    Fruit(registry, shelf="top", kind="pear")
    names = {sample.name for family in registry.collect() for sample in family.samples}
    assert names == {
        "shop_sold_total",
        "shop_weight_grams",
        "shop_sale_seconds_bucket",
        "shop_sale_seconds_count",
        "shop_sale_seconds_sum",
    }
