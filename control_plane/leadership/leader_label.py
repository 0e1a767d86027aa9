"""A label on the leader's pod, by which a Service of Kubernetes finds it.

All control planes of a Deployment are ready, those that stand by too: so one can be replaced or
moved while another leads. The Service therefore selects the pod with this label as well.
"""

from __future__ import annotations

import logging

from control_plane.leadership.kubernetes_api import KubernetesApi, in_one_line

logger = logging.getLogger(__name__)

LEADER_LABEL = "distca.io/leader"


class LeaderLabel:
    """The label of one pod. Used by one thread at a time.

    Args:
        api: whose account may patch pods.
        namespace, pod: whose label; this process runs in it.
    """

    def __init__(self, api: KubernetesApi, namespace: str, pod: str) -> None:
        self._api = api
        self._namespace = namespace
        self._pod = pod
        # None: not known, as a process that ran here before may have led.
        self._shown: bool | None = None

    def show(self, leads: bool) -> None:
        """Sets the label if this process leads, and removes it if not. It costs a call only when
        something changes; a failure is logged, and the next call tries again."""
        if self._shown == leads:
            return
        labels = {LEADER_LABEL: "true" if leads else None}
        try:
            self._api.patch(
                f"/api/v1/namespaces/{self._namespace}/pods/{self._pod}",
                {"metadata": {"labels": labels}},
            )
        except Exception as error:
            # Refused, not reached, or answered by no JSON: all that counts is that it failed.
            logger.warning(
                "label %s of pod %s/%s is not changed: %s",
                LEADER_LABEL,
                self._namespace,
                self._pod,
                in_one_line(error),
            )
        else:
            self._shown = leads
