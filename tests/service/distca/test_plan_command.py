"""``distca plan`` through its command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from distca.apps.commands.plan import plan
from tests.unit.simulator.cases import flat_profile

app = typer.Typer()
app.command()(plan)

DRAWN = ("--distribution", "prolong")
SMALL = ("--ranks", "4", "--tokens-per-rank", "16384", "--batches", "2", "--nano-batches", "1")


def run(*arguments: str, code: int = 0) -> str:
    """What the command printed, on one line; it must end with ``code``."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return " ".join(result.output.replace("│", " ").split())


def refused(*arguments: str) -> str:
    """The one line on stderr with which the command refuses, exit code 2."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    return str(result.stderr).strip()


def test_a_skewed_batch_is_planned_and_judged(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(["16384"] + ["512"] * 96))
    output = run(
        "--lengths", str(lengths), "--ranks", "4", "--tokens-per-rank", "16384", "--batches", "1",
        "--nano-batches", "1", "--bandwidth-gbps", "400",
    )  # fmt: skip
    assert "Verdict: gain" in output
    assert "the speed of plain packing" in output
    assert "Why the planner (balanced) stopped" in output
    assert "What bounds batch 0" in output
    assert "rank-0" in output
    assert "imbalance of the step, plain packing" in output
    assert "imbalance of the worst tick, planned" in output


def test_the_verdict_says_from_which_network_on_latent_attention_pays(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(["16384"] + ["512"] * 96))
    arguments = (
        "--lengths", str(lengths), "--no-shuffle", "--ranks", "4", "--tokens-per-rank", "16384",
        "--batches", "1", "--nano-batches", "1", "--model", "deepseek-v2",
        "--gpus-per-host", "8",
    )  # fmt: skip
    slow = run(*arguments, "--bandwidth-gbps", "1")
    assert "the key and value of a token of its context have 81.9 KB" in slow
    found = re.search(r"pays from ([0-9.e+]+) GB/s of network a GPU \(here 1\)", slow)
    assert found is not None, slow
    pays_from = float(found[1])
    assert "Verdict: gain" in run(*arguments, "--bandwidth-gbps", str(1.01 * pays_from))
    assert "Verdict: gain" not in run(*arguments, "--bandwidth-gbps", str(0.95 * pays_from))


def test_figures_and_page_are_written_and_need_nothing_else(tmp_path: Path) -> None:
    png, page = tmp_path / "out" / "plan.png", tmp_path / "out" / "plan.html"
    run(*DRAWN, *SMALL, "--png", str(png), "--html", str(page))
    assert png.read_bytes().startswith(b"\x89PNG")
    html = page.read_text()
    assert "<svg" in html
    assert "Verdict" not in html or "CAD" in html
    assert "<script src" not in html
    assert "<link" not in html
    assert html.count("<tbody>") == 3
    assert "head_groups that pay" in html


def test_missing_drawing_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("distca.apps.preview.page", "distca.apps.report.environment"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    result = CliRunner().invoke(
        app, ["--distribution", "prolong", *SMALL, "--html", str(tmp_path / "a.html")]
    )
    assert result.exit_code == 2
    assert "needs the package jinja2" in result.stderr


@pytest.mark.parametrize("placement", ["pool", "mixed"])
def test_a_pool_is_planned(placement: str) -> None:
    output = run(
        "--distribution", "prolong", *SMALL, "--placement", placement, "--pool-servers", "2"
    )
    assert "pool-1" in output
    assert ("rank-0" in output) == (placement == "mixed")


def test_texts_say_that_lengths_are_estimated(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": "x" * 4096}) for _ in range(128)))
    page = tmp_path / "a.html"
    output = run("--lengths", str(path), *SMALL, "--html", str(page))
    assert "Lengths are estimated: 4 UTF-8 bytes a token" in output
    assert "Lengths are estimated: 4 UTF-8 bytes a token" in page.read_text()


def test_groups_show_what_trees_save(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    path.write_text(json.dumps({"prompt": 102400, "completions": [4096] * 16}))
    output = run("--groups", str(path))
    assert "all 1 1703936 167936 / 10.1 / 7.5 / 8.2 446.7 ->" in output
    assert "groups is given besides" in refused("--groups", str(path), *DRAWN)


@pytest.mark.parametrize(
    "line", ["", "{", "[1]", "0", "true", '{"prompt": 1}', '{"prompt": 1, "completions": 2}']
)
def test_a_line_that_is_no_group_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    path.write_text(line)
    assert str(path) in refused("--groups", str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either --lengths, a file, or --distribution"),
        ((*DRAWN, "--field", "n"), "field is n, and lengths are drawn from distribution prolong"),
        ((*DRAWN, "--no-shuffle"), "shuffle is False, and lengths are drawn"),
        (("--distribution", "zipf"), "ValueError: distribution: name is 'zipf'; valid are"),
        ((*DRAWN, "--lengths", "none.txt"), "not both"),
        ((*DRAWN, "--tolerance", "nan"), "tolerance is nan"),
        ((*DRAWN, "--bandwidth-gbps", "0"), "gpu_bandwidth_bytes_per_second"),
        ((*DRAWN, "--ranks", "0"), "n_gpus is 0"),
        ((*DRAWN, "--batches", "0"), "batches is 0"),
        ((*DRAWN, "--max-length", str(10**23)), "is 1" + "0" * 23),
        (
            (*DRAWN, "--nano-batches", "2", "--tokens-per-rank", "1"),
            "tokens_per_rank 1 is not a multiple of nano_batches 2",
        ),
        ((*DRAWN, "--nano-batches", "3"), "nano_batches is 3"),
        ((*DRAWN, "--planner", "best"), "planner is 'best'; valid are"),
        ((*DRAWN, "--model", "gpt"), "model is 'gpt'; valid are"),
        ((*DRAWN, "--placement", "pool"), "pool_servers (placement pool) is 0"),
        ((*DRAWN, "--profile", "none.json"), "none.json cannot be read"),
        ((*DRAWN, "--kv-heads", "5"), "num_heads 32 is not a multiple of num_heads_kv 5"),
        ((*DRAWN, "--model", "deepseek-v3", "--head-dim", "64"), "head_dim is 64"),
        (
            (*DRAWN, "--placement", "pool", "--pool-servers", "2", "--homes", "planned"),
            "homes is planned with placement pool",
        ),
    ],
)
def test_bad_settings_are_refused_by_name(arguments: tuple[str, ...], message: str) -> None:
    # What is given twice counts as it is given last.
    assert message in refused(*SMALL, *arguments)


@pytest.fixture(scope="module")
def printed() -> str:
    """What is printed without further options."""
    return run(*DRAWN, *SMALL)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (("--seed", "0"), False),
        (("--seed", "4"), True),
        (("--homes", "planned"), True),
        (("--layers", "8"), True),
        (("--head-dim-v", "64"), True),
        (("--profile", "{profile}"), True),
    ],
)
def test_options_change_what_is_planned(
    printed: str, tmp_path: Path, options: tuple[str, ...], changes: bool
) -> None:
    profile = tmp_path / "profile.json"
    flat_profile(1e-9).save(profile)
    found = run(*DRAWN, *SMALL, *(each.format(profile=profile) for each in options))
    assert (found != printed) is changes
