"""Older clients and this server: what released programs said, as tests/data/conversations has it, is said again, and
the answers have to be such as they understood then: frames of the same sizes, replies with the same parts, the same
numbers. A change that these tests refuse is a new version of the protocol (proto/wire.h), not a new recording."""
import json
import mmap
import os
import socket

import numpy as np
import pytest

import wire
from conftest import DATA, ROOT

RECORDED = {path.stem: json.loads(path.read_text()) for path in sorted((DATA / "conversations").glob("*.json"))}
CASES = [(version, name) for version, talk in RECORDED.items() for name in talk["unix"]]


def header(packet):
    """(length, version, type, request)"""
    return tuple(int.from_bytes(packet[a:b], "little") for a, b in ((0, 4), (4, 6), (6, 8), (8, 16)))


def memory(size):
    fd = wire.memfd(size)
    return fd, mmap.mmap(fd, size)


def numbers(data):
    return np.frombuffer(data[:len(data) // 4 * 4], "<f4")


@pytest.mark.parametrize("version, name", CASES)
def test_over_the_unix_socket(version, name, server):
    memories = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(60)
        connection.connect(server.unix)
        for step in RECORDED[version]["unix"][name]:
            recorded = bytes.fromhex(step["packet"])
            fds = []
            if "passes" in step:
                memories.append(memory(step["passes"]))
                fds = [memories[-1][0]]
            if step["from"] == "client":
                for (_, mapped), changes in zip(memories, step["memory"]):
                    for offset, text in changes:
                        mapped[offset:offset + len(text) // 2] = bytes.fromhex(text)
                socket.send_fds(connection, [recorded], fds) if fds else connection.send(recorded)
                continue
            answer = connection.recv(65536)
            assert header(answer) == header(recorded), answer
            assert wire.ERROR != header(answer)[2]
            for (_, mapped), changes in zip(memories, step["memory"]):  # results
                for offset, text in changes:
                    wanted = bytes.fromhex(text)
                    assert numbers(mapped[offset:offset + len(wanted)]) == pytest.approx(numbers(wanted), rel=1e-6)
            if header(answer)[2] == wire.DONE:
                assert np.frombuffer(answer[16:24], "<f8") == pytest.approx(np.frombuffer(recorded[16:24], "<f8"), rel=1e-6)
    for fd, mapped in memories:
        mapped.close()
        os.close(fd)


def parts(message):
    """(first line, {header: value}, body)"""
    head, _, body = message.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    return lines[0], {key.lower(): value for key, value in (line.split(": ", 1) for line in lines[1:])}, body


def receive(connection):
    message = b""
    while b"\r\n\r\n" not in message:
        message += connection.recv(1 << 16)
    _, headers, body = parts(message)
    while len(body) < int(headers["content-length"]):
        more = connection.recv(1 << 16)
        assert more
        message, body = message + more, body + more
    return message


def contains(new, old, where=""):
    """All that the old answer had is in the new one, which may say more; values are allowed to be others
    where they are the server's own (its version)."""
    assert type(new) is type(old), where
    if isinstance(old, dict):
        for key in old:
            assert key in new, f"{where}.{key}"
            if key != "version":
                contains(new[key], old[key], f"{where}.{key}")
    elif isinstance(old, list) and old and isinstance(old[0], str):
        assert set(old) <= set(new), where
    elif isinstance(old, list):
        assert len(new) == len(old), where
        for index, (one, other) in enumerate(zip(new, old)):
            contains(one, other, f"{where}[{index}]")
    else:
        assert new == old, where


@pytest.mark.parametrize("version, name", CASES)
def test_over_http(version, name, server):
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        for step in RECORDED[version]["http"][name]:
            recorded = bytes.fromhex(step["bytes"])
            if step["from"] == "client":
                connection.sendall(recorded)
                continue
            line, headers, body = parts(receive(connection))
            old_line, old_headers, old_body = parts(recorded)
            assert line == old_line and set(old_headers) <= set(headers)
            assert headers.get("content-type") == old_headers.get("content-type")
            if "inference-header-content-length" in headers:
                at, old_at = (int(each["inference-header-content-length"]) for each in (headers, old_headers))
                contains(json.loads(body[:at]), json.loads(old_body[:old_at]))
                assert numbers(body[at:]) == pytest.approx(numbers(old_body[old_at:]), rel=1e-6)
            elif old_body:
                contains(json.loads(body), json.loads(old_body))


def test_there_is_a_conversation_of_each_kind():
    released = ROOT / "proto" / "VERSION"
    assert not released.exists() or released.read_text().strip() in RECORDED  # record.py makes one
    for talk in RECORDED.values():
        assert {"div", "ping", "status"} <= set(talk["unix"]) and set(talk["unix"]) == set(talk["http"])
        changed = [step for step in talk["unix"]["div"] if any(step["memory"])]
        assert {step["from"] for step in changed} == {"client", "server"}  # inputs and results are in there
