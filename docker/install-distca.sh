#!/usr/bin/env bash
# Completes /opt/distca in a build stage: DistCA itself beside its dependencies, and a list of both.
set -euo pipefail

pip install --no-deps --force-reinstall /dist/distca-*.whl
# What a compiled planner is compared with: image layers keep whole seconds only.
find /opt/distca -name '*.py' -path '*/control_plane/*' -exec touch --date=@"${SOURCE_DATE_EPOCH:-0}" {} +
mkdir --parents /opt/distca/share/doc/distca
cyclonedx-py environment --output-reproducible --spec-version 1.6 --output-format JSON \
    --output-file /opt/distca/share/doc/distca/sbom.cdx.json /opt/distca/bin/python
