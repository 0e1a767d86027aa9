"""Metrics as data: a subsystem's are the rows of one table.

From a table Prometheus' objects are built, and ``tools/metrics_page.py`` prints the rows of
``docs/metrics.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, ClassVar, Final, Generic, Self, TypeVar, cast, overload

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

M = TypeVar("M", Counter, Gauge, Histogram)

SECONDS: Final = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Buckets of what takes from a tenth of a millisecond to half a minute."""


@dataclass(frozen=True)
class Label:
    """A label: its name, and its values if they are a closed set."""

    name: str
    values: tuple[str, ...] = ()


@dataclass(eq=False)
class Metric(Generic[M]):
    """One row of a :class:`Table`; of an instance of the table, Prometheus' object.

    Attributes:
        kind: Prometheus' class.
        text: its help text.
        labels: in order.
        buckets: upper bounds, of a histogram.
        name: as Prometheus knows it: the table's prefix, and the attribute that holds the row. It
            ends in its unit, and of a counter in ``_total``.
    """

    kind: type[M]
    text: str
    labels: tuple[Label, ...]
    buckets: tuple[float, ...] = ()
    name: str = field(init=False)

    def __set_name__(self, table: type[Table], name: str) -> None:
        self._attribute = name
        self.name = f"{table.prefix}_{name}"

    @overload
    def __get__(self, table: None, owner: type[Table]) -> Metric[M]: ...
    @overload
    def __get__(self, table: Table, owner: type[Table]) -> M: ...
    def __get__(self, table: Table | None, owner: type[Table]) -> Metric[M] | M:
        if table is None:
            return self
        series = table._series_of(self)
        # Found there from now on, without this call.
        vars(table)[self._attribute] = series
        return series

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels' names, in order."""
        return tuple(label.name for label in self.labels)

    def build(self, registry: CollectorRegistry) -> M:
        """Prometheus' object, which ``registry`` shows."""
        options: dict[str, Any] = {"buckets": self.buckets} if self.buckets else {}
        built = _SHOWN[self.kind](
            self.name, self.text, self.label_names, registry=registry, **options
        )
        return cast(M, built)


class _WithoutCreated:
    """A metric without the times at which its series began.

    That is a series more for each counter and histogram, and ``rate`` needs none of them. The
    library's own switch is for the whole process, which may be a user's.
    """

    def collect(self) -> Iterable[Family]:
        """The metric's families."""
        for family in super().collect():  # type: ignore[misc]
            family.samples = [one for one in family.samples if not one.name.endswith("_created")]
            yield family


class _Counter(_WithoutCreated, Counter):
    pass


class _Histogram(_WithoutCreated, Histogram):
    pass


_SHOWN: Final = {Counter: _Counter, Gauge: Gauge, Histogram: _Histogram}


def counter(text: str, *labels: Label) -> Metric[Counter]:
    """A row for what only grows."""
    return Metric(Counter, text, labels)


def gauge(text: str, *labels: Label) -> Metric[Gauge]:
    """A row for what goes up and down."""
    return Metric(Gauge, text, labels)


def histogram(text: str, *labels: Label, buckets: tuple[float, ...] = SECONDS) -> Metric[Histogram]:
    """A row for a distribution, over ``buckets`` of these upper bounds."""
    return Metric(Histogram, text, labels, buckets)


class Table:
    """Metrics of one subsystem: rows as attributes of a class, Prometheus' objects of an instance.

    A metric of which every label has a value is one series; any other is the whole metric, to be
    asked by ``labels()``. Series whose labels all come from closed sets exist from the start.

    Args:
        registry: where the metrics appear.
        given: values of labels, by name, that are the same for the whole instance.
    """

    prefix: ClassVar[str]

    def __init__(self, registry: CollectorRegistry, **given: str) -> None:
        self._given = given
        self._built: dict[Metric[Any], Any] = {row: row.build(registry) for row in self.rows()}
        for row, metric in self._built.items():
            values = [(given[one.name],) if one.name in given else one.values for one in row.labels]
            for series in product(*values) if values else ():
                metric.labels(*series)

    @classmethod
    def rows(cls) -> Iterator[Metric[Any]]:
        """The rows, in order."""
        return (row for row in vars(cls).values() if isinstance(row, Metric))

    def at(self, **given: str) -> Self:
        """The same metrics with more labels given. Series begin to exist when they are first used;
        who uses one often keeps it.
        """
        view = object.__new__(type(self))
        view._built, view._given = self._built, {**self._given, **given}
        return view

    def forget(self, **given: str) -> None:
        """Removes the series with these labels, of all metrics that have them."""
        for row, metric in self._built.items():
            if given.keys() <= set(row.label_names):
                metric.remove_by_labels(given)

    def _series_of(self, row: Metric[M]) -> M:
        metric = cast(M, self._built[row])
        if not row.labels or not self._given.keys() >= set(row.label_names):
            return metric
        for label in row.labels:
            if label.values and self._given[label.name] not in label.values:
                raise ValueError(
                    f"label {label.name} of {row.name} is {self._given[label.name]!r}; it may be "
                    + ", ".join(label.values)
                )
        return metric.labels(*(self._given[name] for name in row.label_names))


Reading = tuple[Metric[Counter] | Metric[Gauge], tuple[str, ...], float]
"""A row of a table, the values of its labels, and its value now."""


class ReadTable(Collector):
    """A table of counters and gauges whose values are kept elsewhere, and read when scraped.

    Attributes:
        table: its rows are shown, those without a value too.

    Args:
        table: see above.
        read: gives the values; called by any thread.
    """

    def __init__(self, table: type[Table], read: Callable[[], Iterable[Reading]]) -> None:
        self.table = table
        self._read = read

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """The metrics with their values now."""
        families = {
            row: (CounterMetricFamily if row.kind is Counter else GaugeMetricFamily)(
                row.name, row.text, labels=row.label_names
            )
            for row in self.table.rows()
        }
        for row, labels, value in self._read():
            families[row].add_metric(labels, value)
        return families.values()
