"""CI gives ptxas one file that calls the wrappers of assembler (assembler.cu): all of them; and all assembler is in those."""
import pathlib
import re

KERNELS = pathlib.Path(__file__).resolve().parents[2] / "kernels" / "cuda"
WRAPPERS = ("ptx.cuh", "cluster.cuh")
CALLS = pathlib.Path(__file__).parent / "kernels" / "cuda" / "assembler.cu"


def test_each_wrapper_is_called():
    wrapper = re.compile(r"^(?:template <.*> )?static __device__ __forceinline__ .*?(\w+)\(", re.M)
    made = [name for header in WRAPPERS for name in wrapper.findall((KERNELS / header).read_text())]
    assert len(made) > 30
    called = set(re.findall(r"\b(\w+)(?:<\w+>)?\(", CALLS.read_text()))
    assert not set(made) - called


def test_no_other_file_has_any():
    for path in sorted(KERNELS.rglob("*.cu*")):
        assert path.name in WRAPPERS or not re.search(r"\basm\b", path.read_text()), path.name
