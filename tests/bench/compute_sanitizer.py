#!/usr/bin/env python3
"""The kernel table on a GPU under the tools of compute-sanitizer, in parts beside each other: what each tool reports, by
kernel, and how many cases it saw, as JSON.

--shards: parts of the table, of which --jobs run at a time, on the host's GPUs in turn; what has not begun when
--seconds have passed is left out and counted so. Status 1 where a tool reports anything or did not see every case.
Cases that miss their bounds are counted, no more: the table itself judges those. Needs compute-sanitizer in PATH or
under /usr/local/cuda, and the programs of `make dist` for the machine."""
import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

from argumentlib import how_long, how_many, stop

TOOLS = ["memcheck", "synccheck", "initcheck", "racecheck"]
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error)|(?:RACECHECK SUMMARY: (\d+) hazard)")
CASES = re.compile(r"kernel table: (\d+) passed, (\d+) failed")
# What a report is of: the line above says where, `at name(...)+0x..`; of a race the line itself says what it is.
WHERE = re.compile(r"at (?:void )?([\w:]+)[(<].*?(?: in (\S+))?$")
REPORT = re.compile(r"========= (Invalid|Uninitialized|Barrier|Error: |Warning: |Race|Program hit)(.*)")


def gpus():
    """Which to use, and what they are."""
    said = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                          capture_output=True, text=True, check=True).stdout.strip().splitlines()
    name, driver = (x.strip() for x in said[0].split(","))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(len(said))))
    return chosen.split(","), name, driver


def commit_of(table):
    version = table.resolve().parent.parent / "share" / "kld" / "VERSION"
    if version.exists():
        return version.read_text().split()[-1]
    return subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()


def reports_of(text):
    """{"what, kernel": how often}"""
    found, what = collections.Counter(), None
    for line in text.splitlines():
        report = REPORT.match(line)
        if report:
            what = re.sub(r"0x[0-9a-f]+|\d+", "n", report.group(1) + report.group(2)).strip()[:120]
            found[what] += 1
            continue
        where = WHERE.search(line)
        if what and where:
            found[what] -= 1
            found[f"{what} | {where.group(1)}"] += 1
            what = None
    return +found


def run_shard(sanitizer, tool, options, shard, devices):
    """What the tool and the table say of the shard-th part."""
    command = [sanitizer, "--tool", tool, "--print-limit", "1000", *options.option, str(options.table), "--backend",
               "cuda", "--quick", "--every", str(options.shards), "--seed", str(shard)]
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES=devices[shard % len(devices)])
    done = subprocess.run(command, capture_output=True, text=True, env=environment, errors="replace")
    (options.log / f"{tool}-{shard}.txt").write_text(done.stdout + done.stderr)
    return done.stdout + done.stderr


def run_tool(sanitizer, tool, options, devices):
    totals = {"tool": tool, "shards": options.shards, "left_out": 0, "cases": 0, "cases_beyond_bounds": 0, "reports": 0,
              "broken": 0}
    found, start = collections.Counter(), time.monotonic()

    def one(shard):
        if time.monotonic() - start > options.seconds:
            return None
        return run_shard(sanitizer, tool, options, shard, devices)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for ended in pool.map(one, range(options.shards)):
            if ended is None:
                totals["left_out"] += 1
                continue
            cases, summary = CASES.search(ended), SUMMARY.search(ended)
            if not cases or not summary:
                totals["broken"] += 1
                continue
            totals["cases"] += int(cases.group(1)) + int(cases.group(2))
            totals["cases_beyond_bounds"] += int(cases.group(2))
            totals["reports"] += int(summary.group(1) or summary.group(2))
            found.update(reports_of(ended))
    totals["by_kernel"] = dict(found.most_common(30))
    totals["seconds"] = round(time.monotonic() - start, 1)
    return totals


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=pathlib.Path, default=pathlib.Path("build/kernel-table"))
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--shards", type=how_many, default=64)
    parser.add_argument("--jobs", type=how_many, default=os.cpu_count())
    parser.add_argument("--seconds", type=how_long, default=3600, help="for each tool")
    parser.add_argument("--option", action="append", default=[], help="one more of compute-sanitizer's")
    parser.add_argument("--log", type=pathlib.Path, default=pathlib.Path("sanitizer-logs"))
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    unknown = set(options.tools.split(",")) - set(TOOLS)
    if unknown:
        parser.error(f"--tools {options.tools}: there is no {', '.join(sorted(unknown))}; "
                     f"expected some of {','.join(TOOLS)}")
    if not options.table.exists():
        stop(f"there is no {options.table}: `make {options.table}` makes it, and --table names another")
    for program in (sanitizer, "nvidia-smi"):
        if not shutil.which(program):
            stop(f"there is no {program}; expected a machine with an NVIDIA GPU and the CUDA toolkit")
    devices, name, driver = gpus()
    options.log.mkdir(parents=True, exist_ok=True)
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout.split("Version")[-1]
    result = {"commit": commit_of(options.table), "gpu": name, "driver": driver,
              "compute_sanitizer": version.strip().splitlines()[0] if version.strip() else "", "tools": []}
    for tool in options.tools.split(","):
        result["tools"].append(run_tool(sanitizer, tool, options, devices))
        print(json.dumps(result["tools"][-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    return any(t["reports"] or t["left_out"] or t["broken"] for t in result["tools"])


if __name__ == "__main__":
    sys.exit(main())
