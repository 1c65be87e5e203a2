#!/bin/sh
# check-gpu - runs in the unpacked tarball: the kernel table and the end-to-end tests on the CUDA
# back end. Needs an NVIDIA driver and python3 with pytest and numpy, nothing else.
set -eu
tree=$(cd "$(dirname "$0")" && pwd)
exec python3 "$tree/tests/run" --build "$tree/bin" --table "$tree/libexec/kernel-table" \
    --backend cuda --only table,e2e "$@"
