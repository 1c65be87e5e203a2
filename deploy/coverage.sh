#!/bin/sh
# coverage.sh BUILD - what the tests of a build made with SANITIZE=coverage have reached: a table by folder on standard
# output, each file in BUILD/coverage.txt (lines) and BUILD/coverage-branches.txt, and lines that nothing reached as HTML.
set -eu
build=$1
# Branches that a compiler makes of its own (and nobody can take) are not counted.
gcovr --root . --object-directory "$build/obj" --filter 'proto/' --filter 'kernels/' --filter 'server/' --filter 'client/' \
    --exclude 'client/examples/' --exclude-unreachable-branches --gcov-ignore-parse-errors \
    --json "$build/coverage.json" --json-summary "$build/coverage-summary.json" --txt "$build/coverage.txt" \
    "$build/obj" >/dev/null
gcovr --root . --add-tracefile "$build/coverage.json" --branches --txt "$build/coverage-branches.txt"
mkdir -p "$build/coverage"
gcovr --root . --add-tracefile "$build/coverage.json" --html-details "$build/coverage/index.html"
python3 - "$build/coverage-summary.json" <<'PYTHON'
import collections
import json
import sys

folders = collections.defaultdict(lambda: [0, 0, 0, 0])
for one in json.load(open(sys.argv[1]))["files"]:
    name = one["filename"].rsplit("/", 1)[0]
    for key in (name, "all"):
        for i, field in enumerate(("line_covered", "line_total", "branch_covered", "branch_total")):
            folders[key][i] += one[field]
print(f"{'folder':24} {'lines':>14} {'':>6} {'branches':>14}")
for name, (lines, of_lines, branches, of_branches) in sorted(folders.items(), key=lambda x: (x[0] == "all", x)):
    print(f"{name:24} {lines:6} of {of_lines:5} {100 * lines / max(of_lines, 1):5.1f}% "
          f"{branches:6} of {of_branches:5} {100 * branches / max(of_branches, 1):5.1f}%")
PYTHON
