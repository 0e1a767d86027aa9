"""Slices of plans, cut one by one and plainly: what the control plane's slicer must give."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from core_attention.arrays import Int64Array
from core_attention.ca_task import TaskTable
from core_attention.manifest import Manifest
from core_attention.plan import Plan


def for_rank(plan: Plan, rank: int) -> Plan:
    """The slice that trainer ``rank`` needs: all documents with a row or carried keys on it, and,
    if one of the servers is in-place on it, all documents with a task there."""
    manifest = plan.manifest
    at_home = np.concatenate(
        [
            manifest.segment_document[manifest.segment_rank == rank],
            manifest.carried_document[manifest.carried_rank == rank],
        ]
    )
    own = [i for i, server in enumerate(plan.servers) if server.in_place_rank == rank]
    served = [table.document[np.isin(table.server, own)] for table in (plan.forward, plan.backward)]
    return _slice(plan, np.unique(np.concatenate([at_home, *served])))


def for_server(plan: Plan, server_id: str) -> Plan:
    """The slice that a server needs: all documents with a task on it."""
    index = plan.server_index(server_id)
    assert index is not None
    served = [table.document[table.server == index] for table in (plan.forward, plan.backward)]
    return _slice(plan, np.unique(np.concatenate(served)))


def restrict(manifest: Manifest, documents: Int64Array) -> Manifest:
    """The same step with only ``documents`` (sorted indices); rows keep their places."""
    keep = np.zeros(manifest.n_documents, dtype=bool)
    keep[documents] = True
    segments, carried = keep[manifest.segment_document], keep[manifest.carried_document]
    new_index = np.cumsum(keep) - 1
    return Manifest(
        step=manifest.step,
        n_ranks=manifest.n_ranks,
        n_nano_batches=manifest.n_nano_batches,
        document_id=manifest.document_id[keep],
        document_length=manifest.document_length[keep],
        document_nano_batch=manifest.document_nano_batch[keep],
        segment_document=new_index[manifest.segment_document[segments]],
        segment_offset=manifest.segment_offset[segments],
        segment_length=manifest.segment_length[segments],
        segment_rank=manifest.segment_rank[segments],
        segment_row=manifest.segment_row[segments],
        whole=False,
        carried_document=new_index[manifest.carried_document[carried]],
        carried_offset=manifest.carried_offset[carried],
        carried_length=manifest.carried_length[carried],
        carried_rank=manifest.carried_rank[carried],
        carried_row=manifest.carried_row[carried],
        carried_origin=manifest.carried_origin[carried],
    )


def _slice(plan: Plan, documents: Int64Array) -> Plan:
    """Only ``documents`` (sorted), and only the servers that run their tasks, in their order."""
    new_document = np.full(plan.manifest.n_documents, -1, dtype=np.int64)
    new_document[documents] = np.arange(len(documents))
    kept = (plan.forward, plan.backward)
    rows = [new_document[table.document] >= 0 for table in kept]
    used = np.unique(np.concatenate([t.server[r] for t, r in zip(kept, rows, strict=True)]))
    new_server = np.full(len(plan.servers), -1, dtype=np.int64)
    new_server[used] = np.arange(len(used))
    forward, backward = (
        TaskTable(
            new_document[table.document[row]],
            table.q_begin[row],
            table.q_end[row],
            new_server[table.server[row]],
        )
        for table, row in zip(kept, rows, strict=True)
    )
    return replace(
        plan,
        manifest=restrict(plan.manifest, documents),
        servers=tuple(plan.servers[int(index)] for index in used),
        forward=forward,
        backward=backward,
        forward_forecast=None,
        slots=None,
        backward_forecast=None,
    )
