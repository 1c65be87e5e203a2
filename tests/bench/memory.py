#!/usr/bin/env python3
"""What a server takes of the host's memory: its three processes alone, each client, connection and request. For the
table under "Sizing" in deploy/README.md. On the CPU back end; a GPU's worker has the driver's memory on top.

  tests/bench/memory.py BUILD [--clients N]

Numbers are of proportional set size (PSS), the share of shared pages included, as /proc/PID/smaps_rollup has it.
"""
import argparse
import http.client
import json
import os
import pathlib
import re
import subprocess
import sys
import time

from argumentlib import how_many, need

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/e2e")]


def pss(pid):
    return int(re.search(r"^Pss:\s+(\d+) kB", pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M).group(1))


class Measured:
    def __init__(self, server, children):
        self.pids = {"supervisor": server.pid, **children}

    def look(self):
        time.sleep(0.5)
        return {role: pss(pid) for role, pid in self.pids.items()}


def difference(after, before, count=1):
    return {role: round((after[role] - before[role]) / count, 1) for role in after}


def tls_files(folder):
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                    "-keyout", f"{folder}/key", "-out", f"{folder}/cert", "-subj", "/CN=localhost"], check=True,
                   capture_output=True)
    return {"tls_cert": f"{folder}/cert", "tls_key": f"{folder}/key"}


def connections(server, count, tls=False):
    import ssl
    trusting = ssl._create_unverified_context()
    made = []
    for _ in range(count):
        one = http.client.HTTPSConnection(server.address, context=trusting) if tls else \
            http.client.HTTPConnection(server.address)
        one.request("GET", "/v2/health/live")
        one.getresponse().read()
        made.append(one)
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--clients", type=how_many, default=200)
    options = parser.parse_args()
    need(pathlib.Path(options.build) / "kld-server")
    os.environ["KLD_BIN"] = options.build
    import conftest
    import wire
    import tempfile
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, flags in (("HTTP", {}), ("HTTPS", tls_files(folder))):
            server = conftest.Server(backend="cpu", threads=2, clients_max=options.clients + 8, **flags)
            try:
                measured = Measured(server, conftest.children_of(server.pid))
                alone = measured.look()
                if kind == "HTTP":
                    found["alone"] = alone
                    clients = [wire.Client(server.unix) for _ in range(options.clients)]
                    found["a client of the Unix socket"] = difference(measured.look(), alone, options.clients)
                    for client in clients:
                        client.close()
                    alone = measured.look()
                made = connections(server, options.clients, kind == "HTTPS")
                found[f"a connection over {kind}"] = difference(measured.look(), alone, options.clients)
                for one in made:
                    one.close()
                if kind == "HTTP":
                    before = measured.look()
                    body = json.dumps({"inputs": [{"name": name, "shape": [1, 1 << 20], "datatype": "FP32",
                                                   "data": [0.5] * (1 << 20)}
                                                  for name in ("predictions", "targets")]}).encode()
                    assert server.request("/v2/models/kl_div/infer", body)[0] == 200
                    found[f"left of a request of {len(body) >> 20} MiB of JSON"] = difference(measured.look(), before)
            finally:
                server.remove()
    for what, kib in found.items():
        print(f"{what}: " + ", ".join(f"{role} {value} KiB" for role, value in kib.items()))


if __name__ == "__main__":
    main()
