"""Megatron-core: the core attention of layer specs served, and steps for its training loop.

``serve(spec)`` puts :class:`ServedCoreAttention` into a layer spec, ``ServedSteps`` numbers what
``get_forward_backward_func()`` runs; see docs/frameworks.md. Megatron-core is not changed.
"""

from trainer_client.frameworks.versions import require_version

require_version("megatron-core", "0.16.1", "0.20", "megatron")

from trainer_client.frameworks.megatron.attention import ServedCoreAttention  # noqa: E402
from trainer_client.frameworks.megatron.spec import serve  # noqa: E402
from trainer_client.frameworks.megatron.steps import ServedSteps  # noqa: E402

__all__ = ["ServedCoreAttention", "ServedSteps", "serve"]
