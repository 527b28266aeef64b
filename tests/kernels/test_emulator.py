"""Does the emulator find what a GPU would get wrong, and compute what a GPU computes?

Each probe (`probes/*.cu`) is right, and has a list of bugs that can be switched on one at a time. Every bug is a
finding under every schedule tried, with kernel, block, thread and line; the right one passes and is exact under all.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"
sys.path.insert(0, str(KERNELS / "conformance"))
import conformance  # noqa: E402

SEEDS = (1, 2, 3, 4, 5)

COPIES = {
    "shared memory in steps of 16": r"cp.async touches shared byte \d+, which is not a multiple of 16",
    "global memory in steps of 16": r"cp.async of a global address that is not a multiple of 16",
    "two copies into one place": r"cp.async overwrites shared byte \d+",
    "outside shared memory": r"cp.async touches shared byte \d+, but the block has 2048 bytes",
    "more than 16 bytes": r"cp.async of 17 bytes",
    "never waited for": r"exits with 1 cp.async never waited for, the first into shared byte \d+",
    "a group waited for too little": r"reads shared byte \d+ while a cp.async of thread \d+ into it is under way",
    "no barrier after the wait": r"reads shared byte \d+|overwrites shared byte \d+, which another thread reads",
    "no barrier before the refill": r"overwrites shared byte \d+, which another thread reads with no barrier between"
    r"|cp.async of thread \d+ into it is under way",
}
WORDS = {
    "all write one word": r"st.shared overwrites shared byte 28, which thread \d+ wrote with no barrier between",
    "no barrier after the write": r"ld.shared reads shared byte \d+, which thread \d+ wrote with no barrier between"
    r"|st.shared overwrites shared byte \d+, which another thread reads with no barrier between",
    "outside shared memory": r"ld.shared touches shared byte 384, but the block has 384 bytes",
    "no barrier before the write": r"st.shared overwrites shared byte \d+, which another thread reads with no barrier"
    r"|ld.shared reads shared byte \d+, which thread \d+ wrote with no barrier between",
}
WARPS = {
    "exit before a shuffle": r"deadlock: 31 threads \(the first is 64\) wait at shfl.bfly, line \d+; 97 threads have e"
    r"|exits while \d+ threads wait at a barrier|waits at a barrier after \d+ threads have exited",
    "one lane at another shuffle": r"warp divergence: it is at shfl.bfly, others of its warp wait at shfl.bfly, line",
    "half a warp at a product": r"warp divergence: it is at (mma.m16n8k16|shfl.bfly), others of its warp wait at",
    "a shuffle out of the warp": r"shfl.bfly by 32",
    "exit before a barrier": r"exits while \d+ threads wait at a barrier|waits at a barrier after 1 threads have",
    "a barrier of half the block": r"it is at another barrier than others of its block, who wait at line \d+",
    "two barriers that never meet": r"it is at another barrier than others of its block, who wait at line \d+",
}
STORES = {
    "of two blocks": r"thread \d+ of block \d+ and thread \d+ of block \d+ .* store to one place in global memory",
    "of two threads": r"store to one place in global memory with no barrier between",
    "that overlap": r"store to one place in global memory with no barrier between",
    "in steps of 8": r"st.global.v2.b32 of a global address that is not a multiple of 8",
}
MATRICES = {
    "no fence.proxy.async": r"wgmma reads shared byte \d+, which thread \d+ wrote with no fence.proxy.async before",
    "fence.proxy.async after the barrier": r"wrote with no fence.proxy.async before the barrier",
    "no barrier": r"wgmma reads shared byte \d+, which thread \d+ wrote with no barrier between"
    r"|wgmma reads shared byte \d+ while a cp.async of thread \d+ into it is under way",
    "no wgmma.fence": r"wgmma with no wgmma.fence before it",
    "operands on their way": r"wgmma reads shared byte \d+ while a cp.async of thread \d+ into it is under way",
    "refill too early": r"cp.async overwrites shared byte \d+, which an unfinished wgmma still reads",
    "accumulators written in flight": r"accumulator 3 of thread \d+ of the warpgroup was written while a wgmma was",
    "never committed": r"warpgroup 0 ends with a wgmma never committed",
    "never waited for": r"warpgroup 0 ends with a wgmma never waited for",
    "k steps of 64 bytes": r"operand a starts 128 bytes into an atom of 1024 bytes; a K-major one starts 0, 32, 64",
    "outside shared memory": r"wgmma: operand b reads shared byte \d+, but the block has 65536 bytes",
    "descriptors differ": r"wgmma: descriptors of threads 0 and 31 of the warpgroup differ",
    "a warp does not come": r"deadlock: 96 threads \(the first is 0\) wait at wgmma.fence, line \d+; 32 threads have",
    "another shape in flight": r"wgmma on accumulators that a wgmma of another shape still writes",
    "on without a fence": r"wgmma with no wgmma.fence since its accumulators came back from the last wait",
}


@pytest.fixture(scope="module")
def probes():
    """The library of probes/*.cu, on one host thread."""
    if shutil.which(os.environ.get("CXX") or "g++") is None:
        pytest.skip("g++ is not installed")
    library = ctypes.CDLL(str(conformance.compiled("emulated", sorted((HERE / "probes").glob("*.cu")))))
    library.probe_message.restype = ctypes.c_char_p
    library.smelt_emulator_seed.argtypes = [ctypes.c_uint64]
    library.smelt_emulator_threads(1)
    return library


@pytest.fixture(scope="module")
def primitives():
    if shutil.which(os.environ.get("CXX") or "g++") is None:
        pytest.skip("g++ is not installed")
    return conformance.library("emulated")


def words(*shape, fill=-7):
    return torch.full(shape, fill, dtype=torch.int32)


def run(library, name, *arguments, seed=1):
    """What the emulator found, or None."""
    library.smelt_emulator_seed(seed)
    passed = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
    code = getattr(library, f"probe_{name}")(*passed)
    return library.probe_message(code).decode() if code else None


def counts(library):
    """Since the last call, by name."""
    found = (ctypes.c_int64 * 7)()
    assert library.smelt_emulator_counts(found, 7) == 7
    return dict(zip(("blocks", "mma", "phases", "extra", "worst", "bytes", "wgmma"), found, strict=True))


def buggy(library, name, bug, seed):
    """A probe with one of its bugs."""
    if name == "copies":
        return run(library, name, words(5, 64, 4), words(4, 64), 4, bug, seed=seed)
    if name == "stores":
        return run(library, name, words(9, 8), 8, bug, seed=seed)
    if name == "matrices":
        return run(library, name, torch.zeros(8, 128, 64, dtype=torch.bfloat16), words(128, 32), 8, bug, seed=seed)
    return run(library, name, words(128), bug, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("probe", "bug"),
    [
        pytest.param(probe, bug, id=f"{probe}-{bug}")
        for probe, bugs in (("copies", COPIES), ("words", WORDS), ("warps", WARPS), ("matrices", MATRICES))
        for bug in bugs
    ],
)
def test_a_bug_is_found_and_its_place_named(probes, probe, bug, seed):
    bugs = {"copies": COPIES, "words": WORDS, "warps": WARPS, "matrices": MATRICES}[probe]
    found = buggy(probes, probe, 1 + list(bugs).index(bug), seed)
    assert found is not None
    assert re.search(bugs[bug], found), found
    assert re.match(rf"{probe}_kernel, block \(0, 0, 0\)", found), found
    if not re.search(r"deadlock|warpgroup 0 ends|exits", found):  # these have no one line
        assert re.search(rf"thread \d+, {probe}.cu:\d+: ", found), found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bug", STORES)
def test_two_stores_to_one_place_are_found(probes, bug, seed):
    found = buggy(probes, "stores", 1 + list(STORES).index(bug), seed)
    assert found is not None
    assert re.search(STORES[bug], found), found


@pytest.mark.parametrize("seed", SEEDS)
class TestRight:
    def test_copies(self, probes, seed):
        data, out = torch.arange(4 * 64 * 4, dtype=torch.int32).view(4, 64, 4), words(4, 64)
        assert run(probes, "copies", data, out, 4, 0, seed=seed) is None
        assert torch.equal(out, data[:, :, 0].roll(-1, 1))

    def test_words(self, probes, seed):
        out = words(96)
        assert run(probes, "words", out, 0, seed=seed) is None
        assert torch.equal(out, torch.arange(96).roll(-2).int())

    def test_warps(self, probes, seed):
        out = words(128)
        assert run(probes, "warps", out, 0, seed=seed) is None
        assert torch.equal(out.view(torch.float32), torch.arange(128.0).view(4, 32).sum(1).repeat_interleave(32))

    def test_stores(self, probes, seed):
        out = words(8, 8)
        assert run(probes, "stores", out, 8, 0, seed=seed) is None
        assert out[:, :2].tolist() == [[10 + b] * 2 for b in range(8)]
        assert out[:, 2:].tolist() == [[0, 0, 1, 1, 1, 1]] * 8

    @pytest.mark.parametrize("steps", [1, 2, 6])
    def test_matrices(self, probes, seed, steps):
        a, b = (torch.randint(-8, 9, (steps, 64, 64), generator=torch.Generator().manual_seed(i)) for i in (0, 1))
        out, both = words(128, 32), torch.stack([a, b], 1).bfloat16()
        assert run(probes, "matrices", both, out, steps, 0, seed=seed) is None
        got = conformance.scattered(out.view(torch.float32)[None], conformance.wgmma_places(64), 64, 64)[0]
        assert torch.equal(got, (a @ b.mT).sum(0).float())


@pytest.mark.parametrize("seed", SEEDS)
def test_accumulators_read_before_the_wait_are_nan(probes, seed):
    """A wait for too few groups shows in the result: the hardware's registers are not the thread's yet."""
    out = words(128, 32)
    bug = 1 + len(MATRICES)
    assert run(probes, "matrices", torch.ones(8, 128, 64).bfloat16(), out, 4, bug, seed=seed) is None
    assert out.view(torch.float32).isnan().all()


def test_a_copy_lands_at_its_issue_or_at_its_wait(probes):
    """Both are legal; within a block each copy draws for itself."""
    data, out = torch.tensor([42, 0, 0, 0], dtype=torch.int32), words(2, 32)
    seen = []
    for seed in range(10):
        assert run(probes, "landing", data, out, seed=seed) is None
        assert set(out[0].tolist()) == {42, -1}
        assert set(out[1].tolist()) == {42}
        seen.append(tuple(out[0].tolist()))
    assert len(set(seen)) == 10


def test_shared_memory_is_nan_for_every_block(probes):
    out = words(4, 32)
    assert run(probes, "poison", out, 4) is None
    assert out.view(torch.bfloat16).isnan().all()
    assert out.view(torch.float32).isnan().all()


def test_threads_and_blocks_come_in_an_order_drawn_from_the_seed(probes):
    seen = []
    for seed in [*range(20), *range(20)]:
        out = words(7, 64)
        assert run(probes, "order", out, 7, seed=seed) is None
        assert out.flatten().sort().values.tolist() == list(range(7 * 64))
        assert ((out // 64).amax(1) == (out // 64).amin(1)).all()  # a block at a time
        seen.append(out)
    assert all(torch.equal(a, b) for a, b in zip(seen[:20], seen[20:], strict=True))
    assert len({tuple(out.flatten().tolist()) for out in seen}) == 20
    blocks = {tuple((out[:, 0] // 64).tolist()) for out in seen}
    assert len(blocks) > 10
    ahead = [(out[0] // 32).diff().ne(0).sum() for out in seen]  # how often the warp changes
    assert min(ahead) <= 1  # one warp to its end, then the other
    assert max(ahead) > 16  # or all mixed


def test_numbers_of_threads_and_blocks(probes):
    """x counts fastest (CUDA C++ Programming Guide, "Thread Hierarchy")."""
    out = words(24, 24, 6)
    assert run(probes, "index", out) is None
    place = torch.stack([torch.arange(24) % 2, torch.arange(24) // 2 % 3, torch.arange(24) // 6], -1).int()
    assert torch.equal(out[..., :3], place[:, None].expand(24, 24, 3))
    assert torch.equal(out[..., 3:], place[None].expand(24, 24, 3))


@pytest.mark.parametrize(
    ("pitch", "ways"),
    [(0, 1), (16, 1), (32, 2), (64, 4), (128, 8), (144, 1), (80, 1), (1024, 8)],
)
def test_bank_conflicts_of_ldmatrix(probes, pitch, ways):
    """8 rows of 16 bytes in 32 banks of 4; rows at one address are read once."""
    counts(probes)
    assert run(probes, "banks", words(32, 4), pitch) is None
    found = counts(probes)
    assert (found["phases"], found["extra"], found["worst"]) == (4, 4 * (ways - 1), ways)


def test_counts(probes):
    counts(probes)
    buggy(probes, "copies", 0, 1)
    buggy(probes, "matrices", 0, 1)
    assert counts(probes) == {
        "blocks": 2,
        "mma": 0,
        "phases": 0,
        "extra": 0,
        "worst": 0,
        "bytes": 4 * 64 * 16 + 8 * 2 * 64 * 128,
        "wgmma": 8 * 4,
    }
    assert not any(counts(probes).values())


LIMITS = {
    (2**31, 1, 1, 1, 1, 1, 0): r"a grid of \(2147483648, 1, 1\); at most \(2147483647, 65535, 65535\)",
    (1, 65536, 1, 1, 1, 1, 0): r"a grid of \(1, 65536, 1\)",
    (1, 1, 65536, 1, 1, 1, 0): r"a grid of \(1, 1, 65536\)",
    (0, 1, 1, 1, 1, 1, 0): r"a grid of \(0, 1, 1\); .* at least 1 each",
    (1, 1, 0, 1, 1, 1, 0): r"a grid of \(1, 1, 0\)",
    (1, 1, 1, 0, 1, 1, 0): r"a block of \(0, 1, 1\) threads",
    (1, 1, 1, 1025, 1, 1, 0): r"a block of \(1025, 1, 1\) threads; at most 1024 together",
    (1, 1, 1, 32, 33, 1, 0): r"a block of \(32, 33, 1\) threads",
    (1, 1, 1, 1, 1, 65, 0): r"a block of \(1, 1, 65\) threads",
    (1, 1, 1, 1, 1, 1, 227 * 1024 + 1): r"232449 bytes of shared memory; at most 232448 at capability 90",
}


@pytest.mark.parametrize("sizes", LIMITS, ids=str)
def test_a_launch_that_a_gpu_refuses(probes, sizes):
    """CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""
    found = run(probes, "launch", (ctypes.c_uint * 7)(*sizes))
    assert found is not None
    assert re.match(rf"nothing_kernel: {LIMITS[sizes]}", found), found


@pytest.mark.parametrize(
    "sizes", [(70000, 1, 1, 1, 1, 1, 0), (1, 65535, 1, 1, 1, 1, 0), (2, 1, 1, 1024, 1, 1, 227 << 10)]
)
def test_a_launch_at_the_limits(probes, sizes):
    assert run(probes, "launch", (ctypes.c_uint * 7)(*sizes)) is None


def test_another_gpu_can_be_played(probes, monkeypatch):
    monkeypatch.setenv("SMELT_EMULATED_CAPABILITY", "80")
    assert run(probes, "launch", (ctypes.c_uint * 7)(1, 1, 1, 1, 1, 1, 163 << 10)) is None
    found = run(probes, "launch", (ctypes.c_uint * 7)(1, 1, 1, 1, 1, 1, (163 << 10) + 1))
    assert "166913 bytes of shared memory; at most 166912 at capability 80" in found
    assert "wgmma.fence needs capability 9.0" in buggy(probes, "matrices", 0, 1)
    monkeypatch.setenv("SMELT_EMULATED_CAPABILITY", "89")
    assert "at most 101376 at capability 89" in run(probes, "launch", (ctypes.c_uint * 7)(1, 1, 1, 1, 1, 1, 163 << 10))


def test_a_finding_among_many_blocks_ends_the_launch(probes):
    """On two host threads; texts of earlier findings stay."""
    probes.smelt_emulator_threads(2)
    try:
        out, texts = words(1001, 8), []
        for bug in range(1, 1 + len(STORES)):
            code = probes.probe_stores(ctypes.c_void_p(out.data_ptr()), 1000, bug)
            texts.append((code, probes.probe_message(code)))
        assert all(code >= 20000 and probes.probe_message(code) == text for code, text in texts)
        assert len({code for code, _ in texts}) == len(STORES)
        assert probes.probe_stores(ctypes.c_void_p(out.data_ptr()), 1000, 0) == 0
        assert probes.probe_message(0) == b"no error"
        assert out[:1000, 0].tolist() == list(range(10, 1010))
    finally:
        probes.smelt_emulator_threads(1)


def test_two_emulated_libraries_share_nothing(probes, primitives):
    """The loader unites inline variables of all libraries of a process unless they are hidden."""
    counts(probes), counts(primitives)
    buggy(probes, "copies", 0, 1)
    assert not any(counts(primitives).values())
    assert counts(probes)["blocks"] == 1
    buggy(probes, "warps", 1, 1)
    code = primitives.conformance_warp(99, None, None, 1, None)
    assert primitives.conformance_message(code) == b"no such primitive"


# ---- numerics: what conformance.py compares with a GPU, here with torch ----


def expected(primitive, data):
    """Words, and by how much they may differ as floats (0: equal bits or both NaN)."""
    name, cases = primitive.name, len(data)
    if name.startswith("ldmatrix"):
        rows = data.view(cases, 32, 4).contiguous().view(torch.int16).view(cases, 32, 8)
        matrices = rows[:, (7 * torch.arange(32) + 3) % 32].view(cases, 4, 8, 8)
        matrices = matrices.mT if "trans" in name else matrices
        lanes = matrices.contiguous().view(torch.int32).view(cases, 4, 32)
        return lanes.mT.reshape(cases, -1), None
    if name.startswith("cp.async"):
        kept = torch.arange(16)[None] < torch.arange(17)[:, None]
        return (data.view(torch.uint8).view(cases, 17, 16) * kept).view(torch.int32).flatten(1), None
    if name.startswith("pack"):
        floats = data.view(torch.float32)
        bits = floats.bfloat16().view(torch.int16).masked_fill(floats.isnan(), 0x7FFF).view(cases, 32, 2)
        halves = bits.int() << 16
        pair = bits.contiguous().view(torch.int32)
        return torch.cat([pair, halves, torch.zeros_like(pair)], -1).flatten(1), None
    if name == "exponential":
        x = data.view(torch.float32).double()
        return x.exp().float(), 1.5 * 2.0**-23 * x.exp().clamp(min=2.0**-126, max=3e38)
    if name.startswith("shuffle"):
        lane = torch.arange(32)
        steps = [lane ^ 1 << i for i in range(5)] + [
            torch.where(lane < 1 << i, lane, lane - (1 << i)) for i in range(5)
        ]
        return torch.stack([data[:, step] for step in steps], -1).flatten(1), None
    if name.startswith("loads"):
        return data, None
    if name.startswith("mma"):
        a, b, c = conformance.mma_matrices(data)
        places = conformance.mma_places()[2]
    else:
        columns, a_mn, b_mn = primitive.call
        a, b, c = conformance.wgmma_matrices(columns, bool(a_mn), bool(b_mn), data)
        places = conformance.wgmma_places(columns)
    return conformance.gathered(c + a @ b, places).flatten(1).float(), primitive.allowed(data)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("primitive", conformance.PRIMITIVES, ids=lambda p: p.name)
def test_a_primitive_computes_what_it_says(primitives, primitive, seed):
    """Bit for bit where only data moves or is rounded; sums of whole numbers exactly, others within their bound."""
    data = primitive.inputs(torch.Generator().manual_seed(seed))
    primitives.smelt_emulator_seed(ctypes.c_uint64(seed))
    got = conformance.dump(primitives, primitive, data)
    want, allowed = expected(primitive, data)
    if allowed is None:
        assert torch.equal(got, want)
        return
    got = got.view(torch.float32)
    close = (got.double() - want.double()).abs() <= allowed
    assert (close | (got == want) | (got.isnan() & want.isnan())).all()


def test_conformance_finds_a_difference(primitives):
    """A dump that differs in one word, and one that differs by more than the sums may."""
    moved, _, summed = conformance.PRIMITIVES[:3]
    for primitive, change in ((moved, 1), (summed, 1 << 12)):
        data = primitive.inputs(torch.Generator().manual_seed(0))
        mine = conformance.dump(primitives, primitive, data)
        theirs = mine.clone()
        theirs[1, 5] ^= change
        assert conformance.judged(primitive, data, mine, mine).agrees
        found = conformance.judged(primitive, data, mine, theirs)
        assert not found.agrees
        assert found.text.startswith(f"1 of {mine.numel()} words differ; first: case 1, word 5")


def test_emulator_compiles_without_a_warning(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    source = tmp_path / "empty.cu"
    source.write_text('#include "hopper.h"\n')
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-DSMELT_EMULATED", f"-I{KERNELS / 'include'}"]
    subprocess.run(["g++", *flags, "-x", "c++", "-O1", "-c", str(source), "-o", str(tmp_path / "empty.o")], check=True)
