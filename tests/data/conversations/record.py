#!/usr/bin/env python3
"""Records what the programs of a build say to a server and what it answers, so that later servers can be held to it
(tests/e2e/test_recorded.py): record.py BUILD writes VERSION.json here. To be run at a release, and never again for it.

Over the Unix socket: each packet in hex, in order; of shared memory that the client passes, what had changed in it by
the time that a packet came along. Over HTTP: the bytes of request and reply.
"""
import array
import json
import mmap
import os
import pathlib
import selectors
import socket
import subprocess
import sys
import tempfile
import threading

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))


class Memory:
    """A client's memfd: what changes in it."""

    def __init__(self, fd):
        self.bytes = os.fstat(fd).st_size
        self.map = mmap.mmap(fd, self.bytes, prot=mmap.PROT_READ)
        self.last = bytes(self.bytes)

    def changes(self):
        """[[offset, hex], ...] since the last look."""
        now = self.map[:]
        at = np.flatnonzero(np.frombuffer(now, np.uint8) != np.frombuffer(self.last, np.uint8))
        self.last, found = now, []
        for part in np.split(at, np.flatnonzero(np.diff(at) > 64) + 1) if len(at) else []:
            found.append([int(part[0]), now[part[0]:part[-1] + 1].hex()])
        return found


def record_unix(server, folder, command):
    """One client of the Unix socket, through a socket in between."""
    path = f"{folder}/between"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(4)
    process = subprocess.Popen([*command, "--server", f"unix:{path}"], stdout=subprocess.DEVNULL)
    client, _ = listener.accept()
    worker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker.connect(server.unix)
    watch, said, memories = selectors.DefaultSelector(), [], []
    watch.register(client, selectors.EVENT_READ, ("client", worker))
    watch.register(worker, selectors.EVENT_READ, ("server", client))
    while True:
        key = watch.select(30)[0][0]
        who, other = key.data
        data, rights, _, _ = key.fileobj.recvmsg(65536, socket.CMSG_SPACE(64))
        if not data:
            break
        fds = [fd for _, _, raw in rights for fd in array.array("i", raw[:len(raw) // 4 * 4])]
        memories += [Memory(fd) for fd in fds]
        said.append({"from": who, "packet": data.hex(), "memory": [memory.changes() for memory in memories]})
        if fds:
            said[-1]["passes"] = memories[-1].bytes
        other.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
    assert process.wait(30) == 0
    for one in (client, worker, listener):
        one.close()
    os.unlink(path)
    return said


def record_http(server, command):
    """One connection over HTTP: what went each way, whole."""
    listener = socket.create_server(("127.0.0.1", 0))
    process = subprocess.Popen([*command, "--server", "http://127.0.0.1:%d" % listener.getsockname()[1]],
                               stdout=subprocess.DEVNULL)
    said, lock = [], threading.Lock()

    def pump(origin, target, who):
        while data := origin.recv(1 << 20):
            with lock:
                if said and said[-1]["from"] == who:
                    said[-1]["bytes"] += data.hex()
                else:
                    said.append({"from": who, "bytes": data.hex()})
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    client, _ = listener.accept()
    gateway = socket.create_connection(server.address.rsplit(":", 1))
    threads = [threading.Thread(target=pump, args=way) for way in
               ((client, gateway, "client"), (gateway, client, "server"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert process.wait(30) == 0
    return said


def main():
    os.environ["KLD_BIN"] = sys.argv[1]
    from conftest import BIN, Server
    version = (ROOT / "proto/VERSION").read_text().strip()
    values = np.random.default_rng(1).random((2, 3, 5)).astype("<f4") + 0.1
    values /= values.sum(-1, keepdims=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, array_of in zip(("q", "p"), values):
            np.save(f"{folder}/{name}.npy", array_of)
        div = [BIN / "kld", "div", f"{folder}/q.npy", f"{folder}/p.npy", "--grad-predictions", f"{folder}/g.npy"]
        commands = {"div": div, "ping": [BIN / "kld", "ping", "--count", "1"], "status": [BIN / "kld", "status"]}
        server = Server(backend="cpu", threads=1)
        try:
            talk = {"version": version,
                    "unix": {name: record_unix(server, folder, command) for name, command in commands.items()},
                    "http": {name: record_http(server, command) for name, command in commands.items()}}
        finally:
            server.stop()
            server.remove()
    (HERE / f"{version}.json").write_text(json.dumps(talk, indent=1) + "\n")


if __name__ == "__main__":
    main()
