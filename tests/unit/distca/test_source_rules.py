"""Rules of the library's text: short functions, no decision by words, no wait by the wall clock."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

import pytest

from tests.unit.distca.source_tree import parsed_sources

MOST_LINES = 80
"""Of a function with its decorators, docstring and blank lines: what needs more is several."""

BY_WORDS = {"distca/contract/tls.py": "logs the same failure once"}

WALL_CLOCK = {
    "control_plane/service/cluster_service.py": "shown to operators",
    "control_plane/leadership/epochs.py": "the first generation without a state directory",
    "distca/apps/doctor/cluster_probe.py": "how far the hosts' clocks are apart",
    "distca/process/tracing.py": "times of spans",
}
"""A clock that is set could make a deadline pass, or last for ever: none of these waits."""


def long_functions(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            lines = node.end_lineno - first + 1
            if lines > MOST_LINES:
                yield f"{node.name} has {lines} lines"


def words_compared(tree: ast.Module) -> Iterator[int]:
    """Lines that compare the words of an error, or what a peer said."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            searches = node.func.attr in ("startswith", "endswith", "find", "index", "count")
            compared = [node.func.value] * searches
        else:
            continue
        if any(map(_is_words, compared)):
            yield node.lineno


def _is_words(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "said"
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        return node.func.attr == "details"
    return (
        isinstance(node.func, ast.Name)
        and node.func.id in ("str", "repr")
        and len(node.args) == 1
        and isinstance(node.args[0], ast.Name)
        and node.args[0].id in ("error", "refused", "failure", "cause", "exception", "bad")
    )


def wall_clock_read(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns"):
            yield node.lineno


@pytest.mark.parametrize(
    ("find", "allowed"),
    [(long_functions, {}), (words_compared, BY_WORDS), (wall_clock_read, WALL_CLOCK)],
    ids=["no function is longer than a screen", "codes are compared", "no wait by the wall clock"],
)
def test_the_library_keeps_it(
    find: Callable[[ast.Module], Iterator[object]], allowed: dict[str, str]
) -> None:
    found = {name: places for name, tree in parsed_sources() if (places := [*find(tree)])}
    assert {name: found[name] for name in found.keys() - allowed} == {}
