#!/usr/bin/env bash
# Prints what constraints.txt should hold after a change of versions: those of the Python packages in the
# images that are named, and the file's own for packages that are in none of them.
#
# Images are built with the file's versions, so take those out first that are to be chosen anew:
#   edit docker/constraints.txt; make images constraints
set -euo pipefail
cd "$(dirname "$0")"

pinned_in() {
    "${DOCKER:-docker}" run --rm --entrypoint python "$1" -c '
import importlib.metadata as metadata
for package in metadata.distributions():
    # One version of PyTorch has several builds, told apart after the plus.
    print(package.metadata["Name"].lower() + "==" + package.version.partition("+")[0])
' | grep --invert-match '^distca=='
}

echo "# Versions that images are built and tested with; \`make constraints\` writes them down."
{
    for image in "$@"; do pinned_in "$image"; done
    grep --invert-match '^#' constraints.txt
} | awk -F== '!seen[$1]++' | LC_ALL=C sort
