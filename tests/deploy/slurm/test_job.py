"""``examples/slurm/job.sh`` on a real Slurm of two hosts, which are daemons of this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.deploy.compose_project import free_port
from tests.support.programs import ran
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        shutil.which("slurmctld") is None or os.getuid() != 0,
        reason="needs Slurm (Debian: apt install slurm-wlm), and root",
    ),
]

HOSTS = ("n1", "n2")
JOB_SECONDS = 300.0

_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
ReturnToService=2
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of its commands."""
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        _CONF.format(
            host=socket.gethostname(), folder=tmp_path, ports=[free_port() for _ in range(3)]
        )
    )
    key = tmp_path / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    munge = {"socket": "munge.sock", "key-file": key.name, "log-file": "munged.log"}
    munge |= {"pid-file": "munged.pid", "seed-file": "munged.seed"}
    for folder in ("state", *(f"spool-{host}" for host in HOSTS)):
        (tmp_path / folder).mkdir()
    env = {**os.environ, "SLURM_CONF": str(conf)}
    files = [f"--{option}={tmp_path / name}" for option, name in munge.items()]
    commands = [["munged", "--foreground", "--force", *files], ["slurmctld", "-D"]]
    commands += [["slurmd", "-D", "-N", host] for host in HOSTS]
    daemons = []
    with (tmp_path / "daemons.log").open("wb") as log:
        try:
            for command in commands:
                daemons.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
                if command[0] == "munged":
                    eventually((tmp_path / "munge.sock").exists)
            eventually(lambda: ran("sinfo", "-h", "-o%T", env=env).stdout.split() == ["idle"])
            yield env
        finally:
            ran("scancel", *ran("squeue", "-h", "-o%i", env=env).stdout.split(), env=env)
            eventually(lambda: not ran("squeue", "-h", env=env).stdout, seconds=60)
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait(30)


def test_a_job_trains_to_its_end_though_a_node_is_killed(
    tmp_path: Path, slurm: dict[str, str]
) -> None:
    trainer = (
        "--module distca train --device=cpu --steps=200 --verify --hidden-size=64 --layers=2 "
        f"--heads=4 --kv-heads=2 --tokens-per-rank=256 --data-host=127.0.0.1 "
        f"--run-dir={tmp_path}/run"
    )
    env = {
        **slurm,
        "PATH": f"{Path(sys.executable).parent}:{slurm['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        # Both hosts are this machine.
        "DISTCA_UP_HOST": "127.0.0.1",
        "RENDEZVOUS": f"127.0.0.1:{free_port()}",
        "NODES": "1",
        "RANKS": "1",
        "SHAPE": "4:2:16:float32",
        "PLACEMENT": "pool",
        "TRAIN": trainer,
    }
    script = ROOT / "examples" / "slurm" / "job.sh"
    submitted = ran(
        *("sbatch", "--parsable", "--gpus-per-node=0", f"--chdir={tmp_path}", script), env=env
    )
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    output = tmp_path / f"slurm-{job}.out"
    eventually(lambda: "/200 loss" in _text(output) or _is_over(job, slurm), seconds=JOB_SECONDS)
    server = ran("pgrep", "--full", f"server-id={socket.gethostname()}-1-0").stdout.split()
    assert len(server) == 1, _text(output)
    os.kill(int(server[0]), signal.SIGKILL)
    eventually(lambda: _is_over(job, slurm), seconds=JOB_SECONDS)
    said = _text(output)
    shown = ran("scontrol", "show", "job", job, env=slurm).stdout
    assert "JobState=COMPLETED" in shown, said
    assert "it is started again" in said
    assert "200 steps: equal to local attention" in said
    assert not (tmp_path / f"distca-{job}.json").exists(), "the pool ended in good order"


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _is_over(job: str, env: dict[str, str]) -> bool:
    return not ran("squeue", "--noheader", f"--jobs={job}", env=env).stdout.strip()
