"""The one kernel of this package: an array on the device times a number on the device, in place; nothing is
read or written where that number is 1, which is what autograd's backward() begins with. So a gradient of
the forward pass is handed over as it is, and no CPU has to know the number.

Written as PTX, which the driver compiles for whatever card is there (from 8.0 on): one entry for each
dtype of the array and of the number. Everything else that computes is in libkld.
"""
from __future__ import annotations

from typing import Dict, List, Tuple

THREADS = 256
BLOCKS_MAX = 2112  # more work than that is a loop
VECTOR_BYTES = 16

_DTYPES = ("float32", "float64", "float16", "bfloat16")
_FACTORS = ("float32", "float64")

# How the 32-bit word %w of an array is multiplied by the FP32 number %f.
_WORD: Dict[str, str] = {
    "float32": """
    mov.b32 %x, {w};
    mul.rn.f32 %x, %x, %f;
    mov.b32 {w}, %x;""",
    "float16": """
    mov.b32 {{%a, %b}}, {w};
    cvt.f32.f16 %x, %a;
    cvt.f32.f16 %y, %b;
    mul.rn.f32 %x, %x, %f;
    mul.rn.f32 %y, %y, %f;
    cvt.rn.f16.f32 %a, %x;
    cvt.rn.f16.f32 %b, %y;
    mov.b32 {w}, {{%a, %b}};""",
    "bfloat16": """
    shl.b32 %s, {w}, 16;
    and.b32 %t, {w}, 0xffff0000;
    mov.b32 %x, %s;
    mov.b32 %y, %t;
    mul.rn.f32 %x, %x, %f;
    mul.rn.f32 %y, %y, %f;
    cvt.rn.bf16.f32 %a, %x;
    cvt.rn.bf16.f32 %b, %y;
    mov.b32 {w}, {{%a, %b}};"""}

# The same for the last elements, one a thread, at %p.
_ELEMENT: Dict[str, str] = {
    "float32": """
    ld.global.f32 %x, [%p];
    mul.rn.f32 %x, %x, %f;
    st.global.f32 [%p], %x;""",
    "float64": """
    ld.global.f64 %v, [%p];
    mul.rn.f64 %v, %v, %d;
    st.global.f64 [%p], %v;""",
    "float16": """
    ld.global.b16 %a, [%p];
    cvt.f32.f16 %x, %a;
    mul.rn.f32 %x, %x, %f;
    cvt.rn.f16.f32 %a, %x;
    st.global.b16 [%p], %a;""",
    "bfloat16": """
    ld.global.u16 %a, [%p];
    cvt.u32.u16 %s, %a;
    shl.b32 %s, %s, 16;
    mov.b32 %x, %s;
    mul.rn.f32 %x, %x, %f;
    cvt.rn.bf16.f32 %a, %x;
    st.global.b16 [%p], %a;"""}

_ENTRY = """
.visible .entry {name}(.param .u64 at, .param .u64 factor, .param .u64 count)
{{
    .reg .pred %q;
    .reg .b16 %a, %b;
    .reg .b32 %r<4>, %w<4>, %s, %t;
    .reg .f32 %f, %x, %y;
    .reg .f64 %d, %v, %u;
    .reg .b64 %at, %p, %n, %i, %step, %left;
    ld.param.u64 %p, [factor];
    cvta.to.global.u64 %p, %p;
    {load}
    @%q ret;
    ld.param.u64 %at, [at];
    cvta.to.global.u64 %at, %at;
    ld.param.u64 %n, [count];
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %ntid.x;
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %nctaid.x;
    mul.wide.u32 %i, %r0, %r1;
    cvt.u64.u32 %p, %r2;
    add.u64 %i, %i, %p;
    and.b64 %left, %n, {mask};
    setp.ge.u64 %q, %i, %left;
    @%q bra VECTORS;
    sub.u64 %p, %n, %left;
    add.u64 %p, %p, %i;
    mad.lo.u64 %p, %p, {item}, %at;{element}
VECTORS:
    mul.wide.u32 %step, %r1, %r3;
    shr.u64 %n, %n, {shift};
NEXT:
    setp.ge.u64 %q, %i, %n;
    @%q ret;
    mad.lo.u64 %p, %i, 16, %at;
    {vector}
    add.u64 %i, %i, %step;
    bra NEXT;
}}
"""

_DOUBLES = """ld.global.v2.f64 {%v, %u}, [%p];
    mul.rn.f64 %v, %v, %d;
    mul.rn.f64 %u, %u, %d;
    st.global.v2.f64 [%p], {%v, %u};"""

_LOAD: Dict[str, str] = {
    "float32": """ld.global.f32 %f, [%p];
    setp.eq.f32 %q, %f, 0f3F800000;
    cvt.f64.f32 %d, %f;""",
    "float64": """ld.global.f64 %d, [%p];
    setp.eq.f64 %q, %d, 0d3FF0000000000000;
    cvt.rn.f32.f64 %f, %d;"""}


def entry_name(dtype: str, factor: str) -> str:
    return f"kld_scale_{dtype}_{factor}"


def grid(count: int, item_bytes: int) -> Tuple[int, int]:
    """Blocks and threads for so many elements."""
    vectors = max(1, count * item_bytes // VECTOR_BYTES)
    return min(BLOCKS_MAX, -(-vectors // THREADS)), THREADS


def source() -> bytes:
    """The module, all entries; ends with a NUL, as the driver wants it."""
    parts: List[str] = [".version 7.0\n.target sm_80\n.address_size 64\n"]
    for dtype in _DTYPES:
        item = {"float32": 4, "float64": 8}.get(dtype, 2)
        if dtype == "float64":
            vector = _DOUBLES
        else:
            words = "".join(_WORD[dtype].format(w=f"%w{number}") for number in range(4))
            vector = ("ld.global.v4.b32 {%w0, %w1, %w2, %w3}, [%p];" + words
                      + "\n    st.global.v4.b32 [%p], {%w0, %w1, %w2, %w3};")
        for factor in _FACTORS:
            parts.append(_ENTRY.format(name=entry_name(dtype, factor), load=_LOAD[factor], vector=vector,
                                       mask=VECTOR_BYTES // item - 1, item=item, element=_ELEMENT[dtype],
                                       shift={2: 3, 4: 2, 8: 1}[item]))
    return "".join(parts).encode() + b"\0"
