"""Checks PromQL expressions against the series that exist, and tells the labels of their results.

The parser is Prometheus's own grammar; what is added here is which labels each operation keeps.
"""

from __future__ import annotations

from collections.abc import Mapping

import promql_parser as promql

Labels = frozenset[str]

TARGET_LABELS = frozenset({"job", "instance", "namespace", "pod"})
"""What Prometheus adds to every series that it scrapes; the last two in Kubernetes."""

_KEEPS_LABELS = {
    "avg_over_time",
    "clamp_max",
    "clamp_min",
    "increase",
    "last_over_time",
    "max_over_time",
    "min_over_time",
    "rate",
}
_COMPARISONS = {"==", "!=", ">", "<", ">=", "<="}
_SET_OPERATORS = {"and", "or", "unless"}


class QueryError(ValueError):
    """An expression that names what does not exist."""


def labels_of(expression: str, series: Mapping[str, Labels]) -> Labels:
    """The labels that the results of ``expression`` may have.

    Args:
        expression: PromQL.
        series: the labels of every series that exists, without those of the target.

    Raises:
        QueryError: a series or a label does not exist.
        ValueError: it is no PromQL.
    """
    return _labels(promql.parse(expression), series)


def _labels(node: promql.Expr, series: Mapping[str, Labels]) -> Labels:
    match node:
        case promql.VectorSelector():
            return _selected(node, series)
        case promql.MatrixSelector():
            return _selected(node.vector_selector, series)
        case promql.ParenExpr() | promql.SubqueryExpr() | promql.UnaryExpr():
            return _labels(node.expr, series)
        case promql.NumberLiteral() | promql.StringLiteral():
            return frozenset()
        case promql.AggregateExpr():
            return _aggregated(node, series)
        case promql.BinaryExpr():
            return _combined(node, series)
        case promql.Call():
            return _called(node, series)
    raise QueryError(f"{node.prettify()}: this check does not know {type(node).__name__}")


def _selected(node: promql.VectorSelector, series: Mapping[str, Labels]) -> Labels:
    if node.name is None or node.name not in series:
        raise QueryError(f"{node.prettify()}: there is no such series")
    labels = series[node.name] | TARGET_LABELS
    _require({matcher.name for matcher in node.matchers.matchers}, labels, node)
    return labels


def _called(node: promql.Call, series: Mapping[str, Labels]) -> Labels:
    name = node.func.name
    if name in ("vector", "time"):
        return frozenset()
    if name == "label_join":
        inner, target, _, *sources = node.args
        labels = _labels(inner, series)
        _require({_text(source) for source in sources}, labels, node)
        return labels | {_text(target)}
    if name == "histogram_quantile":
        labels = _labels(node.args[1], series)
        _require({"le"}, labels, node)
        return labels - {"le"}
    if name not in _KEEPS_LABELS:
        raise QueryError(f"{node.prettify()}: this check does not know {name}")
    return _labels(node.args[0], series)


def _text(node: promql.Expr) -> str:
    assert isinstance(node, promql.StringLiteral)
    return str(node.val)


def _aggregated(node: promql.AggregateExpr, series: Mapping[str, Labels]) -> Labels:
    inner = _labels(node.expr, series)
    if str(node.op) in ("topk", "bottomk"):
        return inner
    if node.modifier is None:
        return frozenset()
    named = frozenset(node.modifier.labels)
    _require(named, inner, node)
    by = node.modifier.type == promql.AggModifierType.By
    return named if by else inner - named


def _combined(node: promql.BinaryExpr, series: Mapping[str, Labels]) -> Labels:
    left, right = _labels(node.lhs, series), _labels(node.rhs, series)
    operator = str(node.op)
    matching = node.modifier.matching if node.modifier else None
    on = frozenset(matching.labels) if matching is not None else None
    if on is not None:
        _require(on, left, node)
        _require(on, right, node)
    if operator in _SET_OPERATORS:
        return left | right if operator == "or" else left
    if _is_scalar(node.lhs):
        return right
    if _is_scalar(node.rhs):
        return left
    if on is None and left != right:
        raise QueryError(
            f"{node.prettify()}: {sorted(left)} is matched with {sorted(right)}; say on which"
        )
    if node.modifier and node.modifier.card == promql.VectorMatchCardinality.ManyToOne:
        return left
    # A comparison filters its left side; arithmetic keeps what was matched on.
    return left if on is None or operator in _COMPARISONS else on


def _is_scalar(node: promql.Expr) -> bool:
    is_time = isinstance(node, promql.Call) and node.func.name == "time"
    return isinstance(node, promql.NumberLiteral) or is_time


def _require(names: set[str] | Labels, labels: Labels, node: promql.Expr) -> None:
    missing = set(names) - labels
    if missing:
        raise QueryError(
            f"{node.prettify()}: no label {sorted(missing)}; there are {sorted(labels)}"
        )
