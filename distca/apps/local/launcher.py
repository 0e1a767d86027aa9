"""Launches a local run, follows it to its end, and shows what came of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from distca.apps.local.pool import Pool, PoolSettings
from distca.apps.local.process import LocalProcess
from distca.apps.local.settings import LocalSettings
from distca.apps.local.supervisor import POLL_SECONDS, Supervisor
from distca.apps.train.settings import (
    DataSettings,
    DeviceName,
    ModelSettings,
    ServiceSettings,
    TrainingSettings,
)
from distca.configuration import without_commands
from distca.contract.settings import IntegritySettings, PlanRequest
from distca.contract.timeouts import default_seconds
from distca.errors import DistcaError
from distca.options import as_arguments
from distca.process.interrupt import INTERRUPTED_EXIT_CODE, StopRequest
from distca.process.plain_text import plain
from distca.run_folder import RunFolder

logger = logging.getLogger(__name__)

STOP_SECONDS = default_seconds("local_stop_seconds")
"""How long trainers may take to finish their step and save after Ctrl-C."""

_STOPPED_CODES = (0, INTERRUPTED_EXIT_CODE)


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """All settings of a local run.

    Attributes:
        environ: the launcher's environment, handed down to the processes.
    """

    local: LocalSettings
    data: DataSettings
    model: ModelSettings
    training: TrainingSettings
    plan: PlanRequest
    integrity: IntegritySettings
    environ: Mapping[str, str]


def launch(run: LocalRun, folder: RunFolder, console: Console) -> bool:
    """Runs everything to its end; no process is left when it returns or raises.

    Args:
        run: what to run.
        folder: what it writes; prepared already.
        console: where progress is shown.

    Returns:
        Whether the run finished; False when it was stopped by Ctrl-C or SIGTERM.
    """
    folder.logs.mkdir(parents=True, exist_ok=True)
    with StopRequest() as stop, Supervisor(stopping=lambda: stop.requested) as supervisor:
        trainers = _Launcher(run, folder, supervisor, console).start_all()
        return _Follower(supervisor, trainers, console).follow(stop)


class _Launcher:
    """Starts the processes of one run, each once those that it needs are ready."""

    def __init__(
        self, run: LocalRun, folder: RunFolder, supervisor: Supervisor, console: Console
    ) -> None:
        self._console = console
        self._run = run
        self._folder = folder
        self._supervisor = supervisor
        self._rendezvous = folder.logs / "rendezvous"
        # What an earlier run left there would be taken for this one's.
        self._rendezvous.unlink(missing_ok=True)
        self._environ = {
            **without_commands(run.environ, "control-plane", "attention-node", "train"),
            "OMP_NUM_THREADS": str(run.local.threads),
            # All processes are on this host: gloo need not find out which interface leads out.
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
        }

    def start_all(self) -> list[LocalProcess]:
        """Starts control plane, nodes and trainers, and returns the trainers."""
        local, logs = self._run.local, self._folder.logs
        settings = PoolSettings(
            address_file=logs / "control-plane.address",
            nodes=local.n_nodes,
            shapes=(self._run.model.shape,),
            host="127.0.0.1",
            transport=local.transport,
            logs=logs,
            one_host=True,
        )
        nodes = f"; {local.n_nodes} attention nodes, which measure the kernel at their first start"
        self._say("Starting the control plane" + (nodes if local.n_nodes else ""))
        pool = Pool(settings, self._environ, self._supervisor)
        control_plane = pool.start(["cpu"] * local.n_nodes)
        self._say(f"Starting {local.trainers} trainers")
        return [self._start_trainer(rank, control_plane) for rank in range(local.trainers)]

    def _start_trainer(self, rank: int, control_plane: str) -> LocalProcess:
        run = self._run
        service = ServiceSettings(
            control_plane=control_plane,
            placement=run.local.mode,
            run_dir=self._folder.root,
            transport=run.local.transport,
            rendezvous=f"file://{self._rendezvous}",
            one_host=True,
            device=DeviceName.CPU,
        )
        arguments = as_arguments(
            service, run.data, run.model, run.training, run.plan, run.integrity
        )
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(run.local.trainers)}
        return self._supervisor.watch(
            LocalProcess(
                f"trainer {rank}",
                ["--log-level=info", "train", *arguments],
                self._folder.logs / f"trainer-{rank}.log",
                {**self._environ, **ranks},
                # What the first one shows is for the user.
                shows=rank == 0,
            )
        )

    def _say(self, text: str) -> None:
        self._console.print(plain(text), style="dim", highlight=False, markup=False)


class _Follower:
    """Waits for the trainers, until they end."""

    def __init__(
        self,
        supervisor: Supervisor,
        trainers: Sequence[LocalProcess],
        console: Console,
    ) -> None:
        self._supervisor = supervisor
        self._trainers = trainers
        self._console = console

    def follow(self, stop: StopRequest) -> bool:
        """Waits until every trainer is done; returns False when the run was stopped before."""
        while any(trainer.exit_code is None for trainer in self._trainers):
            if stop.requested:
                self._console.print("Stopping after this step; Ctrl-C again ends at once.")
                self._stop_trainers()
                return False
            self._supervisor.check(done=self._trainers)
            time.sleep(POLL_SECONDS)
        self._supervisor.check(done=self._trainers)
        return True

    def _stop_trainers(self) -> None:
        """Asks the trainers to stop, and gives them time to finish their step and save.

        Raises:
            DistcaError: they did not within STOP_SECONDS, or one failed.
        """
        for trainer in self._trainers:
            trainer.interrupt()
        deadline = time.monotonic() + STOP_SECONDS
        while any(trainer.exit_code is None for trainer in self._trainers):
            self._supervisor.check(done=self._trainers, done_codes=_STOPPED_CODES)
            if time.monotonic() > deadline:
                raise DistcaError(
                    f"the trainers did not stop within {STOP_SECONDS:.0f} s after being asked to; "
                    "they are killed, and go on from their last checkpoint when resumed"
                )
            time.sleep(POLL_SECONDS)
        self._supervisor.check(done=self._trainers, done_codes=_STOPPED_CODES)
