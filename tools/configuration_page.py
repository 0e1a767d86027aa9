"""Writes the tables of ``docs/configuration.md``: timeouts, and the options of the commands."""

from __future__ import annotations

from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any

from distca.cli import command_line
from distca.configuration import ConfigOption, options_of
from distca.contract.timeouts import as_markdown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
BEGIN = "<!-- All below is written by `make configuration-page`. -->\n"

_HEAD = "| key and flag | environment | default | meaning |\n|---|---|---|---|\n"


def printed(page: str) -> str:
    """Returns ``page`` with the tables of timeouts and of all options at its end.

    Raises:
        ValueError: the line after which they stand is missing.
    """
    if BEGIN not in page:
        raise ValueError(f"{PAGE.name} lacks the line {BEGIN.strip()!r}")
    before = page[: page.index(BEGIN) + len(BEGIN)]
    return f"{before}\n{as_markdown()}" + "".join(
        _table(command, list(options))
        for command, options in groupby(options_of(command_line()), key=lambda one: one.command)
    )


def _table(command: tuple[str, ...], options: list[ConfigOption]) -> str:
    title = f"`[{'.'.join(command)}]`" if command else "Before the command"
    rows = "".join(map(_row, sorted(options, key=lambda option: option.key)))
    return f"\n## {title}\n\n{_HEAD}{rows}"


def _row(option: ConfigOption) -> str:
    variables = ", ".join(f"`{name}`" for name in option.variables)
    meaning = " ".join((option.parameter.help or "").split()).replace("|", "\\|")
    return f"| `{option.key}` | {variables} | {_default(option)} | {meaning} |\n"


def _default(option: ConfigOption) -> str:
    value: Any = option.parameter.default
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        value = str(value).lower()
    if option.parameter.required:
        return "required"
    return f"`{value}`" if isinstance(value, str | int | float) and str(value) else ""


def main() -> None:
    """Writes the page."""
    PAGE.write_text(printed(PAGE.read_text()))


if __name__ == "__main__":
    main()
