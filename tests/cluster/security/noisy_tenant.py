"""``python -m tests.cluster.security.noisy_tenant ADDRESS CA CERTIFICATE KEY`` asks for all it may.

It opens jobs and reads no plan. On each line of stdin it hands in manifests of as many documents of
one token as it is allowed, until none is taken any more; at its end it leaves.
"""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path

import numpy as np

from core_attention.manifest import RankManifest, SegmentColumns
from distca.contract import rpc
from distca.contract.codec import WireError, shape_to_proto
from distca.v1 import jobs_pb2
from tests.support.cluster import NODE_SHAPE
from tests.support.service_harness import Client, client_of, job_spec

N_JOBS = 3
N_NANO_BATCHES = 2
RENEW_SECONDS = 2.0
DOCUMENTS = 300_000
"""Of a nano-batch, where that is allowed."""


def short_documents(n: int) -> SegmentColumns:
    """``n`` documents of one token in each nano-batch."""
    total = N_NANO_BATCHES * n
    one = np.ones(total, dtype=np.int64)
    nano_batch = np.repeat(np.arange(N_NANO_BATCHES), n)
    zeros = np.zeros_like(one)
    return SegmentColumns(nano_batch, np.arange(total), one, zeros, one, zeros - 1, zeros)


def submit_all(client: Client, jobs: list[tuple[str, str]], first: int) -> tuple[int, int]:
    """Hands in steps from ``first`` on until no more are taken: how many, and of how many documents
    a nano-batch."""
    n, columns = DOCUMENTS, short_documents(DOCUMENTS)
    for taken in itertools.count():
        job, lease = jobs[taken % len(jobs)]
        step = first + taken // len(jobs)
        while True:
            try:
                manifest = RankManifest.from_columns(step, 0, N_NANO_BATCHES, columns)
                client.submit(job, lease, manifest)
                break
            except (WireError, rpc.RpcError):
                if taken or n == 1:
                    return taken, n
                n //= 2
                columns = short_documents(n)
    raise AssertionError


def renew(client: Client, jobs: list[tuple[str, str]], over: threading.Event) -> None:
    """Keeps the jobs' leases."""
    while not over.wait(RENEW_SECONDS):
        for job, lease in jobs:
            client.jobs.RenewRank(jobs_pb2.RenewRankRequest(job_id=job, rank_lease_id=lease))


def main() -> None:
    """Until stdin ends."""
    address, ca_file, certificate_file, key_file = sys.argv[1:]
    files = {"ca_file": ca_file, "certificate_file": certificate_file, "key_file": key_file}
    settings = {name: Path(file) for name, file in files.items()}
    with client_of(address, call_seconds=60.0, **settings) as client:
        spec = job_spec(n_ranks=1, shape=shape_to_proto(NODE_SHAPE))
        jobs = []
        for index in range(N_JOBS):
            spec.name = f"noisy-{index}"
            jobs.append(client.open(0, spec))
        unread = [
            client.jobs.WatchRank(
                iter([jobs_pb2.WatchRankRequest(job_id=job, rank_lease_id=lease)])
            )
            for job, lease in jobs
        ]
        over = threading.Event()
        renewing = threading.Thread(target=renew, args=(client, jobs, over))
        renewing.start()
        first = 0
        print("ready", flush=True)
        while sys.stdin.readline():
            taken, n = submit_all(client, jobs, first)
            print(taken, n, flush=True)
            first += taken
        over.set()
        renewing.join()
        for job, lease in jobs:
            client.close_job(job, lease, "enough")
        for stream in unread:
            stream.cancel()


if __name__ == "__main__":
    main()
