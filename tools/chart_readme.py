"""Writes the table of values in the chart's README from ``values.yaml`` and its comments.

Every value has a comment right above it; a line that begins with ``## `` opens a section.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

CHART = Path(__file__).resolve().parent.parent / "helm" / "distca"
BEGIN = "<!-- Values: written by `make chart-readme` from values.yaml. -->"
END = "<!-- End of values. -->"


class MissingCommentError(Exception):
    """A value has no comment above it."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """One row of the table.

    Attributes:
        path: for example ``controlPlane.service.port``.
        default: as JSON, on one line.
        comment: its comment's lines joined.
        section: title of the section that it stands in.
    """

    path: str
    default: str
    comment: str
    section: str


def read_values(text: str) -> list[Value]:
    """The values in ``text``, in order.

    Raises:
        MissingCommentError: names the values without a comment.
    """
    lines = text.splitlines()
    document = yaml.compose(text)
    values = list(_leaves(document, "", lines)) if document else []
    bare = [value.path for value in values if not value.comment]
    if bare:
        raise MissingCommentError(
            f"without a comment in values.yaml: {', '.join(bare)}; write one above each"
        )
    return values


def table(values: list[Value]) -> str:
    """Sections with a table each, in Markdown."""
    parts = []
    for section in dict.fromkeys(value.section for value in values):
        rows = [
            f"| `{value.path}` | {_cell(value.comment)} | `{_cell(value.default)}` |"
            for value in values
            if value.section == section
        ]
        parts.append(
            "\n".join(
                [f"### {section}", "", "| value | meaning | default |", "|---|---|---|", *rows]
            )
        )
    return "\n\n".join(parts)


def with_table(readme: str, rows: str) -> str:
    """``readme`` with what stands between the marks replaced by ``rows``.

    Raises:
        ValueError: a mark is missing.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md must contain the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{rows}\n\n{END}{after}"


def _leaves(node: yaml.Node, prefix: str, lines: list[str]) -> Iterator[Value]:
    """The values below a mapping: scalars, lists and mappings that users fill as a whole."""
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        line = key.start_mark.line
        comment = _comment_above(lines, line)
        if isinstance(value, yaml.MappingNode) and value.value and not comment:
            yield from _leaves(value, f"{path}.", lines)
            continue
        yield Value(
            path=path,
            default=json.dumps(yaml.safe_load(yaml.serialize(value))),
            comment=comment,
            section=_section_of(lines, line),
        )


def _comment_above(lines: list[str], line: int) -> str:
    """The comment block that ends right above ``line``."""
    block: list[str] = []
    for above in reversed(lines[:line]):
        text = above.strip()
        if not text.startswith("#") or text.startswith("## "):
            break
        block.append(text.removeprefix("#").strip())
    return " ".join(reversed(block))


def _section_of(lines: list[str], line: int) -> str:
    titles = [text.removeprefix("## ") for text in lines[:line] if text.startswith("## ")]
    return titles[-1] if titles else "Values"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Writes the README."""
    path = CHART / "README.md"
    try:
        rows = table(read_values((CHART / "values.yaml").read_text()))
        path.write_text(with_table(path.read_text(), rows))
    except (MissingCommentError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
