"""torchtitan: ``VarlenAttention`` served, by an override and a trainer of its own.

``served(config)`` makes a configuration of torchtitan one that trains with served core attention;
see docs/frameworks.md. torchtitan is not changed: the attention is replaced by its own override
mechanism (``--override.imports``), the training loop extended by a subclass of its ``Trainer``.
"""

from trainer_client.frameworks.versions import require_version

require_version("torchtitan", "0.3", "0.4", "torchtitan")

from trainer_client.frameworks.torchtitan.attention import (  # noqa: E402
    ServedAttention,
    served_varlen,
)
from trainer_client.frameworks.torchtitan.settings import DistcaSettings  # noqa: E402
from trainer_client.frameworks.torchtitan.trainer import (  # noqa: E402
    ServedTrainer,
    served,
)

__all__ = ["DistcaSettings", "ServedAttention", "ServedTrainer", "served", "served_varlen"]
