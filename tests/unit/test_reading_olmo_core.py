"""OLMo-core's JSON as a baseline: what is read, what is said, what is refused by name.

The files are as `TransformerConfig.as_config_dict` of ai2-olmo-core 3.0.0 writes them; tests/interop/test_olmo_core.py
reads what the real classes wrote.
"""

import copy
import json

import pytest

from smelt_budget.errors import BadInput
from smelt_budget.ledger import Ledger, Setting
from smelt_budget.spec.read import read, read_mapping

NORM = {"name": "rms", "eps": 1e-6, "bias": False, "_CLASS_": "olmo_core.nn.layer_norm.LayerNormConfig"}
ATTENTION = {
    "name": "default",
    "n_heads": 16,
    "head_dim": 128,
    "bias": False,
    "rope": {"name": "default", "theta": 500000, "full_precision": True, "no_global_rope": False},
    "qk_norm": NORM,
    "dtype": "float32",
    "type": "attention",
    "_CLASS_": "olmo_core.nn.attention.AttentionConfig",
}
EXPERTS = {
    "name": "dropless",
    "num_experts": 64,
    "hidden_size": 1024,
    "capacity_factor": 1.2,
    "router": {"name": "default", "top_k": 8, "gating_function": "softmax"},
    "lb_loss_weight": 0.01,
    "lb_loss_granularity": "local_batch",
    "scale_loss_by_num_layers": True,
    "dtype": "float32",
}
OLMOE = {
    "d_model": 2048,
    "vocab_size": 50304,
    "n_layers": 16,
    "name": "moe",
    "block": {"name": "moe", "sequence_mixer": ATTENTION, "layer_norm": NORM, "feed_forward_moe": EXPERTS},
    "lm_head": {"name": "default", "layer_norm": NORM, "bias": False, "loss_implementation": "default"},
    "init_method": "normal",
    "init_seed": 0,
    "init_std": 0.02,
    "tie_word_embeddings": False,
    "_CLASS_": "olmo_core.nn.transformer.config.TransformerConfig",
}


def olmoe(**changes):
    """A copy with values at dotted paths changed; None takes a key away."""
    told = copy.deepcopy(OLMOE)
    for path, value in changes.items():
        *way, last = path.split("__")
        place = told
        for key in way:
            place = place[key]
        place.pop(last, None) if value is None else place.__setitem__(last, value)
    return told


def test_olmoe_has_its_published_size():
    """allenai/OLMoE-1B-7B-0924: 6.9B parameters (arXiv:2409.02060, table 1); exact from its config.json."""
    spec = read_mapping(olmoe(), "olmoe").spec
    ledger = Ledger(spec, Setting.of(spec))
    assert ledger.total == 6_919_161_856
    assert spec.qk_norm == "full"
    assert not spec.norm_topk_prob


def test_experiment_is_opened_and_said(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model": OLMOE, "train_module": {"max_sequence_length": 4096}, "trainer": {"x": 1}}))
    found = read(str(file))
    assert found.spec == read_mapping(olmoe(), "x").spec.replace(max_position_embeddings=4096)
    assert "OLMo-core experiment" in found.notes[0]


def test_absent_bias_is_true_and_said():
    """nn/attention/__init__.py: `bias: bool = True`, and None is left out of the file."""
    found = read_mapping(olmoe(block__sequence_mixer__bias=None), "x")
    assert found.spec.attention_bias
    assert found.spec.attention_output_bias
    assert any("bias is absent" in note for note in found.notes)


def test_several_blocks_by_pattern_and_by_override():
    dense = {
        "name": "default",
        "sequence_mixer": ATTENTION,
        "layer_norm": NORM,
        "feed_forward": {"hidden_size": 8192, "bias": False, "name": "default", "activation": "silu"},
    }
    moe = OLMOE["block"]
    by_pattern = read_mapping(olmoe(block={"a": dense, "b": moe}, block_pattern=["a", "b", "b", "b"]), "x").spec
    assert by_pattern.mlp_only_layers == (0, 4, 8, 12)
    assert by_pattern.intermediate_size == 8192
    assert read_mapping(olmoe(block_overrides={"0": dense}), "x").spec.mlp_only_layers == (0,)


def test_windows_follow_the_pattern():
    """nn/attention, SlidingWindowAttentionConfig: the first and last layer are full unless told; -1 is full."""
    window = {"pattern": [4096, 4096, 4096, -1], "force_full_attention_on_first_layer": False}
    spec = read_mapping(olmoe(block__sequence_mixer__sliding_window=window), "x").spec
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    assert spec.layer_types == tuple(kinds * 4)
    assert spec.sliding_window == 4096
    window["force_full_attention_on_first_layer"] = True
    spec = read_mapping(olmoe(block__sequence_mixer__sliding_window=window), "x").spec
    assert spec.layer_types == ("full_attention", *(kinds * 4)[:14], "full_attention")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block__name": "moe_reordered_norm"}, "norms stand behind the branches"),
        ({"block__feed_forward_moe__name": "default"}, "tokens beyond an expert's capacity are dropped"),
        (
            {"block__feed_forward_moe__shared_mlp": {"hidden_size": 512, "bias": False}},
            "the shared expert is averaged with the routed ones",
        ),
        ({"block__feed_forward_moe__router__normalize_expert_weights": 2.0}, "divided by their 2.0-norm"),
        ({"block__sequence_mixer__clip_qkv": 8.0}, "queries, keys and values are clipped"),
        ({"lm_head__layer_norm": {**NORM, "eps": 1e-5}}, "epsilons differ between norms"),
        ({"block__sequence_mixer__rope__no_global_rope": True}, "layers without positions"),
    ],
)
def test_functions_without_weights_are_told(changes, said):
    """No count differs; what the torch model does otherwise is listed."""
    found = read_mapping(olmoe(**changes), "x")
    assert any(said in what for what in found.functions)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"name": "normalized"}, "normalized"),
        ({"name": "moe_fused_v2"}, "moe_fused_v2"),
        ({"block__name": "moe_hybrid"}, "moe_hybrid"),
        ({"block__sequence_mixer__gate": {"granularity": "headwise"}}, "gate"),
        ({"block__sequence_mixer__scalable_softmax": True}, "scalable_softmax"),
        ({"block__sequence_mixer__type": "gated_delta_net"}, "gated_delta_net"),
        ({"block__sequence_mixer__n_heads": None}, "n_heads is missing"),
        ({"block__feed_forward_moe__hidden_size": None}, "hidden_size is missing"),
        ({"block__feed_forward_moe__router__top_k": None}, "top_k is missing"),
        ({"block__feed_forward_moe__latent_moe": {"latent_dim": 8}}, "latent_moe"),
        ({"block__feed_forward_moe__expert_bias": True}, "expert_bias"),
        ({"block__layer_norm__elementwise_affine": False}, "without gains"),
        ({"block__layer_norm__bias": None}, "rms with a bias"),
        ({"embedding_norm": NORM}, "embedding_norm"),
        ({"n_layers": "16"}, "n_layers"),
        ({"n_layers": 10**9}, "n_layers"),
        ({"block_overrides": {"16": OLMOE["block"]}}, "16"),
        ({"block_overrides": {"3": {**OLMOE["block"], "attention_residual_alpha": 0.5}}}, "alphas differ"),
        ({"block": {"a": OLMOE["block"]}}, "block_pattern"),
        ({"flux_capacitor": 1}, "flux_capacitor"),
        ({"vocab_size": None}, "vocab_size is missing"),
    ],
)
def test_what_cannot_be_read_exactly_is_refused_by_name(changes, named):
    with pytest.raises(BadInput) as caught:
        read_mapping(olmoe(**changes), "x")
    assert named in str(caught.value)


def test_layers_that_differ_are_refused_by_name():
    other = copy.deepcopy(OLMOE["block"])
    other["sequence_mixer"]["n_heads"] = 8
    with pytest.raises(BadInput, match=r"layers differ in num_attention_heads \(16, 8\)"):
        read_mapping(olmoe(block_overrides={"3": other}), "x")
