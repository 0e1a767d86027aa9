"""The pages that people read: what they link to is there, and what they have readers type runs, or
needs what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from core_attention.shape import parse_shape
from tests import ROOT
from tests.support.cluster import keep_profile
from tests.support.pages import blocks, run_page
from tests.unit.release.test_workflows import WORKFLOWS, commands

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
RUN_WHOLE = {"deploy_kubernetes.md": "make chart", "runbook.md": "make chart"}
"""Pages all of whose blocks a test runs, and by what."""

NEEDS = re.compile(r"\bneeds?\b[^.:]*\b(GPUs?|cluster|Docker)\b")

_LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")


def anchors_of(text: str) -> set[str]:
    """Of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_text_and_its_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    assert text.startswith("# ")
    for target, anchor in _LINK.findall(text):
        if target.startswith(("http:", "https:")):
            continue
        other = (page.parent / target) if target else page
        assert other.exists(), f"{page.name} links to {target}"
        if anchor and other.suffix == ".md":
            assert anchor in anchors_of(other.read_text()), f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CONTRIBUTING.md"], ids=lambda page: page.name
)
def test_commands_are_run_in_ci_or_say_what_they_need(page: Path) -> None:
    run = {command for path in WORKFLOWS for command in commands(path)}
    for block in blocks(page):
        runner = block.runner or RUN_WHOLE.get(page.name)
        assert runner in run or NEEDS.search(block.above), f"{page.name}:\n{block.commands}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["planner", "security"])
def test_commands_run_as_they_stand(name: str, tmp_path: Path) -> None:
    """With a file of the reader's own, and a profile that a node need not measure."""
    (tmp_path / "my_documents.jsonl").write_text(
        "".join(json.dumps({"n_tokens": 3_000 * n}) + "\n" for n in range(1, 1000))
    )
    (cache := tmp_path / ".cache" / "distca").mkdir(parents=True)
    keep_profile(cache, parse_shape("4:2:32:float32"))
    run_page(ROOT / "docs" / f"{name}.md", "make test", tmp_path, timeout=200)
