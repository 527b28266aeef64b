"""Each convention gives what its owner publishes or computes. All values exact."""

from fractions import Fraction

import pytest

from smelt_budget.ledger import CONVENTIONS, Ledger, Setting
from smelt_budget.ledger.conventions import windowed_mean
from smelt_budget.spec import read
from smelt_budget.spec.runs import Window


def counted(name, convention, context, length=None):
    spec = read(name).spec
    return Ledger(spec, Setting.of(spec, CONVENTIONS[convention], context, length))


@pytest.mark.parametrize(
    ("name", "context", "training"),
    [
        ("qwen3-30b-a3b", 8192, 37_578_559_488),
        ("gpt-oss-20b", 4096, 24_141_260_160),
        ("gpt-oss-120b", 4096, 34_534_221_696),
    ],
)
def test_torchtitan(name, context, training):
    """Training FLOPs per token as torchtitan reports them (pytorch/torchtitan PR 4300, table of the description)."""
    assert counted(name, "torchtitan", context).training_flops == training


@pytest.mark.parametrize(("name", "forward"), [("qwen3-30b-a3b", 7_668_760_576), ("deepseek-v2-lite", 5_462_060_032)])
def test_megatron(name, forward):
    """Megatron-LM num_floating_point_operations / 3 at 4096 tokens, megatron/training/training.py of August 2026."""
    assert counted(name, "megatron", 4096).forward_flops == forward


FULL_AND_CAUSAL = [
    ("mixtral-8x7b", 27_644_657_664, 26_571_177_984),
    ("olmoe-1b-7b", 2_894_594_048, 2_626_224_128),
    ("qwen3-30b-a3b", 9_304_539_136, 7_694_319_616),
    ("qwen1.5-moe-a2.7b", 5_560_827_904, 5_158_273_024),
    ("deepseek-v2-lite", 6_035_079_168, 5_468_986_368),
    ("glm-4.5-air", 34_865_676_288, 30_236_295_168),
    ("granite-3.1-3b-a800m", 2_570_855_424, 2_168_300_544),
]


@pytest.mark.parametrize(("name", "full", "causal"), FULL_AND_CAUSAL)
def test_full_square_at_4096(name, full, causal):
    """Router and lm-head in; trl 1.16 gives the full value of Qwen3-30B exactly, torch's counter those of toys."""
    assert counted(name, "full-square", 4096).forward_flops == full
    assert counted(name, "full-square", 4096, Fraction(4097, 2)).forward_flops == causal


def test_smelt_leaves_out_the_head_alone():
    """smelt is full-square without the lm-head at equal attention length (rule C11)."""
    length = Fraction(4097, 2)
    with_head = counted("mixtral-8x7b", "full-square", 4096, length)
    head = 2 * with_head.spec.vocab_size * with_head.spec.hidden_size
    assert counted("mixtral-8x7b", "smelt", 4096).forward_flops == with_head.forward_flops - head


@pytest.mark.parametrize("window", [1, 3, 7, 50])
@pytest.mark.parametrize("context", [1, 2, 7, 20])
@pytest.mark.parametrize("chunked", [False, True])
def test_windowed_mean_is_the_mean_over_positions(window, context, chunked):
    """Counted position by position: a token sees itself and what is behind it, in its window or its chunk."""
    seen = [min(i + 1, window) if not chunked else i % window + 1 for i in range(context)]
    assert windowed_mean(Window(window, chunked), Fraction(context + 1, 2)) == Fraction(sum(seen), context)
