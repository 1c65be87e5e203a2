"""The places on the Unix socket: who takes all of them stops neither the gateway nor its successors."""
import os
import signal
import subprocess
import sys

import pytest

from conftest import suspend, wait_until

CLIENTS = 16
BODY = (b'{"inputs":[{"name":"predictions","datatype":"FP32","shape":[1,2],"data":[0.5,0.5]},'
        b'{"name":"targets","datatype":"FP32","shape":[1,2],"data":[0.4,0.6]}]}')


# Connects again as soon as it is refused, and says nothing.
HOLD = f"""
import select, socket, sys
held = []
while True:
    while len(held) < {CLIENTS + 2}:
        held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        held[-1].connect(sys.argv[1])
    for one in select.select(held, [], [], 0.01)[0]:
        held.remove(one)
"""


def status(server, path="/v2/health/ready", body=None):
    try:
        return server.request(path, body)[0]
    except OSError:
        return None


@pytest.mark.parametrize("role", ["gateway", "worker"])
def test_who_takes_every_place_does_not_stop_http(make_server, role):
    server = make_server(clients_max=CLIENTS)
    with subprocess.Popen([sys.executable, "-c", HOLD, server.unix]) as holder:
        try:
            wait_until(lambda: server.metrics()['kld_rejected_total{front="unix",reason="clients_max"}'] > 0,
                       what="every place being taken")
            assert status(server, "/v2/models/kl_div/infer", BODY) == 200
            before = server.kill_child(role)
            wait_until(lambda: server.child(role) != before and status(server) == 200, what="a server that is ready")
            assert status(server, "/v2/models/kl_div/infer", BODY) == 200
        finally:
            holder.kill()


def test_not_ready_without_a_way_to_the_worker(make_server):
    """A worker that serves, as far as anybody knows, but greets nobody."""
    server = make_server()
    worker = server.child("worker")
    suspend(worker)
    try:
        before = server.kill_child("gateway")
        assert wait_until(lambda: server.child("gateway") != before and status(server), what="an answer") == 503
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_until(lambda: status(server) == 200, what="a server that is ready")
