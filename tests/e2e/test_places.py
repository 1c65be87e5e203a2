"""What one user with many connections cannot take all of: the places on the Unix socket, which the gateway and its
successors have as well, and the turns on a CPU."""
import contextlib
import os
import re
import signal
import subprocess
import sys

import pytest

from conftest import suspend, wait_until
from unixlib import LONG, long_submit, read_at_once
from wire import Client, Memory, tensor

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


STREAMS, MANY = 4, 20
DEPTH = 4  # requests of a stream that the device has at once
FEW = 30  # of the crowd's 160


def small(client, region, stream):
    return client.submit((1, 16), {"predictions": tensor(region), "targets": tensor(region)}, predictions_form="logits",
                         targets_form="logits", stream=stream)


@contextlib.contextmanager
def connected(server, name, many=1):
    """Connections whose streams are open -> [(client, region of LONG)]."""
    memory = Memory(4 * LONG[0] * LONG[1])
    with contextlib.ExitStack() as stack:
        stack.callback(memory.close)
        clients = [stack.enter_context(Client(server.unix, name=name)) for _ in range(many)]
        made = [(one, one.region(memory)) for one in clients]
        for one, region in made:
            for stream in range(STREAMS):
                one.result(small(one, region, stream))
        yield made


def crowd_asks(crowd):
    return [(one, long_submit(one, region, stream=stream)) for one, region in crowd for stream in range(STREAMS)
            for _ in range(2)]


def before_last(server, name, begin):
    """How many of the crowd's requests have ended before the last of that name has."""
    names = re.findall(r'worker0: request transport=unix client="([^"]*)"', server.log()[begin:])
    return names[:len(names) - names[::-1].index(name)].count("crowd")


def serve_turns(make_server, backend, **flags):
    if backend != "cpu":
        pytest.skip("a card's streams take turns as it likes")
    server = make_server(log_level="debug", unix_mode=438, **flags)
    os.chmod(server.folder, 0o755)
    return server


def test_a_user_with_many_connections_has_one_users_turns(make_server, backend):
    """Another one's requests are on all of his streams, which come before all but one of the crowd's."""
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    server = serve_turns(make_server, backend, http="")
    with contextlib.ExitStack() as stack:
        crowd = stack.enter_context(connected(server, "crowd", MANY))
        (first, long_region), = stack.enter_context(connected(server, "crowd"))
        os.seteuid(1002)
        try:
            (other, region), = stack.enter_context(connected(server, "other"))
        finally:
            os.seteuid(0)
        begin = len(server.log())
        with read_at_once(server):
            asked = [(first, long_submit(first, long_region))]
            asked += [(other, small(other, region, stream)) for stream in range(STREAMS) for _ in range(DEPTH)]
            asked += crowd_asks(crowd)
        for one, number in asked:
            one.result(number)
    assert before_last(server, "other", begin) <= FEW


def test_http_has_turns_of_its_own(make_server, backend):
    """By streams it would be behind eighty of the crowd's in every round; that it is behind few may take a second one, where
    HTTP's own way was slow."""
    server = serve_turns(make_server, backend).wait_linked()
    assert status(server, "/v2/models/kl_div/infer", BODY) == 200
    before = []
    with connected(server, "crowd", MANY) as crowd:
        while len(before) < 10 and min(before, default=FEW + 1) > FEW:
            begin = len(server.log())
            asked = crowd_asks(crowd)
            answer = server.heard("/v2/models/kl_div/infer", BODY)
            for one, number in asked:
                one.result(number)
            assert answer[0] == 200
            before.append(before_last(server, "gateway", begin))
    assert min(before) <= FEW, before
