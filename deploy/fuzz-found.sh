#!/bin/bash
# fuzz-found.sh BUILD OUT NAME... - what long runs have found beyond the seeds, for tests/fuzz/found.tar.xz: of what lies
# in that archive and in OUT/corpus (by run.sh of `make fuzz-dist`), the inputs that reach what no other does.
set -euo pipefail
build=$1
out=$2
shift 2
[ -d "$out/corpus" ] || { echo "fuzz-found.sh: there is no $out/corpus" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/old" "$work/new"
[ ! -e tests/fuzz/found.tar.xz ] || tar -xJf tests/fuzz/found.tar.xz -C "$work/old"
for name in "$@"; do
    mkdir -p "$work/new/$name" "$work/old/$name" "$out/corpus/$name"
    "$build/fuzz/$name" -merge=1 -print_funcs=0 -max_len=65536 -rss_limit_mb=0 "$work/new/$name" "tests/fuzz/corpus/$name" \
        "$work/old/$name" "$out/corpus/$name" >"$build/fuzz/$name-merge.log" 2>&1
    for seed in "tests/fuzz/corpus/$name"/*; do # libFuzzer names what it writes by the SHA-1 of it
        rm -f "$work/new/$name/$(sha1sum "$seed" | cut -d' ' -f1)"
    done
    echo "$name: $(find "$work/new/$name" -type f | wc -l) inputs"
done
tar -cJf tests/fuzz/found.tar.xz --owner=0 --group=0 --numeric-owner --sort=name --mtime=@0 -C "$work/new" .
