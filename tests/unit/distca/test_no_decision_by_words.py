"""No decision depends on the words of an error: they are for people, and change."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests import ROOT
from tests.unit.distca.source_tree import PACKAGES

ALLOWED = {
    # Logs the same failure once.
    "distca/contract/tls.py",
}


def words_compared(source: str) -> Iterator[int]:
    """Lines that compare the words of an error, or what a peer said."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and any(
            _is_words(side) for side in (node.left, *node.comparators)
        ):
            yield node.lineno
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("startswith", "endswith", "find", "index", "count")
            and _is_words(node.func.value)
        ):
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


def test_the_check_sees_such_comparisons() -> None:
    assert [*words_compared("if 'is over' in str(error): pass")] == [1]
    assert [*words_compared("x = error.said == CLOSE_NOTICE")] == [1]
    assert [*words_compared("if str(refused).startswith('no'): pass")] == [1]
    assert [*words_compared("if call.details() == 'x': pass")] == [1]
    assert not [*words_compared("if error.code == 7: print(str(error))")]


def test_no_decision_by_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if str(path.relative_to(ROOT)) not in ALLOWED
        for line in words_compared(path.read_text())
    ]
    assert not found, f"compare codes instead: {found}"
