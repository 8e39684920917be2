#!/bin/sh
# A checkpoint into a running engine, from the shell: serve one, push another, compare what is installed.
#
#     examples/push_from_the_shell.sh
set -eu
place=$(mktemp -d "${TMPDIR:-/tmp}/lw-XXXXXX")
trap 'rm -r "$place"' EXIT
liveweight init-model "$place/first" --size tiny --seed 1
liveweight init-model "$place/second" --size tiny --seed 2

mkfifo "$place/said"
liveweight serve "$place/first" --port 0 --threads 1 > "$place/said" &
engine=$!
trap 'kill "$engine"; wait "$engine" || true; rm -r "$place"' EXIT
exec 3< "$place/said"
read -r line <&3 # the engine's first line comes when it serves, and says where
url=$(echo "$line" | cut -d ' ' -f 4 | tr -d ,)

liveweight push "$place/second" "$url" --version step_100
liveweight verify "$place/second" "$url"
