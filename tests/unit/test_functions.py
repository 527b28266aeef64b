"""Functions without weights: what each family's file asks for, in transformers' old and new spelling (rule C20).

Defaults and meanings are those of the families' classes in transformers 5.24; `tests/interop` compares the defaults
with the classes themselves.
"""

import pytest

from smelt_budget.errors import BadInput
from smelt_budget.solver import Lattice, Request, solve
from smelt_budget.spec import read, read_mapping
from smelt_budget.spec.model import checked

SHAPE = {
    "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 100, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 4096,
}  # fmt: skip
ROUTED = SHAPE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = SHAPE | {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
LATENT = ROUTED | {
    "q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
OWN = ROUTED | {"intermediate_size": None}
DBRX = {
    "d_model": 64, "n_layers": 4, "n_heads": 4, "vocab_size": 100, "attn_config": {"kv_n_heads": 2},
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
}  # fmt: skip
BASES = {
    "dbrx": DBRX,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe": ROUTED | {"first_k_dense_replace": 1},
    "glm4_moe_lite": LATENT,
    "gpt_oss": LOCAL | {"sliding_window": 8},
    "granitemoe": LOCAL,
    "kimi_k2": LATENT,
    "llama": SHAPE,
    "llama4_text": LOCAL | {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 96, "attention_chunk_size": None},
    "minimax": LOCAL | {"layer_types": ["full_attention"] * 4},
    "minimax_m2": LOCAL,
    "mistral": SHAPE,
    "mixtral": LOCAL,
    "olmoe": LOCAL | {"num_key_value_heads": 4},
    "ouro": SHAPE | {"total_ut_steps": 2},
    "phimoe": LOCAL,
    "qwen2": SHAPE,
    "qwen2_moe": ROUTED | {"shared_expert_intermediate_size": 64},
    "qwen3": SHAPE | {"head_dim": 16},
    "qwen3_moe": ROUTED,
}
FUNCTIONS = (
    "rms_norm_eps", "rope_theta", "rope_scaling", "partial_rotary_factor", "rope_interleave", "swiglu_limit",
    "scoring_func", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "router_correction_bias",
    "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling",
)  # fmt: skip


def reading(family, **more):
    return read_mapping({"model_type": family, **BASES[family], **more}, "case")


def asked(family, **more):
    """What differs from the spec's own defaults, functions only."""
    return {name: value for name, value in reading(family, **more).spec.compact().items() if name in FUNCTIONS}


NOAUX = {"scoring_func": "sigmoid", "router_correction_bias": True}
OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
SILENT = {
    "dbrx": {"rms_norm_eps": 1e-5},
    "deepseek_v2": {"rope_interleave": True, "norm_topk_prob": False},
    "deepseek_v3": NOAUX | {"rope_interleave": True, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
    "glm4_moe": NOAUX | {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": NOAUX | {"rms_norm_eps": 1e-5, "rope_interleave": True, "routed_scaling_factor": 1.8},
    "gpt_oss": {"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "rope_scaling": OSS_YARN, "swiglu_limit": 7.0},
    "granitemoe": {"attention_multiplier": 1.0},
    "kimi_k2": NOAUX | {"rope_interleave": True, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
    "llama4_text": {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "rope_interleave": True}
    | {"scoring_func": "sigmoid", "norm_topk_prob": False},
    "minimax": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "minimax_m2": NOAUX | {"rope_theta": 5e6},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "olmoe": {"rms_norm_eps": 1e-5, "norm_topk_prob": False},
    "phimoe": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen2_moe": {"norm_topk_prob": False},
    "qwen3_moe": {"norm_topk_prob": False},
}


@pytest.mark.parametrize("family", BASES)
def test_a_silent_file_gets_its_familys_functions(family):
    """Class defaults; a family not listed has the spec's own: eps 1e-6, theta 10000, softmax divided by its sum."""
    assert asked(family) == SILENT.get(family, {})


YARN = {"factor": 40, "original_max_position_embeddings": 1024, "mscale": 1.0, "mscale_all_dim": 1.0}
READ_YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 1024}
READ_YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 1024}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("family", [f for f in BASES if f != "dbrx"])
def test_both_spellings_of_rotary_settings_read_the_same(family):
    """`rope_theta` and `rope_scaling` of older files, `rope_parameters` of transformers 5; and both, agreeing."""
    old = asked(family, rope_theta=777, rope_scaling={"type": "yarn", **YARN})
    new = asked(family, rope_parameters={"rope_type": "yarn", "rope_theta": 777.0, **YARN})
    assert old["rope_theta"] == 777.0
    assert old["rope_scaling"] == READ_YARN
    assert new == old
    both = {"rope_theta": 777.0, "rope_parameters": {"rope_theta": 777, "rope_type": "yarn", **YARN}}
    assert asked(family, **both) == old


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta of rope_parameters is 500000.0"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_type of rope_parameters is 'default', rope_type of rope_scaling is 'linear'",
        ),
        ({"rope_theta": "10000"}, "rope_theta is '10000', not a number"),
        ({"rope_theta": True}, "rope_theta is True, not a number"),
        ({"rope_theta": -1}, "rope_theta: Input should be greater than 0"),
        ({"rope_theta": 10**400}, "rope_theta is a number of 401 digits"),
        ({"rope_scaling": [2]}, "rope_scaling is [2], not a mapping"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type linear needs a factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor at most high_freq_factor"),
        ({"rope_scaling": {"type": 3}}, "rope_type is 3, not text"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5', not a number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ],
)
def test_rotary_settings_that_contradict_or_are_no_numbers(more, words):
    """Both places are named."""
    with pytest.raises(BadInput) as error:
        reading("llama", **more)
    assert words in str(error.value)


def test_stretching_of_each_kind():
    """llama3 (Llama 3.1), linear, yarn with a factor from the two contexts, and plain positions under three names."""
    assert asked("llama", rope_scaling=LLAMA3)["rope_scaling"] == LLAMA3
    assert asked("llama", rope_scaling={"type": "linear", "factor": 2})["rope_scaling"]["factor"] == 2.0
    implied = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024}
    assert asked("llama", rope_scaling=implied)["rope_scaling"]["factor"] == 4.0  # 4096 / 1024
    default = asked("llama", rope_scaling={"rope_type": "yarn", "factor": 4.0, "beta_fast": 0})["rope_scaling"]
    assert default == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    for plain in (None, {"rope_type": "default"}, {"type": "mrope", "mrope_section": [2, 3, 3]}):
        assert "rope_scaling" not in asked("qwen2", rope_scaling=plain)


def test_settings_by_layer_type():
    """Alike they are one; where they differ that is said, and full attention's hold."""
    same = {"rope_type": "default", "rope_theta": 5.0}
    one = reading("llama", rope_parameters={"full_attention": same, "sliding_attention": same})
    assert one.spec.rope_theta == 5.0
    assert one.functions == ()
    two = reading("llama", rope_parameters={"sliding_attention": same | {"rope_theta": 9.0}, "full_attention": same})
    assert two.spec.rope_theta == 5.0
    assert "differs by layer type" in two.functions[0]


def test_partial_rotation():
    """GLM by share, MiniMax-M2 by width; two that disagree are an error, and in other families it is not read."""
    assert asked("glm4_moe", partial_rotary_factor=0.25)["partial_rotary_factor"] == 0.25
    assert asked("glm4_moe", rope_parameters={"partial_rotary_factor": 1.0}).get("partial_rotary_factor") is None
    assert asked("minimax_m2", rotary_dim=8)["partial_rotary_factor"] == 0.5  # 8 of 16
    with pytest.raises(BadInput, match="rotary_dim 8 of head_dim 16"):
        reading("minimax_m2", rotary_dim=8, partial_rotary_factor=0.25)
    other = reading("llama", partial_rotary_factor=0.5)
    assert other.spec.partial_rotary_factor == 1.0
    assert "does not read" in other.functions[0]


def test_routing_of_deepseek():
    """V2 groups only by topk_method and never divides; V3 groups by default; 1 and null mean no groups."""
    grouped = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16}
    v2 = asked("deepseek_v2", **grouped)
    assert (v2["n_group"], v2["topk_group"], v2["routed_scaling_factor"]) == (4, 2, 16.0)
    assert "n_group" not in asked("deepseek_v2", **(grouped | {"topk_method": "greedy"}))
    assert "not divided" in reading("deepseek_v2", norm_topk_prob=True).functions[0]
    assert "topk_method is 'noaux_tc'" in reading("deepseek_v2", topk_method="noaux_tc").functions[0]
    for none in (1, None):
        assert "n_group" not in asked("deepseek_v3", n_group=none, topk_group=none)
    assert asked("deepseek_v3", norm_topk_prob=False, rope_interleave=False)["norm_topk_prob"] is False
    odd = reading("deepseek_v3", num_experts=12)
    assert odd.spec.n_group is None
    assert "does not divide" in odd.functions[0]


@pytest.mark.parametrize(
    ("family", "more", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not built"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True}}, "finetuned"),
        ("phimoe", {}, "sparsemixer"),
        ("phimoe", {"rope_scaling": {"type": "longrope", "short_mscale": 1.2}}, "'longrope' is not built"),
        ("olmoe", {"clip_qkv": 8}, "clip_qkv is 8"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5"),
        ("minimax", {}, "residual"),
        ("llama4_text", {}, "no rotary positions"),
        ("llama4_text", {}, "L2 norm"),
        ("llama4_text", {}, "multiplies its input"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("dbrx", {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8}}, "clip_qkv is 8"),
        ("dbrx", {"attn_config": {"kv_n_heads": 2, "rope_theta": 5e5}}, "transformers 5.24 rotates by 10000"),
        ("dbrx", {"ffn_config": DBRX["ffn_config"] | {"moe_normalize_expert_weights": 2.0}}, "2.0-norm"),
        ("dbrx", {"ffn_config": DBRX["ffn_config"] | {"ffn_act_fn": {"name": "gelu"}}}, "gelu"),
    ],
)
def test_what_the_torch_model_does_otherwise_is_said(family, more, words):
    """One line each, apart from the notes that are printed always; the counts are the same."""
    read_ = reading(family, **more)
    assert any(words in line for line in read_.functions)
    assert read_.notes == ()


def test_dbrx_divides_unless_it_says_null():
    """moe_normalize_expert_weights is a p of a norm; 1 is the sum, null is no division."""
    assert reading("dbrx").spec.norm_topk_prob
    null = DBRX["ffn_config"] | {"moe_normalize_expert_weights": None}
    assert not reading("dbrx", ffn_config=null).spec.norm_topk_prob


def test_own_yaml_has_them_as_fields():
    """Directly, strict; Hugging Face's mapping of mappings is refused with the fields that say the same."""
    spec = read_mapping(OWN | {"rope_theta": 500_000, "rope_scaling": LLAMA3, "scoring_func": "sigmoid"}, "own").spec
    assert spec.rope_theta == 500_000.0
    assert spec.rope_scaling.factor == 8.0
    assert checked(spec.compact()) == spec
    with pytest.raises(BadInput, match="rope_parameters is no field"):
        read_mapping(OWN | {"rope_parameters": {"rope_theta": 1e4}}, "own")
    assert read_mapping(OWN | {"hidden_act": "gelu"}, "own").functions == ("not fields of a spec: hidden_act",)
    assert read_mapping(OWN | {"hidden_act": "silu"}, "own").functions == ()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n_group": 3, "topk_group": 1}, "num_experts 8 does not divide by n_group 3"),
        ({"n_group": 4}, "topk_group is missing (n_group is 4)"),
        ({"n_group": 4, "topk_group": 5}, "topk_group 5 is more than n_group 4"),
        ({"topk_group": 2}, "topk_group 2 without n_group"),
        ({"n_group": 8, "topk_group": 1}, "leaves 1 experts of num_experts 8, fewer than num_experts_per_tok 2"),
        (
            {"n_group": 4, "topk_group": 2, "core": {"num_experts": 9}, "loop": {"start": 1, "stop": 3, "visits": 2}},
            "core.num_experts 9 does not divide by n_group 4",
        ),
        ({"rope_scaling": LLAMA3 | {"beta_fast": 9.0}}, "beta_fast set, which rope_type llama3 does not use"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "needs original_max_position_embeddings"),
        ({"rope_scaling": READ_YARN | {"beta_slow": 64.0}}, "beta_slow 64.0 is above beta_fast 32.0"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "is not one of 'linear', 'llama3' or 'yarn'"),
        ({"partial_rotary_factor": 1.5}, "less than or equal to 1"),
        ({"logits_scaling": 0.0}, "greater than 0"),
        ({"norm_topk_prob": 1}, "is a number, not true or false"),
    ],
)
def test_functions_that_make_no_model_are_refused(fields, words):
    """With the numbers that do not fit."""
    with pytest.raises(BadInput) as error:
        checked(OWN | fields)
    assert words in str(error.value)


def test_odd_heads_are_still_counted():
    """What cannot rotate can be counted: evenness is the torch model's business."""
    assert checked(OWN | {"head_dim": 7, "partial_rotary_factor": 0.3}).head_dim == 7


@pytest.mark.parametrize("name", ["gpt-oss-20b", "granite-3.1-3b-a800m", "moonlight-16b-a3b", "minimax-m2"])
def test_a_twin_has_its_baselines_functions(name):
    """The solver moves widths and counts; every function is copied."""
    spec = read(name).spec
    twin = solve(spec).twin
    assert {n: getattr(twin, n) for n in FUNCTIONS} == {n: getattr(spec, n) for n in FUNCTIONS}


@pytest.mark.parametrize(("name", "groups"), [("deepseek-v2", 8), ("deepseek-v3", 8), ("kimi-k2", 1)])
@pytest.mark.parametrize("heads", ["uniform", "sectioned"])
def test_twins_fill_their_groups_of_experts(name, groups, heads):
    """Expert counts move in whole groups, in the core too; with --experts-multiple, in multiples of both."""
    for multiple in (1, 3):
        solution = solve(read(name).spec, Request(heads=heads, lattice=Lattice(experts_multiple=multiple)))
        step = groups * multiple
        core = solution.twin.core and solution.twin.core.num_experts
        assert solution.twin.num_experts % step == 0
        assert (core or 0) % step == 0
        assert solution.certificate.expert_counts[2] == step
        assert any("fill the 8 groups" in note for note in solution.notes) == (groups == 8)


def test_sparsity_and_pins_fill_groups():
    """--sparsity moves the baseline in whole groups; a pin that does not fill them is refused with one that does."""
    spec = read("deepseek-v3").spec
    assert solve(spec, Request(sparsity=0.97)).baseline.num_experts % 8 == 0
    assert solve(spec, Request(keep={"num_experts": 384})).twin.num_experts == 384
    with pytest.raises(BadInput, match="fix: --keep num_experts=304"):
        solve(spec, Request(keep={"num_experts": 301}))
    with pytest.raises(BadInput, match="fix: --keep num_experts=16"):  # 4 of 8 groups must hold 8 experts
        solve(spec, Request(keep={"num_experts": 8}))
