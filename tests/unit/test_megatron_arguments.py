"""Megatron's arguments say which model; what is emitted reads back as what it was made from."""

import contextlib
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from smelt_budget.emit.megatron import MEGATRON, unheld
from smelt_budget.emit.megatron_flags import arguments, lines_of
from smelt_budget.emit.target import Job, lines
from smelt_budget.emit.training import training
from smelt_budget.errors import BadInput
from smelt_budget.ledger import Ledger, Setting
from smelt_budget.spec import read
from smelt_budget.spec.megatron_arguments import flags_of_text, flags_of_yaml, spec_of
from smelt_budget.spec.model import checked
from smelt_budget.spec.text import as_yaml, parse

MOE = """
--num-layers 48
--hidden-size 2048
--num-attention-heads 32
--group-query-attention
--num-query-groups 4
--kv-channels 128
--qk-layernorm
--ffn-hidden-size 6144
--moe-ffn-hidden-size 768
--num-experts 128
--moe-router-topk 8
--normalization RMSNorm
--norm-epsilon 1e-6
--swiglu
--disable-bias-linear
--position-embedding-type rope
--rotary-base 1000000
--padded-vocab-size 151936
--max-position-embeddings 40960
--untie-embeddings-and-output-weights
--moe-aux-loss-coeff 1e-3
--bf16
"""
"""Qwen3-30B-A3B."""


def read_text(text):
    return spec_of(flags_of_text(text, "arguments"), "arguments")


def without(flag, text=MOE):
    return re.sub(rf"--{flag}( [^\n]*)?\n", "", text)


def refused(text):
    with pytest.raises(BadInput) as caught:
        read_text(text)
    return "\n".join((str(caught.value), *map(str, caught.value.args)))


@st.composite
def held(draw):
    """Fields of a baseline that Megatron holds exactly, every feature of its own among them."""
    L, d = draw(st.integers(1, 6)), 2 * draw(st.integers(1, 8))
    groups = draw(st.integers(1, 4))
    fields = {
        "hidden_size": draw(st.integers(1, 64)),
        "num_hidden_layers": L,
        "vocab_size": draw(st.integers(1, 999)),
        "max_position_embeddings": draw(st.integers(8, 99)),
        "tie_word_embeddings": draw(st.booleans()),
        "num_attention_heads": groups * draw(st.integers(1, 4)),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 2.5e-5])),
        "rope_theta": float(draw(st.sampled_from([10_000, 500_000, 7]))),
    }
    latent = draw(st.integers(0, 3)) == 0
    if latent:
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        fields |= {name: draw(st.integers(1, 40)) for name in names}
        fields |= {"qk_rope_head_dim": d, "rope_interleave": True, "rms_norm_eps": 1e-6}
    else:
        fields |= draw(grouped_query(L, d, groups))
    fields |= draw(experts(L)) if draw(st.booleans()) else {"intermediate_size": draw(st.integers(1, 90))}
    return fields


@st.composite
def grouped_query(draw, L, d, groups):
    fields = {"num_key_value_heads": groups, "head_dim": d, "attention_bias": draw(st.booleans())}
    fields |= draw(st.sampled_from([{"qk_norm": "head"}, {}, {"norm": "layer_norm"}]))
    fields |= {"partial_rotary_factor": draw(st.sampled_from([1.0, 0.5])), "rope_interleave": draw(st.booleans())}
    llama = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama |= {"original_max_position_embeddings": 8192}
    linear = {"rope_type": "linear", "factor": float(draw(st.integers(1, 9)))}
    fields["rope_scaling"] = draw(st.sampled_from([None, llama, linear]))
    if draw(st.booleans()):
        fields["sliding_window"] = draw(st.integers(1, 50))
        kinds = st.sampled_from(["full_attention", "sliding_attention"])
        fields["layer_types"] = draw(st.none() | st.lists(kinds, min_size=L, max_size=L).map(tuple))
    return fields


@st.composite
def experts(draw, L):
    E = 2 * draw(st.integers(1, 8))
    K = draw(st.integers(1, E))
    fields = {"num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": draw(st.integers(1, 90))}
    fields["norm_topk_prob"] = K > 1 and draw(st.booleans())
    if K > 1 and draw(st.booleans()):
        fields |= {"scoring_func": "sigmoid", "norm_topk_prob": True, "router_correction_bias": draw(st.booleans())}
    fields["routed_scaling_factor"] = draw(st.sampled_from([1.0, 2.5, 1 / 3]))
    if draw(st.booleans()):
        fields |= {"n_group": 2, "topk_group": draw(st.integers(1, 2))}
    if draw(st.booleans()):
        fields |= {"shared_expert_intermediate_size": draw(st.integers(1, 90))}
        fields |= {"shared_expert_gate": draw(st.booleans())}
    dense = draw(st.sets(st.integers(0, L - 1), max_size=L - 1))
    if dense:
        fields |= {"mlp_only_layers": tuple(sorted(dense)), "intermediate_size": draw(st.integers(1, 90))}
    return fields


def as_script(words):
    """As people keep them: arrays, a variable, comments, a line cut in two."""
    half = len(words) // 2
    head = ["#!/bin/bash", "LAYERS=" + words[0][1], "MODEL_ARGS=(", "  --num-layers $LAYERS  # stored"]
    first = [f"  {' '.join(flag)}" for flag in words[1:half]]
    second = [f"    {' '.join(flag)} \\" for flag in words[half:]]
    return "\n".join(
        [
            *head,
            *first,
            ")",
            'if [ -n "$KEY" ]; then',
            "  echo no",
            "fi",
            "torchrun --nproc_per_node $N \\",
            "    pretrain_gpt.py ${MODEL_ARGS[@]} \\",
            *second,
            "    --save $CHECKPOINTS",
            "",
        ]
    )


@settings(deadline=None, max_examples=300)
@given(fields=held())
def test_what_is_emitted_reads_back(fields):
    """Every baseline that Megatron holds: file, script and YAML of its flags give the spec again."""
    try:
        baseline = checked(fields)
    except BadInput:  # groups that leave too few experts
        assume(False)
    twin = baseline.replace(loop={"start": 0, "stop": 1, "visits": 2, "residual_scale": 0.5})
    job = Job("pair", baseline, twin, training(baseline, twin, 8, 1000, 1, balance="none"))
    try:
        assert all(line.how == "as asked" for line in lines(MEGATRON, job))
    except BadInput:  # groups rated otherwise
        assume(False)
    assume(not unheld(baseline, job))
    flags = arguments(job, "baseline")
    assert read_text(lines_of(flags)).spec == baseline
    architecture = [flag for flag in flags if flag[0] != "--spec"]
    assert read_text(as_script(architecture)).spec == baseline
    values = {name: True if not given else given[0] for name, *given in architecture}
    yaml = parse(as_yaml({"MODEL_ARGS": values}, "As in Megatron-LM's functional tests."), "yaml")
    assert spec_of(flags_of_yaml(yaml), "yaml").spec == baseline


def parameters(spec):
    return Ledger(spec, Setting.of(spec)).as_dict()["parameters"]["total"]


def test_published_models():
    """Qwen3-30B-A3B has 30,532,122,624 parameters, Mixtral 8x7B 46,702,792,704 (their safetensors; exact).

    Mixtral from the flags of Megatron-LM's examples/mixtral, which leave the expert width to --ffn-hidden-size.
    """
    assert parameters(read_text(MOE).spec) == 30_532_122_624
    mixtral = """
    --use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 --normalization RMSNorm
    --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights --group-query-attention
    --num-query-groups 8 --no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000 --num-experts 8
    --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --vocab-size 32000
    """
    found = read_text(mixtral)
    assert parameters(found.spec) == 46_702_792_704
    assert found.notes == ["moe-ffn-hidden-size is left out: Megatron takes --ffn-hidden-size, 14336"]
    assert "moe-aux-loss-coeff" in found.harmless


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (without("hidden-size"), "--hidden-size is missing, and never guessed"),
        (without("num-attention-heads"), "--num-attention-heads is missing"),
        (without("num-query-groups"), "--num-query-groups is missing"),
        (without("moe-router-topk"), "--moe-router-topk is missing"),
        (without("padded-vocab-size"), "--vocab-size is missing: Megatron asks the tokenizer"),
        (without("swiglu"), "without --swiglu the MLP has no gate"),
        (without("position-embedding-type"), "learned positions are weights"),
        (without("ffn-hidden-size", without("moe-ffn-hidden-size")), "--moe-ffn-hidden-size is missing"),
        (without("normalization"), "--qk-layernorm under LayerNorm has biases"),
        (without("ffn-hidden-size") + "--moe-layer-freq ([0]*1+[1]*47)\n", "some layers are dense"),
        (MOE + "--moe-layer-freq [0,1]\n", "--moe-layer-freq lists 2 layers, --num-layers is 48"),
        (MOE + "--moe-layer-freq __import__('os')\n", "not a number or a list of 0 and 1"),
        (MOE + "--moe-layer-freq [1]*99999999999\n", "not a number or a list of 0 and 1"),
        (MOE + "--hybrid-layer-pattern M*E\n--mamba-state-dim 64\n", "--hybrid-layer-pattern M*E"),
        (MOE + "--moe-latent-size 64\n", "--moe-latent-size 64"),
        (MOE + "--attention-output-gate\n", "--attention-output-gate"),
        (MOE + "--my-own-width 3\n", "--my-own-width 3"),
        (MOE + "--spec my_layers spec\n", "--spec 'my_layers spec' replaces the layers"),
        (MOE + "--spec smelt_layers twin\n", "fix: read the pair that was emitted"),
        (MOE + "--hidden-size 4096\n", "--hidden-size stands twice, with '2048' and '4096'"),
        (MOE + "--swiglu yes\n", "--swiglu stands twice, with '' and 'yes'"),
        (MOE.replace("--hidden-size 2048", "--hidden-size 2k"), "--hidden-size is '2k', not a whole number"),
        (MOE.replace("--hidden-size 2048", "--hidden-size $H"), "--hidden-size is '$H', which this file does not set"),
        (MOE.replace("--num-layers 48", "--num-layers 99999999"), "not between 1 and 10000"),
        (MOE.replace("--num-experts 128", "--num-experts 1"), "--num-experts 1 has a router in Megatron"),
        (MOE + "--multi-latent-attention\n--kv-lora-rank 512\n", "without --qk-layernorm or --q-lora-rank"),
        (MOE + "--window-size 128,128\n", "not BEFORE,0"),
        (MOE + '--save "nowhere\n', "cannot be split into words"),
    ],
)
def test_what_is_missing_or_unknown_is_refused_by_name(text, said):
    """Nothing is guessed, and no flag that could change a weight is skipped."""
    assert said in refused(text)


@settings(deadline=None, max_examples=300)
@given(text=st.text("()[]\"'\\$#=-\n ab1,*+{}", max_size=60), at=st.integers(0, 20))
def test_any_text_is_read_or_refused(text, at):
    """No text of this kind ends in anything but a spec or a refusal with words."""
    lines_ = MOE.strip().splitlines()
    lines_.insert(at, text)
    for given_ in ("\n".join(lines_), f"ARGS=({MOE}\n--moe-layer-freq {text})", f"{MOE}--window-size {text}\n"):
        with contextlib.suppress(BadInput):
            read_text(given_)


def test_padding_and_defaults_are_said():
    """Megatron pads to --make-vocab-size-divisible-by times tensor ranks; without groups their number is ignored."""
    text = without("padded-vocab-size") + "--vocab-size 151936\n--tensor-model-parallel-size 8\n"
    found = read_text(without("group-query-attention", text) + "--tokenizer-type HuggingFaceTokenizer\n")
    assert found.spec.vocab_size == 152_576
    assert found.spec.num_key_value_heads == 32
    assert [note.split(",")[0] for note in found.notes] == [
        "the vocabulary is --vocab-size 151936; Megatron asks its tokenizer",
        "vocab-size 151936 is padded to 152576 rows",
        "num-query-groups 4 is ignored",
    ]


def test_biases_are_on_unless_switched_off():
    """With --add-bias-linear, the default, every linear layer and the router have biases."""
    spec = read_text(without("disable-bias-linear")).spec
    biases = (spec.attention_bias, spec.attention_output_bias, spec.mlp_bias, spec.router_bias, spec.expert_bias)
    assert biases == (True,) * 5


def test_other_functions_are_told():
    """They change no count, but the torch model would be another."""
    text = MOE + "--use-mup\n--quick-geglu\n--no-rope-freq 4\n--moe-router-score-function sqrtsoftplus\n"
    said = read_text(text).functions
    assert len(said) == 4


def test_yaml_for_yaml_cfg():
    """Fields of TransformerConfig, nested; a switch that is false is none."""
    data = {
        "language_model": {
            "num_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "ffn_hidden_size": 96,
            "kv_channels": None,
            "activation_func": "swiglu",
            "add_bias_linear": False,
            "normalization": "RMSNorm",
            "layernorm_epsilon": 1e-6,
            "rotary_interleaved": False,
        },
        "model_parallel": {"tensor_model_parallel_size": 1, "bf16": True},
        "position_embedding_type": "rope",
        "padded_vocab_size": 512,
        "untie_embeddings_and_output_weights": True,
        "train_iters": 10,
    }
    found = spec_of(flags_of_yaml(data), "yaml").spec
    base = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 512, "num_attention_heads": 4}
    assert found == checked(base | {"num_key_value_heads": 2, "intermediate_size": 96})


def test_a_file_is_recognised(tmp_path):
    """`solve --baseline` and every other command read it like any model."""
    place = tmp_path / "train.sh"
    place.write_text(f'export GPT_ARGS="{MOE}"\ntorchrun pretrain_gpt.py $GPT_ARGS\n')
    found = read(str(place))
    assert found.spec.num_experts == 128
    assert found.harmless == ("bf16", "moe-aux-loss-coeff")
    with pytest.raises(BadInput):
        read(f"{place}#twin")
