"""Rotation as multiplication of complex numbers, and what only relative positions can do."""

import pytest
import torch

from smelt_budget.model.rotary import angles, rotary_size, rotate
from smelt_budget.spec.model import checked


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_rotation_is_multiplication_by_a_unit_number(small, interleaved, share):
    """z_i e^(i t theta^(-2i/D)) in float64 (arXiv:2104.09864, eq. 14); elements past D = share * 8 stay."""
    spec = checked(small | {"partial_rotary_factor": share, "rope_theta": 500.0})
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    position = torch.tensor([[0, 1, 2, 3, 4], [7, 7, 100, 0, 3]])
    size = int(8 * share)
    first, second = (
        (slice(0, size, 2), slice(1, size, 2)) if interleaved else (slice(size // 2), slice(size // 2, size))
    )
    frequency = 500.0 ** (-torch.arange(0, size, 2).double() / size)
    phase = position[:, None, :, None].double() * frequency
    z = torch.complex(x[..., first].double(), x[..., second].double()) * torch.polar(torch.ones_like(phase), phase)
    want = x.double().clone()
    want[..., first], want[..., second] = z.real, z.imag
    torch.testing.assert_close(rotate(x, angles(spec, position), interleaved).double(), want, rtol=1e-5, atol=1e-5)


def test_the_rotating_share_is_of_the_rotary_part_where_attention_is_latent(fields_of):
    """As the field's description says; transformers takes int(qk_rope_head_dim * partial_rotary_factor) too."""
    fields = fields_of("latent", "once")
    assert rotary_size(checked(fields)) == 4
    assert rotary_size(checked(fields | {"partial_rotary_factor": 0.5})) == 2


@pytest.mark.parametrize("kind", ["grouped", "part of a head", "neighbours", "latent", "latent windows", "sinks"])
@pytest.mark.parametrize("shift", [1, 37])
def test_only_distances_count(build, fields_of, close, kind, shift):
    """Padding of any length before a prompt moves all positions, and no logit: rotary positions are relative."""
    model = build(fields_of(kind, "sectioned")).eval()
    ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))
    other = torch.zeros(2, shift, dtype=torch.long)
    document = torch.cat((other + 5, torch.zeros_like(ids)), 1)
    with torch.no_grad():
        close(model(torch.cat((other, ids), 1), document_BT=document).logits[:, shift:], model(ids).logits, 2e-5)
