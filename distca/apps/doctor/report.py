"""Findings as lines for people, or as JSON."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from distca import __version__
from distca.apps.doctor.finding import CheckFinding, Severity, worst
from distca.process.plain_text import plain_lines

_STYLE = {Severity.PASS: "green", Severity.WARN: "yellow", Severity.FAIL: "bold red"}
_NAME_WIDTH = 14


def show(finding: CheckFinding, console: Console) -> None:
    """Prints a finding, and below it what to do."""
    line = Text()
    line.append(f"{finding.status.upper():<5}", style=_STYLE[finding.status])
    line.append(f"{finding.check:<{_NAME_WIDTH}}", style="bold")
    line.append(plain_lines(finding.says))
    console.print(line, soft_wrap=True)
    if finding.advice:
        indent = " " * (5 + _NAME_WIDTH)
        advice = plain_lines(finding.advice)
        console.print(Text(f"{indent}-> {advice}", style="italic"), soft_wrap=True)


def summary(findings: Iterable[CheckFinding]) -> str:
    """How many of each."""
    found = list(findings)
    counts = {status: sum(f.status is status for f in found) for status in Severity}
    return (
        f"{counts[Severity.PASS]} passed, {counts[Severity.WARN]} to look at, "
        f"{counts[Severity.FAIL]} failed"
    )


def as_json(findings: Iterable[CheckFinding]) -> str:
    """One document: the worst status, where, and every finding."""
    found = list(findings)
    return json.dumps(
        {
            "status": worst(found),
            "host": platform.node(),
            "version": __version__,
            "findings": [dataclasses.asdict(finding) for finding in found],
        }
    )
