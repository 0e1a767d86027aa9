"""The control plane and the attention nodes of one host, for as long as a job lasts."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar

import typer
from rich.console import Console

from core_attention.shape import AttentionShape, format_shape, parse_shape
from data_plane.interfaces import OWN_ADDRESS, own_address
from data_plane.transport import TransportName
from distca.apps.local.process import LocalProcess
from distca.apps.local.supervisor import POLL_SECONDS, Supervisor
from distca.contract.addresses import FILE, split_address, split_addresses
from distca.contract.checks import check_least
from distca.errors import DistcaError
from distca.options import Read, option
from distca.process.interrupt import StopRequest
from distca.process.plain_text import plain

logger = logging.getLogger(__name__)

MOST_DEATHS = 5
"""A process that ends so often is not started again."""


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """The part of a control plane and a pool that one host has."""

    PANEL: ClassVar = "Pool"

    address_file: Annotated[
        Path,
        typer.Option(
            help="File, new for each job, that all hosts share: trainers read the control plane's "
            "address there, by DISTCA_CONTROL_PLANE=file:PATH."
        ),
    ]
    rank: Annotated[
        int,
        typer.Option(
            help="Number of this host; host 0 has the control plane.",
            envvar=["SLURM_PROCID", "SKYPILOT_NODE_RANK"],
        ),
    ] = 0
    control_plane: str = option(
        "",
        "host:port at which host 0 has it, where hosts share no files. Default: a free port, in "
        "--address-file.",
    )
    nodes: int | None = option(
        None, "Attention nodes of this host. Default: one for each of its GPUs."
    )
    shapes: Annotated[
        tuple[AttentionShape, ...],
        typer.Option(
            "--shape",
            metavar="HEADS:KV_HEADS:HEAD_DIM:DTYPE",
            help="Attention shape that nodes measure at start; may be given several times.",
        ),
        Read(str, parse_shape),
    ] = ()
    host: str = option(
        OWN_ADDRESS, "Address of this host that others reach; auto: what its name stands for."
    )
    data_interface: str = option(
        "", "Network interface whose IPv4 address trainers reach. Default: that of --host."
    )
    transport: TransportName = option(TransportName.AUTO, "What moves the rows.")
    logs: Path = option(Path("distca-logs"), "Folder of the processes' logs.")
    one_host: bool = option(
        False,
        "Whether all trainers are on this host: then they use shared memory.",
        "--one-host/--several-hosts",
    )

    def __post_init__(self) -> None:
        check_least(self, rank=0)
        if self.nodes is not None:
            check_least(self, nodes=0)
        if self.nodes != 0 and not self.shapes:
            raise ValueError("shape is not given; nodes measure one, or choose --nodes 0")
        if self.host == OWN_ADDRESS:
            object.__setattr__(self, "host", own_address())

    @property
    def named(self) -> str:
        """The control plane, as other processes are given it."""
        return self.control_plane or f"{FILE}{self.address_file.absolute()}"

    @property
    def devices(self) -> list[str]:
        """The device of each node."""
        n_gpus = _count_gpus() if self.nodes != 0 else 0
        n_nodes = n_gpus if self.nodes is None else self.nodes
        if not n_gpus:
            return ["cpu"] * n_nodes
        if n_nodes > n_gpus:
            raise ValueError(f"nodes is {n_nodes}, and this host has {n_gpus} GPUs")
        return [f"cuda:{index}" for index in range(n_nodes)]


def keep_up(settings: PoolSettings, environ: Mapping[str, str], console: Console) -> None:
    """Starts the processes of this host, and starts again those that end, until a signal comes;
    none is left then.

    Raises:
        DistcaError: one did not become ready, or has ended :data:`MOST_DEATHS` times.
    """
    devices = settings.devices
    settings.logs.mkdir(parents=True, exist_ok=True)
    with StopRequest() as stop, Supervisor(stopping=lambda: stop.requested) as supervisor:
        pool = Pool(settings, environ, supervisor)
        try:
            control_plane = pool.start(devices)
            console.print(
                plain(
                    f"{len(devices)} attention nodes on {settings.host}, control plane at "
                    f"{control_plane}. Trainers: DISTCA_CONTROL_PLANE={settings.named}"
                ),
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            pool.keep(lambda: stop.requested)
        finally:
            if settings.rank == 0:
                settings.address_file.unlink(missing_ok=True)


@dataclass
class _Member:
    """A process that is to run: its arguments, and how often it has ended."""

    name: str
    arguments: list[str]
    process: LocalProcess
    n_deaths: int = field(default=0)


class Pool:
    """The processes of one host, each started once those that it needs are ready."""

    def __init__(
        self, settings: PoolSettings, environ: Mapping[str, str], supervisor: Supervisor
    ) -> None:
        self._settings = settings
        self._environ = {**environ, "PYTHONUNBUFFERED": "1"}
        self._supervisor = supervisor
        self._kept: list[_Member] = []

    def start(self, devices: Sequence[str]) -> str:
        """Starts all that this host has, a node for each of ``devices``, and returns the address of
        the control plane."""
        settings = self._settings
        if settings.rank == 0:
            settings.address_file.unlink(missing_ok=True)
            fixed = settings.control_plane or "any:0"
            _, port = split_address("control_plane", fixed, any_port=True)
            kept = self._start("control-plane", self._control_plane(port))
            self._supervisor.wait_for_file(kept.process, settings.address_file)
        (address, *_) = split_addresses("control_plane", settings.named)
        if settings.rank == 0:
            # When it is started again, it is found where it was.
            kept.arguments = self._control_plane(port=int(address.rpartition(":")[2]))
        waited = []
        for index, device in enumerate(devices):
            host = f"{socket.gethostname()}-{settings.rank}"
            name = f"{'node' if settings.one_host else host}-{index}"
            ready = settings.logs / f"{name}.address"
            ready.unlink(missing_ok=True)
            arguments = self._node(name, device, ready)
            waited.append((self._start(name, arguments), ready))
        for kept, ready in waited:
            self._supervisor.wait_for_file(kept.process, ready)
        return address

    def keep(self, is_over: Callable[[], bool]) -> None:
        """Starts again what ends, until it is over."""
        while not is_over():
            for kept in self._kept:
                if kept.process.exit_code is not None:
                    self._start_again(kept)
            time.sleep(POLL_SECONDS)

    def _start_again(self, kept: _Member) -> None:
        ended = kept.process.describe_end()
        kept.n_deaths += 1
        if kept.n_deaths == MOST_DEATHS:
            raise DistcaError(
                f"{kept.name} {ended}, {MOST_DEATHS} times by now; see {kept.process.log}"
            )
        logger.warning("%s %s; it is started again, see %s", kept.name, ended, kept.process.log)
        kept.process = self._run(kept.name, kept.arguments)

    def _start(self, name: str, arguments: Sequence[str]) -> _Member:
        kept = _Member(name, list(arguments), self._run(name, arguments))
        self._kept.append(kept)
        return kept

    def _run(self, name: str, arguments: Sequence[str]) -> LocalProcess:
        log = self._settings.logs / f"{name}.log"
        return self._supervisor.watch(
            LocalProcess(name, ["--log-level=info", *arguments], log, self._environ)
        )

    def _control_plane(self, port: int) -> list[str]:
        settings = self._settings
        return [
            "control-plane",
            f"--listen={settings.host}:{port}",
            f"--metrics-listen={settings.host}:0",
            f"--address-file={settings.address_file.absolute()}",
            f"--state-dir={settings.logs.absolute() / 'state'}",
        ]

    def _node(self, name: str, device: str, ready: Path) -> list[str]:
        settings = self._settings
        return [
            "attention-node",
            f"--control-plane={settings.named}",
            f"--server-id={name}",
            f"--device={device}",
            f"--data-host={settings.host}",
            f"--data-interface={settings.data_interface}",
            f"--transport={settings.transport}",
            f"--address-file={ready.absolute()}",
            *(["--one-host"] if settings.one_host else []),
            *(f"--shape={format_shape(shape)}" for shape in settings.shapes),
        ]


def _count_gpus() -> int:
    if find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()
