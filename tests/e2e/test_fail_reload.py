"""The N-th of everything fails while a server reloads, in the supervisor, in the gateway or in a worker: afterwards the
old settings are in force or the new ones, tokens, certificate and log levels alike, as the log says; and the next
reload works. FAIL_NTH_EVERY=1 (make fail-nth) takes every N.
"""
import collections
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import ssl
import time

import pytest

import faillib
import oip
from conftest import Server, wait_until
from faillib import holdings
from httplib import certificates, probabilities, tls_flags
from test_reload import issue

EVERY = int(os.environ.get("FAIL_NTH_EVERY", 0))
STEP = {"memory": 61}  # of a sample; of other kinds 3
KINDS = {"supervisor": ["memory", "map", "descriptor", "send", "receive", "file", "thread", "interrupt", "option"],
         "gateway": ["memory", "map", "descriptor", "send", "receive", "file", "interrupt", "option"],
         "worker": ["memory", "send", "receive", "descriptor", "interrupt"]}
HEADERS, DATA = oip.body({"predictions": probabilities((2, 3), 1), "targets": probabilities((2, 3), 2)})
# Without memory libtasn1 4.19 faults, and GMP and what GnuTLS has for it end the process, over a certificate: the next
# gateway takes it over.
NOT_OURS = "libuv", "libtasn1", "libgmp", "libgnutls", "libnettle", "libhogweed"
pytestmark = faillib.needs(faillib.LIBRARY)


class Reloads:
    """A server with two sets of settings, "a" and "b": a token, a certificate, a log level."""
    LEVEL = {"a": "info", "b": "debug"}

    def __init__(self, folder, backend):
        self.folder, self.page, self.symbols, self.now = folder, faillib.Page(), faillib.Symbols(), "a"
        for name in "ab":
            issue(folder, "server", 0xA0 + "ab".index(name))
            for end in ("crt", "key"):
                shutil.copy(folder / f"server.{end}", folder / f"{name}.{end}")
        self.write("a")
        self.server = Server(backend=backend, environment=self.page.environment(), http_threads=1, threads=1,
                             log_format="json", config=folder / "kld.json", tokens=folder / "tokens", reload_ms=2000,
                             restart_ms_max=100, **tls_flags(folder))
        self.context = ssl.create_default_context(cafile=folder / "ca.crt")
        self.asks = {name: self.ask("steady") for name in "ab"}  # whatever is done the first time only
        for name in "babab":
            self.write(name)
            assert self.reload()[0] == "reloaded"
            self.now = name
            assert self.seen(name) == self.all(name)
        self.tried, self.outcomes = collections.Counter(), collections.Counter()

    def put(self, name, data):
        new = self.folder / (name + ".new")
        new.write_bytes(data)
        os.replace(new, self.folder / name)

    def write(self, name):
        rights = {"steady": "infer,metrics", name: "infer"}
        self.put("tokens", "".join(f"{who} {hashlib.sha256(who.encode()).hexdigest()} {right}\n"
                                   for who, right in rights.items()).encode())
        self.put("kld.json", json.dumps({"log_level": self.LEVEL[name]}).encode())
        for end in ("crt", "key"):
            self.put(f"server.{end}", (self.folder / f"{name}.{end}").read_bytes())

    # ---- what is in force -----------------------------------------------------------------------
    def ask(self, token, method="POST", path=oip.INFER, data=DATA):
        """-> (status, the certificate's serial number, the reply)."""
        client = http.client.HTTPSConnection(self.server.address, timeout=30, context=self.context)
        try:
            client.request(method, path, data, {**(HEADERS if data else {}), "Authorization": f"Bearer {token}"})
            serial = client.sock.getpeercert()["serialNumber"]
            reply = client.getresponse()
            return reply.status, serial, reply.read()
        finally:
            client.close()

    def counts(self):
        """Of reloads, those that failed, and lines of the log that were lost."""
        text = self.ask("steady", "GET", "/metrics", None)[2].decode()
        found = [0, 0, 0]
        for line in text.splitlines():
            for i, name in enumerate(("config_reloads_total", "config_reloads_failed_total", "log_lines_lost_total")):
                if re.match(rf"kld_{name}[ {{]", line):
                    found[i] += int(line.rsplit(" ", 1)[1])
        return found

    def lines(self, begin):
        """Those that are whole: a line's write may be what fails."""
        found = []
        for line in self.server.log()[begin:].splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def all(self, name):
        return {"token": name, "certificate": name, "gateway": name, "worker0": name}

    def seen(self, expected, seconds=30):
        """{what: "a" or "b"}, once that is as expected or does not become so."""
        end = time.monotonic() + seconds
        while True:
            begin = len(self.server.log())
            status = {name: self.ask(name)[0] for name in "ab"}
            serial = self.ask("steady")[1]
            time.sleep(0.01)
            loud = {line.get("role") for line in self.lines(begin) if line["level"] == "debug"}
            found = {"token": "".join(name for name in "ab" if status[name] == 200),
                     "certificate": {"A0": "a", "A1": "b"}[serial],
                     **{role: "b" if role in loud else "a" for role in ("gateway", "worker0")}}
            if found == self.all(expected) or time.monotonic() > end:
                return found

    # ---- a reload -------------------------------------------------------------------------------
    def outcome(self, begin):
        return [line for line in self.lines(begin) if line.get("event") in ("reloaded", "reload failed")]

    def reload(self, counted=False, seconds=60):
        """SIGHUP -> what the log says of it: (event, reason); counted: or /metrics, where that line was lost."""
        begin, before = len(self.server.log()), self.counts() if counted else None
        os.kill(self.server.pid, signal.SIGHUP)
        wait_until(lambda: self.outcome(begin) or counted and self.counts()[:2] != before[:2], seconds, "the outcome")
        if counted:  # before its line is written
            wait_until(lambda: self.outcome(begin) or self.counts()[2] > before[2], seconds,
                       "its line, which is neither there nor counted as lost,")
        for line in self.outcome(begin):
            return line["event"], line.get("reason", "")
        after = self.counts()
        return "reloaded" if after[0] > before[0] else "reload failed", "counted"

    def one(self, role, kind, first):
        """-> (did a call fail, what was wrong)."""
        start = time.monotonic()
        want, began = "ab"["ba".index(self.now)], len(self.server.log())
        self.write(want)
        pid = self.page.read(role)["pid"]
        self.symbols.look(pid)
        self.page.arm(role, kind, first)
        try:
            event, reason = self.reload(counted=kind == "file")
        except AssertionError as error:
            event, reason = "none", str(error)
        seen = self.page.disarm(role)
        new = want if event == "reloaded" else self.now
        problems = [] if event != "none" else ["no outcome in the log"]
        found = self.seen(new)
        if found != self.all(new):
            problems.append(f"{event} ({reason}), yet in force are {found} and not {new}")
        if event == "reload failed" and (not seen["failed"] or len(reason) < 4):
            problems.append(f"failed: {reason!r}")
        if seen["failed"]:
            self.tried[role, kind] += 1
            self.outcomes[role, kind, event] += 1
        again = self.reload()
        self.now = want
        found = self.seen(want)
        if again[0] != "reloaded" or found != self.all(want):
            problems.append(f"the next one: {again}, in force are {found} and not {want}")
        events = [line for line in self.lines(began) if line["level"] in ("warn", "error")]
        died = [line for line in events if line["event"] == "child died" and line["signal"] != signal.SIGKILL]
        if died and not seen["caller"].startswith(NOT_OURS):
            problems.append(f"{died}")
        if problems or faillib.VERBOSE and time.monotonic() - start > 1:
            where = " < ".join(self.symbols.names(pid, seen["frame"])[:7])
            text = f"{seen['call']} < {where}; {[line['event'] for line in events]}"
            problems = [f"{role}: {kind} {first}: {problem}\n   {text}" for problem in problems]
            print(f"{time.monotonic() - start:.1f} s: {role} {kind} {first}: {event}; {text}", flush=True)
        return bool(seen["failed"]), problems

    def at_rest(self):
        """What each process holds, once that does not change any more."""
        while True:
            now = holdings(self.server)
            time.sleep(0.6)
            if holdings(self.server) == now:
                return now

    def close(self):
        log = self.server.log()
        assert self.server.stop() == 0, log[-3000:]
        self.server.remove()
        self.page.close()


@pytest.fixture(scope="module")
def reloads(backend, certificates, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reloads") / "settings"
    shutil.copytree(certificates, folder)
    one = Reloads(folder, backend)
    yield one
    print("\n| role | call | failed | new settings | old settings |\n|---|---|---|---|---|")
    for (role, kind), tried in one.tried.items():
        print(f"| {role} | {kind} | {tried} | {one.outcomes[role, kind, 'reloaded']} | "
              f"{one.outcomes[role, kind, 'reload failed']} |")
    one.close()


@pytest.mark.parametrize("role", KINDS)
@pytest.mark.timeout(3000 if EVERY else 300)
def test_old_or_new_and_never_half(reloads, role):
    problems, base = [], reloads.at_rest()
    for kind in KINDS[role]:
        step = EVERY or STEP.get(kind, 3)
        first = 1
        while True:
            failed, wrong = reloads.one(role, kind, first)
            problems += wrong
            if not failed:
                break
            first += step
    now = reloads.at_rest()
    if [pid for pid, *_ in now.values()] == [pid for pid, *_ in base.values()]:
        assert now == base
    assert not problems, "\n".join(problems)


def test_some_did_fail(reloads):
    """A library that no longer sees the calls would leave all of the above right."""
    for role in {role for role, _ in reloads.tried}:
        assert sum(tried for (which, _), tried in reloads.tried.items() if which == role) > 1, role
