#!/bin/sh
# A checkpoint into a running engine, from the shell: serve one, push another, compare what is installed.
#
#     examples/push_from_the_shell.sh
set -eu
place=$(mktemp -d "${TMPDIR:-/tmp}/lw-XXXXXX")
liveweight init-model "$place/first" --size tiny --seed 1
liveweight init-model "$place/second" --size tiny --seed 2
liveweight serve "$place/first" --port "${PORT:-8000}" &
engine=$!
trap 'kill "$engine"; wait "$engine" || true; rm -r "$place"' EXIT
url="http://127.0.0.1:${PORT:-8000}"
until curl -sf "$url/health" > /dev/null; do
    kill -0 "$engine"
done
liveweight push "$place/second" "$url" --version step_100
liveweight verify "$place/second" "$url"
