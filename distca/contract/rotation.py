"""New certificates need a new contact: a channel's credentials cannot change."""

from __future__ import annotations

import logging

from distca.contract import rpc

logger = logging.getLogger(__name__)


class Rotation:
    """When to make a new contact, because the certificate files have changed. For one thread.

    Args:
        settings: with the files, see :meth:`distca.contract.rpc.RpcSettings.following_files`.
    """

    def __init__(self, settings: rpc.RpcSettings) -> None:
        self._files = settings.certificates
        self._is_waiting = False
        self._is_warned = False

    def is_due(self, current: rpc.RpcSettings) -> bool:
        """Tests whether new certificates are accepted by the control plane; True once for each.

        Nothing is given up for certificates that it does not take: they cost a warning, and are
        tried again with the next call.

        Args:
            current: how the control plane is reached now.
        """
        if self._files is None or not (self._files.changed() or self._is_waiting):
            return False
        self._is_waiting = True
        try:
            with rpc.open_channel(current) as channel:
                rpc.wait_until_ready(channel, current)
        except rpc.RpcError as error:
            if not self._is_warned:
                self._is_warned = True
                logger.warning(
                    "no connection with the new certificates; going on with the old ones, and "
                    "trying again every %g s: %s",
                    current.certificate_check_seconds,
                    error,
                )
            return False
        self._is_waiting = self._is_warned = False
        return True
