"""Draws the figures of ``docs/results.md`` from the tables of ``docs/benchmarks.md``."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import matplotlib

DOCS = Path(__file__).resolve().parent.parent / "docs"

WAYS = ("plain packing", "re-packed", "context parallel", "DistCA", "spread evenly")
COLORS = ("#9aa5b1", "#c9a227", "#7a5aa6", "#2f6fd0", "#5b9e6d")


class Figure(NamedTuple):
    """Bars in groups, of ``values[way][group]``, and a line at ``baseline``."""

    title: str
    values: dict[str, dict[str, float]]
    baseline: float
    unit: str


def figures(page: str) -> dict[str, Figure]:
    """Those of the page of benchmarks, by name of file."""
    steps: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    for setting, way, *_, over_plain in _table(page, "Is a training step faster"):
        tokens, longest = setting.split(", ")
        group = f"{tokens} tokens a rank,\ndocuments to {longest}"
        (name,) = (each for each in WAYS if each in way)
        steps[name][group] = _number(over_plain) if over_plain else 1.0
    hidden: dict[str, dict[str, float]] = {}
    networks = ("8 GPUs, NVLink", "64 GPUs, 50 GB/s\nbetween hosts", "64 GPUs, 50 GB/s\neverywhere")
    for way, *shares in _table(page, "How much of the communication", 1):
        hidden[re.sub("[*`]", "", way)] = dict(zip(networks, map(_number, shares), strict=True))
    return {
        "steps": Figure("Tokens/s over plain packing, 4 H200s", steps, 1.0, "x"),
        "loops": Figure("Tokens/s over the loop's own way", {"DistCA": _loops(page)}, 1.0, "x"),
        "messages": Figure("Share of a step that messages add, in the model", hidden, 0.0, "%"),
    }


def _loops(page: str) -> dict[str, float]:
    """Pipelines over 1F1B, frameworks over plain packing, one document over context parallelism."""
    ratios, name = {}, ""
    for way, _, _, cell, _ in _table(page, "Pipelines"):
        name = way.partition(":")[0] if "1F1B," in way else name
        if "DistCA" in way:
            ratios[f"PyTorch's pipelines, {name}"] = _number(cell)
    for layout, way, _, _, cell, _ in _table(page, "torchtitan and Megatron-core"):
        if "DistCA" in way:
            ratios[re.sub(r" \(.*\)", "", layout)] = _number(cell)
    tokens_per_second = {
        (setting, "DistCA" in way): _number(rate.replace(",", ""))
        for setting, way, _, rate, *_ in _table(page, "One document over all ranks")
    }
    for setting, served in tokens_per_second:
        if served:
            ratio = tokens_per_second[setting, True] / tokens_per_second[setting, False]
            ratios[f"one document, {setting.replace(', ', ' GPUs, ')} tokens"] = ratio
    return ratios


def _table(page: str, heading: str, index: int = 0) -> list[list[str]]:
    """The cells of a section's table; an empty first one is that of the row above."""
    section = re.split(r"^## ", page.partition(f"\n## {heading}")[2], maxsplit=1, flags=re.M)[0]
    text = re.findall(r"(?:^\|.*\n)+", section, re.M)[index]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines()[2:]]
    for above, row in pairwise(rows):
        row[0] = row[0] or above[0]
    return rows


def _number(cell: str) -> float:
    """What stands out in a cell, or its first number."""
    found = re.search(r"\*\*([\d.]+)%?\*\*", cell) or re.search(r"([\d.]+)", cell)
    assert found, cell
    return float(found[1])


def draw(figure: Figure, path: Path) -> None:
    """Writes an SVG whose words are text and whose bars have the ids ``bar-0``, ``bar-1``, ..."""
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "", "font.family": "sans-serif"}
    from matplotlib.figure import Figure as Canvas

    groups = list(next(iter(figure.values.values())))
    height = 0.8 / len(figure.values)
    n_bars = len(groups) * len(figure.values)
    axes = (canvas := Canvas(figsize=(8, 1.2 + 0.24 * n_bars), layout="constrained")).subplots()
    for place, (way, values) in enumerate(figure.values.items()):
        at = [group + (place + 0.5) * height - 0.4 for group in range(len(groups))]
        color = COLORS[place] if len(figure.values) > 1 else COLORS[3]
        bars = axes.barh(at, list(values.values()), height * 0.9, color=color, label=way)
        axes.bar_label(bars, [f"{value:.4g}{figure.unit}" for value in values.values()], padding=3)
        for group, bar in enumerate(bars):
            bar.set_gid(f"bar-{place * len(groups) + group}")
    axes.axvline(figure.baseline, color="0.6", linewidth=1, zorder=0)
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(figure.title)
    if len(figure.values) > 1:
        canvas.legend(loc="outside lower center", ncols=3, frameon=False)
    canvas.savefig(path, metadata={"Date": None})


def main() -> None:
    """Draws all of them."""
    for name, figure in figures((DOCS / "benchmarks.md").read_text()).items():
        draw(figure, DOCS / "img" / f"results-{name}.svg")


if __name__ == "__main__":
    main()
