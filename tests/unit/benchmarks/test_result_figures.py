"""The figures of ``docs/results.md`` show the numbers of the tables of ``docs/benchmarks.md``."""

from __future__ import annotations

import re

import pytest

from tools.result_figures import DOCS, Figure, figures

FIGURES = figures((DOCS / "benchmarks.md").read_text())


def test_the_page_has_all_figures() -> None:
    shown = re.findall(r"\(img/results-(\w+)\.svg\)", (DOCS / "results.md").read_text())
    assert sorted(shown) == sorted(FIGURES)


@pytest.mark.parametrize(("name", "figure"), FIGURES.items(), ids=list(FIGURES))
def test_bars_are_as_long_as_the_numbers_and_bear_them(name: str, figure: Figure) -> None:
    svg = (DOCS / "img" / f"results-{name}.svg").read_text()
    numbers = [number for values in figure.values.values() for number in values.values()]
    bars = re.findall(r'<g id="bar-(\d+)">\s*<path d="M ([\d.]+) [\d.]+\s*L ([\d.]+)', svg)
    assert [int(number) for number, *_ in bars] == list(range(len(numbers)))
    lengths = [float(right) - float(left) for _, left, right in bars]
    # Drawn to a thousandth of a point.
    assert lengths == pytest.approx(
        [number * sum(lengths) / sum(numbers) for number in numbers], abs=0.01
    )
    said = re.findall(rf">([\d.]+){figure.unit}</text>", svg)
    assert said == [f"{number:.4g}" for number in numbers]
