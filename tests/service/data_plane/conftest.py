"""Settings that UCX reads when it is loaded, before any test imports it."""

import os

os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
