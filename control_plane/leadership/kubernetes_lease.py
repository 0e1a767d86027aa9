"""Leadership by a Lease of coordination.k8s.io, as Kubernetes' own controllers elect a leader.

The leader renews the Lease every :data:`RETRY_SECONDS`. A candidate takes over when the Lease has
not changed for :data:`LEASE_SECONDS`, by its own clock: clocks of machines are not compared. A
leader that has not managed to renew for :data:`RENEW_SECONDS` leads no more; the difference is what
its clock may be wrong by, and what a call that it has begun may take. Writes carry the version that
was read, so of two candidates one wins.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime

from control_plane.leadership.kubernetes_api import (
    CONFLICT,
    NOT_FOUND,
    KubernetesApi,
    KubernetesError,
    Object,
    in_one_line,
)
from control_plane.leadership.leader_label import LeaderLabel
from distca.contract.timeouts import default_seconds

logger = logging.getLogger(__name__)

LEASE_SECONDS = int(default_seconds("leader_lease_seconds"))
RENEW_SECONDS = default_seconds("leader_renew_seconds")
RETRY_SECONDS = 2.0


class KubernetesLease:
    """The leadership of the holder of a Lease.

    Args:
        api: whose account may get, create and update Leases.
        namespace, name: of the Lease; it is made if it is not there.
        identity: of this process, unique among the candidates: the pod's name.
        label: shows a Service which pod leads; None: nothing does.
        lease_seconds, renew_seconds, retry_seconds: see the module.
    """

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        name: str,
        identity: str,
        *,
        label: LeaderLabel | None = None,
        lease_seconds: int = LEASE_SECONDS,
        renew_seconds: float = RENEW_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        if not retry_seconds < renew_seconds < lease_seconds:
            raise ValueError(
                f"retry_seconds {retry_seconds} < renew_seconds {renew_seconds} < lease_seconds "
                f"{lease_seconds} must hold"
            )
        self._api = api
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._label = label
        self._lease_seconds = lease_seconds
        self._renew_seconds = renew_seconds
        self._retry_seconds = retry_seconds
        self._held_until = 0.0
        # What was seen last, and since when it has not changed.
        self._seen: tuple[str, str | None] | None = None
        self._seen_at = 0.0

    @property
    def is_held(self) -> bool:
        return time.monotonic() < self._held_until

    async def acquire(self) -> None:
        """Waits until this process holds the Lease. Failures of the API are logged, and it is
        asked again."""
        waiting = False
        while not await self._attempt():
            if not waiting:
                waiting = True
                logger.info("standing by: another control plane holds Lease %s", self)
            await self._show(leads=False)
            await asyncio.sleep(self._retry_seconds)
        logger.info("leading: holding Lease %s as %s", self, self._identity)
        await self._show(leads=True)

    async def lost(self) -> str:
        """Renews the Lease; returns when that has not worked for too long, or somebody else has
        it."""
        while True:
            await asyncio.sleep(self._retry_seconds)
            renewed = await self._attempt()
            if renewed:
                await self._show(leads=True)
            if not self.is_held:
                return f"Lease {self} was not renewed for {self._renew_seconds:g} s"
            if not renewed and self._is_anothers():
                self._held_until = 0.0
                return f"Lease {self} was taken by {self._seen[0] if self._seen else 'nobody'}"

    async def release(self) -> None:
        """Gives the Lease up, so that a standby need not wait for its end."""
        if not self.is_held:
            return
        self._held_until = 0.0
        await self._show(leads=False)
        try:
            await asyncio.to_thread(self._give_up)
        except Exception as error:
            # The Lease runs out by itself.
            logger.warning("giving up Lease %s: %s", self, error)

    def __str__(self) -> str:
        return f"{self._namespace}/{self._name}"

    def _is_anothers(self) -> bool:
        return self._seen is not None and self._seen[0] not in ("", self._identity)

    async def _show(self, *, leads: bool) -> None:
        if self._label is not None:
            await asyncio.to_thread(self._label.show, leads)

    async def _attempt(self) -> bool:
        """Takes or renews the Lease; whether that worked."""
        began = time.monotonic()
        try:
            taken = await asyncio.wait_for(asyncio.to_thread(self._take), self._renew_seconds)
        except Exception as error:
            # The client raises what its HTTP library does; all that counts is that it failed.
            logger.warning("Lease %s: %s", self, in_one_line(error))
            return False
        if taken:
            # From before the call: nobody can have seen the renewal earlier than that.
            self._held_until = began + self._renew_seconds
        return taken

    def _take(self) -> bool:
        """Reads the Lease, and writes it if it is free or this process's."""
        lease = self._read()
        if lease is None:
            return self._create()
        spec = lease["spec"]
        holder = spec.get("holderIdentity") or ""
        seen = (holder, spec.get("renewTime"))
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()
        unchanged_seconds = time.monotonic() - self._seen_at
        patience_seconds = spec.get("leaseDurationSeconds") or self._lease_seconds
        if holder not in ("", self._identity) and unchanged_seconds < patience_seconds:
            return False
        now = _now()
        if holder != self._identity:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = (spec.get("leaseTransitions") or 0) + 1
        spec["holderIdentity"] = self._identity
        spec["leaseDurationSeconds"] = self._lease_seconds
        spec["renewTime"] = now
        return self._write(lease)

    def _read(self) -> Object | None:
        try:
            return self._api.get(f"{self._leases}/{self._name}")
        except KubernetesError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def _create(self) -> bool:
        now = _now()
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": self._lease_seconds,
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": 0,
            },
        }
        try:
            self._api.create(self._leases, lease)
        except KubernetesError as error:
            if error.status == CONFLICT:
                return False
            raise
        return True

    def _write(self, lease: Object) -> bool:
        """Replaces the Lease, unless somebody has done so since it was read."""
        try:
            self._api.replace(f"{self._leases}/{self._name}", lease)
        except KubernetesError as error:
            if error.status == CONFLICT:
                return False
            raise
        return True

    def _give_up(self) -> None:
        lease = self._read()
        if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
            lease["spec"]["holderIdentity"] = ""
            self._write(lease)


def _now() -> str:
    """As the API writes times with parts of seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
