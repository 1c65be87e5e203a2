#!/bin/bash
# fuzz-dist.sh BUILD DIST NAME... - the relocatable tree DIST/ and DIST.tar.xz: fuzz targets, the libraries they need
# beside them, the corpus, and run.sh, which runs them for long on a machine that has nothing of ours.
# shellcheck disable=SC2016 # $ORIGIN is for others to expand
set -euo pipefail
build=$1
dist=$2
shift 2
deploy/deps.sh dist
. deploy/closure.sh
rm -rf "$dist" "$dist.tar.xz"
mkdir -p "$dist"/{bin,lib,corpus}
tar -xJf tests/fuzz/found.tar.xz -C "$dist/corpus"
for name in "$@"; do
    cp "$build/fuzz/$name" "$dist/bin/"
    mkdir -p "$dist/corpus/$name"
    for seeds in "tests/fuzz/corpus/$name" "$build/fuzz/corpus/$name"; do
        [ ! -d "$seeds" ] || cp -r "$seeds/." "$dist/corpus/$name/"
    done
done
bring "$dist/lib" "$dist"/bin/*
for library in "$dist"/lib/*.so*; do
    patchelf --set-rpath '$ORIGIN' "$library"
done
for program in "$dist"/bin/*; do
    patchelf --set-rpath '$ORIGIN/../lib' "$program"
done
check_inside "$dist" "$dist"/bin/* "$dist"/lib/*.so*
cp deploy/fuzz-run.sh "$dist/run.sh"
chmod 755 "$dist/run.sh"
XZ_OPT=-2 tar -cJf "$dist.tar.xz" --owner=0 --group=0 --numeric-owner -C "$(dirname "$dist")" "$(basename "$dist")"
echo "$dist.tar.xz: $(du -h "$dist.tar.xz" | cut -f1)"
