#!/usr/bin/env python3
"""Writes the seeds of the stateful fuzz targets: what their instructions mean is in their sources.

    tests/fuzz/seeds.py [FOLDER]    default: tests/fuzz/corpus

Those of the others, and inputs that once broke a promise (crash-*), are files of their own there.
"""

import pathlib
import struct
import sys


def short(number):
    return struct.pack("<H", number)


# ---- worker.c -------------------------------------------------------------------------------------

OPEN, HELLO, CLOSE, TAKE, RAW, CUT, KNOB, FLOOD, MADE = range(9)
LARGE, UNSEALED, CUDA_IPC, POOL, CUDA_FD = 2, 3, 0x81, 0x80, 0x80


def step(what, client=0):
    return bytes([client * 16 + what])


def made(kind, rest, client=0):
    return step(MADE, client) + bytes([kind]) + rest


def region(how=0, client=0):
    return made(0, bytes([how]), client)


def region_kind(kind, client=0):
    """kind: 2 CUDA IPC, 3 pool, 4 CUDA descriptor."""
    how = next(how for how in range(0x80, 0x90) if how % 3 == kind - 2)
    return made(0, bytes([how]), client)


def submit(slots=1 << 7, divergence=0, reduction=0, forms=0, stream=0, regions=(0,) * 9, size=3,
           extra=b"", events=None, client=0):
    shape = next(s for s in range(128) if s % 3 == 1 and (s >> 4) % 8 == size and (s >> 2) % 4 == 1)
    if events is not None:
        shape = next(s for s in range(128, 256) if s % 3 == 1)
    more = forms % 9 + 9 * stream
    if extra:
        more = next(m for m in range(128, 256) if m % 3 == forms % 3 and m // 9 % 4 == stream)
    text = bytes([shape, divergence + 10 * reduction, more]) + extra
    if events is not None:
        text += bytes(events)
    text += short(slots)
    for slot in range(9):
        if slot <= 1 or slots & 1 << slot:
            text += bytes([0, regions[slot]])
    return made(1, text, client)


def packet(*parts, traced=False):
    """Of what submit() and copy() made, each without its first two bytes."""
    texts = [bytes([(0xC0 if traced else 0) + (part[1] == 3)]) + part[2:] for part in parts]
    return made(2 + 8 * ((len(parts) - 2) or 8), b"".join(texts))


def copy(to, source, to_offset=0, source_offset=1024, count=256, client=0):
    return made(3, bytes([to, source]) + short(to_offset) + short(source_offset) + short(count) + b"\0",
                client)


def publish(name=0, where=0, client=0):
    return made(4, bytes([name, where]), client)


def attach(name=0, client=0):
    return made(5, bytes([name]), client)


def detach(name=0, client=0):
    return made(13, bytes([name]), client)


def small(kind, rest=b"", more=0, client=0):
    """kind: 0 drop, 1 cancel, 2 event (more=3: fence), 3 drop event, 4 stream, 5 trace, 6 stats, 7 ping."""
    return made(6, bytes([kind + 8 * more]) + rest, client)


def grow(at, count=1, where=0, same=False, client=0):
    """By `count` pages, at that page of a region; same: the allocation is one that all such have."""
    return made(0x87, bytes([where, at + 16 * (count - 1) + 64 * same]), client)


def knob(which, value):
    return step(KNOB) + bytes([which + 16 * value])


SPACE = made(0, b"\xa0")


WORKER = {
    "submit": step(HELLO) + region() + submit(),
    "outputs": step(HELLO) + region() + region() + submit(slots=0x1E0, regions=(0, 0, 0, 0, 0, 1, 1, 1, 1)),
    "weights": step(HELLO) + region() + submit(slots=0x8C, reduction=5) + submit(slots=0x4, reduction=2),
    "divergences": step(HELLO) + region() + b"".join(submit(divergence=d, forms=d % 9) for d in range(9)),
    "large": step(HELLO) + region(LARGE) + submit(size=6) + submit(size=7) + region(LARGE),
    "limits": b"".join(step(HELLO, c) for c in range(6)) + b"".join(region() for _ in range(8))
    + b"".join(submit(stream=i % 4) for i in range(14)),
    "files": step(HELLO) + b"".join(region(file) for file in range(10)),
    "timeout": step(HELLO) + region() + submit(extra=b"\0\1\0", size=7) + submit(extra=b"\0\0\0"),
    "copy": step(HELLO) + region() + region(1) + copy(0, 1) + copy(0, 0) + copy(1, 0, 60000, 0, 4000),
    "share": step(HELLO) + region() + publish() + step(HELLO, 1) + attach(client=1) + region(1, client=1)
    + submit(client=1, regions=(0, 0, 1, 1, 1, 1, 1, 1, 1)) + copy(1, 0, client=1) + publish(client=1)
    + detach() + submit(client=1) + attach(client=1),
    "share-dropped": step(HELLO) + region() + publish() + publish(1) + step(HELLO, 1) + attach(client=1)
    + attach(1, client=1) + small(0, b"\0") + copy(0, 1, client=1) + step(CLOSE) + small(0, b"\0", client=1),
    "cancel": step(HELLO) + region() + submit(size=7) + submit() + small(1, more=0) + small(1, more=1),
    "pool": step(HELLO) + region_kind(3) + region() + copy(0, 1) + submit(regions=(0, 1, 0, 0, 0, 0, 0, 1, 0)),
    "streams": step(HELLO) + small(4, more=9) + region() + submit(stream=1) + small(4, more=1) + submit(stream=3),
    "trace": step(HELLO) + region() + small(5, more=3) + submit() + small(5) + submit(),
    "stats": step(HELLO) + small(6) + small(7) + step(TAKE) + step(HELLO),
    "flood": step(HELLO) + step(FLOOD) + b"\1" + step(FLOOD) + b"\0" + region(),
    "cut": step(HELLO) + region() + submit(size=7) + step(CUT) + b"\1" + step(HELLO, 1) + step(CUT, 1) + b"\0",
    "leave": step(HELLO) + region() + submit(size=7) + step(CLOSE) + step(OPEN) + step(CLOSE) + step(HELLO),
    "packet": step(HELLO) + region() + packet(submit(), submit(), submit(regions=(9,) * 9)) + submit()
    + packet(submit(), copy(0, 0), submit(size=7), submit(), traced=True) + small(1) + packet(submit(), submit()),
    "raw": step(HELLO) + step(RAW) + b"\xb5" + short(0) + bytes(40) + step(RAW) + b"\x30" + short(5) + b"hello",
    "no-hello": step(OPEN) + region() + submit() + small(7),
}
FAKED = {
    "hold": step(HELLO) + knob(0, 1) + region() + submit() * 6 + small(1) + small(1, more=2) + small(0, b"\0")
    + knob(0, 0),
    "hold-leave": step(HELLO) + knob(0, 1) + region() + submit() * 6 + step(CLOSE) + knob(0, 0),
    "hold-memory": step(HELLO) + knob(1, 1) + region() + region_kind(3) + submit() + knob(1, 0) + step(TAKE),
    "cuda": step(HELLO) + region_kind(2) + region_kind(4) + region_kind(4) + region_kind(2)
    + submit(regions=(0, 1, 0, 0, 0, 0, 0, 2, 0)),
    "spaces": step(HELLO) + SPACE + submit() + grow(0) + submit() + grow(1, 3) + submit(size=7) + publish() + grow(9)
    + SPACE + grow(0, where=1) + copy(0, 1) + copy(1, 0, 4000, 4000, 96) + grow(1, where=1, same=True)
    + grow(2, where=1, same=True) + small(0, b"\0") + submit() + step(HELLO, 1) + attach(client=1),
    "spaces-held": step(HELLO) + SPACE + grow(0) + knob(1, 1) + grow(1) + grow(2) + submit() + small(0, b"\0")
    + knob(1, 0) + step(TAKE) + SPACE + knob(1, 1) + grow(0, where=1) + step(CLOSE),
    "spaces-fail": step(HELLO) + SPACE + knob(4, 0) + grow(0) + grow(0) + knob(4, 1) + grow(1) + submit() + knob(4, 0) + SPACE,
    "events": step(HELLO) + region() + small(2) + small(2, more=1) + submit(events=(0, 1)) + small(3, b"\0"),
    "fences": step(HELLO) + region() + small(2, b"\0" + short(64), more=3) + submit(events=(1, 0)) * 2 + knob(0, 1)
    + submit(events=(1, 0), stream=1) + submit(events=(1, 0)) + small(0, b"\0") + small(3, b"\0") + small(2, b"\0\1\0", more=3),
    "event-waits": step(HELLO) + region() + small(2) + knob(8, 1) + knob(0, 1) + submit(events=(0, 0)) * 3
    + step(HELLO, 1) + region(client=1) + submit(client=1) + step(CLOSE) + knob(11, 0),
    "fails": step(HELLO) + region() + knob(3, 5) + submit() + knob(4, 0) + region() + knob(5, 4) + region_kind(3)
    + knob(6, 1) + submit(),
    "kept": step(HELLO) + knob(10, 1) + knob(4, 4) + region_kind(3) + step(TAKE),
    "kept-leave": step(HELLO) + knob(10, 1) + knob(5, 4) + region_kind(3) + step(CLOSE),
    "early": step(HELLO) + region_kind(2) + submit(extra=b"\0\0\1") + knob(7, 1) + submit(extra=b"\0\0\1"),
    "peers": step(HELLO) + knob(9, 1) + made(0, b"\xa2") + made(0, b"\xa1"),
}

# ---- http.c ---------------------------------------------------------------------------------------

CHUNKED, GZIP, DEFLATE, SPLIT, EXPECT, LAST, TRACED, PACKED = (1 << bit for bit in range(8))
WEB_CLOSE, WEB_RAW, WEB_CUT, WEB_TAKE, WEB_SETTLE, WEB_ORDER, WEB_ASK = range(7)


def web(what, rest=b"", client=0):
    return bytes([client * 16 + what]) + rest


def ask(target, how=0, json=b"", tail=0, shift=0, client=0):
    return web(WEB_ASK, bytes([target, how]) + short(len(json)) + json + bytes([tail, shift]), client)


def tensor(name, shape, where, datatype="FP32"):
    return '{"name":"%s","datatype":"%s","shape":%s,%s}' % (name, datatype, shape, where)


def infer(predictions, targets, more=""):
    return ('{"inputs":[%s,%s]%s}' % (predictions, targets, more)).encode()


DATA = '"data":[0.2,0.3,0.5]'
JSON = infer(tensor("predictions", "[1,3]", DATA), tensor("targets", "[1,3]", DATA),
             ',"outputs":[{"name":"loss"},{"name":"grad_predictions"}]')


def binary(size):
    return '"parameters":{"binary_data_size":%d}' % size


BINARY = infer(tensor("predictions", "[2,8]", binary(64)), tensor("targets", "[2,8]", binary(64)),
               ',"parameters":{"divergence":"js","reduction":"none","binary_data_output":true},'
               '"outputs":[{"name":"loss"},{"name":"grad_targets"}]')
BULK = infer(tensor("predictions", "[16,2048]", binary(131072)), tensor("targets", "[16,2048]", binary(131072)),
             ',"outputs":[{"name":"grad_predictions","parameters":{"binary_data":true}}]')
LARGE_JSON = infer(tensor("predictions", "[40,40]", '"data":[%s]' % ",".join(["0.25"] * 1600)),
                   tensor("targets", "[40,40]", '"data":[%s]' % ",".join(["0.125"] * 1600)),
                   ',"outputs":[{"name":"grad_targets"},{"name":"grad_predictions"}]')
STORED = infer(tensor("predictions", "[2,8]", '"parameters":{"stored_tensor":"a"}'),
               tensor("targets", "[2,8]", binary(64)))
SHARED = infer(tensor("predictions", "[2,8]", '"parameters":{"shared_memory_region":"r","shared_memory_byte_size":64}'),
               tensor("targets", "[2,8]", '"parameters":{"shared_memory_region":"r","shared_memory_byte_size":64,'
                      '"shared_memory_offset":64}'),
               ',"outputs":[{"name":"grad_targets","parameters":{"shared_memory_region":"r",'
               '"shared_memory_byte_size":64,"shared_memory_offset":128}}]')
REGISTER = b'{"key":"/kld-fuzz","offset":0,"byte_size":4096}'
CUDA = b'{"raw_handle":{"b64":"' + b"A" * 86 + b'=="},"device_id":0,"byte_size":4096}'

def raw(text):
    return web(WEB_RAW, short(len(text)) + text)


HTTP = {
    "json": ask(0, 0, JSON),
    "binary": ask(0, 0, BINARY, 32, 0),
    "gzip": ask(0, GZIP | PACKED, JSON) + ask(1, DEFLATE, BINARY, 32, 0),
    "chunked": ask(0, CHUNKED, JSON) + ask(0, CHUNKED | SPLIT | TRACED, BINARY, 32, 0),
    "bulk": ask(0, 0, BULK, 128, 9) + ask(0, GZIP, BULK, 128, 9) + ask(0, CHUNKED, BULK, 128, 9),
    "bulk-many": b"".join(ask(0, 0, BULK, 128, 9, client=c) for c in (0, 1, 2)) * 2,
    "large": ask(0, 0, LARGE_JSON) + ask(0, PACKED, LARGE_JSON),
    "bulk-cut": ask(0, 0, BULK, 64, 9) + web(WEB_CLOSE),
    "stored": ask(2, 0, b"", 16, 0) + web(WEB_SETTLE) + ask(0, 0, STORED, 16, 0) + ask(7) + ask(8) + ask(5),
    "stored-large": ask(3, 0, b"", 128, 9) + ask(3, CHUNKED, b"", 128, 9, client=1) + ask(6, client=1) + ask(4, 0, b"", 250, 1),
    "shared": ask(9, 0, REGISTER) + ask(12) + ask(0, 0, SHARED) + ask(11) + ask(0, 0, SHARED),
    "cuda": ask(13, 0, CUDA) + ask(14),
    "pages": b"".join(ask(target) for target in (15, 16, 17, 18, 19, 20, 21, 22, 23)),
    "expect": ask(0, EXPECT, JSON) + ask(0, EXPECT | LAST, BULK, 128, 9),
    "pipelined": ask(0, 0, JSON) * 3 + ask(0, LAST, JSON) + ask(16, client=3) + ask(0, 0, JSON, client=3),
    "orders": ask(0, 0, JSON) + b"".join(web(WEB_ORDER, bytes([kind])) for kind in (0, 1, 2)) + ask(0, 0, JSON),
    "raw": raw(b"POST /v2/models/kl_div/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{\"in") + web(WEB_CUT, b"\1"),
    "raw-chunked": raw(b"POST /v2/models/kl_div/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nfffffffff\r\n"),
    "raw-twice": raw(b"PUT /v2/tensors/a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"),
    "raw-blank": raw(b"PUT /v2/tensors/a HTTP/1.1\r\nHost: localhost\r\nContent-Length : 1\r\n\r\n"),
    "raw-nameless": raw(b"POST /v2/tensors HTTP/1.1\r\nHost: localhost\r\n: x\r\nContent-Length: 30\r\n\r\nGET /v2 HTTP/1.0\r\n\r\n"),
    "raw-nul": raw(b"GET /v2\0?a HTTP/1.1\r\nHost: a\0\r\n\0b: c\r\n\r\n"),
    "raw-trailer": raw(b"POST /v2 HTTP/1.1\nHost: a\nTransfer-Encoding: chunked\n\n2\r\n{}\r\n0\r\nA: b\r\n\0\r\nGET /v2 HTTP/1.0\n\n"),
    "raw-folded": raw(b"PUT /v2/tensors/a HTTP/1.1\r\nHost: localhost\r\nContent-Leng: 1\r\n th\r\n\r\n"),
}

# ---- answers.c ------------------------------------------------------------------------------------

ANSWERS = {
    "run": b"\0",
    "no-copy": b">\0\5\2\0\b\x10\0\x10\0\0\0\1\0D" + bytes(7) + b"\x0f\x19#-7AK\5\x0f\x19#-7AK",
    "all": b"\x3e",
    "spoiled": b"\x02\x01\x01\x14\0\1\x20\0\1\0\x01\0\x18\0\xff",
    "errors": b"\x3e" + b"\0\2\x0d\2\x0a\2\x0f\2\x0e" * 6,
    "twice": b"\x3e" + b"\3" * 30,
    "others": b"\x3e\0" + bytes(5 + 10 * kind for kind in range(8)) * 2,
    "silence": b"\x0e\0\6\6\6",
    "ends": b"\x3e\0\7\0\7\0\0\7\0\0\0\7",
    "raw": b"\x02\0\x08" + short(16) + b"\x10\0\0\0\1\0\x44\0" + bytes(8),
    "attached": b"\x09\0\1\3\x20\0\1\x24\0\x77\x28\0\xff\x2c\0\1",
    "devices": b"\x18\1\0\x1c\0\3",
    "fence": b"\x81",
    "fence-ends": b"\xc1" + bytes(3) + b"\7" + bytes(4) + b"\7\0\2\x0d",
}

# ---- replies.c ------------------------------------------------------------------------------------

GOOD = (b'{"outputs":[{"name":"grad_predictions","parameters":{"binary_data_size":128}},'
        b'{"name":"loss","parameters":{"binary_data_size":4}}]}')


def reply(how, json, more=b""):
    return b"\1" + bytes([how]) + short(len(json)) + json + more


def no_http(text):
    return b"\3" + short(len(text)) + text


REPLIES = {
    "run": b"\6",
    "made": b"\1" + reply(0x40, GOOD),
    "short": b"\1" + reply(0, GOOD, b"\x10"),
    "split": b"\1" + reply(0xC0, GOOD, short(10)),
    "large-size": b"\1" + reply(0x40, GOOD.replace(b"128", b"18446744073709551615")),
    "twice": b"\1" + reply(0x40, GOOD.replace(b"loss", b"grad_predictions")),
    "error": b"\2\0" + reply(2, b'{"error":"a \\"b\\" \\u00e9"}', b"\0"),
    "lost": b"\1" + reply(0x33, b'{"error":"lost"}', b"\0") * 3,
    "ready": b"\2\6\6\0\6\0",
    "ends": b"\6\0\4\7\0\4\5",
    "no-http": b"\1" + no_http(b"SSH-2.0-nothing\r\n"),
    "chunked": b"\1\x83" + short(60) + b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n",
    "info": b"\2\0\0" + reply(0, b'{"name":"x","version":"12345678901234567890123456789","device":"a\\x"}', b"\0"),
}

# ---- config.c, text.c, page.c -----------------------------------------------------------------------------

CONFIG = {
    "flags": b"\4--http=127.0.0.1:0\n--log-level\ndebug\n--unix-mode=0660\n--cuda-shm\n--device=0,1\n\nKLD_SPIN_US=7\n\n",
    "file": b'\4--threads=2\n\nKLD_LOG_FORMAT=json\n\n{"http": "", "pool_bytes_max": "3G", "threads": 4, "sandbox": false}',
    "slip": b"\4--log-levle=debug\n\n",
    "number": b"\4--pool-bytes-max=9223372036854775808\n\n",
    "secrets": b"\0" + struct.pack("<8I", 1, 0, 0, 1, 3, 0, 0, 2) + b"abcde",
    "secrets-short": b"\0" + struct.pack("<8I", 1, 1, 1, 1, 1 << 20, 1, 2, 3) + b"abc",
    "order": b"\1\x81Rdebug\0\0\0",
    "order-many": b"\1\x84Rdebug\0\0\0",
    "tokens": b"\2name 0123 infer\n",
    "reports": b"\xff\x0e" + b"".join(
        who + b"\0\4" + status + b"\1\0cputext" for who, status in ((b"\0", b"\0"), (b"\1", b"\0"), (b"\0", b"\5"))),
    "reports-reload": b"\xff\5" + b"\0\4\x20\0\0\0cpu" + b"x" * 29 + b"\0\4\x20\7\0\0" + b"\0" * 32,
    "reports-odd": b"\xff\3" + b"\0\3\1!" + b"\1\3\5abcde" + b"\1\2\xff\1\2\3" + b"y" * 250,
    "notify": b"\3@kld-fuzz\n1000000\n1\n",
}
OUTPUT = '{"name":"%s","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":%d}}'
METRICS = b"""# HELP kld_info x
kld_build_info{version="0.1.0"} 1
kld_worker_ready{worker="0"} 1
kld_worker_info{worker="0",backend="cpu",device="a \\"b\\" \\\\",uuid=""} 1
kld_requests_total{front="unix",worker="0",status="ok",op="js"} 12
kld_unix_request_seconds_bucket{worker="0",op="js",le="0.001"} 3
kld_unix_request_seconds_bucket{worker="0",op="js",le="+Inf"} 12
kld_unix_request_seconds_sum{worker="0",op="js"} 0.5
kld_unix_request_seconds_count{worker="0",op="js"} 12
kld_stage_seconds_sum{stage="queue"} 1e-3
kld_process_cpu_seconds_total{process="gateway"} 1.5
kld_pool_bytes{worker="15"} 18446744073709551616
kld_staging_bytes NaN
"""
TEXT = {
    "reply": b"\0" + ('{"outputs":[%s,%s]}' % (OUTPUT % ("loss", 4), OUTPUT % ("grad_targets", 64))).encode(),
    "error": b'\1{"code":[1,{"a":"\\u00e9"}],"error":"a \\"b\\"\\n"}',
    "headers": b"\2Inference-Header-Content-Length: 120\r\nRetry-After: 99999999999\r\nKLD-Status: device_lost\r\n",
    "metrics": b"\3" + METRICS,
    "options": b"\4\0a.npy\n--timeout\n1e3\nb.npy\n--server=unix:/x\n",
    "options-top": b"\4\3--once\n--timeout=nan\n",
}
PAGE = {
    "ones": b"\x08\xff",
    "anything": b"\3" + bytes(range(1, 252)),
    "workers": b"\x08" + struct.pack("<QII", 0, 1, 16) + bytes(4080),
}


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "corpus")
    worker = {name: b"\0" + text for name, text in WORKER.items()}
    worker.update({"faked-" + name: b"\1" + text for name, text in {**WORKER, **FAKED}.items()})
    for target, seeds in (("worker", worker), ("http", HTTP), ("answers", ANSWERS), ("replies", REPLIES), ("config", CONFIG), ("text", TEXT),
                          ("page", PAGE)):
        (folder / target).mkdir(parents=True, exist_ok=True)
        for name, text in seeds.items():
            (folder / target / name).write_bytes(text)


main()
