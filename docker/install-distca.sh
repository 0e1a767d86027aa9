#!/usr/bin/env bash
# Completes /opt/distca in a build stage: DistCA itself beside its dependencies, and a list of both. The
# same files alone are below /stage, to be a layer of their own.
set -euo pipefail

pip install --no-deps --no-compile --root=/stage /dist/distca-*.whl
# What a compiled planner is compared with: image layers keep whole seconds only.
find /stage -name '*.py' -exec touch --date=@"${SOURCE_DATE_EPOCH:-0}" {} +
# By content: nobody compares times again, and equal sources make equal files.
/opt/distca/bin/python -m compileall -q -s /stage --invalidation-mode unchecked-hash /stage/opt/distca
cp --archive /stage/opt/distca/. /opt/distca/
mkdir --parents /stage/opt/distca/share/doc/distca
cyclonedx-py environment --output-reproducible --spec-version 1.6 --output-format JSON \
    --output-file /stage/opt/distca/share/doc/distca/sbom.cdx.json /opt/distca/bin/python
