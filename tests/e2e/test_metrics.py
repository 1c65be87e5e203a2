"""/metrics of a running server: what is counted of a request, of who is turned away, of processes."""
import os
import re
import signal
import socket
import threading
import time

import numpy as np
import pytest

import oip
from conftest import suspend, wait_until
from httplib import Late, probabilities, unless_late


def ask(server, divergence, gradient=False):
    q, p = probabilities((64, 512), 1), probabilities((64, 512), 2)
    outputs = {name: {"binary_data": True} for name in ["loss"] + ["grad_predictions"] * gradient}
    headers, body = oip.body({"predictions": q, "targets": p}, outputs, {"divergence": divergence})
    return server.request("/v2/models/kl_div/infer", body, headers)[0]


def grown(server, act):
    """What act() adds to each sample."""
    before = server.metrics()
    act()
    wait_until(lambda: not server.metrics()["kld_http_requests_in_flight"], what="the end of all")
    after = server.metrics()
    return {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}


def test_a_request_by_what_it_asked_for(server):
    def act():
        assert ask(server, "js") == ask(server, "js", gradient=True) == 200
        assert ask(server, "nonsense") == 400
    new = grown(server, act)
    assert new['kld_op_requests_total{front="http",op="js",status="ok"}'] == 2
    assert new['kld_op_requests_total{front="unix",op="js",status="ok"}'] == 2
    assert new['kld_op_requests_total{front="http",op="unknown",status="invalid"}'] == 1
    assert new['kld_requests_total{front="http",status="ok"}'] == 2
    assert new['kld_op_seconds_count{front="http",op="js"}'] == new['kld_op_seconds_count{front="unix",op="js"}'] == 2
    assert new["kld_http_request_seconds_count"] == 3  # those refused take time, too
    assert new['kld_http_replies_total{code="400"}'] == 1 and new['kld_http_replies_total{code="200"}'] >= 3
    tensor = 64 * 512 * 4
    read, both = (new[f'kld_op_bytes_total{{worker="0",op="js",access="{a}"}}'] for a in ("read", "read_write"))
    assert 2 * tensor <= read < 2.1 * tensor and 3 * tensor <= both < 3.1 * tensor
    assert new['kld_kernel_bytes_total{worker="0"}'] == read + both
    assert new['kld_op_kernel_seconds_total{worker="0",op="js",access="read"}'] > 0


@unless_late
def test_tensors_to_store_are_requests_too(make_server):
    """Those that fail are in the metrics that alerts look at, once each; they are no inferences; and who waits for room is
    one refusal of the device's, not one for each look."""
    server = make_server(pool_bytes_max="8M", http_deadline_ms=300, tensor_lifetime_ms=600000)

    def put(name):
        return server.request(f"/v2/tensors/{name}?datatype=FP32&shape=1572864", bytes(6291456), method="PUT")[::2]
    wait_until(lambda: put("first")[0] == 200, what="a gateway that has met its worker, and a worker that has its pool")

    def act():
        replies = [put(name) for name in "abc"]
        if not all(b"memory pool" in body for _, body in replies):  # not even that there is no room was said in time
            raise Late(replies)
    new = grown(server, act)
    assert new['kld_http_replies_total{code="503"}'] == 3
    assert new['kld_requests_total{front="http",status="no_memory"}'] == 3
    assert new['kld_op_requests_total{front="http",op="put_tensor",status="no_memory"}'] == 3
    assert 1 <= new['kld_device_errors_total{worker="0",class="memory"}'] <= 3  # behind another one that waits nobody asks
    assert 'nv_inference_request_failure{model="kl_div",version="1"}' not in new
    assert server.metrics()['kld_op_requests_total{front="http",op="put_tensor",status="ok"}'] == 1


def test_the_models_statistics_outlive_the_gateway(make_server):
    server = make_server()
    assert ask(server, "js") == 200 and ask(server, "nonsense") == 400

    def said():
        counts = server.json("/v2/models/kl_div/stats")[1]["model_stats"][0]
        page = server.request("/")[2].decode()
        return counts, [re.search(rf"{what}<td>(\d+)", page).group(1)
                        for what in ("requests answered since it started", "requests refused or failed", "of those: invalid")]
    before = said()
    assert before[0]["inference_count"] == 1 and before[0]["inference_stats"]["fail"]["count"] == 1
    assert before[1] == ["1", "1", "1"]
    server.kill_child("gateway")
    wait_until(lambda: server.request("/v2/health/ready")[0] == 200, what="the next gateway")
    assert said() == before
    assert server.metrics()['nv_inference_count{model="kl_div",version="1"}'] == 1


def test_the_time_of_who_left_is_of_what_he_asked_for(make_server):
    server = make_server()
    q = probabilities((64, 512), 1)
    headers, body = oip.body({"predictions": q, "targets": q}, None, {"divergence": "js"})
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    worker = server.child("worker")

    def act():
        suspend(worker)
        try:
            with socket.create_connection(server.address.rsplit(":", 1)) as raw:
                raw.sendall(f"POST {oip.INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode()
                            + body)
                # What follows the head of a body is taken once that is understood.
                wait_until(lambda: server.metrics()["kld_http_received_bytes_total"] == len(body))
                assert server.metrics()["kld_http_requests_in_flight"] == 1
            wait_until(lambda: server.metrics()["kld_requests_detached_total"] == 1)
        finally:
            os.kill(worker, signal.SIGCONT)
    new = grown(server, act)
    assert new['kld_op_requests_total{front="http",op="js",status="cancelled"}'] == 1
    assert new['kld_op_seconds_count{front="http",op="js"}'] == 1
    assert new["kld_http_request_seconds_count"] == 1


@unless_late
def test_who_is_refused_at_the_end_of_the_drain(make_server):
    """Once each, like those who are refused before; the next gateway tells."""
    server, said = make_server(drain_ms=300, http_deadline_ms=60000, worker_wait_ms=2000), []
    assert ask(server, "js") == 200
    worker, gateway = server.child("worker"), server.child("gateway")

    def put():
        return server.request("/v2/tensors/a?datatype=FP32&shape=2,3", bytes(24), method="PUT")[0]
    askers = [threading.Thread(target=lambda one=one: said.append(one())) for one in (lambda: ask(server, "js"), put)]

    def act():
        suspend(worker)
        try:
            for asker in askers:
                asker.start()
            wait_until(lambda: said or server.metrics()["kld_http_requests_in_flight"] == 2, what="both")
            if said:  # the one to store has 2 s with a worker that is silent
                raise Late
            os.kill(gateway, signal.SIGTERM)
            for asker in askers:
                asker.join()
        finally:
            os.kill(worker, signal.SIGCONT)
        wait_until(lambda: server.child("gateway") != gateway, what="the next gateway")
    new = grown(server, act)
    assert said == [503, 503] and new['kld_http_replies_total{code="503"}'] == 2
    assert new['kld_requests_total{front="http",status="unavailable"}'] == 2
    for op in ("js", "put_tensor"):
        assert new[f'kld_op_requests_total{{front="http",op="{op}",status="unavailable"}}'] == 1
    assert new['nv_inference_request_failure{model="kl_div",version="1"}'] == 1  # a tensor to store is no inference
    refusals = [line for line in server.log().splitlines() if "status=unavailable" in line]
    assert len(refusals) == 2, server.log()


def test_stages_add_up(server):
    new = grown(server, lambda: [ask(server, "tv") for _ in range(5)])
    stages = ("receive", "gateway", "queue", "copy", "kernel", "reply")
    assert all(new[f'kld_stage_seconds_count{{front="http",stage="{stage}"}}'] == 5 for stage in stages)
    parts = [new.get(f'kld_stage_seconds_sum{{front="http",stage="{stage}"}}', 0) for stage in stages]
    assert sum(parts) == pytest.approx(new["kld_http_request_seconds_sum"], rel=0.01) and min(parts[:3]) > 0
    triton = {name[len("nv_inference_"):].split("{")[0]: value for name, value in new.items() if name.startswith("nv_inf")}
    assert triton["request_success"] == triton["count"] == triton["exec_count"] == 5
    assert triton["request_duration_us"] == pytest.approx(sum(parts) * 1e6, abs=2)
    assert triton["compute_infer_duration_us"] == pytest.approx(parts[4] * 1e6, abs=2)
    assert "request_failure" not in triton


def test_who_is_turned_away(server, make_server):
    def act():
        assert server.request("/nothing")[0] == 404
        with socket.create_connection(server.address.rsplit(":", 1)) as raw:
            raw.sendall(b"POST /v2/models/kl_div/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n"
                        b"Transfer-Encoding: chunked\r\n\r\n")
            assert b" 400 " in raw.recv(100)
    new = grown(server, act)
    assert new['kld_rejected_total{front="http",reason="no_path"}'] == 1
    assert new['kld_rejected_total{front="http",reason="framing"}'] == 1
    other = make_server(clients_max=3, body_bytes_max="4K")

    def refuse():
        assert ask(other, "js") == 413
        held = [other.connect() for _ in range(4)]
        wait_until(lambda: other.metrics()['kld_rejected_total{front="unix",reason="clients_max"}'] > 0, what="a refusal")
        for one in held:
            one.close()
    assert grown(other, refuse)['kld_rejected_total{front="http",reason="body_bytes_max"}'] == 1


@pytest.mark.parametrize("sent, code", [
    (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n", "400"), (b"GET /v2 HTTP/1.1\r\nnonsense\r\n\r\n", "400"),
    (b"POST /v2/models/kl_div/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + b"x\r\n" * 9, "400"),
    (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 18446744073709551616\r\n\r\n", "413"),
    (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nA: " + bytes(40000).replace(b"\0", b"a") + b"\r\n\r\n", "other"),
    (b"GET /v2 HTTP/3.0\r\nHost: localhost\r\n\r\n", "other")],
    ids=["length", "line", "chunk", "long", "head", "version"])
def test_what_the_library_answers_is_counted(server, sent, code):
    def act():
        with socket.create_connection(server.address.rsplit(":", 1)) as raw:
            raw.sendall(sent)
            got.append(raw.recv(12).split()[-1].decode())
    got = []
    new = grown(server, act)
    assert got == [code] if code != "other" else got[0] in ("431", "505"), got
    assert new['kld_rejected_total{front="http",reason="not_http"}'] == 1
    assert new[f'kld_http_replies_total{{code="{code}"}}'] == 1
    assert 'kld_rejected_total{front="http",reason="framing"}' not in new


def test_bytes_that_are_sent(server):
    """What is not, in reply to HEAD, is none; a wrong method has a body, and is an error like others."""
    def told():
        """What has been sent so far, and once the page that says so has been sent, too."""
        page = server.request("/metrics")[2]
        sent = int(re.search(rb"^kld_http_sent_bytes_total (\d+)$", page, re.M)[1])
        return sent, sent + len(page)
    _, sent = told()
    assert server.request("/metrics", method="HEAD")[::2] == (200, b"")
    before, after = told()
    assert before == sent
    status, headers, body = server.request("/v2", method="DELETE")
    assert status == 405 and headers["Allow"] == "GET, HEAD"
    assert told()[0] == after + len(body)
    assert b"this path takes GET, HEAD" in server.request("/")[2]


def test_processes(make_server):
    server = make_server()
    # What kld top knows a restart by is there from the first answer on.
    assert abs(server.metrics()['process_start_time_seconds{role="supervisor"}'] - time.time()) < 60
    started = 'process_start_time_seconds{role="worker",worker="0"}'
    metrics = wait_until(lambda: (m := server.metrics()).get(started) and m, what="the first look")
    for role, pid in (('role="supervisor"', server.pid), ('role="gateway"', server.child("gateway")),
                      ('role="worker",worker="0"', server.child("worker"))):
        def resident_is_told(name=f"process_resident_memory_bytes{{{role}}}", pid=pid):
            pages = int(open(f"/proc/{pid}/statm").read().split()[1])
            return server.metrics()[name] == pytest.approx(pages * os.sysconf("SC_PAGESIZE"), rel=0.5)
        wait_until(resident_is_told, what="a look since it has started")

        def descriptors_are_told(name=f"process_open_fds{{{role}}}", pid=pid):
            # As many as there are, but for connections that came and went meanwhile.
            return abs(server.metrics()[name] - len(os.listdir(f"/proc/{pid}/fd"))) <= 3
        wait_until(descriptors_are_told, what="a look since all were opened, of which CUDA's are many")
        metrics = server.metrics()
        resident = metrics[f"process_resident_memory_bytes{{{role}}}"]
        assert metrics[f"process_max_fds{{{role}}}"] >= 1024
        assert metrics[f"process_virtual_memory_bytes{{{role}}}"] > resident
    # By the kernel's word: the folder in /proc has the time at which somebody first looked for it.
    ticks = int(open(f"/proc/{server.child('worker')}/stat").read().rsplit(")", 1)[1].split()[19])
    booted = next(int(line.split()[1]) for line in open("/proc/stat") if line.startswith("btime "))
    assert abs(metrics[started] - booted - ticks / os.sysconf("SC_CLK_TCK")) < 5
    assert ask(server, "js") == 200
    server.kill_child("worker")
    wait_until(lambda: server.metrics().get(started, 0) > metrics[started], what="its successor's")
    server.kill_child("gateway")
    after = wait_until(lambda: server.request("/v2/health/ready")[0] == 200 and server.metrics(), what="the gateway")
    assert after['kld_op_requests_total{front="http",op="js",status="ok"}'] == 1  # counters outlive both


def test_roofline(make_server):
    server = make_server(measure_roofline="true")
    ceilings = [server.metrics()[f'kld_roofline_bytes_per_second{{worker="0",access="{a}"}}'] for a in ("read", "read_write")]
    assert all(1e8 < ceiling < 1e14 for ceiling in ceilings)
    assert "measured=true" in server.log()
    server.kill_child("worker")
    assert server.child("worker")  # from now on it is not the last one that is ready
    wait_until(lambda: server.metrics()['kld_worker_ready{worker="0"}'], what="its successor")
    assert server.log().count(": roofline") == 1  # who waits for a successor does not wait for that
    told = make_server(roofline_bytes_per_s="2G")
    assert told.metrics()['kld_roofline_bytes_per_second{worker="0",access="read"}'] == 2 << 30
    assert not [name for name in make_server().metrics() if "roofline" in name]


def test_a_copy_is_no_kernel(server):
    q = np.full((1024, 1024), 1 / 1024, "<f4")
    new = grown(server, lambda: server.heard("/v2/tensors/kept?datatype=FP32&shape=1024,1024", q.tobytes(), method="PUT"))
    assert new['kld_copied_bytes_total{worker="0"}'] == q.nbytes
    assert new['kld_op_requests_total{front="unix",op="copy",status="ok"}'] >= 1
    assert 'kld_kernel_bytes_total{worker="0"}' not in new
    assert server.request("/v2/tensors/kept", method="DELETE")[0] == 200
