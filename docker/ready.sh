#!/usr/bin/env bash
# Whether the process of this container serves, by what /readyz says at its metrics port:
#
#   distca-ready PORT
#
# Health checks run every few seconds, and Python would take a hundred times longer to start.
set -euo pipefail

exec 3<>"/dev/tcp/${HOSTNAME}/$1"
printf 'GET /readyz HTTP/1.0\r\n\r\n' >&3
IFS=$'\r' read -r -t 10 status _ <&3
echo "${status}"
[[ "${status}" == HTTP/1.?" 200 "* ]]
