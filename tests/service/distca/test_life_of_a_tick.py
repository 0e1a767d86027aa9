"""docs/architecture.md follows a tick, a row and a batch's lengths by functions that are there."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from tests import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


LIFE = section("The life of a tick")
ROW, LENGTHS = section("Two ways, counted").split("**A batch's lengths** pass")


def functions(way: str) -> list[tuple[str, str]]:
    """Module and name of each function; a module in lower case stands before its functions."""
    module, found = "", []
    for name in re.findall(r"`([\w.]+)`", way.partition("\n\n-")[2]):
        if re.fullmatch(r"\w+(\.[a-z]\w*)+", name) and name == name.lower():
            module = name
        else:
            found.append((module, name))
    return found


def of_life() -> list[tuple[str, str]]:
    names = re.findall(r"`((?:[a-z]\w*\.)+)(\w+(?:\.\w+)*)`", LIFE)
    return [(module.rstrip("."), name) for module, name in names]


def test_a_tick_lives_for_eight_lines() -> None:
    assert re.findall(r"^(\d)\. ", LIFE, re.MULTILINE) == list("12345678")
    assert len(of_life()) >= 8


def test_ways_have_as_many_functions_as_the_page_says() -> None:
    assert f"passes {len(set(functions(ROW)))} functions" in ROW
    assert f" {len(set(functions(LENGTHS)))} functions" in LENGTHS


@pytest.mark.parametrize(("module", "name"), [*of_life(), *functions(ROW), *functions(LENGTHS)])
def test_its_functions_are_there(module: str, name: str) -> None:
    found = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found) or isinstance(found, property)
