"""The examination of a server's reply before it is used."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from core_attention.checksum import ChecksumMismatch, verify
from core_attention.message_views import message_views
from core_attention.score_rule import ScoreRule
from core_attention.tick import Tick
from distca.contract.server_loss import LossCause, ServerLoss
from trainer_client.integrity.answer import Answer, Tensors
from trainer_client.integrity.audit import AuditFinding, Auditor
from trainer_client.integrity.result_checks import ResultChecker
from trainer_client.metrics import TrainerMetrics
from trainer_client.options import SessionOptions
from trainer_client.step.exchanges import ServerExchange

logger = logging.getLogger(__name__)


class Examiner:
    """Checks the replies of other processes' servers, and audits some of their tasks.

    Args:
        options: which checks.
        metrics: of what they find.
        lost: receives the loss of a server that an audit convicts.
    """

    def __init__(
        self,
        options: SessionOptions,
        metrics: TrainerMetrics,
        lost: Callable[[ServerLoss], None],
    ) -> None:
        device = torch.device(options.device)
        self._options = options
        self._metrics = metrics
        self._lost = lost
        self._checker = (
            ResultChecker(device, scale=options.scale) if options.checks_results else None
        )
        self._auditor = (
            Auditor(
                options.audit_rate,
                scale=options.scale,
                on_finding=self._audited,
                device=device,
            )
            if options.audit_rate > 0
            else None
        )

    def fault(
        self,
        exchange: ServerExchange,
        tick: Tick,
        rule: ScoreRule,
        inputs: Tensors,
        reply: torch.Tensor,
    ) -> str | None:
        """The fault of a reply that has arrived, in words; None if nothing is.

        Args:
            exchange: with whom, and which rows.
            tick: which exchange.
            rule: for its scores.
            inputs: what was sent, by packed row.
            reply: the message, 1-D uint8.
        """
        connection = exchange.connection
        try:
            if connection is not None and self._options.seals(leaves_host=connection.leaves_host):
                verify(reply, tick.tag(reply=True), connection.receiving_key)
        except ChecksumMismatch as mismatch:
            self._metrics.series.at(kind="checksum").corrupt_results_total.inc()
            return str(mismatch)
        if self._checker is None and self._auditor is None:
            return None
        answer = Answer(
            tick=tick,
            server_id=exchange.server_id,
            plan=exchange.plan,
            route=exchange.route,
            inputs=inputs,
            results=message_views(reply, exchange.reply),
            rule=rule,
        )
        fault = self._checker.fault(answer) if self._checker else None
        if fault is not None:
            self._metrics.series.at(kind="not_finite").corrupt_results_total.inc()
        elif self._auditor is not None:
            self._auditor.sample(answer)
        return fault

    def close(self) -> None:
        """Ends the audits."""
        if self._auditor is not None:
            self._auditor.close()

    def _audited(self, finding: AuditFinding) -> None:
        result = "equal" if finding.equal else "different"
        self._metrics.series.at(result=result).audited_tasks_total.inc()
        if not finding.equal:
            logger.error("%s; the step has used the result", finding)
            self._metrics.series.at(kind="audit").corrupt_results_total.inc()
            self._lost(
                ServerLoss(
                    server_id=finding.server_id,
                    epoch=finding.epoch,
                    cause=LossCause.CORRUPT_RESULT,
                    detail=str(finding),
                )
            )
