"""Arrays of other libraries on a GPU, by __cuda_array_interface__ and DLPack, and our own, which others take. Needs no GPU:
none of their memory is looked at."""
import ctypes
import sys
import types

import numpy as np
import pytest

from pythonlib import import_kld

kld = import_kld()
from kld import _arrays, _cuda, _interface  # noqa: E402


class Foreign:
    """An array of another library on a GPU, of which only the addresses are looked at."""

    def __init__(self, **more):
        self.bits = more.pop("bits", (2, 32))
        self.__cuda_array_interface__ = {"shape": (1, 4), "typestr": "<f4", "data": (4096, False), "strides": None,
                                         **more}
        self.asked = []

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, *, stream=None):
        self.asked.append(stream)
        shape, strides = (ctypes.c_int64 * 2)(1, 4), (ctypes.c_int64 * 2)(1, 1)
        self.lent = _interface._DlManaged(tensor=_interface._DlTensor(8192, 2, 0, 2, *self.bits, 1, shape,
                                                                           strides, 0))
        return _interface._new_capsule(ctypes.addressof(self.lent), b"dltensor", None)


class Bool:
    """A mask of PyTorch 1.13 on a GPU."""

    def __init__(self, dtype, lends):
        self.dtype, self.lends, self.__cuda_array_interface__ = dtype, lends, {"typestr": "|b1"}

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, *, stream=None):
        if self.lends is None:
            raise RuntimeError("Bool type is not supported by dlpack")
        return self.lends.__dlpack__(stream=stream)

    def view(self, dtype):
        self.kept = Foreign(typestr="|u1", bits=(1, 8))  # a real capsule keeps what it lends
        return Bool(dtype, self.kept)


def test_masks_of_a_pytorch_whose_dlpack_has_no_bool(monkeypatch):
    torch = types.SimpleNamespace(bool=object(), uint8=object(), Tensor=Bool)
    monkeypatch.setitem(sys.modules, "torch", torch)
    found = _interface.find("row_mask", Bool(torch.bool, None))
    assert (found.view.dtype, found.view.address, found.view.shape) == ("uint8", 8192, (1, 4))
    with pytest.raises(RuntimeError, match="not supported by dlpack"):
        _interface.find("row_mask", Bool(torch.uint8, None))


def test_a_tensor_whose_interface_has_not_its_dtype(monkeypatch):
    """bfloat16 and bool of PyTorch (1.13 to 2.x): the property looks up the dtype, which it has not."""
    class Tensor(Foreign):
        @property
        def __cuda_array_interface__(self):
            raise KeyError("torch.bfloat16")

        @__cuda_array_interface__.setter
        def __cuda_array_interface__(self, value):
            pass

    with kld.connect("local:cpu") as connection:
        sides = _arrays.Sides(connection, Tensor(bits=(4, 16)), Tensor(bits=(4, 16)))
        assert (sides.predictions.dtype, sides.predictions.address, sides.predictions.ordinal) == ("bfloat16", 8192, 0)
        mask = sides.vector("row_mask", Tensor(bits=(6, 8)), "float32", ((1, 4),))
        assert mask.dtype == "bool" and mask.ordinal == 0
        out = Tensor(bits=(4, 16))
        assert sides.output_of("grad_predictions", out, "bfloat16", (1, 4)).address == 8192
        out.requires_grad = True
        with pytest.raises(ValueError, match=r"out\['grad_predictions'\] requires grad"):
            sides.output_of("grad_predictions", out, "bfloat16", (1, 4))


def test_an_interface_without_a_stream_leaves_it_to_dlpack(monkeypatch):
    """PyTorch's says nothing of the stream that fills the tensor; DLPack is told who reads it next."""
    monkeypatch.setattr(_cuda, "driver", lambda: types.SimpleNamespace(
        look_up=lambda address: types.SimpleNamespace(ordinal=0)))
    silent = Foreign(version=2)
    found = _interface.find("x", silent)
    assert silent.asked == [1] and (found.stream, found.view.address, found.view.strides) == (1, 8192, None)
    for stream, expected in ((7, 7), (None, 1)):
        said = Foreign(version=3, stream=stream)
        found = _interface.find("x", said)
        assert said.asked == [] and (found.stream, found.view.address) == (expected, 4096)


# ---- Ours


@pytest.fixture
def lent():
    """A DeviceArray of memory that is none."""
    made = object.__new__(_interface.DeviceArray)
    made.ordinal, made.shape, made._dtype, made.nbytes, made._address = 1, (2, 3), "float32", 24, 8192
    return made


def test_what_dlpack_may_ask_for(lent):
    for more in ({}, {"copy": False}, {"copy": None, "dl_device": (2, 1), "max_version": (1, 0)}, {"stream": 7}):
        capsule = lent.__dlpack__(**more)
        tensor = ctypes.cast(_interface._capsule_pointer(capsule, b"dltensor"),
                             ctypes.POINTER(_interface._DlManaged)).contents.tensor
        assert (tensor.data, tensor.device_type, tensor.device) == (8192, 2, 1)
    del capsule, tensor
    with pytest.raises(BufferError, match="without a copy"):
        lent.__dlpack__(copy=True)
    for other in ((1, 0), (2, 0)):
        with pytest.raises(BufferError, match="on its GPU"):
            lent.__dlpack__(dl_device=other)
    assert not _interface._lent


def test_numpy_makes_no_object_of_it(lent):
    assert lent.ndim == np.ndim(lent) == 2
    for use in (np.asarray, np.array, lambda array: np.add(array, 1), lambda array: np.zeros((2, 3)) - array):
        with pytest.raises(kld.KldTypeError, match=r"`numpy\(\)` copies it"):
            use(lent)
