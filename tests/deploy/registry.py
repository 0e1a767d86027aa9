"""A registry of images and charts of our own: Debian's docker-registry, on loopback."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 20.0

PROGRAM = "docker-registry"

_CONFIGURATION = """
version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: "127.0.0.1:0"}}
"""


class RegistryError(Exception):
    """It is not installed, or does not start."""


@contextmanager
def registry_on_loopback(folder: Path) -> Iterator[str]:
    """host:port of a registry that ends with the block, where nobody asks for a certificate.

    Args:
        folder: for what is pushed, its settings and its log.

    Raises:
        RegistryError: it is not there, or does not serve.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise RegistryError(f"there is no {PROGRAM} (Debian: apt-get install {PROGRAM})")
    configuration, log = folder / "registry.yml", folder / "registry.log"
    configuration.write_text(_CONFIGURATION.format(folder=folder / "registry"))
    with log.open("w") as output:
        process = subprocess.Popen(
            [program, "serve", str(configuration)],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    try:
        yield _address(process, log)
    finally:
        process.kill()
        process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while not (found := re.search(r"listening on (127\.0\.0\.1:\d+)", log.read_text())):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RegistryError(f"{PROGRAM} does not serve; its log:\n{log.read_text()}")
        time.sleep(0.1)
    return found[1]
