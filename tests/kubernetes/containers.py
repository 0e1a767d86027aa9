"""Containers as processes of this machine, in namespaces of their own: bubblewrap gives each the
root file system of an image of ours, read-only, with the pod's volumes in their places."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.kubernetes.network import PodNetwork

ROOT = Path(__file__).resolve().parents[2]

START_SECONDS = 30.0

_FROM_MACHINE = ("/etc/ld.so.cache", "/etc/ssl", "/etc/nsswitch.conf", "/etc/alternatives")
_DISTCA_USER = "root:x:0:0::/:/bin/sh\ndistca:x:10001:10001::/var/lib/distca:/bin/sh\n"


@dataclass(frozen=True)
class Image:
    """What an image of docker/Dockerfile holds, without being built.

    Attributes:
        code: a checkout, which lies where this one is; packages are this checkout's.
    """

    code: Path

    def environment(self) -> dict[str, str]:
        """As the Dockerfile sets it."""
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONUNBUFFERED": "1",
            # A version before has packages that this one's environment does not know.
            "PYTHONPATH": str(ROOT),
            "HOME": "/var/lib/distca",
            # Images hold the planner's machine code; small steps are planned as well without.
            "NUMBA_DISABLE_JIT": "1",
            "MPLCONFIGDIR": "/tmp/matplotlib",
            # Two cores carry all pods.
            "OMP_NUM_THREADS": "1",
        }

    def mounts(self) -> list[tuple[str, str, str]]:
        """(option of bubblewrap, from, to)."""
        environment = Path(sys.prefix)
        found = [("--ro-bind", "/usr", "/usr")]
        found += [("--ro-bind-try", path, path) for path in _FROM_MACHINE]
        found += [
            ("--ro-bind", sys.base_prefix, sys.base_prefix),
            ("--ro-bind", str(self.code), str(ROOT)),
            ("--ro-bind", str(environment), str(environment)),
        ]
        return found


@dataclass
class PodFiles:
    """What all containers of a pod share.

    Attributes:
        folder: of the pod: volumes, logs, names of hosts.
        volumes: folders by the name of the volume.
    """

    folder: Path
    volumes: dict[str, Path] = field(default_factory=dict)

    @property
    def hosts(self) -> Path:
        """/etc/hosts, which stands in for the cluster's DNS."""
        return self.folder / "hosts"


class Process:
    """One run of a container.

    Args:
        image: of the container.
        manifest: of the container.
        context: the pod's security context and the container's.
        env: all of its variables.
        command: with its arguments.
        log: what it writes.
    """

    def __init__(
        self,
        network: PodNetwork,
        files: PodFiles,
        image: Image,
        manifest: dict[str, object],
        context: Mapping[str, int],
        env: Mapping[str, str],
        command: list[str],
        log: Path,
    ) -> None:
        self._network = network
        self._env = {**image.environment(), **env}
        self._as_user = _as_user(context)
        read, write = os.pipe()
        sandbox = _sandbox(files, image, manifest, write)
        with log.open("ab") as output:
            # Libraries open /dev/stderr again, as the container's user.
            os.fchown(output.fileno(), context["runAsUser"], context["runAsGroup"])
            self._popen = subprocess.Popen(
                [*network.enter(), *sandbox, *self._as_user, *command],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[write],
            )
        os.close(write)
        with os.fdopen(read) as told:
            text = told.read()
        # Empty: bubblewrap could not make it; its log says why.
        self._pid = json.loads(text)["child-pid"] if text else None

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._popen.poll()

    def run(self, command: list[str], timeout_seconds: float) -> bool:
        """Whether a command succeeds within the container."""
        if self._pid is None or self.exit_code() is not None:
            return False
        enter = ["nsenter", f"--target={self._pid}", "--mount", "--pid"]
        entered = subprocess.Popen(
            [*self._network.enter(), *enter, "--", *self._as_user, *command],
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return entered.wait(timeout_seconds) == 0
        except subprocess.TimeoutExpired:
            # The command is a child of nsenter.
            os.killpg(entered.pid, signal.SIGKILL)
            entered.wait()
            return False

    def signal(self, number: int) -> None:
        """Sends a signal to the process with number 1."""
        if self._pid is not None and self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def kill(self) -> None:
        """Ends it at once, with all that it has started."""
        self.signal(signal.SIGKILL)
        self._popen.kill()
        self._popen.wait()

    def wait(self, timeout_seconds: float) -> bool:
        """Whether it ends in time."""
        deadline = time.monotonic() + timeout_seconds
        while self.exit_code() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def _as_user(context: Mapping[str, int]) -> list[str]:
    """No capabilities, as the chart drops all of them."""
    user, group = context["runAsUser"], context["runAsGroup"]
    groups = sorted({group, context.get("fsGroup", group)})
    return [
        "/usr/bin/setpriv",
        f"--reuid={user}",
        f"--regid={group}",
        f"--groups={','.join(map(str, groups))}",
        "--no-new-privs",
        "--bounding-set=-all",
        "--inh-caps=-all",
    ]


def _sandbox(files: PodFiles, image: Image, manifest: dict[str, object], write: int) -> list[str]:
    passwd = files.folder / "passwd"
    passwd.write_text(_DISTCA_USER)
    mounts = [
        *image.mounts(),
        ("--ro-bind", str(passwd), "/etc/passwd"),
        ("--ro-bind", str(files.hosts), "/etc/hosts"),
    ]
    volumes = manifest.get("volumeMounts", [])
    assert isinstance(volumes, list)
    devices = ["--proc", "/proc", "--dev", "/dev", "--ro-bind", "/sys", "/sys"]
    for mount in volumes:
        source = files.volumes[mount["name"]]
        option = "--ro-bind" if mount.get("readOnly") else "--bind"
        mounts.append((option, str(source / mount.get("subPath", "")), mount["mountPath"]))
    # What lies within another's folder is put there after it: a checkout below /tmp, which the pod
    # has a volume for.
    mounts.sort(key=lambda mount: mount[2])
    binds = [part for mount in mounts for part in (*_parents(mount[2]), *mount)]
    links = [
        part
        for name in ("bin", "sbin", "lib", "lib64")
        for part in ("--symlink", f"usr/{name}", f"/{name}")
    ]
    # By its path: it is started with the container's PATH, which need not lead to this machine's.
    bubblewrap = shutil.which("bwrap")
    assert bubblewrap is not None
    return [
        bubblewrap,
        "--unshare-pid",
        "--as-pid-1",
        "--die-with-parent",
        *devices,
        *binds,
        *links,
        "--remount-ro",
        "/",
        "--chdir",
        "/",
        "--info-fd",
        str(write),
        "--",
    ]


def _parents(target: str) -> list[str]:
    """Folders above a mount point, open to the container's user."""
    above = [str(path) for path in reversed(Path(target).parents)]
    made = [path for path in above if path not in ("/", "/dev", "/usr")]
    return [part for path in made for part in ("--perms", "0755", "--dir", path)]
