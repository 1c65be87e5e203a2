"""local:cuda in a program that has CUDA of its own: the device that is current in its threads, streams that it
captures into graphs, memory that is not pinned, a card that it fills. Programs of their own, where what they
leave behind in a process or a thread is what matters. On the CUDA back end only, with a torch that has one."""
import ctypes as c
import subprocess
import sys

import numpy as np
import pytest

from pythonlib import environment, import_kld, import_torch, needs_card, probabilities

kld = import_kld()
torch = import_torch()
from kld import _library  # noqa: E402

SECONDS = 120  # that a program may take

BEGINNING = '''
import ctypes as c
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import kld
from kld import _library

library = _library.library()
URL = sys.argv[1]

class Case:
    """A request of two arrays, and what is right for it."""

    def __init__(self, rows, classes, seed=1):
        values = np.random.default_rng(seed).random((2, rows, classes), dtype=np.float32) + np.float32(0.05)
        self.q, self.p = values / values.sum(axis=-1, keepdims=True)
        q, p = self.q.astype(np.float64), self.p.astype(np.float64)
        self.loss, self.gradient = (p * np.log(p / q)).sum() / rows, -p / q / rows

    def is_right(self, result, gradient=True):
        assert abs(result.loss - self.loss) <= 1e-5 * abs(self.loss), (result.loss, self.loss)
        if gradient:
            np.testing.assert_allclose(result.grad_predictions, self.gradient, rtol=1e-5)

    def run(self, connection):
        self.is_right(connection.kl_div(self.q, self.p))

def elsewhere(function, *arguments):
    """In a thread that has done nothing yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()

def request_of(rows, classes, stream, **given):
    """Of libkld: predictions, targets, grad_predictions, each an address or a region and an offset."""
    request = _library.Request()
    library.kld_op_init(c.byref(request.op))
    request.op.rank, request.stream = 2, stream
    request.op.shape[:2] = rows, classes
    for name, place in given.items():
        slot = _library.SLOT[name]
        request.op.tensor[slot].dtype = 1
        request.bytes[slot] = _library.Bytes(place) if isinstance(place, int) else _library.Bytes(None, *place)
    return request

def pool_region(connection, size):
    region = c.c_void_p()
    library.kld_region_create_pool.argtypes = c.c_void_p, c.c_uint64, c.c_void_p, c.c_void_p
    _library.call("kld_region_create_pool", connection._handle, size, c.byref(region))
    return region

def ask(connection, request):
    result = _library.Result()
    _library.call("kld_run", connection._handle, c.byref(request), c.byref(result))
    return result

def run_in_place(connection):
    """What a caller's thread launches and looks after by itself."""
    region = pool_region(connection, 1 << 16)
    request = request_of(16, 64, 0, predictions=(region, 0), targets=(region, 4096), grad_predictions=(region, 8192))
    for _ in range(3):
        ask(connection, request)
    library.kld_region_drop(region)
'''

CURRENT = '''
driver = c.CDLL("libcuda.so.1")
assert driver.cuInit(0) == 0

def current():
    context = c.c_void_p()
    assert driver.cuCtxGetCurrent(c.byref(context)) == 0
    return context.value

def has_context(ordinal):
    flags, active = c.c_uint(), c.c_int()
    assert driver.cuDevicePrimaryCtxGetState(c.c_int(ordinal), c.byref(flags), c.byref(active)) == 0
    return bool(active.value)

def use_in_full(url, look):
    """All that a program does with it. look(): behind each call."""
    seen = [look()]
    connection = kld.connect(url)
    seen.append(look())
    for case in Case(16, 32), Case(512, 5000):
        case.run(connection)
        seen.append(look())
    run_in_place(connection)
    seen.append(look())
    connection.stats(), connection.info(), connection.ping()
    seen.append(look())
    connection.close()
    return seen + [look()]
'''


@pytest.fixture(scope="module", autouse=True)
def card(backend):
    needs_card(backend, torch)


def run(program, url="local:cuda", *arguments):
    """The program's last line is "ended", so that one that ends early does not pass."""
    source = BEGINNING + CURRENT + program + '\nprint("ended")\n'
    done = subprocess.run([sys.executable, "-B", "-c", source, url, *arguments], env=environment(), text=True,
                          capture_output=True, timeout=SECONDS)
    assert done.returncode == 0 and done.stdout.endswith("ended\n"), done.stdout + done.stderr
    return done.stdout.splitlines()[:-1]


def needs_two():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


# ---- What is current in callers' threads

def test_a_thread_that_has_no_device_has_none_afterwards():
    run('''
assert not any(elsewhere(use_in_full, URL, current))
connection = kld.connect(URL)  # and one that another thread has opened
assert current() is None

def compute():
    seen = [current()]
    Case(64, 1000).run(connection)
    run_in_place(connection)
    return seen + [current()]

for _ in range(3):
    assert elsewhere(compute) == [None, None]
connection.close()
assert current() is None
''')


def test_another_context_comes_back():
    """One that the caller has made, which is no device's primary one: cudaSetDevice() knows no way back to it."""
    run('''
device, context = c.c_int(), c.c_void_p()
assert driver.cuDeviceGet(c.byref(device), c.c_int(0)) == 0
assert driver.cuCtxCreate_v2(c.byref(context), c.c_uint(0), device) == 0
assert set(use_in_full(URL, current)) == {context.value}
assert driver.cuCtxDestroy_v2(context) == 0
''')


def test_the_second_card_makes_no_context_on_the_first():
    """Since CUDA 12 cudaSetDevice(0) alone makes one, of some 500 MB."""
    needs_two()
    run('''
def look():
    return has_context(0), current()

assert set(use_in_full(URL, look)) == {(False, None)}
assert set(elsewhere(use_in_full, URL, look)) == {(False, None)}
assert has_context(1)  # the question has an answer
''', "local:cuda:1")


@pytest.mark.parametrize("own, url", [(0, "local:cuda:1"), (1, "local:cuda:0")])
def test_the_program_stays_on_its_card(own, url):
    needs_two()
    run('''
import torch
from kld import functional

own = int(sys.argv[2])
torch.cuda.set_device(own)
kept = torch.ones(8, device="cuda")
runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "libcudart" in line}
runtime = c.CDLL(runtimes.pop()) if runtimes else None

def look():
    """As PyTorch, as the runtime and as the driver have it."""
    device = c.c_int(-1)
    assert driver.cuCtxGetDevice(c.byref(device)) == 0
    seen = {torch.cuda.current_device(), torch.empty(8, device="cuda").get_device(), device.value}
    if runtime is not None:
        assert runtime.cudaGetDevice(c.byref(device)) == 0
        seen.add(device.value)
    return tuple(seen)

assert set(use_in_full(URL, look)) == {(own,)}
case, other = Case(256, 3000), torch.device("cuda", 1 - own)
q, p = torch.from_numpy(case.q).to(other).requires_grad_(), torch.from_numpy(case.p).to(other)
with kld.connect(URL) as connection:
    for _ in range(3):  # of the second kind on: a call like one before it
        q.grad = None
        loss = functional.kl_div(q.log(), p, reduction="batchmean", connection=connection)
        loss.backward()
        assert look() == (own,)
        assert loss.device == other and abs(float(loss.detach()) - case.loss) <= 1e-5 * case.loss
        np.testing.assert_allclose(q.grad.cpu().numpy(), case.gradient, rtol=1e-5)
assert look() == (own,) and float((kept + kept).sum()) == 16
''', url, str(own))


# ---- Captures

GRAPHS = '''
import torch

STEPS = 40
start = torch.zeros(1 << 16, device="cuda")
(start * 1 + 1).sum().item()  # is loaded

def capture(meanwhile=None, **mode):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **mode):
        end = start
        for step in range(STEPS):
            end = end + 1
            if meanwhile is None:
                time.sleep(0.001)
            elif step == STEPS // 2:
                meanwhile()
    return graph, end

def replays(graph, end):
    for begin in 3, 8:
        start.fill_(begin)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((end == begin + STEPS).all())
'''


@pytest.mark.parametrize("what", ["arrays", "tensors", "connections"])
def test_a_capture_in_one_thread_and_requests_in_another(what):
    """In each mode of torch.cuda.graph, whose default is the one that looks at other threads too. connections: opened
    and closed meanwhile."""
    lines = run(GRAPHS + '''
what, case = sys.argv[2], Case(256, 4000)
connection = kld.connect(URL)
q, p = case.q, case.p
if what == "tensors":
    q, p = (torch.from_numpy(array).cuda() for array in (q, p))

def compute():
    case.is_right(connection.kl_div(q, p, grad=what != "tensors"), what != "tensors")
    if what == "connections":
        with kld.connect(URL) as other:
            case.run(other)

def go_on():
    global count
    while not enough.is_set():
        compute()
        count += 1

compute()
torch.cuda.synchronize()
enough, count, during = threading.Event(), 0, 0
with ThreadPoolExecutor(1) as pool:
    going = pool.submit(go_on)
    try:
        for mode in ({}, {"capture_error_mode": "global"}, {"capture_error_mode": "thread_local"}):
            for _ in range(4):
                before = count
                made = capture(**mode)
                during += count - before
                replays(*made)
    finally:
        enough.set()
    going.result()
compute()
connection.close()
print(during)
''', "local:cuda", what)
    assert int(lines[-1]) > 0, "no request ended during a capture: this test showed nothing"


def test_a_request_of_the_thread_that_captures():
    """Arrays of NumPy are computed, outside of the graph. Tensors would be of the stream that is captured: refused, and
    nothing of them is in the graph."""
    run(GRAPHS + '''
from kld import functional

connection, case = kld.connect(URL), Case(256, 4000)
tensors = [torch.from_numpy(array).cuda() for array in (case.q, case.p)]

def compute_tensors():
    return float(functional.kl_div(tensors[0].log(), tensors[1], reduction="batchmean", connection=connection))

def refused():
    try:
        functional.kl_div(*tensors, reduction="batchmean", connection=connection)
    except NotImplementedError as error:
        assert "captured into a CUDA graph" in str(error)
    else:
        raise AssertionError("it was taken")

case.run(connection)
compute_tensors()
for meanwhile in (lambda: case.run(connection), refused):
    for mode in ({}, {"capture_error_mode": "thread_local"}):
        replays(*capture(meanwhile, **mode))
        case.run(connection)
        assert abs(compute_tensors() - case.loss) <= 1e-5 * case.loss
connection.close()
''')


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_stream_that_is_captured_takes_no_request(where):
    """By libkld itself, which kld_stream_adopt() tells not to: an error, and nothing of it in the graph."""
    run(GRAPHS + '''
from kld._errors import KldBusyError

connection, case, stream = kld.connect(URL), Case(512, 4000), torch.cuda.Stream()
arrays = [case.q, case.p, np.zeros_like(case.q)]
if sys.argv[2] == "device":
    arrays = [torch.from_numpy(array).cuda() for array in arrays]
    torch.cuda.synchronize()
    at = [array.data_ptr() for array in arrays]
else:
    at = [array.ctypes.data for array in arrays]
request = request_of(512, 4000, 7, predictions=at[0], targets=at[1], grad_predictions=at[2])
_library.call("kld_stream_adopt", connection._handle, 7, stream.cuda_stream)

def compute():
    case.is_right(ask(connection, request), gradient=False)

def refused():
    try:
        compute()
    except KldBusyError as error:
        assert "captured" in str(error)
    else:
        raise AssertionError("it was taken")

compute()
for _ in range(3):
    made = capture(refused, stream=stream)
    compute()
    case.run(connection)
    arrays[2][:] = 3
    replays(*made)
    assert float(arrays[2].min()) == 3 == float(arrays[2].max())
    compute()
connection.close()
''', "local:cuda", where)


# ---- Memory that is not pinned

def test_two_threads_with_memory_that_cannot_be_pinned():
    """300 MB of each tensor: several pieces, of which each is right by its own factor."""
    run('''
import resource

resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
TIMES, ROWS, CLASSES = 9, 64, 131072

def compute(seed):
    case = Case(ROWS, CLASSES, seed)
    factors = 1 + np.arange(TIMES, dtype=np.float32) / 8
    q = np.tile(case.q, (TIMES, 1))
    p = (factors[:, None, None] * case.p).reshape(q.shape)
    loss = sum(f * (case.loss + np.log(f) * case.p.sum(dtype=np.float64) / ROWS) for f in factors.astype(float)) / TIMES
    truth = (case.gradient / TIMES).astype(np.float32)
    with kld.connect(URL) as connection:
        for _ in range(2):
            result = connection.kl_div(q, p)
            assert abs(result.loss - loss) <= 1e-5 * loss, (result.loss, loss)
            for part, factor in zip(result.grad_predictions.reshape(TIMES, ROWS, CLASSES), factors):
                assert np.abs(part / (truth * factor) - 1).max() < 1e-5

with ThreadPoolExecutor(2) as pool:
    list(pool.map(compute, (1, 2)))
''')


def test_memory_that_is_not_pinned_holds_up_nobody():
    """A request in plain memory, behind 600 ms of other work in its stream; one on the device, in a stream of its own,
    is computed at once."""
    run('''
import torch

connection, case = kld.connect(URL), Case(1024, 8192)
stream, gradient = torch.cuda.Stream(), np.zeros_like(case.q)
tensors = [torch.from_numpy(array).cuda() for array in (case.q, case.p)]
torch.cuda.synchronize()
_library.call("kld_stream_adopt", connection._handle, 7, stream.cuda_stream)
late = request_of(1024, 8192, 7, predictions=case.q.ctypes.data, targets=case.p.ctypes.data,
                  grad_predictions=gradient.ctypes.data)
soon = request_of(1024, 8192, 1, predictions=tensors[0].data_ptr(), targets=tensors[1].data_ptr())

for request in soon, late:
    case.is_right(ask(connection, request), gradient=False)
np.testing.assert_allclose(gradient, case.gradient, rtol=1e-5)
for _ in range(3):
    gradient[:] = 0
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_100_000_000)
    begun, result, number = time.monotonic(), _library.Result(), c.c_uint64()
    _library.call("kld_run_slice", connection._handle, c.byref(late), 20, c.byref(number), c.byref(result))
    assert number.value and not stream.query()
    case.is_right(ask(connection, soon), gradient=False)
    assert not stream.query(), f"it came after {time.monotonic() - begun} s"
    while number.value:
        _library.call("kld_wait_slice", connection._handle, c.byref(number), 1000, c.byref(result))
    stream.synchronize()
    case.is_right(result, gradient=False)
    np.testing.assert_allclose(gradient, case.gradient, rtol=1e-5)
connection.close()
''')


# ---- A full card

LEFT, BUFFER = 32 << 20, 96 << 20  # bytes


class Filling:
    """All of the card but some megabytes, in pieces that become smaller."""

    def __enter__(self):
        self.pieces = []
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        for size in (8 << 30, 1 << 30, 128 << 20, 16 << 20):
            while torch.cuda.mem_get_info()[0] > size + LEFT:
                try:
                    self.pieces.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                except torch.cuda.OutOfMemoryError:
                    break
        return self

    def __exit__(self, *_):
        self.pieces.clear()
        torch.cuda.empty_cache()


def compute_much(connection):
    """236 MB of staging, kept from then on."""
    q, p = (probabilities(seed, (150, 1 << 17)) for seed in (1, 2))
    truth = (p.astype(np.float64) * np.log(p.astype(np.float64) / q)).sum() / len(q)
    assert connection.kl_div(q, p).loss == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("where", ["server", "local"])
def test_a_buffer_has_the_room_of_kept_staging(make_server, where):
    """This process has the rest of the card. A fifth buffer has no more to come from; a job has its staging."""
    library = _library.library()
    library.kld_region_create_pool.argtypes = c.c_void_p, c.c_uint64, c.c_void_p, c.c_void_p
    regions = []

    def take(connection):
        region = c.c_void_p()
        _library.call("kld_region_create_pool", connection._handle, BUFFER, c.byref(region))
        regions.append(region)

    with kld.connect(make_server(pool_bytes_max="2G").url_unix if where == "server" else "local:cuda") as connection:
        compute_much(connection)
        with Filling():
            take(connection)
            with pytest.raises(kld.KldMemoryError):
                for _ in range(4):
                    take(connection)
        for region in regions:
            library.kld_region_drop(region)
        compute_much(connection)
