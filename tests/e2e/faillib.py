"""Makes the N-th call of a kind fail in a role of a server, for N = 1, 2, 3, ... while a scripted part of a
conversation runs, and says what came of each. tests/fail/nth.c does it, loaded into the server before libc;
this file speaks to it through a page of shared memory, so one running server is asked thousands of times.
"""
import collections
import mmap
import os
import pathlib
import re
import select
import struct
import subprocess
import tempfile
import time

import pytest

from conftest import BIN, Server, children_of, sanitizer, wait_until

KINDS = ["none", "memory", "map", "descriptor", "send", "receive", "file", "epoll", "thread", "interrupt",
         "option", "connect", "cuda", "cuda look"]
ROLES = ["supervisor", "worker", "gateway", "other"]
SLOT = 512
HEAD = struct.Struct("<IiQQQQqqII")  # kind, error, first, last, count, failed, blocks, bytes, pid, frames
FRAMES, CALL = 40, HEAD.size + 8 * 40
LIBRARY = pathlib.Path(os.environ.get("FAIL_NTH_LIBRARY", BIN / "tests" / "fail" / "nth.so"))
VERBOSE = "FAIL_NTH_VERBOSE" in os.environ
START_STUCK_MS = 3000  # after which a child whose start hangs is replaced
BLOCKS_OF_CACHES = 8  # that a role may come to keep for good while it works, a grown table, say


def needs(part):
    """Builds with a sanitizer have none; in CI every other one has."""
    left_out = not part.exists() and (sanitizer() is not None or os.environ.get("CI") != "true")
    return pytest.mark.skipif(left_out, reason=f"no {part.name} in this build")


class Page:
    def __init__(self):
        self.file = tempfile.NamedTemporaryFile(prefix="kld-nth-")
        self.file.truncate(SLOT * len(ROLES))
        self.map = mmap.mmap(self.file.fileno(), SLOT * len(ROLES))

    def environment(self):
        return {"LD_PRELOAD": str(LIBRARY), "NTH_PAGE": self.file.name}

    def read(self, role):
        names = ["kind", "error", "first", "last", "count", "failed", "blocks", "bytes", "pid", "frames"]
        at = SLOT * ROLES.index(role)
        found = dict(zip(names, HEAD.unpack_from(self.map, at)))
        found["frame"] = struct.unpack_from(f"<{min(found['frames'], FRAMES)}Q", self.map, at + HEAD.size)
        for i, name in enumerate(("call", "caller")):
            text = self.map[at + CALL + 32 * i:at + CALL + 32 * (i + 1)]
            found[name] = text.split(b"\0", 1)[0].decode()
        return found

    def arm(self, role, kind, first=1, last=None, error=0):
        """Calls first to last (only the first one, if not said) fail from now on."""
        at = SLOT * ROLES.index(role)
        struct.pack_into("<I", self.map, at, 0)
        struct.pack_into("<iQQQQ", self.map, at + 4, error, first, first if last is None else last, 0, 0)
        struct.pack_into("<I", self.map, at + HEAD.size - 4, 0)
        struct.pack_into("<I", self.map, at, KINDS.index(kind))

    def disarm(self, role):
        """-> what was counted meanwhile."""
        struct.pack_into("<I", self.map, SLOT * ROLES.index(role), 0)
        return self.read(role)

    def close(self):
        self.map.close()
        self.file.close()


def counting():
    """A page for who only counts blocks of memory; None where there is no such library, or a sanitizer in its place."""
    return Page() if LIBRARY.exists() and not sanitizer() else None


class Symbols:
    """Where code addresses of a process are in the sources."""

    def __init__(self):
        self.known, self.ranges = {}, {}

    def look(self, pid):
        """While it lives; what it has loaded does not change."""
        if pid in self.ranges:
            return
        self.ranges[pid] = ranges = []
        for line in pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(None, 5)
            if len(fields) == 6 and "x" in fields[1]:
                begin, end = (int(x, 16) for x in fields[0].split("-"))
                ranges.append((begin, end, begin - int(fields[2], 16), fields[5]))

    def names(self, pid, addresses):
        """Which functions they are in, innermost first, as "function file:line"."""
        ranges, found = self.ranges.get(pid, []), []
        for address in addresses:
            for begin, end, base, path in ranges:
                if begin <= address < end and not path.endswith("nth.so"):
                    found += self.one(path, address - base - 1)
        return found

    def one(self, path, offset):
        key = path, offset
        if key not in self.known:
            try:
                said = subprocess.run(["addr2line", "-Cfise", path, hex(offset)], capture_output=True, text=True)
                lines = said.stdout.splitlines()
            except FileNotFoundError:
                lines = []
            names = [f"{f} {w}" for f, w in zip(lines[::2], lines[1::2])]
            if not names or names[0].startswith("??"):
                names = [f"{pathlib.Path(path).name}+{offset:#x}"]
            self.known[key] = names
        return self.known[key]


class Clear(Exception):
    """An error that says what was wrong."""


class Cut(Exception):
    """The connection was closed without a word."""


class Blamed(Exception):
    """An error that says that the client did something wrong, which it did not."""


def holdings(server):
    """What a leak shows in: of each role, descriptors, threads, and mappings of shared memory."""
    found = {}
    for role, pid in [("supervisor", server.pid), *children_of(server.pid).items()]:
        fds = os.listdir(f"/proc/{pid}/fd")
        maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
        found[role] = (pid, len(fds), len(os.listdir(f"/proc/{pid}/task")), maps.count("memfd:"))
    return found


GAUGES = re.compile(r"kld_(.*in_flight|.*queued|.*clients|.*regions|.*region_bytes|.*pool_bytes|.*staging_bytes"
                    r"|.*tensors|.*tensor_bytes|.*publications|.*connections)(\{.*)?$")


def gauges(server):
    return {k: v for k, v in server.metrics().items() if GAUGES.match(k) and "pool" not in k}


def at_rest(server):
    """What it holds once that does not change any more."""
    while True:
        now = holdings(server), gauges(server)
        time.sleep(0.6)
        if (holdings(server), gauges(server)) == now:
            return now


class Sweep:
    """One server with the library in it."""

    def __init__(self, seconds=20, **flags):
        self.page, self.symbols, self.seconds = Page(), Symbols(), seconds
        flags = {"http_threads": 1, "threads": 2, "shm_prefix": "/kld-test-", "staging_bytes_max": "64M",
                 "staging_request_bytes_max": "256K", "pool_bytes_max": "256M", **flags}
        self.server = Server(environment=self.page.environment(), **flags)
        self.problems = []
        self.tried = collections.Counter()    # (role, kind): failures made
        self.outcomes = collections.Counter()  # (role, kind, outcome)
        self.sites = collections.defaultdict(collections.Counter)  # outcome: {(role, kind, part, site, text)}
        self.base, self.warmed, self.swept = None, set(), set()

    def close(self):
        try:
            log = self.server.log()
            status = self.server.stop()
            assert status == 0, log[-3000:]
        finally:
            self.server.remove()
            self.page.close()

    def report(self):
        """A table: of each role and kind how many calls failed, or rows of them, and what came of them. Problems."""
        print("\n| role | call | failed | right | clear error | connection closed |\n|---|---|---|---|---|---|")
        for (role, kind), tried in sorted(self.tried.items()):
            came = [self.outcomes[role, kind, what] for what in ("right", "clear", "cut")]
            print(f"| {role} | {kind} | {tried} | " + " | ".join(map(str, came)) + " |", flush=True)
        print(f"problems: {len(self.problems)}", *self.problems, sep="\n   ", flush=True)

    # ---- one call -------------------------------------------------------------------------------
    def attempt(self, part):
        """-> (outcome, text)."""
        begin = time.monotonic()
        try:
            part(self.server)
            outcome = "right", ""
        except Clear as error:
            outcome = "clear", str(error)
        except Cut as error:
            outcome = "cut", str(error)
        except Blamed as error:
            outcome = "blamed", str(error)
        except (TimeoutError, OSError) as error:
            outcome = "hang", repr(error)
        except Exception as error:  # AssertionError among them
            outcome = "wrong", repr(error)[:300]
        if time.monotonic() - begin > self.seconds:
            outcome = "hang", f"{outcome} after {time.monotonic() - begin:.1f} s"
        return outcome

    def site(self, role, seen, depth=6):
        """Where the call was that failed."""
        names = self.symbols.names(seen["pid"], seen["frame"])
        return seen["call"] + " < " + " < ".join(names[:depth])

    def settle(self):
        """Waits until all is given back; -> what is not."""
        end = time.monotonic() + 30
        while True:
            now = holdings(self.server), gauges(self.server)
            if now == self.base:
                return None
            if time.monotonic() > end:
                return {k: (self.base[i].get(k), now[i].get(k)) for i in (0, 1)
                        for k in {**now[i], **self.base[i]} if self.base[i].get(k) != now[i].get(k)}
            time.sleep(0.02)

    def blocks(self):
        """{(role, pid): blocks of memory in use}"""
        pages = {role: self.page.read(role) for role in ROLES[:3]}
        return {(role, page["pid"]): page["blocks"] for role, page in pages.items()}

    def rest(self):
        """Its state at rest, from which nothing may be missing or left over later."""
        self.base = at_rest(self.server)

    def fault(self, role, kind, part, first, last, error, what):
        self.problems.append(f"{role}: {kind} {first}{f' to {last}' if last != first else ''}"
                             f"{f' with {error}' if error else ''} during {part.__name__}: {what}")
        if VERBOSE:
            print("PROBLEM", self.problems[-1], flush=True)

    @staticmethod
    def allowed(kind, seen, dead):
        """libuv ends the process where a descriptor cannot be watched again: it is replaced. So is a worker
        whose device is lost, which it says by its exit status."""
        return (kind == "epoll" and seen["caller"].startswith("libuv") or
                kind.startswith("cuda") and not any("signal=" in line or "status=1" in line for line in dead))

    def one(self, role, kind, part, first, last=None, error=0, careful=False):
        """-> whether a call failed at all. careful: looks at once for what is left behind."""
        mark, began = len(self.server.log()), time.monotonic()
        last = first if last is None else last
        self.symbols.look(self.page.read(role)["pid"])
        self.page.arm(role, kind, first, last, error)
        outcome, text = self.attempt(part)
        seen = self.page.disarm(role)
        if not seen["failed"]:
            if outcome != "right":
                self.fault(role, kind, part, first, last, error, f"nothing failed, yet {outcome}: {text}")
            return False
        row = (f" ({error})" if error else "") + (f", {last - first + 1} in a row" if last > first else "")

        def site():  # only where somebody reads it: to look takes longer than a part
            return self.site(role, seen)
        self.tried[role, kind + row] += 1
        self.outcomes[role, kind + row, outcome] += 1
        self.sites[outcome][role, kind, part.__name__, seen["call"] if outcome == "right" else site(), text] += 1
        if outcome in ("wrong", "hang", "blamed"):
            self.fault(role, kind, part, first, last, error, f"{outcome}: {text}\n   {site()}")
        if kind.startswith("cuda"):  # a worker whose device is lost leaves
            wait_until(lambda: self.server.request("/v2/health/ready")[0] == 200, 60, "a worker")
        for again in range(3):
            after = self.attempt(part)
            if after[0] == "right":
                break
        dead = [line for line in self.server.log()[mark:].splitlines() if "child" in line]
        # A region's end comes behind the answer, and so does the loss of the device by it.
        if again > (seen["call"] == "cudaHostUnregister" and bool(dead)):
            self.fault(role, kind, part, first, last, error, f"afterwards not right {again} times: {after}\n   {site()}")
        left = {"replaced": dead} if dead else self.settle() if careful else None
        if left and not (dead and self.allowed(kind, seen, dead)):
            self.fault(role, kind, part, first, last, error, f"before and after: {left}\n   {site()}")
        if left:
            self.warmed = {part}  # a replaced worker has no connections but those of this part
            self.rest()
        if VERBOSE and time.monotonic() - began > 2:
            print(f"SLOW {time.monotonic() - began:.1f} s: {role} {kind} {first} {part.__name__} {outcome} {text}\n   {site()}", flush=True)
        return True

    def sweep(self, role, kind, part, step=1, begin=1, width=1, error=0, limit=100000, careful=False):
        """Each step-th call; -> how many there are. What is left behind is looked for at the end, and if
        there is anything, after each call of a second round. Memory that is still in use then is a leak if
        the second round leaves as much again: else it was the first to fill a cache."""
        self.warm(part)
        first, problems, before = begin, len(self.problems), self.blocks()
        while first < limit and self.one(role, kind, part, first, first + width - 1, error, careful):
            first += step
        tried = (first - begin) // step
        left = self.settle() if tried else None
        if left:
            self.fault(role, kind, part, begin, first, error, f"all of them, before and after: {left}")
        grown = self.grown(before) if tried else {}
        if grown and careful:
            self.fault(role, kind, part, begin, first, error, f"blocks of memory left, twice: {grown}")
        if (grown or len(self.problems) > problems) and not careful:
            self.sweep(role, kind, part, step, begin, width, error, limit, careful=True)
        return tried

    def grown(self, before, seconds=1):
        """{role: blocks of memory} that are more than before, also after some time; but of a process that began since."""
        end = time.monotonic() + seconds
        while True:
            after = self.blocks()
            more = {whose[0]: after[whose] - before[whose] for whose in before
                    if after.get(whose, 0) > before[whose] + BLOCKS_OF_CACHES}
            if not more or time.monotonic() > end:
                return more
            time.sleep(0.05)

    def warm(self, part):
        """Whatever is done the first time only."""
        if part not in self.warmed:
            for _ in range(2):
                came = self.attempt(part)
                assert came[0] == "right", came
            self.warmed.add(part)
            self.rest()


def serves(server, part):
    """What failed while it started may be told to the first who asks: the memory that the gateway registers, for one."""
    try:
        part(server)
    except Clear:
        part(server)


def start_without(role, kind, first, parts, **flags):
    """A server starts while a call fails in one of its roles from main() on: it serves, or ends and says why.
    -> (problem or None, what was counted, and with "log", if it did either)."""
    page = Page()
    page.arm(role, kind, first)
    server = Server(environment=page.environment(), wait=False, stuck_ms=START_STUCK_MS, start_ms=START_STUCK_MS,
                    **flags)
    try:
        line = first_line(server, 15)
        if line is None:
            return "neither ready nor ended within 15 s:\n" + server.log(), page.disarm(role)
        seen = page.disarm(role)
        if line:
            server.wait_ready(line=line)
            for part in parts:
                serves(server, part)
            status = server.stop(seconds=15)
            seen["log"] = server.log()
            return f"status {status} in the end:\n{server.log()}" if status else None, seen
        status = server.process.wait(10)
        log = seen["log"] = server.log()
        said = "cannot start" in log or log.startswith("kld-server: ")
        return None if status == 1 and said else f"status {status}, and says:\n{log}", seen
    finally:
        server.remove()
        page.close()


def first_line(server, seconds):
    """Of its standard output; b"": it ended; None: neither in time."""
    if not select.select([server.process.stdout], [], [], seconds)[0]:
        return None
    return server.process.stdout.readline()
