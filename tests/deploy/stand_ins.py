"""Images that stand in for public base images where no registry of images can be reached.

They hold this machine's certificate authorities, so that package registries are reached from them
as from here. ``DISTCA_TEST_BASE_IMAGE`` and ``PROMETHEUS_IMAGE`` name public images to use instead.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.deploy.docker_engine import Docker, DockerError
from tests.support.programs import ran

BARE = "distca-test/bare"
BASE = "distca-test/base"
PROMETHEUS = "distca-test/prometheus"

SUITE = "bookworm"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
BOOTSTRAP_SECONDS = 600.0


def make_stand_ins(docker: Docker, folder: Path) -> None:
    """Makes all three images, unless the engine has them.

    Args:
        docker: where.
        folder: for the file system of the first; needs 300 MB.

    Raises:
        DockerError: debootstrap or a build failed.
    """
    if not docker("images", "--quiet", BARE):
        _import_debian(docker, folder / "debian")
    recipe = Path(__file__).with_name("test-images.Dockerfile")
    for target, name in (("base", BASE), ("prometheus", PROMETHEUS)):
        docker(
            "build",
            f"--file={recipe}",
            f"--target={target}",
            f"--tag={name}",
            str(folder),
            timeout_seconds=BOOTSTRAP_SECONDS,
        )


def _import_debian(docker: Docker, root: Path) -> None:
    """Debian's smallest variant, with this machine's certificate authorities."""
    docker.run(
        ["debootstrap", "--variant=minbase", "--include=ca-certificates", SUITE, str(root)],
        timeout_seconds=BOOTSTRAP_SECONDS,
    )
    within = root / CERTIFICATES.relative_to("/")
    within.write_bytes(CERTIFICATES.read_bytes())
    (root / "etc" / "pip.conf").write_text(f"[global]\ncert = {CERTIFICATES}\n")
    archive = root.with_suffix(".tar")
    subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True, timeout=300)
    docker("import", str(archive), BARE, timeout_seconds=300)
    archive.unlink()


def fetch_torch(wheels: Path, constraints: Path) -> None:
    """Puts the wheel of PyTorch that ``constraints`` name into ``wheels``, where builds look first.

    An image is built with Debian's Python 3.11. Where pip looks is this machine's setting.

    Raises:
        DockerError: pip cannot find it.
    """
    (torch,) = (line for line in constraints.read_text().splitlines() if line.startswith("torch=="))
    download = ["python3", "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={wheels}"]
    target = ["--python-version=3.11", "--only-binary=:all:"]
    index = ["--retries=1", "--extra-index-url=https://download.pytorch.org/whl/cpu"]
    done = ran(*download, *target, *index, torch, timeout=600)
    if done.returncode:
        raise DockerError(f"pip download of {torch} failed:\n{done.stderr[-2000:]}")
