"""Which shapes does every tier compute? One of every tile, and those that have failed elsewhere, with who found them.

A case costs what its tiles cost: 64 or 128 rows for each expert that has any. The emulator multiplies some 2e8 times a
second, so widths are small where the failure does not depend on them, and `source` says where they were larger.
"""

from oracle import Case

TILES = {
    "narrow": Case(N=70, K=2, E=3, H=64, F=32),
    "hidden 96, width 128": Case(N=67, K=2, E=2, H=96, F=128),
    "hidden 128, width 128": Case(N=20, K=1, E=1, H=128, F=128),
    "hidden 128, width 48": Case(N=80, K=1, E=2, H=128, F=48),
    "hidden 72, width 96": Case(N=66, K=2, E=3, H=72, F=96, dead=0.2),
    "hidden 96, width 32": Case(N=33, K=2, E=2, H=96, F=32),
    "hidden 328, width 32": Case(N=65, K=1, E=1, H=328, F=32),
    "hidden 64, width 40": Case(N=90, K=3, E=5, H=64, F=40, dead=0.1),
}
"""Together they take every tile of the table, with 64 and with 128 rows, and every product of tiles of `wgrad`."""

PUBLIC = {
    "rows past offs[-1]": Case(N=40, K=1, E=2, H=64, F=32, dead=0.25, source="pytorch #193633, grouped_gemm #36"),
    "empty experts, of 2577 rows": Case(
        N=3268,
        K=1,
        E=6,
        H=64,
        F=24,
        counts=(162, 0, 2577, 446, 0, 83),
        source="pytorch #172439, MSLK PR158; H 2048, F 768 there",
    ),
    "256 experts, few tokens": Case(N=3, K=2, E=256, H=64, F=32, source="pytorch #154557"),
    "no tokens": Case(N=0, K=2, E=4, H=64, F=32, source="TransformerEngine PR3019"),
    "no routed tokens": Case(
        N=40, K=2, E=4, H=64, F=32, dead=1.0, source="TransformerEngine PR3019, torchtitan PR1166"
    ),
    "experts without tokens": Case(N=30, K=2, E=16, H=64, F=32, chosen=3, source="torchtitan PR1166"),
    "22 of 512 experts": Case(N=4, K=22, E=512, H=64, F=32, source="vLLM PR43599"),
    "tile wider than the matrix": Case(
        N=70, K=1, E=2, H=120, F=120, source="kernels-community #1153; N 128, BLOCK_N 256"
    ),
    "hidden no multiple of 256": Case(N=9, K=2, E=2, H=360, F=40, source="vLLM PR49087"),
    "K no multiple of a step": Case(N=9, K=2, E=2, H=72, F=8, source="kernels-community #1153"),
    "8, 16, 32 and 64 rows": Case(N=120, K=1, E=4, H=64, F=32, counts=(8, 16, 32, 64), source="DeepGEMM #268"),
    "one group of one row": Case(N=1, K=1, E=1, H=1536, F=96, source="DeepGEMM #178; F 12288 there"),
    "128 groups of 16 rows": Case(
        N=2048, K=1, E=128, H=64, F=32, counts=(16,) * 128, source="DeepGEMM #237; wider there"
    ),
    "1 token": Case(N=1, K=2, E=8, H=64, F=32, source="tt-metal #50669"),
    "3 tokens": Case(N=3, K=2, E=8, H=64, F=32, source="tt-metal #50669"),
    "63 tokens": Case(N=63, K=1, E=1, H=64, F=32, source="tt-metal #50669"),
    "64 tokens": Case(N=64, K=1, E=1, H=64, F=32, source="tt-metal #50669"),
    "65 tokens": Case(N=65, K=1, E=1, H=64, F=32, source="tt-metal #50669"),
    "128 tokens": Case(N=128, K=1, E=1, H=64, F=32, source="DeepGEMM #365, tt-metal #50669"),
    "128 tokens, rows of 128": Case(
        N=128, K=1, E=1, H=64, F=32, tile_rows=128, source="sonic-moe #63, ScatterMoE PR23"
    ),
    "129 tokens, rows of 128": Case(
        N=129, K=1, E=1, H=64, F=32, tile_rows=128, source="sonic-moe #63, ScatterMoE PR23"
    ),
    "id -1 among 512 experts": Case(N=12, K=2, E=512, H=64, F=32, dead=0.3, source="flashinfer #3170, vLLM PR50845"),
    "5 experts": Case(N=40, K=2, E=5, H=64, F=32, dead=0.1, source="LightLLM PR1369"),
    "experts no multiple of 16": Case(N=40, K=2, E=83, H=64, F=32, source="sglang PR8777"),
}
"""Narrower than they were found where the failure is one of rows, and they say so."""
