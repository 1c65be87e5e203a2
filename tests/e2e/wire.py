"""A client of the Unix socket that speaks the frames of proto/wire.h itself, with struct, and can
therefore also say what no library would: wrong sizes, versions, numbers and descriptors."""
import array
import fcntl
import mmap
import os
import socket
import struct

import numpy as np

VERSION = 1
(HELLO, REGION_ADD, REGION_DROP, COPY, SUBMIT, CANCEL, STATS, PING, EVENT_ADD, EVENT_DROP, PUBLISH, ATTACH,
 DETACH, STREAM, TRACE, FENCE_ADD, REGION_GROW) = range(1, 18)
WELCOME, REGION, DONE, STATS_REPLY, PONG, ERROR, EVENT, ATTACHED = range(64, 72)
MEMFD, CUDA_IPC, POOL, CUDA_FD, CUDA_SPACE = 1, 2, 3, 4, 5
EVENT_READY, EVENT_DONE = 1, 2
EARLY = 1
UID_OWN = 2**32 - 1
STATUS = ["ok", "invalid", "unauthenticated", "forbidden", "not_found", "method", "deadline", "exists",
          "too_large", "media", "throttled", "internal", "unimplemented", "busy", "unavailable",
          "device_lost", "no_memory", "cancelled", "version", "gone"]
DTYPES = {"FP32": (1, np.dtype("<f4")), "FP64": (2, np.dtype("<f8")), "FP16": (3, np.dtype("<f2")),
          "BF16": (4, np.dtype("<u2")), "UINT8": (5, np.dtype("u1")), "BOOL": (6, np.dtype("?"))}
FORMS = {"probs": 0, "logprobs": 1, "logits": 2}
DIVERGENCES = {"forward_kl": 0, "reverse_kl": 1, "jeffreys": 2, "mixed_kl": 3, "js": 4, "skew_kl": 5,
               "skew_reverse_kl": 6, "tv": 7, "cross_entropy": 8}
REDUCTIONS = {"batchmean": 0, "none": 1, "row": 2, "sum": 3, "mean": 4, "rowmean": 5}
NUMBERS = ["temperature", "beta", "skew", "weight", "scale", "normalizer", "grad_output"]
SLOTS = ["predictions", "targets", "row_weights", "row_mask", "grad_output", "loss", "row_loss",
         "grad_predictions", "grad_targets"]

HEADER = struct.Struct("<IHHQ")
HELLO_BODY = struct.Struct("<HHI64s")
WELCOME_BODY = struct.Struct("<QHHI16sIIIIQQ")
DEVICE = struct.Struct("<16s64s")
REGION_ADD_BODY = struct.Struct("<IIQQQ16s64s")
REGION_GROW_BODY = struct.Struct("<QQQ")
REGION_BODY = struct.Struct("<QQ")
COPY_BODY = struct.Struct("<QQQQQII")
SUBMIT_HEAD = struct.Struct("<IIQIIIIII8Q7d")
TENSOR = struct.Struct("<IIQQQ")
DONE_BODY = struct.Struct("<dQQQQII")
ERROR_BODY = struct.Struct("<II256s")
EVENTS = struct.Struct("<QQ")
EVENT_ADD_BODY = struct.Struct("<II16s64s")
EVENT_BODY = struct.Struct("<Q64s")
DESCRIPTION = struct.Struct("<IIII8QQ")
PUBLISH_HEAD = struct.Struct("<64sQQ")
PUBLISH_TAIL = struct.Struct("<II8I")
STATS_BODY = struct.Struct("<QQQQIIQQQQQQ")
STATS_FIELDS = ["epoch", "uptime_ns", "requests_total", "errors_total", "in_flight", "clients", "regions",
                "region_bytes", "pool_bytes", "pool_bytes_max", "kernel_ns_total", "bytes_total"]
FRAME_BYTES = 2048  # larger than every frame


class Failed(Exception):
    """An ERROR frame."""

    def __init__(self, status, text):
        super().__init__(f"{status}: {text}")
        self.status, self.text = status, text


class Ended(Exception):
    """The connection ended."""


def frame(kind, request, body=b"", version=VERSION, length=None):
    size = HEADER.size + len(body) if length is None else length
    return HEADER.pack(size, version, kind, request) + body


def memfd(size, seals=fcntl.F_SEAL_SHRINK):
    fd = os.memfd_create("kld-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class Memory:
    """A sealed memfd, mapped here; .array() views parts of it."""

    def __init__(self, size):
        self.size = size
        self.fd = memfd(size)
        self.map = mmap.mmap(self.fd, size)

    def array(self, offset, shape, dtype):
        count = int(np.prod(shape))
        return np.frombuffer(self.map, dtype=dtype, count=count, offset=offset).reshape(shape)

    def close(self):
        try:
            self.map.close()
        except BufferError:  # an array still looks at it
            pass
        os.close(self.fd)


def tensor(region, offset=0, dtype="FP32", stride=0, reserved=0):
    number = DTYPES[dtype][0] if isinstance(dtype, str) else dtype
    return number, reserved, region, offset, stride


def submit_body(shape, tensors, divergence="forward_kl", reduction="batchmean", predictions_form="probs",
                targets_form="probs", stream=0, flags=0, timeout_ns=0, rank=None, given=None, ready=0,
                done=0, **numbers):
    """tensors: {slot name: tensor(...)}. Names may also be raw numbers."""
    def number(table, value):
        return table[value] if isinstance(value, str) else value
    bits, values = 0, []
    for i, name in enumerate(NUMBERS):
        if name in numbers:
            bits |= 1 << i
        values.append(float(numbers.pop(name, 0)))
    assert not numbers, numbers
    sizes = list(shape) + [0] * (8 - len(shape))
    body = SUBMIT_HEAD.pack(stream, flags, timeout_ns, number(DIVERGENCES, divergence),
                            number(REDUCTIONS, reduction), number(FORMS, predictions_form),
                            number(FORMS, targets_form), len(shape) if rank is None else rank,
                            bits if given is None else given, *sizes, *values)
    for slot in SLOTS:
        body += TENSOR.pack(*tensors.get(slot, (0, 0, 0, 0, 0)))
    return body + EVENTS.pack(ready, done)


def description(shape, dtype="FP32", form="probs", stride=0, rank=None):
    sizes = list(shape) + [0] * (8 - len(shape))
    return DESCRIPTION.pack(DTYPES[dtype][0], FORMS[form], len(shape) if rank is None else rank, 0, *sizes,
                            stride)


class Client:
    """One connection. Replies are kept by request number; errors are raised as Failed."""

    def __init__(self, path, hello=True, name="test", timeout=60):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(timeout)
        self.socket.connect(path)
        self.number = 0
        self.replies = {}
        self.welcome = self.hello(name=name) if hello else None

    def __enter__(self):
        return self

    def __exit__(self, *ignored):
        self.close()

    def close(self):
        self.socket.close()

    # ---- Raw -----------------------------------------------------------------------------------
    def next_number(self):
        self.number += 1
        return self.number

    def send_raw(self, data, fds=()):
        if fds:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            self.socket.sendmsg([data], rights)
        else:
            self.socket.send(data)

    def send(self, kind, body=b"", fds=(), request=None):
        request = self.next_number() if request is None else request
        try:
            self.send_raw(frame(kind, request, body), fds)
        except (BrokenPipeError, ConnectionResetError):
            pass  # receive() tells, after what the worker said last
        return request

    def receive(self):
        """The next frame -> (type, request, body)."""
        try:
            data = self.socket.recv(FRAME_BYTES)
        except (ConnectionResetError, BrokenPipeError):
            raise Ended from None
        if not data:
            raise Ended
        length, version, kind, request = HEADER.unpack_from(data)
        assert length == len(data) and version == VERSION, (length, len(data), version)
        return kind, request, data[HEADER.size:]

    def reply(self, request):
        """The body of the reply to that request; Failed if it is an ERROR."""
        while request not in self.replies:
            kind, number, body = self.receive()
            if kind == ERROR and number == 0 != request:  # the connection was refused
                request = 0
            assert number not in self.replies, f"two replies to {number}"
            self.replies[number] = kind, body
        kind, body = self.replies.pop(request)
        if kind == ERROR:
            status, reserved, text = ERROR_BODY.unpack(body)
            assert reserved == 0 and status != 0 and b"\0" in text
            text = text.split(b"\0", 1)[0].decode()
            assert text
            raise Failed(STATUS[status], text)
        return kind, body

    def ask(self, kind, body=b"", fds=(), request=None):
        return self.reply(self.send(kind, body, fds, request))

    # ---- Frames --------------------------------------------------------------------------------
    def hello(self, name="test", low=VERSION, high=VERSION, reserved=0):
        raw = name if isinstance(name, bytes) else name.encode()
        kind, body = self.ask(HELLO, HELLO_BODY.pack(low, high, reserved, raw))
        assert kind == WELCOME
        fields = WELCOME_BODY.unpack_from(body)
        names = ["epoch", "version", "device", "devices", "backend", "regions_max", "requests_max",
                 "streams_max", "events_max", "region_bytes_max", "pool_bytes_max"]
        welcome = dict(zip(names, fields))
        welcome["backend"] = welcome["backend"].rstrip(b"\0").decode()
        devices = [DEVICE.unpack_from(body, WELCOME_BODY.size + DEVICE.size * i)
                   for i in range(welcome["devices"])]
        welcome["list"] = [(uuid, device.rstrip(b"\0").decode()) for uuid, device in devices]
        welcome["uuid"], welcome["name"] = welcome["list"][welcome["device"]]
        return welcome

    def ping(self):
        assert self.ask(PING) == (PONG, b"")

    def stats(self):
        kind, body = self.ask(STATS)
        assert kind == STATS_REPLY
        return dict(zip(STATS_FIELDS, STATS_BODY.unpack(body)))

    def region_add(self, kind, size, fds=(), offset=0, base=0, uuid=b"", handle=b"", reserved=0):
        reply, body = self.ask(REGION_ADD,
                               REGION_ADD_BODY.pack(kind, reserved, size, offset, base, uuid, handle), fds)
        assert reply == REGION
        region, got = REGION_BODY.unpack(body)
        assert got == (0 if kind == CUDA_SPACE else size) and region != 0
        return region

    def region_grow(self, region, offset, size, fd):
        """-> the bytes that the region has then."""
        reply, body = self.ask(REGION_GROW, REGION_GROW_BODY.pack(region, offset, size), [fd])
        assert reply == REGION
        same, got = REGION_BODY.unpack(body)
        assert same == region
        return got

    def region(self, memory):
        """Registers a Memory."""
        return self.region_add(MEMFD, memory.size, [memory.fd])

    def drop(self, region):
        kind, _ = self.ask(REGION_DROP, struct.pack("<Q", region))
        assert kind == DONE

    def event_add(self, kind, uuid=b"", handle=b""):
        """-> (id, handle)."""
        reply, body = self.ask(EVENT_ADD, EVENT_ADD_BODY.pack(kind, 0, uuid, handle))
        assert reply == EVENT
        return EVENT_BODY.unpack(body)

    def fence_add(self, region, offset=0):
        """-> its id, to be named and dropped as a done event."""
        reply, body = self.ask(FENCE_ADD, struct.pack("<QQ", region, offset))
        assert reply == EVENT
        event, handle = EVENT_BODY.unpack(body)
        assert not any(handle)
        return event

    def event_drop(self, event):
        kind, _ = self.ask(EVENT_DROP, struct.pack("<Q", event))
        assert kind == DONE

    def publish(self, name, region, tensor, offset=0, uids=()):
        raw = name if isinstance(name, bytes) else name.encode()
        kind, _ = self.ask(PUBLISH, PUBLISH_HEAD.pack(raw, region, offset) + tensor
                           + PUBLISH_TAIL.pack(len(uids), 0, *uids, *[0] * (8 - len(uids))))
        assert kind == DONE

    def attach(self, name, uid=UID_OWN, reserved=0):
        """-> (region, its bytes, {dtype, form, shape, stride, uid})."""
        kind, body = self.ask(ATTACH, struct.pack("<64sII", name.encode(), uid, reserved))
        assert kind == ATTACHED
        region, size = REGION_BODY.unpack_from(body)
        dtype, form, rank, hole, *rest = DESCRIPTION.unpack_from(body, REGION_BODY.size)
        owner, behind = struct.unpack_from("<II", body, REGION_BODY.size + DESCRIPTION.size)
        assert hole == behind == 0 and not any(rest[rank:8])
        names = {number: name for name, (number, _) in DTYPES.items()}
        return region, size, {"dtype": names[dtype], "form": form, "shape": tuple(rest[:rank]),
                              "stride": rest[8], "uid": owner}

    def detach(self, name):
        kind, _ = self.ask(DETACH, struct.pack("<64s", name.encode()))
        assert kind == DONE

    def stream(self, stream, priority):
        kind, _ = self.ask(STREAM, struct.pack("<Ii", stream, priority))
        assert kind == DONE

    def copy(self, to, to_offset, source, source_offset, size, stream=0, reserved=0):
        kind, body = self.ask(COPY, COPY_BODY.pack(to, to_offset, source, source_offset, size, stream,
                                                   reserved))
        assert kind == DONE
        return self.done(body)

    def cancel(self, target):
        kind, _ = self.ask(CANCEL, struct.pack("<Q", target))
        assert kind == DONE

    def submit(self, shape, tensors, **parameters):
        return self.send(SUBMIT, submit_body(shape, tensors, **parameters))

    @staticmethod
    def done(body):
        fields = DONE_BODY.unpack(body)
        names = ["loss", "queue_ns", "copy_ns", "kernel_ns", "bytes", "scalar", "fence_number"]
        return dict(zip(names, fields))

    def result(self, request):
        kind, body = self.reply(request)
        assert kind == DONE
        return self.done(body)

    def run(self, shape, tensors, **parameters):
        return self.result(self.submit(shape, tensors, **parameters))
