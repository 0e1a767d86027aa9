"""``distca simulate`` through its command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from distca.apps.commands.simulate import simulate

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
    for name in ("plain packing", "re-packing", "WLB-ideal-like", "CAD"):
        assert name in output
    assert "16 GPUs" in output
    assert "32 GPUs" in output
    assert "head_groups that pay" in output
    assert "Verdict:" in output


PIPELINE = ("--distribution", "prolong", *SMALL[:-2], "--gpus", "16", "--stages", "2")


def test_schedules_are_compared_with_a_verdict_and_explained(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    output = run(*PIPELINE, "--microbatches", "2", "--html", str(page))
    for name in ("1f1b", "same-phase", "interleaved", "zero-bubble", "CAD, idle-aware", "Verdict"):
        assert name in output
    assert "idles, or has less to do, take more of it" in output
    assert "zero-bubble" in page.read_text()


def test_each_verdict_of_pipelines_names_its_size_and_remedies_not_in_use(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    pipeline = (*PIPELINE[:-4], "--gpus", "16,32", "--stages", "2", "--microbatches", "2")
    slow = ("--bandwidth-gbps", "8", "--host-bandwidth-gbps", "8")
    output = run(*pipeline, *slow, "--tolerance", "0.1", "--html", str(page))
    for size in ("On 16 GPUs: ", "On 32 GPUs: "):
        assert size in output
        assert size in page.read_text()
    assert "first: planned homes (--homes planned), faster links." in output.replace("│ ", "")


def test_one_s_own_schedule_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "gpipe.csv"
    path.write_text("0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1,\n")
    output = run(*PIPELINE, "--microbatches", "2", "--schedules", f"1f1b, {path}")
    assert "gpipe" in output
    assert "interleaved" not in output
    path.write_text("0F0,0B0\n1F0,1B0\n")
    refusal = refused(*PIPELINE, "--microbatches", "2", "--schedules", str(path))
    assert "is for 2 ranks and 1 microbatches; stages is 2, microbatches is 2" in refusal


def test_schedules_of_one_name_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "s.csv" for folder in "ab"] + [tmp_path / "1f1b.csv"]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text("0F0,,,0B0\n,1F0,1B0,\n")
    refusal = refused(*PIPELINE, "--schedules", f"{paths[0]},{paths[1]}")
    assert f"{paths[1]} is called s, and so is another one" in refusal
    refusal = refused(*PIPELINE, "--schedules", f"1f1b,{paths[2]}")
    assert f"{paths[2]} is called 1f1b, and so is another one" in refusal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "16,x"), "gpus: 'x' is no integer"),
        (("--gpus", "12"), "n_gpus 12 is not a multiple of tensor_parallel 8"),
        (("--stages", "3"), "cannot form pipelines of 3 stages"),
        (("--gradient-sync-ms", "-1"), "gradient_sync_seconds is -0.001"),
        (("--host-bandwidth-gbps", "0"), "host_bandwidth_bytes_per_second is 0"),
        (("--stages", "2", "--schedules", "gpipe"), "'gpipe' is unknown; valid are all, 1f1b"),
        (("--stages", "2", "--schedules", "no.csv"), "no.csv cannot be read"),
        (("--stages", "2", "--in-flight", "0"), "in_flight is 0"),
        (("--in-flight", "-7"), "in_flight is -7.0, and stages is 1; it is for pipelines"),
        (("--schedules", "nonsense"), "schedules is nonsense, and stages is 1; it is for"),
        (("--stages", "2", "--schedules", "interleaved"), "1 microbatches over 2 ranks"),
    ],
)
def test_bad_settings_are_refused_by_name(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused("--distribution", "prolong", *SMALL, *arguments)
