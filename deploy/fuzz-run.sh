#!/bin/bash
# run.sh SECONDS JOBS OUT [NAME...] - of the tree that `make fuzz-dist` makes: runs each fuzz target (or those named)
# for so long in JOBS processes at a time, one target after the other, from the tree's corpus. OUT gets
#   figures.txt     a line for each target: executions, seconds of CPU, edges and features covered, crashes
#   corpus/NAME     what is new beside the tree's corpus, minimised
#   crashes/NAME-*  inputs that broke a promise, and logs/ what was printed
# Ends with status 1 if there are any, if a target was not executed once, or ended with an error and no input that tells
# why (failed.txt). Needs nothing that is not in the tree but bash and glibc 2.36 or newer.
set -u
[ $# -ge 3 ] || { sed -n 2,8p "$0" >&2; exit 2; }
seconds=$1
jobs=$2
mkdir -p "$3"/{corpus,crashes,logs} || exit 1
out=$(cd "$3" && pwd)
shift 3
cd "$(dirname "$0")" || exit 1
if [ $# = 0 ]; then
    mapfile -t names < <(cd bin && printf '%s\n' *)
    set -- "${names[@]}"
fi
# The sanitizer's shadow has its place: some kernels put something else there now and then.
fixed=()
setarch "$(uname -m)" -R true 2>/dev/null && fixed=(setarch "$(uname -m)" -R)
# It looks for leaks by ptrace(), which not every container allows.
leaks=0
ASAN_OPTIONS=detect_leaks=1 "${fixed[@]}" bin/npy -runs=0 >/dev/null 2>&1 && leaks=1
export ASAN_OPTIONS="detect_leaks=$leaks:quarantine_size_mb=16:handle_abort=0"
common=(-print_funcs=0 -max_len=4096 -timeout=60 -rss_limit_mb=3072 -malloc_limit_mb=2048 "-detect_leaks=$leaks")

crashes() { find "$out/crashes" -name "$1-*" | wc -l; }

# fuzz NAME JOB: until the time is over, again after each crash; its seconds of CPU go to a file.
fuzz() {
    local name=$1 job=$2 end=$((SECONDS + seconds)) left tries=0 before status
    while left=$((end - SECONDS)) && [ "$left" -gt 0 ] && [ "$tries" -lt 20 ]; do
        tries=$((tries + 1))
        before=$(crashes "$name")
        "${fixed[@]}" "bin/$name" "${common[@]}" -reload=30 -max_total_time="$left" -print_final_stats=1 -seed=$((job * 1000 + tries)) \
            -artifact_prefix="$out/crashes/$name-" "$work/$name" >>"$out/logs/$name-$job.log" 2>&1 && break
        status=$?
        [ "$(crashes "$name")" -gt "$before" ] && continue
        echo "$name: job $job ended with status $status" >>"$out/failed.txt"
        sleep 1
    done
    times >"$work/times-$job" # not through a pipe: that is another shell, with children of its own
    awk 'NR == 2 { for (i = 1; i <= 2; i++) { split($i, t, /[ms]/); sum += t[1] * 60 + t[2] } print sum }' \
        "$work/times-$job" >"$out/logs/$name-$job.cpu"
}

work=$(mktemp -d)
rm -f "$out/failed.txt"
trap 'rm -rf "$work"' EXIT
for name in "$@"; do
    [ -x "bin/$name" ] || { echo "run.sh: no target $name" >&2; exit 2; }
    mkdir -p "$work/$name" "$out/corpus/$name"
    cp -r "corpus/$name/." "$work/$name/"
    [ ! -d "$out/corpus/$name" ] || cp -r "$out/corpus/$name/." "$work/$name/"
    rm -f "$out/logs/$name"-*
    for job in $(seq "$jobs"); do
        fuzz "$name" "$job" &
    done
    wait
    mkdir "$work/$name.least"
    timeout 900 "${fixed[@]}" "bin/$name" "${common[@]}" -merge=1 "$work/$name.least" "corpus/$name" "$work/$name" >"$out/logs/$name-merge.log" 2>&1
    for new in "$work/$name.least"/*; do
        [ ! -f "$new" ] || [ -e "corpus/$name/$(basename "$new")" ] || cp "$new" "$out/corpus/$name/"
    done
    runs=$(cat "$out/logs/$name"-[0-9]*.log | awk '/stat::number_of_executed_units/ {sum += $2} END {print sum + 0}')
    cpu=$(cat "$out/logs/$name"-*.cpu | awk '{sum += $1} END {printf "%.0f", sum}')
    covered=$(grep -ho 'cov: [0-9]* ft: [0-9]*' "$out/logs/$name"-[0-9]*.log | sort -k2 -n | tail -1)
    inputs=$(find "$work/$name.least" -type f | wc -l)
    echo "$name executions=$runs cpu_s=$cpu ${covered:-cov: 0 ft: 0} corpus=$inputs crashes=$(crashes "$name")" | tee -a "$out/figures.txt"
    [ "$runs" -gt 0 ] || echo "$name: not executed once" >>"$out/failed.txt"
    rm -rf "${work:?}/$name" "$work/$name.least"
done
if [ -s "$out/failed.txt" ]; then
    cat "$out/failed.txt" >&2
    exit 1
fi
[ "$(find "$out/crashes" -type f | wc -l)" = 0 ]
