#!/bin/bash
# fuzz-coverage.sh BUILD CORPUS NAME... - what the corpus of each fuzz target reaches of the code that it is for:
# lines and branches, as rows of a table in Markdown. The targets in BUILD were built with clang's own counters.
set -euo pipefail
build=$1
corpus=$2
shift 2
declare -A of=(
    [wire]="proto/wire.c proto/op.c"
    [oip]="proto/oip.c proto/oip_json.c proto/oip_data.c proto/oip_number.c proto/oip_reply.c"
    [npy]="client/cli/npy.c client/cli/safetensors.c"
    [gateway]="server/gateway/auth.c server/gateway/compress.c server/gateway/upload_query.c"
    [worker]="server/worker/*.c"
    [http]="server/gateway/*.c"
    [answers]="client/unix.c client/unix_*.c"
    [replies]="client/http.c client/http_*.c"
    [config]="server/config.c server/config_adopt.c server/secrets.c server/child.c server/supervisor/notify.c
        server/supervisor/child.c"
    [page]="server/stats.c server/gateway/metrics.c server/gateway/metrics_*.c server/gateway/page.c"
    [text]="client/http_reply.c client/cli/metrics.c client/cli/options.c"
)
found=$build/fuzz/found
rm -rf "$found"
mkdir -p "$found"
[ "$corpus" != tests/fuzz/corpus ] || tar -xJf tests/fuzz/found.tar.xz -C "$found"
for name in "$@"; do
    mkdir -p "$found/$name"
    profile=$build/fuzz/$name.profraw
    rm -f "$profile"
    LLVM_PROFILE_FILE=$profile "$build/fuzz/$name" -runs=0 -print_funcs=0 -timeout=60 "$corpus/$name" "$found/$name" >"$build/fuzz/$name.log" 2>&1 ||
        { tail -5 "$build/fuzz/$name.log" >&2; exit 1; }
    llvm-profdata merge -sparse "$profile" -o "$build/fuzz/$name.profdata"
    # shellcheck disable=SC2086 # a list of files
    llvm-cov report "$build/fuzz/$name" -instr-profile="$build/fuzz/$name.profdata" ${of[$name]} |
        awk -v name="$name" '$1 == "TOTAL" {printf "| `%s` | %d of %d | %s | %d of %d | %s |\n",
            name, $8 - $9, $8, $10, $11 - $12, $11, $13}'
done
