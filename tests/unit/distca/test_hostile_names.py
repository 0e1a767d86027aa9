"""Names and errors of others at every place that shows them: what a terminal, a browser, a figure
or a scraper would obey is shown instead."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from distca import cli
from distca.apps.doctor.finding import CheckFinding, Severity, failed
from distca.apps.doctor.report import as_json, show
from distca.apps.preview.output import Preview
from distca.apps.preview.sections import PageSection
from distca.apps.preview.settings import OutputSettings
from distca.apps.report.display import TrainingDisplay
from distca.apps.report.figures import draw_figures
from distca.apps.report.page import render_page
from distca.apps.report.record import RunRecord
from distca.apps.report.summary import summary_table
from distca.apps.simulator.verdict import Judgement, Worth
from distca.apps.top.run import _view
from distca.contract.rpc_errors import Reason, RpcError
from distca.process.plain_text import plain
from tests.unit.distca.example_record import example_record

HOSTILE = "n\x1b[2J\x9b31m\u202e\r\n[red]x[/red][/nope][link=http://e]<script>$\\frac{$"
SHOWN = plain(HOSTILE)


def hostile_record() -> RunRecord:
    record = example_record(n_steps=3)
    assert record.detail is not None
    detail = replace(
        record.detail,
        servers=(HOSTILE, "node-1"),
        reason=HOSTILE,
    )
    return replace(record, name=HOSTILE, model=HOSTILE, data=HOSTILE, detail=detail)


def progress(console: Console) -> None:
    TrainingDisplay(console, HOSTILE, 3).show(example_record(n_steps=1).steps[0])


def finding() -> CheckFinding:
    return failed(HOSTILE, HOSTILE)


TERMINAL: dict[str, Callable[[Console], None]] = {
    "progress": progress,
    "summary": lambda console: console.print(summary_table(hostile_record())),
    "doctor": lambda console: show(finding(), console),
    "preview": lambda console: hostile_preview().show(console),
    "top": lambda console: console.print(_view(None, "cp", HOSTILE, 1.0)),
}


def hostile_preview() -> Preview:
    figure = Figure(figsize=(1, 1))
    figure.suptitle("<script>")
    section = PageSection(HOSTILE, (HOSTILE,), ("what",), ((HOSTILE,),))
    verdict = Judgement(Worth.GAIN, HOSTILE)
    return Preview(title=HOSTILE, sections=[section], verdicts=[verdict], draw=lambda: figure)


@pytest.mark.parametrize("sink", TERMINAL)
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_obeys_nothing(sink: str, is_terminal: bool) -> None:
    output = io.StringIO()
    # Without colours, rich itself writes no escape sequences but those of a live view.
    console = Console(file=output, force_terminal=is_terminal, color_system=None, width=400)
    TERMINAL[sink](console)
    text = output.getvalue()
    for obeyed in ("\x1b[2Jx", "\x1b[2J\x9b", "\x9b", "\u202e", "\x1b]8"):
        assert obeyed not in text
    assert "n\\x1b[2J\\x9b31m\\u202e\\r" in text
    assert "[red]x[/red][/nope][link=http://e]" in text


def test_an_error_of_ours_is_shown_as_it_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise RpcError(Reason.OTHER, "OpenJob", "localhost:1", HOSTILE)

    monkeypatch.setattr(cli, "command_line", lambda: fail)
    with pytest.raises(SystemExit):
        cli.main()
    text = capsys.readouterr().err
    assert not any(obeyed in text for obeyed in ("\x1b[2J", "\x9b", "\u202e"))
    assert "[red]x[/red][/nope]" in text


def test_findings_are_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    text = as_json([finding()])
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text)["findings"][0]["says"] == HOSTILE
    assert json.loads(text)["status"] == Severity.FAIL


def test_a_report_page_runs_nothing_and_turns_no_text_round() -> None:
    page = render_page(hostile_record(), {})
    assert not any(obeyed in page for obeyed in ("<script>", "\u202e", "\x1b", "\x9b"))
    assert "&lt;script&gt;" in page


def test_a_preview_page_runs_nothing_and_keeps_its_figure(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    hostile_preview().save(OutputSettings(html=path))
    page = path.read_text()
    assert not any(obeyed in page for obeyed in ("<script>", "\u202e", "\x1b", "\x9b"))
    assert "<svg" in page


@pytest.mark.filterwarnings("ignore:constrained_layout not applied")
def test_figures_take_no_name_for_a_formula() -> None:
    record = hostile_record()
    assert record.detail is not None
    drawn = draw_figures(record).values()
    texts = []
    for figure in drawn:
        # Raises for what looks like a formula and is none.
        figure.savefig(io.BytesIO(), format="png", dpi=40)
        for axes in figure.axes:
            labels = [*axes.get_xticklabels(), *axes.get_yticklabels()]
            texts += [label.get_text() for label in labels]
    assert SHOWN.replace("$", r"\$") in texts
    assert all(text.isprintable() for text in texts)


def test_a_scrape_stays_one_sample_for_each_name() -> None:
    registry = CollectorRegistry()
    name = HOSTILE + '"} 1\nforged{a="'
    Gauge("distca_test", "Test.", ["server"], registry=registry).labels(name).set(2)
    (family,) = text_string_to_metric_families(generate_latest(registry).decode())
    assert family.name == "distca_test"
    assert [(sample.labels["server"], sample.value) for sample in family.samples] == [(name, 2.0)]
