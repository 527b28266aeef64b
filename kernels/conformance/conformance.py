"""Does a GPU do what the emulator does? Each primitive of device.h and hopper.h gets the same bits on both.

    moved      ldmatrix, cp.async of every length, loads, stores, shuffles            equal bit for bit
    rounded    two floats to a bf16 pair, and back                                     equal bit for bit
    multiplied mma and wgmma: equal where all sums are whole numbers that fp32 holds; otherwise each of the k products
               and the sum before them may be cut at the last place on either side:
                   |gpu - emulator| <= (k + 1) 2^-22 (|c| + sum over k of |a_k b_k|)
    exponential  2 + floor(1.173 |x|) units in the last place for __expf (CUDA C++ Programming Guide, "Intrinsic
               Functions"), one for the C library's expf; below the smallest normal number nothing is said

Words are int32 tensors, [cases, words]; primitives.cu says what they hold. It needs torch only, on any device.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

COLUMNS = (64, 96, 128, 176, 192, 256)
"""Of wgmma, as hopper_instructions.h has them."""
SUM_ERROR = 2.0**-22
"""Twice a unit in the last place of fp32, relative."""
SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Primitive:
    """One of the functions of device.h or hopper.h."""

    name: str
    call: tuple[int, ...]
    """`which` of conformance_warp, or columns, a_mn, b_mn of conformance_wgmma."""
    out: int
    """Words a case."""
    inputs: Callable[[torch.Generator], Tensor]
    allowed: Callable[[Tensor], Tensor] | None = None
    """From the inputs, by how much each result may differ, as a float; None: results are words and equal."""


@dataclass(frozen=True)
class Agreement:
    """What two libraries make of a primitive."""

    primitive: str
    agrees: bool
    text: str


# ---- bits ----


def random_words(cases: int, words: int, g: torch.Generator) -> Tensor:
    """Any bits."""
    return torch.randint(-(2**31), 2**31, (cases, words), generator=g).int()


def pairs(values: Tensor) -> Tensor:
    """The words of a tensor whose last dimension is even, as bf16."""
    return values.bfloat16().contiguous().view(torch.int32)


def halves(words: Tensor) -> Tensor:
    """The inverse of `pairs`, in float64."""
    return words.contiguous().view(torch.bfloat16).double()


def floats(words: Tensor) -> Tensor:
    """Words that are float32."""
    return words.contiguous().view(torch.float32)


def packed(g: torch.Generator) -> Tensor:
    """Floats to round: any bits, ties of both kinds, the largest, subnormal, infinite, NaN."""
    tie = torch.arange(0, 2**16, 257).repeat_interleave(4)  # every exponent, both parities of the bf16 below
    near = torch.tensor([0x7FFF, 0x8000, 0x8001, 0x17FFF]).repeat(len(tie) // 4)
    special = torch.tensor([0, 0x80000000, 1, 0x807FFFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF])
    chosen = torch.cat([tie * 2**16 + near, special])
    chosen = torch.where(chosen >= 2**31, chosen - 2**32, chosen).int()
    words = torch.cat([chosen, random_words(1, 4096 - len(chosen), g)[0]])
    return words.view(-1, 64)


def exponents(g: torch.Generator) -> Tensor:
    """Floats of the sizes that a sigmoid meets, and the ends."""
    x = torch.cat([torch.randn(256, generator=g), torch.randn(256, generator=g) * 40, torch.linspace(-104, 89, 500)])
    x = torch.cat([x, torch.tensor([0.0, -0.0, 1e-30, -1e-30, float("inf"), -float("inf"), 1e30, -1e30])])
    return torch.cat([x, torch.zeros(-len(x) % 32)]).view(-1, 32).view(torch.int32)


def exponential_allowed(words: Tensor) -> Tensor:
    """Of the exponentials of these floats."""
    x = floats(words).double()
    exact = x.clamp(-200, 200).exp()
    unit = torch.maximum(exact, torch.tensor(SMALLEST_NORMAL)) * 2.0**-23
    return torch.where(x.abs() < 200, unit * (3 + (1.173 * x.abs()).floor()) + SMALLEST_NORMAL * (x < -87), 0.0)


# ---- the fragments of mma.m16n8k16 (device.h) ----


def mma_places() -> tuple[Tensor, Tensor, Tensor]:
    """(row, column) of a[4][2], b[2][2] and c[4] of each lane: [32, 8, 2], [32, 4, 2], [32, 4, 2]."""
    lane = torch.arange(32)[:, None]
    g, t = lane // 4, lane % 4 * 2
    q8, q4 = torch.arange(8)[None], torch.arange(4)[None]
    a = torch.stack([g + q8 // 2 % 2 * 8, t + q8 % 2 + q8 // 4 * 8], -1)
    b = torch.stack([t + q4 % 2 + q4 // 2 * 8, g.expand(32, 4)], -1)
    c = torch.stack([g + q4 // 2 * 8, t + q4 % 2], -1)
    return a, b, c


def gathered(matrix: Tensor, places: Tensor) -> Tensor:
    """Elements of [cases, rows, columns] at these places."""
    return matrix[:, places[..., 0], places[..., 1]]


def scattered(values: Tensor, places: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse."""
    matrix = torch.zeros(values.shape[0], rows, columns, dtype=values.dtype)
    matrix[:, places[..., 0], places[..., 1]] = values
    return matrix


def operands(g: torch.Generator, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Whole numbers in the first half of the cases, then normal ones, then of very different sizes."""
    found = []
    for cases, *shape in shapes:
        x = torch.randn(cases, *shape, generator=g)
        x[: cases // 2] = torch.randint(-8, 9, (cases // 2, *shape), generator=g).float()
        x[cases * 3 // 4 :] *= torch.exp2(torch.randint(-20, 21, (cases - cases * 3 // 4, *shape), generator=g).float())
        found.append(x)
    return found


def mma_inputs(g: torch.Generator, cases: int = 32) -> Tensor:
    """Words a lane: a[4], b0, b1, c[4], 2 unused; the last cases have an infinity, a NaN and subnormals in a."""
    a, b, c = operands(g, (cases, 16, 16), (cases, 16, 8), (cases, 16, 8))
    a[-1, 3, 5], a[-2, 7, 9], a[-3, 2] = float("inf"), float("nan"), 1e-39
    of_a, of_b, of_c = mma_places()
    parts = [pairs(gathered(a, of_a)), pairs(gathered(b, of_b)), gathered(c, of_c).contiguous().view(torch.int32)]
    return torch.cat([*parts, torch.zeros(cases, 32, 2, dtype=torch.int32)], -1).flatten(1)


def mma_matrices(words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a [cases, 16, 16], b [cases, 16, 8] and c [cases, 16, 8] in float64."""
    lanes = words.view(-1, 32, 12)
    of_a, of_b, of_c = mma_places()
    return (
        scattered(halves(lanes[..., :4]), of_a, 16, 16),
        scattered(halves(lanes[..., 4:6]), of_b, 16, 8),
        scattered(floats(lanes[..., 6:10]).double(), of_c, 16, 8),
    )


def mma_allowed(words: Tensor) -> Tensor:
    """Of c, in the order of the registers."""
    a, b, c = mma_matrices(words)
    return gathered(sum_allowed(a, b, c), mma_places()[2]).flatten(1)


def sum_allowed(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Of c + a b; 0 in the first half, the whole numbers."""
    allowed = (a.shape[-1] + 1) * SUM_ERROR * (a.abs() @ b.abs() + c.abs())
    allowed[: len(a) // 2] = 0
    return allowed


# ---- wgmma (hopper_instructions.h) ----


def wgmma_places(columns: int) -> Tensor:
    """(row, column) of the accumulators of each thread: [128, columns / 2, 2]."""
    thread, i = torch.arange(128)[:, None], torch.arange(columns // 2)[None]
    row = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8
    return torch.stack([row, i // 4 * 8 + thread % 4 * 2 + i % 2], -1)


def wgmma_inputs(columns: int, a_mn: bool, b_mn: bool, g: torch.Generator, cases: int = 4) -> Tensor:
    """Words: a, b and then the accumulators of each thread."""
    a, b, c = operands(g, (cases, 64, 64), (cases, columns, 64), (cases, 64, columns))
    a, b = a.mT if a_mn else a, b.mT if b_mn else b
    registers = gathered(c, wgmma_places(columns)).contiguous().view(torch.int32)
    return torch.cat([pairs(a).flatten(1), pairs(b).flatten(1), registers.flatten(1)], -1)


def wgmma_matrices(columns: int, a_mn: bool, b_mn: bool, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a [cases, 64, 64], b [cases, 64, columns] and c [cases, 64, columns] in float64."""
    a, b, c = words.split([2048, 32 * columns, 64 * columns], -1)
    a = halves(a).view(-1, 64, 64)
    b = halves(b).view(-1, *((64, columns) if b_mn else (columns, 64)))
    c = scattered(floats(c).view(-1, 128, columns // 2).double(), wgmma_places(columns), 64, columns)
    return a.mT if a_mn else a, b if b_mn else b.mT, c


def wgmma_allowed(columns: int, a_mn: bool, b_mn: bool, words: Tensor) -> Tensor:
    """Of the accumulators, in the order of threads and registers."""
    allowed = sum_allowed(*wgmma_matrices(columns, a_mn, b_mn, words))
    return gathered(allowed, wgmma_places(columns)).flatten(1)


def wgmma(columns: int, a_mn: bool, b_mn: bool) -> Primitive:
    """One form of the instruction."""
    major = ("K", "MN")
    return Primitive(
        f"wgmma.m64n{columns}k16, a {major[a_mn]}-major, b {major[b_mn]}-major",
        (columns, int(a_mn), int(b_mn)),
        64 * columns,
        functools.partial(wgmma_inputs, columns, a_mn, b_mn),
        functools.partial(wgmma_allowed, columns, a_mn, b_mn),
    )


PRIMITIVES = (
    Primitive("ldmatrix.x4", (0,), 128, functools.partial(random_words, 4, 128)),
    Primitive("ldmatrix.x4.trans", (1,), 128, functools.partial(random_words, 4, 128)),
    Primitive("mma.m16n8k16", (2,), 128, mma_inputs, mma_allowed),
    Primitive("cp.async of 0 to 16 bytes", (3,), 68, functools.partial(random_words, 4, 68)),
    Primitive("pack, low, high", (4,), 128, packed),
    Primitive("exponential", (5,), 32, exponents, exponential_allowed),
    Primitive("shuffle_xor, shuffle_up", (6,), 320, functools.partial(random_words, 4, 32)),
    Primitive("loads and stores", (7,), 256, functools.partial(random_words, 4, 256)),
    *(wgmma(columns, a_mn, b_mn) for columns in COLUMNS for a_mn in (False, True) for b_mn in (False, True)),
)
"""In the order of conformance_warp."""


# ---- libraries ----


def library(target: Literal["cuda", "emulated"], *, sanitize: str | None = None) -> ctypes.CDLL:
    """The compiled primitives; the CUDA library is for the GPUs that are here alone, or for all without one.

    Raises:
        KernelBuildError: they cannot be compiled here.
    """
    return loaded(compiled(target, [Path(__file__).with_name("primitives.cu")], sanitize=sanitize))


def compiled(target: Literal["cuda", "emulated"], units: Sequence[Path], *, sanitize: str | None = None) -> Path:
    """A library of these sources in place of `kernels/src`, from the cache of kernel_build.

    Raises:
        KernelBuildError: they cannot be compiled here.
    """
    from smelt_budget.model import kernel_build, kernel_library

    architectures = (kernel_library.gpus() or None) if target == "cuda" else None
    kernels = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder)
        for name in ("include", "emulator"):
            shutil.copytree(kernels / name, sources / name)
        (sources / "src").mkdir()
        for unit in units:
            shutil.copy(unit, sources / "src")
        return kernel_build.build(target, sources=sources, sanitize=sanitize, architectures=architectures)


def loaded(path: Path) -> ctypes.CDLL:
    """With the types of its functions."""
    found = ctypes.CDLL(str(path))
    pointers, count = [ctypes.c_void_p] * 2, ctypes.c_int
    found.conformance_message.restype = ctypes.c_char_p
    found.conformance_message.argtypes = [count]
    found.conformance_capability.argtypes = [ctypes.POINTER(count)]
    found.conformance_warp.argtypes = [count, *pointers, count, ctypes.c_void_p]
    found.conformance_wgmma.argtypes = [count, count, count, *pointers, count, ctypes.c_void_p]
    return found


def capability(of: ctypes.CDLL) -> int:
    """90 is 9.0.

    Raises:
        RuntimeError: there is no GPU.
    """
    value = ctypes.c_int()
    checked(of, of.conformance_capability(ctypes.byref(value)))
    return value.value


def checked(of: ctypes.CDLL, code: int) -> None:
    """Raises RuntimeError: the code is not 0."""
    if code:
        raise RuntimeError(of.conformance_message(code).decode(errors="replace"))


def dump(of: ctypes.CDLL, primitive: Primitive, words: Tensor, device: str = "cpu") -> Tensor:
    """What the library makes of the inputs, [cases, out] words on the CPU; a place nobody wrote holds -1.

    Raises:
        RuntimeError: the kernel was not started, or the emulator found a fault.
    """
    words = words.contiguous().to(device)
    out = torch.full((len(words), primitive.out), -1, dtype=torch.int32, device=device)
    function = of.conformance_warp if len(primitive.call) == 1 else of.conformance_wgmma
    checked(of, function(*primitive.call, words.data_ptr(), out.data_ptr(), len(words), None))
    return out.cpu()


def compare(cuda: ctypes.CDLL, emulated: ctypes.CDLL, device: str = "cuda", seed: int = 0) -> list[Agreement]:
    """Every primitive that the GPU has, on both: `library("cuda")` and `library("emulated")`."""
    found = []
    hopper = capability(cuda) == 90  # sm_90a has no successor: wgmma is of this one alone
    for primitive in PRIMITIVES:
        if len(primitive.call) > 1 and not hopper:
            continue
        words = primitive.inputs(torch.Generator().manual_seed(seed))
        try:
            mine, theirs = dump(cuda, primitive, words, device), dump(emulated, primitive, words)
        except RuntimeError as error:
            found.append(Agreement(primitive.name, False, str(error)))
            continue
        found.append(judged(primitive, words, mine, theirs))
    return found


def judged(primitive: Primitive, words: Tensor, mine: Tensor, theirs: Tensor) -> Agreement:
    """Two dumps of a primitive."""
    if primitive.allowed is None:
        wrong, worst = mine != theirs, ""
    else:
        x, y = floats(mine).double(), floats(theirs).double()
        allowed = primitive.allowed(words)
        apart = (x - y).abs()
        wrong = ~((x == y) | (x.isnan() & y.isnan()) | (apart <= allowed))
        share = torch.where((allowed > 0) & apart.isfinite(), apart / allowed.clamp(min=1e-300), 0.0).max().item()
        worst = f", at most {share:.2f} of what is allowed"
    if not wrong.any():
        same = (mine == theirs).double().mean().item()
        return Agreement(primitive.name, True, f"{same:.1%} of {mine.numel()} words equal{worst}")
    case, word = wrong.nonzero()[0].tolist()
    return Agreement(
        primitive.name,
        False,
        f"{int(wrong.sum())} of {mine.numel()} words differ; first: case {case}, word {word},"
        f" {mine[case, word].item() & 0xFFFFFFFF:#010x} and {theirs[case, word].item() & 0xFFFFFFFF:#010x}",
    )
