#!/bin/sh
# fuzz.sh BUILD SECONDS NAME... - runs each fuzz target that long, from its checked-in seeds and what
# longer runs have found (fuzz-found.sh). New
# inputs go to BUILD/fuzz/corpus; a crash leaves its input in BUILD/fuzz and ends with status 1.
set -eu
build=$1
seconds=$2
shift 2
case $seconds in
'' | 0* | *[!0-9]*) # which libFuzzer takes for 0, no end
    echo "fuzz.sh: SECONDS='$seconds': expected how many of each target, a whole number from 1 on" >&2
    exit 2
    ;;
esac
rm -rf "$build/fuzz/found"
mkdir -p "$build/fuzz/found"
tar -xJf tests/fuzz/found.tar.xz -C "$build/fuzz/found"
for name in "$@"; do
    corpus=$build/fuzz/corpus/$name
    seeds=tests/fuzz/corpus/$name
    found=$build/fuzz/found/$name
    mkdir -p "$corpus" "$found"
    [ -d "$seeds" ] || seeds=$corpus
    echo "fuzzing $name for $seconds s"
    "$build/fuzz/$name" -max_total_time="$seconds" -max_len=65536 -timeout=60 -rss_limit_mb=2048 -print_funcs=0 \
        -artifact_prefix="$build/fuzz/" -print_final_stats=1 -verbosity=0 "$corpus" "$seeds" "$found" \
        >"$build/fuzz/$name.log" 2>&1 || {
        tail -40 "$build/fuzz/$name.log" >&2
        echo "fuzz.sh: $name found something; its input is in $build/fuzz" >&2
        exit 1
    }
    grep -E "number_of_executed_units" "$build/fuzz/$name.log" || true
done
