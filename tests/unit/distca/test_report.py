"""The step log keeps what it is given, and the report shows what a record holds."""

from __future__ import annotations

import base64
import io
import json
import re
import resource
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from distca.apps.report.figures import draw_figures, draw_load
from distca.apps.report.page import render_page, write_report
from distca.apps.report.step_log import StepLog
from distca.apps.report.summary import summary_rows, summary_table
from distca.errors import DistcaError
from tests.unit.distca.example_record import example_detail, example_record

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def test_page_needs_no_other_file_and_embeds_every_figure(tmp_path: Path) -> None:
    record = example_record()
    write_report(record, tmp_path / "report.html", tmp_path / "figures")
    html = (tmp_path / "report.html").read_text()
    assert not re.search(r"https?://|<link|<script|src=\"(?!data:)", html)
    images = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    names = {"loss", "imbalance", "load"}
    assert len(images) == len(names)
    assert all(base64.b64decode(image).startswith(PNG_SIGNATURE) for image in images)
    files = {path.stem: path for path in (tmp_path / "figures").iterdir()}
    assert files.keys() == names
    assert all(path.read_bytes().startswith(PNG_SIGNATURE) for path in files.values())
    assert "Verified" in html
    assert "1,234,567 parameters" in html


def test_a_stopped_run_with_nothing_measured_still_has_a_report(tmp_path: Path) -> None:
    record = example_record(n_steps=1)
    bare_step = replace(
        record.steps[0], home_imbalance=None, planned_imbalance=None, measured_imbalance=None
    )
    bare = replace(record, steps=(bare_step,), detail=None, verification=None, finished=False)
    assert draw_figures(bare).keys() == {"loss"}
    assert dict(summary_rows(bare))["run"] == "example (stopped early)"
    write_report(replace(bare, steps=()), tmp_path / "report.html", tmp_path / "figures")


def test_load_shows_home_planned_and_measured_seconds_as_bars() -> None:
    detail = example_detail()

    def heights(figure_axes: int) -> list[float]:
        axes = draw_load(detail).axes[figure_axes]
        return [round(float(bar.get_height()), 6) for bar in axes.patches]  # type: ignore[attr-defined]

    assert heights(0) == [120.0, 42.0]
    assert heights(1) == [82.0, 80.0, 86.0, 79.0]


def test_difference_above_the_tolerance_is_shown_as_a_failure() -> None:
    record = example_record()
    assert record.verification is not None
    for wrong in (1e-3, float("nan")):
        failed = replace(record, verification=replace(record.verification, gradient=wrong))
        assert "DIFFERENT" in dict(summary_rows(failed))["verified"]
        assert "Not verified" in render_page(failed, {})


def test_run_that_ended_before_a_verified_step_claims_nothing() -> None:
    record = example_record()
    assert record.verification is not None
    ended = replace(record, verification=replace(record.verification, steps=0))
    assert dict(summary_rows(ended))["verified"].startswith("no step")
    assert "equal those of local attention" not in render_page(ended, {})


def test_table_fits_a_narrow_terminal() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary_table(example_record()))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("5.5000 (step 0) to 2.6190 (step 11)" in line for line in lines)


def test_step_log_leaves_out_what_is_not_whole_and_forgets_from_a_step_on(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    assert log.read() == ()
    steps = example_record(n_steps=4).steps
    for step in steps:
        log.append(step)
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert log.read() == steps
    log.forget_from(2)
    assert log.read() == steps[:2]


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 1, "loss"',
        b"\0" * 40,
        b"\xffab",
        b"[]",
        b'{"step": 1}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_line_of_a_step_log_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "steps.jsonl"
    first, last = (json.dumps(asdict(s)).encode() for s in example_record(n_steps=2).steps)
    path.write_bytes(b"\n".join((first, line, last, b"")))
    log = StepLog(path)
    for read in (log.read, partial(log.forget_from, 0)):
        with pytest.raises(DistcaError, match=r"steps\.jsonl"):
            read()


def test_step_log_survives_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "steps.jsonl"
    log = StepLog(path)
    steps = example_record(n_steps=4).steps
    log.append(steps[0])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
    try:
        log.append(steps[1])
        log.append(steps[2])
        assert StepLog(path).read() == steps[:1]
        assert log.read() == steps[:3]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(caplog.records) == 1
    log.append(steps[3])
    assert StepLog(path).read() == steps
