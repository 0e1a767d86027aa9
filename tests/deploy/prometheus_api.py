"""Questions to a Prometheus server, over its HTTP API."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any


class QueryError(Exception):
    """Prometheus refused a question; the message is its own."""


class Prometheus:
    """A server at ``address``, such as ``http://localhost:9090``."""

    def __init__(self, address: str) -> None:
        self._address = address

    def reachable(self) -> bool:
        """Whether it serves."""
        try:
            with urllib.request.urlopen(f"{self._address}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def targets(self) -> list[dict[str, Any]]:
        """What it scrapes, each with ``labels``, ``health`` and ``lastError``."""
        return list(self._get("targets", state="active")["activeTargets"])

    def rule_groups(self) -> list[dict[str, Any]]:
        """Rules as it evaluates them, each with ``health`` and ``lastError``."""
        return list(self._get("rules")["groups"])

    def firing_alerts(self) -> set[str]:
        """Names of the alerts that fire now."""
        return {
            rule["name"]
            for group in self.rule_groups()
            for rule in group["rules"]
            if rule["type"] == "alerting" and rule["state"] == "firing"
        }

    def query_range(
        self, expression: str, begin: float, end: float, step_seconds: float
    ) -> list[dict[str, Any]]:
        """Series of ``expression`` between two times, each with ``metric`` and ``values``.

        Raises:
            QueryError: the expression is wrong.
        """
        found = self._get("query_range", query=expression, start=begin, end=end, step=step_seconds)
        return list(found["result"])

    def _get(self, what: str, **parameters: object) -> Any:
        url = f"{self._address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise QueryError(f"{parameters}: {error.read().decode()}") from error
