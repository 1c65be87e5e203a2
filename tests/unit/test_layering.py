"""The house keeps its order: who includes whom, headers that stand alone, files of a readable size.

Runs on the sources only; needs gcc and g++. One test a rule, each naming every breach.
"""
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
if not (ROOT / ".git").exists():
    pytest.skip("a rule of the repository, not of an installed tree", allow_module_level=True)
FILES = sorted(ROOT / name for name in subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True,
    text=True, check=True).stdout.splitlines() if (ROOT / name).is_file())
SOURCES = [path for path in FILES if path.suffix in (".c", ".h", ".cu", ".cuh", ".inc")]

TOP_LEVEL = {"server", "kernels", "proto", "client", "deploy", "tests", "Makefile", "Dockerfile",
             "README.md", "LICENSE"}

# Folder -> what it may include of ours (prefixes) and of others (names). The longest folder wins.
# Our own: a prefix of the path. libc and POSIX are open to all.
RULES = {
    "proto": (["proto/"], []),
    "kernels": (["proto/", "kernels/"], ["immintrin.h", "x86intrin.h", "cpuid.h"]),
    "kernels/cuda": (["proto/", "kernels/backend.h", "kernels/rule.h", "kernels/cuda/"],
                     ["cuda", "cooperative_groups"]),
    "server": (["proto/", "server/config.h", "server/descriptors.h", "server/log.h", "server/output.h", "server/role.h",
                "server/secrets.h", "server/signals.h", "server/stack.h", "server/stats.h"], ["cjson/cJSON.h"]),
    "server/supervisor": (["proto/", "server/config.h", "server/log.h", "server/output.h", "server/role.h",
                           "server/secrets.h", "server/signals.h", "server/stats.h", "server/uv_loop.h", "server/uv_pool.h", "server/supervisor/"], ["uv.h"]),
    "server/worker": (["proto/", "kernels/backend.h", "server/config.h", "server/descriptors.h",
                       "server/failed_lines.h", "server/host_memory.h", "server/log.h",
                       "server/role.h", "server/signals.h", "server/stats.h", "server/uv_loop.h", "server/uv_pool.h", "server/worker/"], ["uv.h"]),
    "server/gateway": (["proto/", "client/kld.h", "server/config.h", "server/descriptors.h",
                        "server/failed_lines.h", "server/log.h",
                        "server/role.h", "server/secrets.h", "server/signals.h", "server/stats.h", "server/uv_loop.h", "server/uv_pool.h", "server/gateway/"], ["uv.h", "microhttpd.h", "zlib.h", "gnutls/",
                        "seccomp.h"]),
    "client": (["proto/", "client/"], []),
    "client/cli": (["proto/", "client/kld.h", "client/cli/"], ["cjson/cJSON.h"]),
    "client/examples": ([], []),  # <kld/kld.h>, which client/include and an installed kld both have
}
# Single files that may include more.
EXCEPTIONS = {
    "kernels/backends.c": (["kernels/cuda/cuda.h"], []),
    "client/local.c": (["kernels/backend.h"], []),
    "proto/copy.c": ([], ["immintrin.h"]),
    "server/failed_lines.c": (["server/failed_lines.h", "server/log.h"], ["uv.h"]),
    "server/failed_lines.h": ([], ["uv.h"]),
    "server/host_memory.c": (["server/host_memory.h"], []),
    "server/uv_loop.c": (["server/descriptors.h", "server/uv_loop.h"], ["uv.h"]),
    "server/uv_loop.h": ([], ["uv.h"]),
    "server/uv_pool.c": (["server/signals.h", "server/uv_pool.h"], ["uv.h"]),
    "server/uv_pool.h": (["proto/status.h"], ["uv.h"]),
}
for http in (ROOT / "client").glob("http*.[ch]"):
    EXCEPTIONS[f"client/{http.name}"] = ([], ["curl/curl.h"])
for oip in (ROOT / "proto").glob("oip*"):
    EXCEPTIONS[f"proto/{oip.name}"] = ([], ["cjson/cJSON.h"])
OTHERS = re.compile(r"cuda|cooperative_groups|^uv\.h|microhttpd|^zlib|gnutls/|^seccomp|curl/|cjson/|^check\.h|intrin|^cpuid")


def relative(path):
    return path.relative_to(ROOT).as_posix()


def includes(path):
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        match = re.match(r'\s*#\s*include\s+([<"])([^>"]+)[>"]', line)
        if match:
            yield number, match.group(1) == '"', match.group(2)


def rule_of(name):
    folder = name.rsplit("/", 1)[0]
    while folder and folder not in RULES:
        folder = folder.rpartition("/")[0]
    ours, others = RULES.get(folder, (None, None))
    if ours is None:
        return None
    more = EXCEPTIONS.get(name, ([], []))
    return ours + more[0], others + more[1]


def breaches(name, found):
    rule = rule_of(name)
    if rule is None:
        return []
    ours, others = rule
    wrong = []
    for number, is_ours, target in found:
        if is_ours and not (ROOT / target).is_file():
            wrong.append(f"{name}:{number}: \"{target}\" is not a path from the top")
        elif is_ours and not any(target.startswith(prefix) for prefix in ours):
            wrong.append(f"{name}:{number}: may not include \"{target}\"")
        elif not is_ours and OTHERS.search(target) and not any(
                target.startswith(prefix) for prefix in others):
            wrong.append(f"{name}:{number}: may not include <{target}>")
    return wrong


def test_who_may_include_whom():
    wrong = [line for path in SOURCES if not relative(path).startswith("tests/")
             for line in breaches(relative(path), includes(path))]
    assert not wrong, "\n".join(wrong)


def test_the_rules_can_fail():
    assert breaches("proto/x.c", [(1, False, "cjson/cJSON.h")])
    assert breaches("proto/x.c", [(1, True, "server/config.h")])
    assert breaches("kernels/cpu/x.c", [(1, True, "server/log.h")])
    assert breaches("server/gateway/x.c", [(1, True, "kernels/backend.h")])
    assert breaches("server/worker/x.c", [(1, True, "client/kld.h")])
    assert breaches("server/worker/x.c", [(1, False, "cuda_runtime.h")])
    assert breaches("client/examples/x.c", [(1, True, "client/kld.h")])
    assert breaches("client/unix.c", [(1, True, "nowhere.h")]) and not breaches(
        "client/http.h", [(1, False, "curl/curl.h"), (2, False, "string.h")])


def test_top_level_holds_only_the_house():
    names = {relative(path).split("/")[0] for path in FILES}
    extra = {name for name in names if not name.startswith(".")} - TOP_LEVEL
    assert not extra, f"not of the house: {sorted(extra)}"


TEMPLATES = {"kernels/cpu/body.h"}  # the body of a source; each of its users sets what it needs
HEADERS = [relative(path) for path in SOURCES
           if path.suffix == ".h" and relative(path) not in TEMPLATES
           and not relative(path).startswith(("tests/", "kernels/cuda/"))]


@pytest.mark.parametrize("header", HEADERS)
def test_header_stands_alone(header):
    """As C; those that a client includes also as C++."""
    public = header == "client/kld.h" or header in ("proto/op.h", "proto/status.h", "proto/wire.h",
                                                    "kernels/backend.h")
    compilers = [["gcc", "-std=c17", "-x", "c", "-D_GNU_SOURCE"]]
    if public:
        compilers += [["gcc", "-std=c99", "-x", "c", "-Wpedantic"],
                      ["g++", "-std=c++11", "-x", "c++", "-Wpedantic"]]
    text = f'#include "{header}"\n#include "{header}"\nextern int unused_by_anybody;\n'
    for compiler in compilers:
        result = subprocess.run([*compiler, "-fsyntax-only", "-Wall", "-Wextra", "-Werror",
                                 "-Wno-unused-function", "-Wno-unused-parameter",
                                 # set by each of the sources that share the vector code
                                 "-DKLD_VECTOR_BYTES=32", "-Wno-psabi", "-I.", "-"],
                                input=text, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr


def test_files_have_a_readable_size():
    wrong = []
    for path in SOURCES:
        lines = path.read_text(errors="replace").splitlines()
        limit = 520 if not relative(path).startswith("tests/") else 700
        if len(lines) > limit:
            wrong.append(f"{relative(path)}: {len(lines)} lines; split it (limit {limit})")
        wrong += [f"{relative(path)}:{i}: {len(line)} columns" for i, line in enumerate(lines, 1)
                  if len(line) > 100]
    assert not wrong, "\n".join(wrong)


def test_files_open_with_what_they_do():
    wrong = [relative(path) for path in SOURCES
             if not path.read_text(errors="replace").startswith(("/*", "//"))]
    assert not wrong, f"no comment at the top that says what the file does: {wrong}"
