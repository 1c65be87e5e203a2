"""A server in a user namespace: whoever has no uid there comes as the one that all of them have, and is refused. They
would be one user, who may attach to whatever any of them published."""
import contextlib
import os
import shutil
import subprocess

import pytest

import oip
from httplib import probabilities
from wire import Client, Failed, Memory, description

UNKNOWN = "forbidden: which user this is cannot be told: its uid is not mapped in the server's user namespace"
NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs to change its user")


@pytest.fixture
def serve(make_server):
    def start(*namespace, **flags):
        if namespace and (not shutil.which("unshare") or
                          subprocess.run([*namespace, "true"], capture_output=True).returncode):
            assert os.environ.get("CI") != "true", "no user namespaces here (unshare)"
            pytest.skip("no user namespaces here")
        server = make_server(within=namespace, unix_mode=438, **flags)
        os.chmod(server.folder, 0o755)
        return server.wait_linked()
    return start


@contextlib.contextmanager
def user(server, uid):
    """A client that connected as this one."""
    os.seteuid(uid)
    try:
        client = Client(server.unix)
    finally:
        os.seteuid(0)
    with client:
        yield client


def test_users_without_a_uid_are_not_one_user(serve):
    server, memory = serve("unshare", "--user", "--map-root-user"), Memory(4096)
    with pytest.raises(Failed, match=UNKNOWN):
        with user(server, 12345) as teacher, user(server, 23456) as student:
            teacher.publish("teacher/secret", teacher.region(memory), description((4, 8)))
            student.attach("teacher/secret")
    memory.close()
    with user(server, 0) as client:
        client.ping()
    assert server.log().count("user namespace nobody_uid=65534") == 1, server.log()
    assert server.metrics()['kld_rejected_total{front="unix",reason="not_allowed"}'] == 1


def test_no_list_lets_them_in(serve):
    """Though it names the number as which they come."""
    server = serve("unshare", "--user", "--map-root-user", allow_uids=NOBODY, allow_gids=NOBODY)
    for uid in (12345, NOBODY):
        with pytest.raises(Failed, match=UNKNOWN), user(server, uid):
            pass


def test_a_server_without_a_uid_serves_http(serve):
    """Its gateway comes as nobody, too."""
    server = serve("unshare", "--user")
    with pytest.raises(Failed, match=UNKNOWN), user(server, 0):
        pass
    server.kill_child("worker")
    q, p = probabilities((2, 3), 1), probabilities((2, 3), 2)
    oip.infer(server, {"predictions": q, "targets": p})  # by the next one: readiness may still be the last one's


def test_where_all_have_a_uid_that_one_is_a_users(serve):
    server = serve()
    for uid in (12345, NOBODY):
        with user(server, uid) as client:
            client.ping()
    assert "user namespace" not in server.log()
