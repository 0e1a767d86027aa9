"""Commands and files that pages show, and running them as they stand there."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests import ROOT
from tests.support.addresses import unused_port

_BLOCK = re.compile(
    r"^(?:<!-- run by (make [\w-]+) -->\n)?```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
_FILE = re.compile(r"`(\w+\.py)`[^`]*\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """Commands of a page.

    Attributes:
        runner: the command whose tests run them, "" if none does.
        above: what the page says first, and in their section before them.
    """

    runner: str
    above: str
    commands: str


def blocks(page: Path) -> Iterator[Block]:
    """Those of code blocks that name no language."""
    text = page.read_text()
    begin = text.partition("\n## ")[0]
    for runner, language, commands in (found.groups() for found in _BLOCK.finditer(text)):
        section = text[: text.index(commands)].rpartition("\n## ")[2]
        if not language:
            yield Block(runner or "", begin + section, commands)


def run_page(page: Path, runner: str, folder: Path, *, timeout: float) -> str:
    """Runs the blocks of ``runner`` in one shell in ``folder``, which gets the page's files.

    A control plane's ports are free ones. Returns what was printed; what is left running is killed.
    """
    port = unused_port()
    for name, content in _FILE.findall(page.read_text()):
        (folder / name).write_text(content)
    script = "".join(block.commands for block in blocks(page) if block.runner == runner)
    script = script.replace(":7700", f":{port}")
    assert script, f"{page.name} has no block with <!-- run by {runner} --> above it"
    # A file, since what is left running holds a pipe open.
    with (folder / "printed").open("w+") as printed:
        shell = subprocess.Popen(
            ["bash", "-euxo", "pipefail", "-c", script],
            cwd=folder,
            env=environment(folder, port),
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = shell.wait(timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    said = (folder / "printed").read_text()
    assert code == 0, said[-6000:]
    return said


def environment(home: Path, port: int) -> dict[str, str]:
    """One in which commands are those of this Python, on CPUs, and the project's code is this."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DISTCA_CONTROL_PLANE_LISTEN": f"127.0.0.1:{port}",
        "DISTCA_CONTROL_PLANE_METRICS_LISTEN": "127.0.0.1:0",
    }
