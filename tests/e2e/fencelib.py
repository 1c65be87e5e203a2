"""A client of libkld on a GPU, in steps that nobody's CPU waits for: ready event, early answer, and a stream that waits for
a fence, or for a done event. What the processes of test_gpu_fences.py and tests/bench/fences.py run. Needs an NVIDIA
driver, and the Python package for the structs of libkld."""
import ctypes as c

import numpy as np

from gpulib import HANDLE_BYTES, Allocation, Gpu
from kld import _library
from kld._errors import KldError, Status
from unixlib import probabilities

SHAPE = (64, 1024)
TENSOR = 4 * SHAPE[0] * SHAPE[1]
FENCE_BYTES = 4096


class Trainer:
    def __init__(self, path, fence=True):
        self.gpu, self.connection = Gpu(), c.c_void_p()
        _library.call("kld_connect", f"unix:{path}".encode(), None, c.byref(self.connection))
        self.memory = Allocation(self.gpu, 4 << 20)
        self.q, self.p = probabilities(*SHAPE), probabilities(*SHAPE)
        self.gpu.put(self.memory.at, self.q)
        self.gpu.put(self.memory.at + TENSOR, self.p)
        self.region, self.wait, self.record = c.c_void_p(), c.c_void_p(), c.c_void_p()
        _library.call("kld_region_import_cuda_ipc", self.connection, self.memory.handle, self.gpu.uuid,
                      self.memory.size, 0, self.memory.size, c.byref(self.region))
        self.stream = self.gpu.stream()
        self.ready, handle = self.gpu.event()
        _library.call("kld_event_import", self.connection, handle, self.gpu.uuid, c.byref(self.wait))
        self.word = self.at = None
        if fence:
            self.make_fence()
        else:
            handle = c.create_string_buffer(HANDLE_BYTES)
            _library.call("kld_event_create", self.connection, handle, c.byref(self.record))
            self.done = self.gpu.open_event(handle.raw)
        self.result, self.request = _library.Result(), self._request()

    def make_fence(self):
        word = c.c_void_p()
        _library.call("kld_fence_create", self.connection, c.byref(word), c.byref(self.record))
        self.word = word.value
        self.at = self.gpu.pin(self.word, FENCE_BYTES)

    def drop_fence(self):
        self.gpu.unpin(self.word)
        _library.library().kld_event_drop(self.record)

    def _request(self):
        request = _library.Request()
        _library.library().kld_op_init(c.byref(request.op))
        request.op.rank = 2
        request.op.shape[:2] = SHAPE
        for slot, offset in (("predictions", 0), ("targets", TENSOR), ("grad_predictions", 2 * TENSOR)):
            number = _library.SLOT[slot]
            request.op.tensor[number].dtype = _library.DTYPE["float32"]
            request.bytes[number].region, request.bytes[number].offset_bytes = self.region, offset
        request.early = True
        return request

    def submit(self):
        """Enqueued at the server when this returns; the number of the fence."""
        self.gpu.record(self.ready, self.stream)
        self.request.wait, self.request.record = self.wait, self.record
        _library.call("kld_run", self.connection, c.byref(self.request), c.byref(self.result))
        return self.result.fence_number

    def step(self):
        """Enqueued on both sides when this returns."""
        number = self.submit()
        if self.at is None:
            self.gpu.wait(self.stream, self.done)
        else:
            self.gpu.wait_for(self.stream, self.at, number)
        return number

    def finish(self):
        self.gpu.finish(self.stream)

    def passed(self, number):
        return bool(_library.library().kld_fence_passed(self.record, number))

    def is_told_of_the_loss(self):
        try:
            self.submit()
        except KldError as error:
            return error.status == Status.DEVICE_LOST and "create another" in str(error)
        return False

    def is_right(self):
        gradient = self.gpu.get(self.memory.at + 2 * TENSOR, SHAPE)
        return np.allclose(gradient, -self.p.astype(np.float64) / self.q / SHAPE[0], rtol=1e-5, atol=0)

    def wrong_steps(self, count, ordered=True):
        """Steps, each with predictions of its own, that the stream writes and whose gradient it then copies; nobody waits
        in between. How many copies are not that step's gradient."""
        row, step = 4 * SHAPE[1], self.step if ordered else self.submit
        kept = Allocation(self.gpu, count * row)
        values = [np.float32((1 + i % 7 + i / 1000) / SHAPE[1]) for i in range(count)]
        for i, value in enumerate(values):
            self.gpu.fill_later(self.memory.at, value, SHAPE[0] * SHAPE[1], self.stream)
            step()
            self.gpu.copy_later(kept.at + i * row, self.memory.at + 2 * TENSOR, row, self.stream)
        self.finish()
        found = self.gpu.get(kept.at, (count, SHAPE[1]))
        kept.free()
        expected = -self.p[0].astype(np.float64)[None, :] / np.array(values, np.float64)[:, None] / SHAPE[0]
        self.gpu.put(self.memory.at, self.q)
        return int((~np.isclose(found, expected, rtol=1e-5, atol=0).all(axis=1)).sum())

    def close(self):
        if self.word is not None:
            self.gpu.unpin(self.word)
        _library.library().kld_close(self.connection)
