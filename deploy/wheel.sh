#!/bin/bash
# wheel.sh BUILD - BUILD/kld-VERSION-py3-none-manylinux_2_36_x86_64.whl: the package of client/python with
# BUILD/libkld.so and the libraries that it needs beside it (found by $ORIGIN; libc and its parts stay the
# system's). One wheel for every Python 3; pip takes it where glibc is 2.36 or newer.
# shellcheck disable=SC2016 # $ORIGIN is for others to expand
set -euo pipefail
build=$1
deploy/deps.sh wheel
. deploy/closure.sh
for python in python3 /usr/bin/python3; do
    if "$python" -c 'import setuptools, wheel' 2>/dev/null; then break; fi
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir -p "$work"/{lib,out,tree/client,tree/proto}
cp "$build/libkld.so" "$work/lib/libkld.so.0"
strip --strip-debug "$work/lib/libkld.so.0"
bring "$work/lib" "$work/lib/libkld.so.0"
patchelf --set-rpath '$ORIGIN' "$work"/lib/*
check_inside "$work/lib" "$work"/lib/* || exit 1

# Built from a copy, so that setuptools leaves nothing in the tree.
cp -r client/python "$work/tree/client/"
cp LICENSE "$work/tree/client/python/"
cp proto/VERSION "$work/tree/proto/"
cd "$work/tree/client/python"
KLD_BUNDLE="$work/lib" KLD_PLATFORM=manylinux_2_36_x86_64 "$python" -c '
import sys
from setuptools import build_meta
build_meta.build_wheel(sys.argv[1])' "$work/out" >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
cd "$OLDPWD"
wheel=$(basename "$work"/out/*.whl)
cp "$work/out/$wheel" "$build/$wheel"
echo "$build/$wheel: $(du -h "$build/$wheel" | cut -f1)"
