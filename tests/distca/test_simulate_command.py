"""``distca simulate`` through its command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from distca.commands.simulate import simulate

app = typer.Typer()
app.command()(simulate)

SMALL = ("--tokens-per-rank", "16384", "--batches", "1", "--gpus", "16,32")


def run(*arguments: str) -> str:
    """What the command printed, on one line."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def refused(*arguments: str) -> str:
    """The one line on stderr with which the command refuses, exit code 2."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1, result.stderr
    return str(result.stderr).strip()


def test_all_methods_are_compared() -> None:
    output = run("--distribution", "prolong", *SMALL)
    for name in ("plain packing", "re-packing", "WLB-ideal-like", "hidden gather", "CAD"):
        assert name in output
    assert "16 GPUs" in output
    assert "32 GPUs" in output


def test_pipelines_are_simulated() -> None:
    output = run("--distribution", "prolong", *SMALL, "--stages", "2", "--microbatches", "3")
    assert "2 stages, 3 microbatches" in output


def test_figures_and_page_are_written(tmp_path: Path) -> None:
    png, page = tmp_path / "a.png", tmp_path / "a.html"
    run("--distribution", "pretrain", *SMALL, "--png", str(png), "--html", str(page))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "16,x"), "gpus: 'x' is no integer"),
        (("--gpus", "0"), "gpus is 0"),
        (("--gpus", "12"), "n_gpus 12 is not a multiple of tensor_parallel 8"),
        (("--stages", "3"), "cannot form pipelines of 3 stages"),
        (("--stages", "0"), "n_stages is 0"),
        (("--microbatches", "0"), "n_microbatches is 0"),
        (("--gradient-sync-ms", "-1"), "gradient_sync_seconds is -0.001"),
        (("--host-bandwidth-gbps", "0"), "host_bandwidth_bytes_per_second is 0"),
        (("--tolerance", "-1"), "tolerance is -1"),
    ],
)
def test_bad_settings_are_refused_by_name(arguments: tuple[str, ...], message: str) -> None:
    small = SMALL[:-2] if arguments[0] == "--gpus" else SMALL
    assert message in refused("--distribution", "prolong", *small, *arguments)
