"""What do the kernels do past 2^31 elements? In memory of which only what they touch is ever there.

    axolotl PR3667, PR3865    262,144 rows of 2048; 512 x 5120 x 2048 and 896 x 2048 x 2048 weights, silent writes
    DLBlas #171               38,000 x 8 rows of 7168, which wraps at row 299,593
    sglang PR4727             56,000 x 8 rows of 7168
    torchtitan #2430          1,048,577 rows

Only the last experts and rows hold anything; a plan that gives nothing else a tile is handed to the stages. Widths that
do not make the size are small. Every function asserts.
"""

from __future__ import annotations

import torch
from oracle import Outputs, relative
from torch import Tensor
from torch.nn.functional import silu

BF16 = torch.bfloat16
LIMIT = 2**31
ROWS, WIDTH = 38_000 * 8, 7168


def last_expert(E: int, slots: int) -> tuple[Tensor, Tensor]:
    """offs and tile0 where the last of E experts has all slots."""
    offs, tile0 = (torch.zeros(E + 1, dtype=torch.int32) for _ in range(2))
    offs[E], tile0[E] = slots, 1
    return offs, tile0


def last_rows(slots: int) -> tuple[Tensor, Tensor]:
    """offs and tile0 of one expert that has the last of ROWS slots.

    To the stages S is `slots`: it sets the size of the grid, offs says which rows.
    """
    return torch.tensor([ROWS - slots, ROWS], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    """Of unit scale, the same every time."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(BF16)


def close(name: str, got: Tensor, want: Tensor, tolerance: float = 3e-3) -> None:
    distance = relative(got, want)
    assert distance <= tolerance, f"{name}: relative norm {distance:.1e}"


def weights(library, tier: int = 80, E: int = 525_000, H: int = 64, F: int = 64, slots: int = 3) -> None:
    """up, down, dact and dx with the last expert's matrices."""
    w_gate_up, w_down = torch.empty(E, 2 * F, H, dtype=BF16), torch.empty(E, H, F, dtype=BF16)
    assert w_gate_up.numel() > LIMIT
    w_gate_up[-1], w_down[-1] = normal(2 * F, H, scale=H**-0.5), normal(H, F, scale=F**-0.5)
    x, h, dpre = normal(slots, H), normal(slots, F), normal(slots, 2 * F)
    offs, tile0 = last_expert(E, slots)
    choice, weight = torch.arange(slots, dtype=torch.int32), torch.ones(slots)
    outputs = Outputs()
    pre, hidden, out, dx, d, hw = (outputs.new(slots, width) for width in (2 * F, F, H, H, 2 * F, F))
    partial = outputs.new(library.partials(tier, slots, E, H, F), slots, dtype=torch.float32)
    tail = (E, H, F, tier, 64, 0)
    library.up(x, H, w_gate_up, pre, hidden, choice, offs, tile0, slots, 1, *tail)
    library.down(h, w_down, out, offs, tile0, slots, *tail)
    library.dact(x, H, w_down, dpre, weight, d, hw, partial, choice, offs, tile0, slots, 1, *tail)
    library.dx(dpre, w_gate_up, dx, offs, tile0, slots, *tail)
    up, down = w_gate_up[-1].double(), w_down[-1].double()
    close("up", pre, x.double() @ up.T)
    close("down", out, h.double() @ down.T)
    close("dact", d[:, F:], x.double() @ down * silu(dpre[:, :F].double()))
    close("dx", dx, dpre.double() @ up)


def weight_gradients(library, tier: int = 80, E: int = 130, side: int = 4096, slots: int = 5) -> None:
    """dw [E, side, side] in float32, added to: an expert without slots is left alone."""
    dw = torch.empty(E, side, side)
    assert dw.numel() > LIMIT
    dw[-1] = 0
    left, right = normal(slots, side), normal(slots, side) + 1
    offs, _ = last_expert(E, slots)
    library.wgrad(left, side, None, right, side, None, 1, dw, 2, offs, slots, E, side, side, tier, 0)
    close("wgrad", dw[-1], left.double().T @ right.double(), 1e-4)


def gathers(library, tier: int = 80, rows: int = ROWS, width: int = WIDTH, F: int = 8) -> None:
    """up, dact and wgrad gather first and last tokens."""
    tokens, K, S = torch.tensor([0, rows - 1, LIMIT // width, 1]), 2, 4
    x = torch.empty(rows, width, dtype=BF16)
    assert x.numel() > LIMIT
    x[tokens] = normal(4, width)
    w_gate_up, w_down = normal(1, 2 * F, width, scale=width**-0.5), normal(1, width, F, scale=width**-0.5)
    choice, weight = (tokens * K + 1).int(), torch.ones(rows, K)
    offs, tile0 = last_expert(1, S)
    outputs = Outputs()
    pre, h, dpre, hw = (outputs.new(S, width) for width in (2 * F, F, 2 * F, F))
    partial = outputs.new(library.partials(tier, S, 1, width, F), S, dtype=torch.float32)
    tail = (choice, offs, tile0, S, K, 1, width, F, tier, 64, 0)
    library.up(x, width, w_gate_up, pre, h, *tail)
    library.dact(x, width, w_down, pre, weight, dpre, hw, partial, *tail)
    given = x[tokens].double()
    close("up", pre, given @ w_gate_up[0].double().T)
    close(
        "dact",
        partial.sum(0),
        (given @ w_down[0].double() * silu(pre[:, :F].double()) * pre[:, F:].double()).sum(1),
        1e-4,
    )
    dw_gate_up, dw_down = outputs.new(1, 2 * F, width), outputs.new(1, width, F)
    library.wgrad(pre, 2 * F, None, x, width, choice, K, dw_gate_up, 0, offs, S, 1, 2 * F, width, tier, 0)
    library.wgrad(x, width, choice, h, F, None, K, dw_down, 0, offs, S, 1, width, F, tier, 0)
    close("dw_gate_up", dw_gate_up[0], pre.double().T @ given)
    close("dw_down", dw_down[0], given.T @ h.double())


def slots(library, tier: int = 80) -> None:
    """combine, down and wgrad read the last slots."""
    rows = torch.empty(ROWS, WIDTH, dtype=BF16)
    slot = torch.tensor([[0, ROWS - 1, -1], [299_593, 1, ROWS - 2]], dtype=torch.int32)
    rows[slot[slot >= 0].long()] = normal(5, WIDTH)
    outputs, weight = Outputs(), torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    y = outputs.new(2, WIDTH)
    library.combine(rows, slot, weight, y, 2, 3, WIDTH, 0)
    close("combine", y, (rows[slot.clamp(min=0).long()].double() * (weight * (slot >= 0))[..., None]).sum(1))

    rows[-3:] = normal(3, WIDTH)
    offs, tile0 = last_rows(3)
    w, out, dw = normal(1, 8, WIDTH), torch.empty(ROWS, 8, dtype=BF16), outputs.new(1, WIDTH, 8)
    library.down(rows, w, out, offs, tile0, 3, 1, 8, WIDTH, tier, 64, 0)
    library.wgrad(rows, WIDTH, None, out, 8, None, 1, dw, 0, offs, 3, 1, WIDTH, 8, tier, 0)
    close("down", out[-3:], rows[-3:].double() @ w[0].double().T)
    close("wgrad", dw[0], rows[-3:].double().T @ out[-3:].double())


def results(library, tier: int = 80) -> None:
    """down, up and dx write the last slots."""
    offs, tile0 = last_rows(3)
    tail = (offs, tile0, 3, 1, WIDTH, 8, tier, 128, 0)
    h, w = torch.zeros(ROWS, 16, dtype=BF16), normal(1, WIDTH, 8)
    h[-3:] = normal(3, 16)
    dense = h[:, :8].contiguous()
    rows = torch.empty(ROWS, WIDTH, dtype=BF16)
    library.down(dense, w, rows, *tail)
    close("down", rows[-3:], dense[-3:].double() @ w[0].double().T)
    rows, w = torch.empty(ROWS, WIDTH, dtype=BF16), normal(1, 16, WIDTH)
    library.dx(h, w, rows, *tail)
    close("dx", rows[-3:], h[-3:].double() @ w[0].double())
    pre, half, w = torch.empty(ROWS, WIDTH, dtype=BF16), torch.empty(ROWS, WIDTH // 2, dtype=BF16), normal(1, WIDTH, 8)
    choice = torch.arange(ROWS, dtype=torch.int32)
    library.up(dense, 8, w, pre, half, choice, offs, tile0, 3, 1, 1, 8, WIDTH // 2, tier, 128, 0)
    close("up", pre[-3:], dense[-3:].double() @ w[0].double().T)
