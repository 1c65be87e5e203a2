#!/usr/bin/env python3
"""A teacher publishes its logits once; a student in another process takes loss and gradient against them,
where they lie. Both are Python processes that call libkld through ctypes; no tensor byte is copied.

  share.py unix:/run/kld/kld.sock                  both, in processes of their own
  share.py teacher unix:/run/kld/kld.sock          until its standard input ends
  share.py student unix:/run/kld/kld.sock 2.5      at temperature 2.5

Where the server runs on a CPU the tensors are NumPy arrays in shared memory. On a GPU they are PyTorch's
own CUDA tensors, given to the server by CUDA IPC handle. libkld.so is looked for beside this file, in
../lib and in build/, or named by KLD_LIBRARY."""
import ctypes as c
import os
import pathlib
import subprocess
import sys

try:
    import numpy as np
except ImportError as problem:
    raise SystemExit(f"share.py: it needs NumPy (Debian: python3-numpy; or pip install numpy): {problem}") from None

NAME, ROWS, CLASSES, WAIT_S = b"example/py-logits", 64, 1000, 20
SLOTS = ["predictions", "targets", "row_weights", "row_mask", "grad_output", "loss", "row_loss",
         "grad_predictions", "grad_targets"]
FP32, LOGITS = 1, 2  # proto/op.h: enum kld_dtype, enum kld_form


# ---- libkld, as client/kld.h and proto/op.h declare it ---------------------------------------------

class Error(c.Structure):
    _fields_ = [("status", c.c_int), ("text", c.c_char * 256)]


class Tensor(c.Structure):
    _fields_ = [("dtype", c.c_uint32), ("reserved", c.c_uint32), ("region", c.c_uint64),
                ("offset_bytes", c.c_uint64), ("row_stride_bytes", c.c_uint64)]


class Op(c.Structure):
    _fields_ = [("divergence", c.c_uint32), ("reduction", c.c_uint32), ("predictions_form", c.c_uint32),
                ("targets_form", c.c_uint32), ("rank", c.c_uint32), ("given", c.c_uint32),
                ("shape", c.c_uint64 * 8), ("number", c.c_double * 7), ("tensor", Tensor * 9)]


class Bytes(c.Structure):
    _fields_ = [("data", c.c_void_p), ("region", c.c_void_p), ("offset_bytes", c.c_uint64)]


class Request(c.Structure):
    _fields_ = [("op", Op), ("bytes", Bytes * 9), ("stream", c.c_uint32), ("timeout_ns", c.c_uint64),
                ("wait", c.c_void_p), ("record", c.c_void_p), ("early", c.c_bool),
                ("trace", c.c_uint8 * 25)]


class Result(c.Structure):
    _fields_ = [("loss", c.c_double), ("scalar", c.c_bool), ("queue_ns", c.c_uint64), ("copy_ns", c.c_uint64),
                ("kernel_ns", c.c_uint64), ("bytes", c.c_uint64), ("total_ns", c.c_uint64),
                ("attempts", c.c_uint32)]


class View(c.Structure):
    _fields_ = [("dtype", c.c_uint32), ("form", c.c_uint32), ("rank", c.c_uint32), ("shape", c.c_uint64 * 8),
                ("row_stride_bytes", c.c_uint64), ("offset_bytes", c.c_uint64)]


class Info(c.Structure):
    _fields_ = [("backend", c.c_char * 16), ("device", c.c_char * 64), ("epoch", c.c_uint64),
                ("region_bytes_max", c.c_uint64), ("requests_max", c.c_uint32), ("streams_max", c.c_uint32),
                ("events_max", c.c_uint32), ("device_uuid", c.c_ubyte * 16), ("device_index", c.c_uint32),
                ("devices", c.c_uint32), ("version", c.c_char * 24)]


def load():
    here = pathlib.Path(__file__).resolve().parent
    places = [here / "libkld.so", here.parent / "lib/libkld.so", here.parents[1] / "build/libkld.so"]
    path = os.environ.get("KLD_LIBRARY") or next((str(p) for p in places if p.exists()), "libkld.so.0")
    lib = c.CDLL(path)
    lib.kld_region_data.restype = c.c_void_p
    lib.kld_region_data.argtypes = [c.c_void_p]
    return lib


class Connection:
    """One kld_connection, and memory that the server can reach."""

    def __init__(self, url):
        self.lib, self.handle, info = load(), c.c_void_p(), Info()
        self.call("kld_connect", url.encode(), None, c.byref(self.handle))
        self.call("kld_info", self.handle, c.byref(info))
        self.on_gpu = info.backend == b"cuda"

    def call(self, name, *arguments):
        error = Error()
        if getattr(self.lib, name)(*arguments, c.byref(error)):
            raise SystemExit(f"share.py: {error.text.decode()}")

    def tensor(self, values):
        """-> (a tensor that holds the values, the region that it is)."""
        region = c.c_void_p()
        if self.on_gpu:
            return self.gpu_tensor(values, region), region
        self.call("kld_region_create", self.handle, c.c_uint64(values.nbytes), c.byref(region))
        memory = (c.c_char * values.nbytes).from_address(self.lib.kld_region_data(region))
        array = np.frombuffer(memory, values.dtype).reshape(values.shape)
        array[:] = values
        return array, region

    def gpu_tensor(self, values, region):
        try:
            import torch
        except ImportError as problem:
            raise SystemExit("share.py: the server computes on a GPU, so the tensors are PyTorch's, which is needed "
                             f"for them (pip install torch): {problem}") from None
        tensor = torch.tensor(values, device="cuda")
        driver, base, size = c.CDLL("libcuda.so.1"), c.c_uint64(), c.c_size_t()
        handle, at = c.create_string_buffer(64), c.c_uint64(tensor.data_ptr())
        # PyTorch's tensors are parts of larger allocations: the handle is of the whole.
        if driver.cuMemGetAddressRange_v2(c.byref(base), c.byref(size), at) \
                or driver.cuIpcGetMemHandle(handle, base):
            raise SystemExit("share.py: the tensor's memory has no handle")
        torch.cuda.synchronize()
        self.call("kld_region_import_cuda_ipc", self.handle, handle.raw,
                  bytes(torch.cuda.get_device_properties(tensor.device).uuid.bytes), c.c_uint64(size.value),
                  c.c_uint64(at.value - base.value), c.c_uint64(values.nbytes), c.byref(region))
        return tensor

    def close(self):
        self.lib.kld_close(self.handle)


# ---- The two processes -----------------------------------------------------------------------------

def logits(seed):
    """Stands for a model."""
    return (np.random.default_rng(seed).random((ROWS, CLASSES)) * 4).astype(np.float32)


def teacher(url):
    connection = Connection(url)
    tensor, region = connection.tensor(logits(1))
    view = View(FP32, LOGITS, 2)
    view.shape[0], view.shape[1] = ROWS, CLASSES
    connection.call("kld_publish", connection.handle, NAME, region, c.byref(view), None, 0)
    print(f"teacher: published {NAME.decode()}", flush=True)
    sys.stdin.read()
    connection.close()  # the tensor is no longer published
    del tensor


def student(url, temperature):
    connection = Connection(url)
    tensor, predictions = connection.tensor(logits(2))
    gradient, written = connection.tensor(np.zeros((ROWS, CLASSES), np.float32))
    targets, view = c.c_void_p(), View()
    connection.call("kld_attach", connection.handle, NAME, c.c_uint64(WAIT_S * 10**9), c.byref(targets),
                    c.byref(view))
    if (view.dtype, view.form, view.rank, *view.shape[:2]) != (FP32, LOGITS, 2, ROWS, CLASSES):
        raise SystemExit("share.py: the teacher's tensor is of another shape")
    request, result, error = Request(), Result(), Error()
    connection.lib.kld_op_init(c.byref(request.op))  # forward KL, batchmean
    request.op.rank, request.op.predictions_form, request.op.targets_form = 2, LOGITS, LOGITS
    request.op.shape[0], request.op.shape[1] = ROWS, CLASSES
    connection.lib.kld_op_set_number(c.byref(request.op), b"temperature", c.c_double(temperature),
                                     c.byref(error))
    for name, region in (("predictions", predictions), ("targets", targets), ("grad_predictions", written)):
        request.op.tensor[SLOTS.index(name)].dtype = FP32
        request.bytes[SLOTS.index(name)].region = region
    connection.call("kld_run", connection.handle, c.byref(request), c.byref(result))
    print(f"student: temperature {temperature:g}: loss {result.loss:.9g}, "
          f"gradient[0] {float(gradient[0][0]):.9g}\n", end="", flush=True)  # in one piece: there are two
    connection.close()
    del tensor


def main():
    if len(sys.argv) == 2:
        with subprocess.Popen([sys.executable, __file__, "teacher", sys.argv[1]],
                              stdin=subprocess.PIPE) as teaches:
            students = [subprocess.Popen([sys.executable, __file__, "student", sys.argv[1], temperature])
                        for temperature in ("1", "2.5")]
            failed = any([one.wait() for one in students])
        return failed or teaches.returncode
    if len(sys.argv) == 3 and sys.argv[1] == "teacher":
        return teacher(sys.argv[2])
    if len(sys.argv) == 4 and sys.argv[1] == "student":
        return student(sys.argv[2], float(sys.argv[3]))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
