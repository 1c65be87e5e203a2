#!/bin/sh
# fuzz.sh BUILD SECONDS NAME... - runs each fuzz target that long, from its checked-in seeds. New
# inputs go to BUILD/fuzz/corpus; a crash leaves its input in BUILD/fuzz and ends with status 1.
set -eu
build=$1
seconds=$2
shift 2
for name in "$@"; do
    corpus=$build/fuzz/corpus/$name
    seeds=tests/fuzz/corpus/$name
    mkdir -p "$corpus"
    [ -d "$seeds" ] || seeds=$corpus
    echo "fuzzing $name for $seconds s"
    "$build/fuzz/$name" -max_total_time="$seconds" -max_len=65536 -timeout=60 -rss_limit_mb=2048 -print_funcs=0 \
        -artifact_prefix="$build/fuzz/" -print_final_stats=1 -verbosity=0 "$corpus" "$seeds" \
        >"$build/fuzz/$name.log" 2>&1 || {
        tail -40 "$build/fuzz/$name.log" >&2
        echo "fuzz.sh: $name found something; its input is in $build/fuzz" >&2
        exit 1
    }
    grep -E "number_of_executed_units" "$build/fuzz/$name.log" || true
done
