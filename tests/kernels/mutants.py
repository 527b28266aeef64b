"""Which bugs must the tests find? One change of the sources each, in the mma.sync tier.

Every one compiles, and most leave results right on a quiet GPU or for round shapes.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A bug."""

    name: str
    file: str
    """Of `kernels`."""
    old: str
    """Text that stands there once."""
    new: str
    unit: str = ""
    """The translation unit that shows it, where the file is a header; the file itself is left out."""
    says: str = ""
    """A word of the finding, where another finding would be luck."""


MULTIPLY, GRID, EPILOGUE, SWIGLU = (f"include/{name}.h" for name in ("multiply", "grid", "epilogue", "swiglu"))
UP, DOWN, DACT, DX, WGRAD = (f"src/{name}.cu" for name in ("up", "down", "dact", "dx", "wgrad"))
PLAN, COMBINE = "src/plan.cu", "src/combine.cu"
BARRIER = "barrier();  // all copies of this stage"
COLUMN_MASK = "if (row < last && column < columns) store8"

MUTANTS = [
    Mutant("no barrier", MULTIPLY, BARRIER, "// ", UP),
    Mutant("wait one group short", MULTIPLY, "wait_copies<STAGES - 2>", "wait_copies<STAGES - 1>", DOWN),
    Mutant("prefetch into a live stage", MULTIPLY, "(stage + STAGES - 1) % STAGES", "(stage + STAGES) % STAGES", UP),
    Mutant("K tail unmasked", MULTIPLY, "row[i] && k < depth", "row[i]", UP),
    Mutant("columns of weights unmasked", MULTIPLY, "next[i] && column < width", "next[i]", DX),
    Mutant(
        "quads swapped",
        MULTIPLY,
        "lane % 8 + lane / 16 * 8, k_part * 2 + lane / 8 % 2",
        "lane % 16, k_part * 2 + lane / 16",
        DOWN,
    ),
    Mutant("no swizzle", MULTIPLY, "(chunk ^ turn)", "chunk + 0 * turn", WGRAD, "bank conflicts"),
    Mutant("divergent mma", MULTIPLY, "mma(c[i][j]", "if (threadIdx.x != 77 || step != 1) mma(c[i][j]", UP),
    Mutant("rows of a tile go on into the next expert", GRID, "place.first + tile_rows < end ?", "true ?", DOWN),
    Mutant("search off by one", GRID, "tile0[middle] <= tile", "tile0[middle] < tile", UP),
    Mutant("spare rows unwritten", GRID, "return place.first < S;", "return false;", DX),
    Mutant("rows unmasked", EPILOGUE, COLUMN_MASK, "if (column < columns) store8", DOWN),
    Mutant("columns unmasked", EPILOGUE, COLUMN_MASK, "if (row < last) store8", DX),
    Mutant(
        "lanes swap the wrong halves",
        EPILOGUE,
        "Quad{other, mine} : Quad{mine, other}",
        "Quad{mine, other} : Quad{mine, other}",
        DOWN,
    ),
    Mutant("slope without its second term", SWIGLU, "up * (sigma + silu * (1 - sigma))", "up * sigma", DACT),
    Mutant("gate and up swapped", UP, "swiglu(low(gate[b]), low(up[b]))", "swiglu(low(up[b]), low(gate[b]))"),
    Mutant(
        "h of gates that are not rounded", UP, "swiglu(low(gate[b]), low(up[b]))", "swiglu(g[half * 2], u[half * 2])"
    ),
    Mutant(
        "rows of up unmasked", UP, "if (s >= place.last || feature >= a.F) continue;", "if (feature >= a.F) continue;"
    ),
    Mutant(
        "columns of up unmasked",
        UP,
        "if (s >= place.last || feature >= a.F) continue;",
        "if (s >= place.last) continue;",
    ),
    Mutant("row product in 32 bits", UP, "a.choice[s] / a.K * a.ldx", "a.choice[s] / a.K * static_cast<int>(a.ldx)"),
    Mutant("expert stride in 32 bits", DOWN, "(static_cast<int64_t>(a.H) * a.F)", "static_cast<int>(a.H * a.F)"),
    Mutant("weight of the slot, not of the choice", DACT, "a.weight[a.choice[s]]", "a.weight[s]"),
    Mutant("spare rows take part in dact", DACT, "routed && s < place.last;  //", "s < place.last;  //"),
    Mutant("wgrad leaves empty experts out", WGRAD, "a.how == SMELT_FP32_ADD && first == last", "first == last"),
    Mutant("wgrad reads a row too many", WGRAD, "if (s >= last) return nullptr;", "if (s > last) return nullptr;"),
    Mutant("wgrad does not add", WGRAD, "if (a.how == SMELT_FP32_ADD) x +=", "if (false) x +="),
    Mutant(
        "plan unstable",
        PLAN,
        "earlier += same && other < me;\n    later += same && other > me;",
        "earlier += same && other > me;\n    later += same && other < me;",
    ),
    Mutant("ids cut to 32 bits", PLAN, "const int64_t id = choice", "const int id = choice"),
    Mutant("negative ids are experts", PLAN, "return id >= 0 && id < a.E ?", "return id < a.E ?"),
    Mutant("a stale slot for what is not routed", PLAN, "int slot = -1;", "int slot = 0;"),
    Mutant(
        "spare slots unwritten",
        PLAN,
        "if (choice >= a.offs[a.E]) store4(a.choice + choice, static_cast<uint32_t>(-1));",
        "",
    ),
    Mutant("ids read before they are there", PLAN, "expert);\n  barrier();\n", "expert);\n"),
    Mutant("combine takes slot -1", COMBINE, "if (slot < 0) continue;", ""),
    Mutant("slot product in 32 bits", COMBINE, "static_cast<int64_t>(slot) * a.H", "slot * a.H"),
    Mutant("last part of dweight dropped", COMBINE, "part < a.parts", "part + 1 < a.parts"),
]
