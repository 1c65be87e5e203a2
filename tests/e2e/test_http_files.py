"""The files of the gateway: where the kernel has Landlock its sandbox bounds them, and nobody is told that it does not."""
import ctypes
import errno
import os
import struct
import threading

import pytest

import oip
from httplib import PREFIX, Shared, is_sanitized, probabilities, register

LIBC = ctypes.CDLL(None, use_errno=True)
CREATE_RULESET = 444  # on every architecture, as each call that is younger than 2019
COMPLAINT = "files are not bounded"

pytestmark = pytest.mark.skipif(is_sanitized() or os.environ.get("TEST_SANDBOX") == "false", reason="a build without the sandbox")


def has_landlock():
    return LIBC.syscall(CREATE_RULESET, None, 0, 1) > 0


def take_landlock_away():
    """From this thread and all that it starts: what seccomp answers is what an old kernel says."""
    def op(code, k, if_equal=0, otherwise=0):
        return struct.pack("=HBBI", code, if_equal, otherwise, k)
    program = ctypes.create_string_buffer(
        op(0x20, 0) + op(0x15, CREATE_RULESET, 0, 1) + op(0x06, 0x50000 | errno.ENOSYS) + op(0x06, 0x7fff0000))
    about = struct.pack("@HP", 4, ctypes.addressof(program))
    assert LIBC.prctl(38, 1, 0, 0, 0) == 0 and LIBC.prctl(22, 2, about, 0, 0) == 0, os.strerror(ctypes.get_errno())


def serves_regions(server):
    """What it has to open goes on to open."""
    q = probabilities((2, 3), 1)
    with Shared(4096) as shared:
        assert register(server, "r", shared, 4096) == (200, None)
    oip.infer(server, {"predictions": q, "targets": q})
    assert server.request("/metrics")[0] == 200


@pytest.mark.skipif(not has_landlock(), reason="this kernel has no Landlock")
def test_files_are_bounded(make_server):
    server = make_server(shm_prefix=PREFIX)
    serves_regions(server)
    assert COMPLAINT not in server.log() and "no sandbox" not in server.log(), server.log()


def test_who_starts_it_is_told_where_they_are_not(make_server):
    servers = []

    def start():
        take_landlock_away()
        servers.append(make_server(shm_prefix=PREFIX))
    starter = threading.Thread(target=start)
    starter.start()
    starter.join()
    serves_regions(servers[0])
    assert servers[0].log().count(COMPLAINT) == 1, servers[0].log()
