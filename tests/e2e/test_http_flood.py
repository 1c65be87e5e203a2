"""More small requests than the server can take, on many connections: nobody else is held up by them, and none of
them is lost."""
import json
import os
import socket
import subprocess

import pytest

import oip
import wire
from conftest import BIN, wait_until
from httplib import probabilities
from oip import INFER

LOAD, SECONDS = BIN / "bench/http_load", 0.7


def request():
    headers, data = oip.body({"predictions": probabilities((2, 8), 1), "targets": probabilities((2, 8), 2)})
    lines = [f"POST {INFER} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}"]
    return "\r\n".join(lines + [f"{k}: {v}" for k, v in headers.items()] + ["", ""]).encode() + data


@pytest.mark.skipif(not LOAD.is_file() and os.environ.get("CI") != "true", reason="make bench-programs")
@pytest.mark.parametrize("connections", [4, 64])
def test_a_flood_holds_up_nobody(make_server, connections):
    """While it goes on a client of the Unix socket has its PONGs and its results, and who asks for health his 200."""
    server = make_server()
    port = server.address.rsplit(":", 1)[1]
    shape, q = (4, 4), probabilities((4, 4), 3)
    memory = wire.Memory(2 * q.nbytes)
    memory.array(0, (2, *shape), "<f4")[:] = q
    flood = subprocess.Popen([LOAD, "load", port, str(connections), str(SECONDS)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    flood.stdin.write(request())
    flood.stdin.close()
    wait_until(lambda: server.metrics()["kld_http_connections"] > connections, what="the flood")
    rounds = 0
    with wire.Client(server.unix) as client:
        region = client.region(memory)
        tensors = {"predictions": wire.tensor(region), "targets": wire.tensor(region, q.nbytes)}
        while flood.poll() is None:
            client.ping()
            assert client.run(shape, tensors)["loss"] == 0
            assert server.request("/v2/health/live")[0] == 200
            with socket.create_connection(("127.0.0.1", int(port)), 10) as newcomer:
                newcomer.sendall(request())
                assert newcomer.recv(12) == b"HTTP/1.1 200"
            rounds += 1
    memory.close()
    out, err = flood.stdout.read(), flood.stderr.read()
    flood.stdout.close(), flood.stderr.close()
    assert flood.returncode == 0, err  # each of its replies was a 200
    done = json.loads(out)["requests"]
    assert rounds >= 3 and done > rounds, (rounds, done)
    counted = server.json("/v2/models/kl_div/stats")[1]["model_stats"][0]["inference_stats"]
    assert counted["fail"]["count"] <= connections  # those that were cut off in the middle
    assert counted["success"]["count"] >= done + rounds
