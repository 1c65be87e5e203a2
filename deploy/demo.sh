#!/bin/bash
# demo.sh [BUILD] - the main job on real input: starts a server on the best back end, runs the two
# examples of libkld against it, stops it, and looks whether anything was left behind. In the
# unpacked tarball it is called `demo` and finds everything beside itself.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ -d "$here/libexec" ]; then
    programs=$here/bin examples=$here/libexec data=$here/tests/data/digits
else
    programs=$(realpath "${1:-build}") examples=$programs/examples data=$here/../tests/data/digits
fi

folder=$(mktemp -d)
server=
# shellcheck disable=SC2317 # called by the trap
finish() {
    if [ -n "$server" ]; then
        kill -KILL "$server" 2>/dev/null
        wait "$server" 2>/dev/null
    fi
    rm -rf "$folder"
}
trap finish EXIT
trap 'exit 130' INT TERM

# Whoever has a card does not expect the CPU's figures.
if compgen -G '/dev/nvidia[0-9]*' >/dev/null &&
    ! why=$("$programs/kld" ping --count 1 --server local:cuda 2>&1 >/dev/null); then
    case $why in
    *"no back end"*) why="this build has no CUDA back end: no nvcc found when it was built, or CUDA=0 asked for" ;;
    esac
    echo "demo: the GPU is not used: ${why%%$'\n'*}"
fi

# Its one line on standard output says that it serves, and where.
mkfifo "$folder/out"
env -u KLD_CONFIG "$programs/kld-server" --http 127.0.0.1:0 --unix "$folder/kld.sock" \
    --log-level warn >"$folder/out" 2>"$folder/log" &
server=$!
exec 3<"$folder/out"
read -r -t 60 -u 3 line || line=
case $line in
ready\ *) echo "kld-server: $line" ;;
*)
    echo "demo: the server did not start:" >&2
    cat "$folder/log" >&2
    exit 1
    ;;
esac
echo
http=${line#*http=}
http=http://${http%% *}

failed=0
"$examples/digits" "unix:$folder/kld.sock" "$http" "$data" || failed=1
"$examples/headline" "unix:$folder/kld.sock" || failed=1
echo

children=$(cat "/proc/$server/task/$server/children" 2>/dev/null)
kill -TERM "$server"
wait "$server"
status=$?
server=
left=
[ "$status" = 0 ] || left="$left exit-status-$status"
[ ! -e "$folder/kld.sock" ] || left="$left socket"
for child in $children; do
    [ ! -d "/proc/$child" ] || left="$left process-$child"
done
if [ -n "$left" ]; then
    echo "demo: the server left something behind:$left" >&2
    cat "$folder/log" >&2
    failed=1
fi
if [ "$failed" = 0 ]; then
    echo "demo: everything as it has to be, nothing left behind ($SECONDS s)"
else
    echo "demo: FAILED" >&2
fi
exit "$failed"
