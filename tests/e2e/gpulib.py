"""GPU memory, streams and events of this process, through the driver's own interface and nothing else
(ctypes): what a co-located client has to share. Needs an NVIDIA driver; import it where there is one."""
import ctypes as c
import os

import numpy as np

HANDLE_BYTES = 64
INTERPROCESS = 6  # CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS
POSIX_FD = 1
NOT_READY = 600

# Two kernels for a test to be slow or wrong with.
PTX = rb"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 spin_ns)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [spin_ns];
    mov.u64 %rd2, %globaltimer;
AGAIN:
    mov.u64 %rd3, %globaltimer;
    sub.u64 %rd4, %rd3, %rd2;
    setp.lt.u64 %p1, %rd4, %rd1;
    @%p1 bra AGAIN;
    ret;
}
.visible .entry fault()
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    mov.u64 %rd1, 64;
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""


class Handle(c.Structure):
    _fields_ = [("bytes", c.c_ubyte * HANDLE_BYTES)]


class Location(c.Structure):
    _fields_ = [("type", c.c_int), ("id", c.c_int)]


class AllocationProperties(c.Structure):
    _fields_ = [("type", c.c_int), ("handle_types", c.c_int), ("location", Location),
                ("win32", c.c_void_p), ("flags", c.c_ubyte * 8)]


class Access(c.Structure):
    _fields_ = [("location", Location), ("flags", c.c_int)]


class GpuError(RuntimeError):
    pass


class Gpu:
    """A device, its primary context current on this thread."""

    def __init__(self, index=0):
        self.lib = c.CDLL("libcuda.so.1")
        self.call("cuInit", c.c_uint(0))
        device, context, uuid = c.c_int(), c.c_void_p(), (c.c_ubyte * 16)()
        self.call("cuDeviceGet", c.byref(device), c.c_int(index))
        self.call("cuDeviceGetUuid", uuid, device)
        self.call("cuDevicePrimaryCtxRetain", c.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.uuid, self.index, self.context = bytes(uuid), index, context
        mps = c.c_int(0)
        self.lib.cuDeviceGetAttribute(c.byref(mps), c.c_int(133), device)  # older drivers do not know it
        self.mps = mps.value != 0
        module = c.c_void_p()
        self.call("cuModuleLoadData", c.byref(module), c.c_char_p(PTX))
        self.kernels = {}
        for name in (b"spin", b"fault"):
            function = c.c_void_p()
            self.call("cuModuleGetFunction", c.byref(function), module, c.c_char_p(name))
            self.kernels[name.decode()] = function

    def select(self):
        """Where there are several of these: makes this one the thread's."""
        self.call("cuCtxSetCurrent", self.context)

    def call(self, name, *arguments):
        status = getattr(self.lib, name)(*arguments)
        if status != 0:
            raise GpuError(f"{name}: error {status}")

    def free_bytes(self):
        free, total = c.c_size_t(), c.c_size_t()
        self.call("cuMemGetInfo_v2", c.byref(free), c.byref(total))
        return free.value

    # ---- Streams and events ------------------------------------------------------------------------
    def stream(self):
        stream = c.c_void_p()
        self.call("cuStreamCreate", c.byref(stream), c.c_uint(1))
        return stream

    def finish(self, stream):
        self.call("cuStreamSynchronize", stream)

    def is_busy(self, stream):
        status = self.lib.cuStreamQuery(stream)
        if status not in (0, NOT_READY):
            raise GpuError(f"cuStreamQuery: error {status}")
        return status == NOT_READY

    def launch(self, kernel, stream, *arguments):
        values = [c.c_uint64(argument) for argument in arguments]
        pointers = (c.c_void_p * max(len(values), 1))(*[c.addressof(value) for value in values])
        one = c.c_uint(1)
        self.call("cuLaunchKernel", self.kernels[kernel], one, one, one, one, one, one, c.c_uint(0), stream,
                  pointers, None)

    def event(self):
        """-> (event, its handle)."""
        event, handle = c.c_void_p(), Handle()
        self.call("cuEventCreate", c.byref(event), c.c_uint(INTERPROCESS))
        self.call("cuIpcGetEventHandle", c.byref(handle), event)
        return event, bytes(handle.bytes)

    def open_event(self, handle):
        event = c.c_void_p()
        self.call("cuIpcOpenEventHandle", c.byref(event), Handle((c.c_ubyte * HANDLE_BYTES)(*handle)))
        return event

    def record(self, event, stream):
        self.call("cuEventRecord", event, stream)

    def wait(self, stream, event):
        self.call("cuStreamWaitEvent", stream, event, c.c_uint(0))

    def pin(self, address, size):
        """Memory of the host; its address on the device."""
        at = c.c_uint64()
        self.call("cuMemHostRegister_v2", c.c_void_p(address), c.c_size_t(size), c.c_uint(3))
        self.call("cuMemHostGetDevicePointer_v2", c.byref(at), c.c_void_p(address), c.c_uint(0))
        return at.value

    def unpin(self, address):
        self.call("cuMemHostUnregister", c.c_void_p(address))

    def wait_for(self, stream, at, number):
        """Until a word has reached the number."""
        self.call("cuStreamWaitValue32_v2", stream, c.c_uint64(at), c.c_uint(number), c.c_uint(0))

    def wait_for_ever(self, stream):
        """The stream goes on when a word in memory is 1, and nobody writes that."""
        self.word = Allocation(self, 1 << 21)
        self.put(self.word.at, np.zeros(16, "<i4"))
        self.call("cuStreamWaitValue32_v2", stream, c.c_uint64(self.word.at), c.c_uint(1), c.c_uint(0))

    # ---- Copies ------------------------------------------------------------------------------------
    def put(self, at, array):
        array = np.ascontiguousarray(array)
        self.call("cuMemcpyHtoD_v2", c.c_uint64(at), c.c_void_p(array.ctypes.data), c.c_size_t(array.nbytes))

    def get(self, at, shape, dtype="<f4"):
        array = np.empty(shape, dtype)
        self.call("cuMemcpyDtoH_v2", c.c_void_p(array.ctypes.data), c.c_uint64(at), c.c_size_t(array.nbytes))
        return array

    def pinned(self, count):
        """FP32 host memory that get_later() does not wait for."""
        at = c.c_void_p()
        self.call("cuMemAllocHost_v2", c.byref(at), c.c_size_t(4 * count))
        array = np.ctypeslib.as_array((c.c_float * count).from_address(at.value))
        array[:] = 0
        return array

    def get_later(self, at, array, stream):
        self.call("cuMemcpyDtoHAsync_v2", c.c_void_p(array.ctypes.data), c.c_uint64(at),
                  c.c_size_t(array.nbytes), stream)

    def copy_later(self, to, source, size, stream):
        self.call("cuMemcpyDtoDAsync_v2", c.c_uint64(to), c.c_uint64(source), c.c_size_t(size), stream)

    def fill_later(self, at, value, count, stream):
        bits = int(np.float32(value).view(np.uint32))
        self.call("cuMemsetD32Async", c.c_uint64(at), c.c_uint(bits), c.c_size_t(count), stream)


class Allocation:
    """cuMemAlloc() and its legacy IPC handle."""

    def __init__(self, gpu, size):
        at, handle = c.c_uint64(), Handle()
        gpu.call("cuMemAlloc_v2", c.byref(at), c.c_size_t(size))
        gpu.call("cuIpcGetMemHandle", c.byref(handle), at)
        self.gpu, self.at, self.size, self.handle = gpu, at.value, size, bytes(handle.bytes)

    def free(self):
        self.gpu.call("cuMemFree_v2", c.c_uint64(self.at))


class Mapped:
    """cuMemCreate(), mapped here and exported as a file descriptor."""

    def __init__(self, gpu, least):
        properties = AllocationProperties(1, POSIX_FD, Location(1, gpu.index))
        unit, handle, at, fd = c.c_size_t(), c.c_uint64(), c.c_uint64(), c.c_int(-1)
        gpu.call("cuMemGetAllocationGranularity", c.byref(unit), c.byref(properties), c.c_int(0))
        self.gpu, self.unit = gpu, unit.value
        self.size = -(-least // self.unit) * self.unit
        size, none = c.c_size_t(self.size), c.c_uint64(0)
        gpu.call("cuMemCreate", c.byref(handle), size, c.byref(properties), none)
        gpu.call("cuMemAddressReserve", c.byref(at), size, c.c_size_t(0), none, none)
        gpu.call("cuMemMap", at, size, c.c_size_t(0), handle, none)
        gpu.call("cuMemSetAccess", at, size, c.byref(Access(Location(1, gpu.index), 3)), c.c_size_t(1))
        gpu.call("cuMemExportToShareableHandle", c.byref(fd), handle, c.c_int(POSIX_FD), none)
        gpu.call("cuMemRelease", handle)
        self.at, self.fd = at.value, fd.value

    def free(self):
        self.gpu.call("cuMemUnmap", c.c_uint64(self.at), c.c_size_t(self.size))
        self.gpu.call("cuMemAddressFree", c.c_uint64(self.at), c.c_size_t(self.size))
        if self.fd >= 0:
            os.close(self.fd)
