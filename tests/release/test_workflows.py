"""Workflows call targets of the Makefile that exist, and actions that nobody can exchange."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
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


def test_there_are_workflows_for_checks_and_releases() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]
    assert {"test", "publish", "push-chart", "sign"} <= TARGETS


@each_workflow
def test_steps_call_targets_that_exist_or_install_debians_packages(path: Path) -> None:
    called = set()
    for command in filter(None, commands(path)):
        if command.startswith("sudo apt-get "):
            continue
        found = re.match(r"make ([a-z-]+)( [A-Z]+=\"\$[A-Z]+\")*$", command)
        assert found, command
        called.add(found[1])
    assert called
    assert called <= TARGETS


def test_checks_run_the_test_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"^```\nmake demo .*?^```$", readme, re.DOTALL | re.MULTILINE)
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


def test_checks_are_those_of_the_ci_machine() -> None:
    """But for images on a Docker engine, which the workflow builds and does not try."""
    script = (ROOT / ".ci" / "run").read_text()
    named = re.findall(r"^run ([a-z-]+)", script, re.MULTILINE)
    (packages,) = re.findall(r"^packages=\((.+)\)$", script, re.MULTILINE)
    for_engine = {"docker.io", "docker-compose", "debootstrap"}
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    check = yaml.safe_load(workflow.read_text())["jobs"]["check"]
    targets = {*named, *in_order(script)} - {"install", "deploy-test"}
    assert set(check["strategy"]["matrix"]["target"]) == targets
    (install,) = (each for each in commands(workflow) if each.startswith("sudo apt-get "))
    assert set(packages.split()) - for_engine <= set(install.split())


def in_order(script: str) -> list[str]:
    """The targets that are made where there is time for them."""
    (targets,) = re.findall(r"^for target in (.+); do$", script, re.MULTILINE)
    found: list[str] = targets.split()
    return found


def test_every_target_that_is_made_where_there_is_time_has_its_usual_time() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert sorted(re.findall(r"\[([a-z-]+)\]=\d+", script)) == sorted(in_order(script))
