#!/usr/bin/env bash
# Installs what DistCA requires in a build stage, itself and with extras:
#
#   install-packages.sh [--root=FOLDER] EXTRA...
#
# With --root, what is not in /opt/distca yet goes below FOLDER, to be a layer of its own.
set -euo pipefail

options=(--requirement=/requirements/distca.txt)
for argument in "$@"; do
    case "${argument}" in
        --root=*) options+=("${argument}") ;;
        *) options+=("--requirement=/requirements/${argument}.txt") ;;
    esac
done
pip install "${options[@]}"
