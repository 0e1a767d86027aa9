"""A job of Ray's: ``distca up`` on each host, and :mod:`examples.sft` in Ray's ``TorchTrainer``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from distca.contract.addresses import split_addresses

START_SECONDS = 600
"""Nodes measure the kernel's speed when they first come to a kind of GPU."""


@ray.remote(num_cpus=0)
class Pool:
    """``distca up`` on a host, which ends with this actor, however that ends."""

    def __init__(self, rank: int, options: Sequence[str]) -> None:
        folder = Path(tempfile.mkdtemp(prefix="distca-"))
        self._address_file = folder / "control-plane"
        command = ["up", f"--rank={rank}", f"--host={ray.util.get_node_ip_address()}", *options]
        command += [f"--address-file={self._address_file}", f"--logs={folder}"]
        tied = [sys.executable, "-m", "distca.child", str(os.getpid())]
        self._up = subprocess.Popen([*tied, *command])

    def control_plane(self) -> str:
        """Its address, once it is there; only the first host has it."""
        (address,) = split_addresses("control_plane", f"file:{self._address_file}")
        return address

    def wait_for_nodes(self, n_nodes: int) -> None:
        command = ["top", "--once", "--wait-seconds", str(START_SECONDS)]
        command += ["--expect-servers", str(n_nodes), "--control-plane", self.control_plane()]
        subprocess.run([sys.executable, "-m", "distca", *command], check=True)

    def end(self) -> None:
        self._up.terminate()
        self._up.wait(60)


def train(options: dict[str, Any]) -> None:
    """A rank, in a process and a process group of Ray's."""
    os.environ.update(options["environment"])
    from examples.sft.__main__ import train as fine_tune

    # It leaves the job, and its process group, before the pool ends.
    fine_tune(options["arguments"]).end()


def run(chosen: argparse.Namespace, arguments: list[str]) -> None:
    """Trains, with a pool that lives as long."""
    bundle = {"CPU": 1, **({"GPU": chosen.nodes} if chosen.use_gpu and chosen.nodes else {})}
    hosts = placement_group([bundle] * chosen.hosts, strategy="STRICT_SPREAD")
    ray.get(hosts.ready())
    options = [f"--nodes={chosen.nodes}", *(["--shape", chosen.shape] if chosen.nodes else [])]
    pools: list[Any] = []
    try:
        for rank in range(chosen.hosts):
            there = PlacementGroupSchedulingStrategy(hosts, placement_group_bundle_index=rank)
            actor: Any = Pool
            placed = actor.options(scheduling_strategy=there, num_gpus=bundle.get("GPU", 0))
            pools.append(placed.remote(rank, options))
            if rank == 0:
                address = ray.get(pools[0].control_plane.remote())
                options.append(f"--control-plane={address}")
        ray.get(pools[0].wait_for_nodes.remote(chosen.hosts * chosen.nodes))
        environment = {
            "DISTCA_CONTROL_PLANE": address,
            "DISTCA_PLACEMENT": chosen.placement,
        }
        TorchTrainer(
            train,
            train_loop_config={"environment": environment, "arguments": arguments},
            torch_config=TorchConfig(backend="nccl" if chosen.use_gpu else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=chosen.hosts * chosen.ranks, use_gpu=chosen.use_gpu
            ),
        ).fit()
    finally:
        ray.get([pool.end.remote() for pool in pools])
        remove_placement_group(hosts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="Other options are those of examples.sft.",
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=6, help="trainers of a host")
    parser.add_argument("--nodes", type=int, default=2, help="attention nodes of a host")
    parser.add_argument(
        "--shape", default="32:8:128:bfloat16", help="HEADS:KV_HEADS:HEAD_DIM:DTYPE"
    )
    parser.add_argument("--placement", default="mixed", help="mixed, pool or in-place")
    parser.add_argument("--no-gpus", dest="use_gpu", action="store_false")
    chosen, arguments = parser.parse_known_args()
    ray.init()
    run(chosen, arguments)


if __name__ == "__main__":
    main()
