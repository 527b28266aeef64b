"""Which bugs of the wgmma tier must the tests find, and how? Changes of the sources, and the battery that judges them.

Most of them would leave results right on a quiet GPU: what orders copies, products and refills is only seen by an
emulator that lands every copy and reads every operand as late, or as early, as it may.
"""

import large
import torch
from oracle import NAN, Case, bytes_copied, counts, failures, make, run

TILE = "include/hopper_tile.h"
UP, DOWN, DACT, DX, WGRAD = (f"src/hopper_{name}.cu" for name in ("up", "down", "dact", "dx", "wgrad"))

MUTANTS = [
    # name, file, old, new, unit, a word of the finding
    ("no fence.proxy.async", TILE, "      fence_async();\n", "", UP, "fence.proxy.async"),
    ("no barrier before the product", TILE, "      barrier();\n", "", DOWN, "wgmma"),
    ("no wgmma.fence", TILE, "      wgmma_fence();\n", "", DX, "wgmma.fence"),
    ("prefetch one stage too far", TILE, "T::STAGES - 2; ++i) copy();", "T::STAGES - 1; ++i) copy();", UP, "wgmma"),
    ("copies waited for one step late", TILE, "wait_copies<T::STAGES - 3>", "wait_copies<T::STAGES - 2>", DOWN),
    ("products waited for too late for the refill", TILE, "wgmma_wait<1>", "wgmma_wait<2>", WGRAD, "wgmma"),
    ("no wait after the last product", TILE, "    wgmma_wait<0>();\n", "", DX),
    (
        "swizzle by every other row",
        TILE,
        "stage + r * ROW_BYTES + (threadIdx.x % 8 ^ r % 8)",
        "stage + r * ROW_BYTES + (threadIdx.x % 8 ^ r / 2 % 8)",
        UP,
    ),
    (
        "no swizzle across k",
        TILE,
        "block * BLOCK_BYTES + r * ROW_BYTES + (threadIdx.x % 8 ^ r % 8)",
        "block * BLOCK_BYTES + r * ROW_BYTES + (threadIdx.x % 8)",
        DX,
    ),
    ("k in steps of 64 bytes", TILE, "K_INSTRUCTION * 2;", "K_INSTRUCTION * 4;", DOWN),
    ("k across in steps of 8 rows", TILE, "K_INSTRUCTION * ROW_BYTES;", "K_INSTRUCTION / 2 * ROW_BYTES;", WGRAD),
    ("both warpgroups take the first rows", TILE, " + threadIdx.x / 128 * BLOCK_BYTES;", ";", UP),
    ("leading offset of half a block", TILE, "Right::ACROSS, BLOCK_BYTES)", "Right::ACROSS, BLOCK_BYTES / 2)", DX),
    ("K tail unmasked", TILE, "row[i] && k < depth", "row[i]", UP),
    ("columns across k unmasked", TILE, "next[i] && column < width", "next[i]", DX),
    ("row map of the sums", TILE, "threadIdx.x % 32 / 4; }", "threadIdx.x % 8; }", DOWN),
    ("rows unmasked", TILE, "if (row < last_row && fragment", "if (fragment", DOWN),
    ("columns unmasked", TILE, " && column < width)\n        store16", ")\n        store16", DX),
    ("fragments past 176 columns", TILE, "fragment < T::COLUMNS / 8 && ", "", DOWN),
    ("the next tile starts at the end of k", TILE, "        left.rewind();\n", "", DOWN),
    ("the next tile has the same columns", TILE, "        right.start(column);\n", "        right.rewind();\n", DX),
    ("expert stride in 32 bits", DX, "(depth * a.H)", "static_cast<int>(depth * a.H)"),
    ("spare rows take part in dact", DACT, "place.expert >= 0 && s < place.last;", "s < place.last;"),
    ("partial of the first columns only", DACT, "feature0 / T::COLUMNS * a.S", "0 * a.S"),
    ("wgrad reads a row too many", WGRAD, "return k < count ?", "return k <= count ?"),
    ("wgrad leaves empty experts out", WGRAD, "slots == 0 && a.how == SMELT_FP32_ADD", "slots == 0"),
    ("wgrad does not add", WGRAD, "if (add) {", "if (false) {"),
]


def battery(library) -> list[str]:
    """Tails in all directions, more steps than stages, more columns than a tile, NaN next door, 2^31 elements."""
    for case, tile_rows, how in (
        (Case(N=70, K=2, E=3, H=72, F=40, dead=0.1), 64, 0),
        (Case(N=150, K=1, E=3, H=392, F=264, counts=(0, 70, 80)), 128, 2),
        (Case(N=9, K=1, E=1, H=1056, F=392), 64, 1),
        (Case(N=400, K=1, E=3, H=40, F=16, counts=(399, 0, 1)), 128, 0),
    ):
        inputs = make(case)
        counts(library)
        got = run(library, inputs, tier=90, tile_rows=tile_rows, how=how)
        if found := failures(inputs, got, tile_rows, how):
            return found
        copied = counts(library)["copied"]
        # matrices of one tile: there the rows of a weight gradient's tile, always 128, are as many as its columns
        if max(case.H, 2 * case.F) <= 128 and copied != bytes_copied(library, inputs, got, tier=90):
            return [f"{copied} bytes copied"]
    if found := leaks(library):
        return found
    for check in (large.weights, large.gathers):
        check(library, tier=90)
    return []


def leaks(library) -> list[str]:
    """Where the NaN of one expert turns up that belongs to another."""
    counts = (50, 13, 9, 1)
    inputs = make(Case(N=sum(counts), K=1, E=4, H=72, F=40, counts=counts))
    bad, others = inputs.idx[:, 0] == 1, torch.arange(4) != 1
    inputs.x[bad] = inputs.grad[bad] = NAN
    got = run(library, inputs, tier=90)
    parts = {name: getattr(got, name)[~bad] for name in ("y", "dx", "dweight")}
    parts |= {name: getattr(got, name)[others] for name in ("dw_gate_up", "dw_down")}
    return [f"NaN of another expert in {name}" for name, part in parts.items() if not part.isfinite().all()]
