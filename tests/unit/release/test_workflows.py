"""Workflows call targets of the Makefile that exist, and actions that nobody can exchange."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def steps(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(job, step) of all steps of a workflow."""
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        for step in job.get("steps", []):
            yield job, step


def commands(path: Path) -> Iterator[str]:
    """What the steps run, once for each value of the job's matrix."""
    for job, step in steps(path):
        text = step.get("run", "")
        named = re.fullmatch(r"(.*)\$\{\{ matrix\.(\w+) \}\}(.*)", text)
        if named is None:
            yield text
            continue
        for value in job["strategy"]["matrix"][named[2]]:
            yield f"{named[1]}{value}{named[3]}"


@each_workflow
def test_steps_call_targets_that_exist_or_install_debians_packages(path: Path) -> None:
    called = set()
    for command in filter(None, commands(path)):
        if command.startswith("sudo apt-get "):
            continue
        root = r"(?:sudo --preserve-env=PATH )?"
        found = re.match(root + r"make ([a-z-]+)( [A-Z]+=\"\$[A-Z]+\")*$", command)
        assert found, command
        called.add(found[1])
    assert called
    assert called <= TARGETS


def test_checks_run_the_test_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"^```\nmake demo\b.*?^```$", readme, re.DOTALL | re.MULTILINE)
    shown = [line.partition("#")[0].strip() for line in block.splitlines()[1:-1]]
    assert shown == ["make demo", "make test"]
    assert set(shown) <= set(commands(ROOT / ".github/workflows/ci.yml"))


@each_workflow
def test_actions_are_pinned_by_commit_and_say_their_version(path: Path) -> None:
    used = re.findall(r"uses: (\S+)(.*)", path.read_text())
    for action, comment in used:
        if action.startswith("./"):
            assert (ROOT / action).is_file()
            continue
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


@each_workflow
def test_no_text_of_strangers_becomes_part_of_a_command(path: Path) -> None:
    """Names of branches and tags come by the environment, where the shell does not read them."""
    for _, step in steps(path):
        assert set(re.findall(r"\$\{\{ (\w+)\.", step.get("run", ""))) <= {"matrix"}


def test_an_image_is_signed_by_the_job_that_pushes_it() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    for name, push in (("images", "make publish"), ("chart", "make push-chart")):
        runs = [step["run"] for step in jobs[name]["steps"] if "run" in step]
        pushed = next(i for i, command in enumerate(runs) if command.startswith(push))
        assert "make sign" in runs[pushed:]
        assert jobs[name]["permissions"]["id-token"] == "write"


def test_the_workflow_has_all_checks_of_the_ci_machine() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    matrix = yaml.safe_load(workflow.read_text())["jobs"]["check"]["strategy"]["matrix"]["target"]
    assert set(re.findall(r"^run ([a-z-]+)$", script, re.MULTILINE)) - {"install"} <= set(matrix)
    (packages,) = re.findall(r"^packages=\((.+)\)$", script, re.MULTILINE)
    (install,) = {each for each in commands(workflow) if each.startswith("sudo apt-get ")}
    assert set(packages.split()) <= set(install.split())


def test_every_target_that_tests_is_run_by_a_schedule() -> None:
    run = {
        each
        for name in ("ci", "nightly", "weekly")
        for each in commands(WORKFLOWS[0].parent / f"{name}.yml")
    }
    made = {command.rpartition("make ")[2] for command in run}
    by_hand = {"test-gpu", "test-gpu-loops", "check", "test-unit", "test-cluster"}
    tests = {each for each in TARGETS if re.search(r"test|chaos|chart$|demo|lint", each)}
    assert tests - by_hand - {"push-chart"} <= made
