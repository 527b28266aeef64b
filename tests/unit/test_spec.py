"""The spec is strict, frozen and whole: what cannot be read exactly is refused, with the key and the value."""

import pytest
from pydantic import ValidationError

from smelt_budget.errors import BadInput
from smelt_budget.spec import ModelSpec, read_mapping
from smelt_budget.spec.model import checked
from smelt_budget.spec.runs import unfold

MOE = {
    "hidden_size": 64, "num_hidden_layers": 6, "vocab_size": 100, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
LOOP = {"start": 2, "stop": 5, "visits": 2, "residual_scale": 0.5}


def message(**fields):
    with pytest.raises(BadInput) as error:
        checked(MOE | fields)
    return str(error.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": True}, "hidden_size: is a boolean, not a whole number (got True)"),
        ({"hidden_size": "64"}, "hidden_size: is text, not a whole number (got '64')"),
        ({"hidden_size": 64.0}, "write it as 64"),
        ({"hidden_size": float("nan")}, "hidden_size"),
        ({"hidden_size": 0}, "greater than or equal to 1"),
        ({"num_experts": -1}, "greater than or equal to 1"),
        ({"num_hidden_layers": 10**6}, "less than or equal to 10000"),
        ({"hidden_size": 65}, "65 does not divide by num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 does not divide by num_key_value_heads 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_experts 8"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"mlp_only_layers": [0]}, "intermediate_size is missing"),
        ({"mlp_only_layers": [6], "intermediate_size": 9}, "names layer 6; the last is 5"),
        ({"mlp_only_layers": [1, 1], "intermediate_size": 9}, "twice"),
        ({"num_experts": None}, "set without num_experts"),
        ({"layer_types": ["full_attention"]}, "lists 1 layers, num_hidden_layers is 6"),
        ({"layer_types": ["sliding_attention"] * 6}, "sliding_window is missing"),
        ({"layer_types": ["linear_attention"] * 6}, "layer_types.0"),
        ({"attention_chunk_size": 8}, "needs layer_types"),
        ({"v_head_dim": 8}, "without kv_lora_rank"),
        ({"kv_lora_rank": 8}, "latent attention (kv_lora_rank is set) needs"),
        ({"loop": {"start": 3, "stop": 3, "visits": 2}}, "holds no layer"),
        ({"loop": {"start": 3, "stop": 9, "visits": 2}}, "past the last of 6 layers"),
        ({"core": {"num_experts": 9}}, "core needs loop"),
        ({"core": {"num_experts": 1}, "loop": LOOP}, "below num_experts_per_tok"),
        ({"core": {"num_key_value_heads": 3}, "loop": LOOP}, "does not divide"),
        ({"shared_expert_gate": True}, "without shared_expert_intermediate_size"),
        ({"hidden_sizes": 3}, "unknown key"),
        ({"vocab_size": None}, "vocab_size: missing, and never guessed"),
        ({"tie_word_embeddings": 1}, "is a number, not true or false"),
        ({"mlp_only_layers": 3}, "is a number, not a list"),
        ({"loop": 3}, "loop: is a number, not a mapping"),
        ({"qk_norm": "some"}, "is not one of 'none', 'head' or 'full'"),
    ],
)
def test_refusals_name_key_and_value(fields, words):
    """Each kind of wrong field has a message with what was given."""
    assert words in message(**fields)


def test_a_missing_width_is_an_error():
    """Class defaults are not checkpoint values."""
    with pytest.raises(BadInput, match="hidden_size: missing, and never guessed"):
        checked({k: v for k, v in MOE.items() if k != "hidden_size"})


def test_frozen_and_replaced_copies_are_checked():
    """pydantic's own model_copy(update=) would let a wrong value in; replace does not."""
    spec = checked(MOE)
    with pytest.raises(ValidationError):
        spec.hidden_size = 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(BadInput):
        spec.replace(num_experts_per_tok=99)
    assert spec.replace(num_experts=16).num_experts == 16


def test_compact_reads_back_to_the_same_spec():
    """What is written to smelt.yaml is the whole spec."""
    full = MOE | {
        "loop": LOOP,
        "core": {"num_key_value_heads": 1, "num_experts": 9},
        "mlp_only_layers": [0],
        "intermediate_size": 96,
        "layer_types": ["full_attention", "sliding_attention"] * 3,
        "sliding_window": 5,
    }
    spec = checked(full)
    assert checked(spec.compact()) == spec
    assert read_mapping(spec.compact(), "again").spec == spec


def test_runs_are_the_layers_in_order():
    """(layer kind, how many, visits): prelude 2, core 3 twice, coda 1; the windows split them further."""
    spec = checked(MOE | {"loop": LOOP, "core": {"num_key_value_heads": 1}})
    runs = [(r.section, r.layers, r.visits, r.layer.attention.kv_heads) for r in unfold(spec)]
    assert runs == [("prelude", 2, 1, 2), ("core", 3, 2, 1), ("coda", 1, 1, 2)]
    windows = checked(MOE | {"layer_types": ["full_attention", "sliding_attention"] * 3, "sliding_window": 4})
    assert [r.layers for r in unfold(windows)] == [1] * 6


def test_effective_depth():
    """Layers executed over all visits: 6 + 3."""
    assert checked(MOE | {"loop": LOOP}).effective_depth == 9
    assert checked(MOE).effective_depth == 6


def test_schema_documents_every_doubtful_field():
    """Public fields carry their meaning; the plainly named switches may go without."""
    schema = ModelSpec.model_json_schema()["properties"]
    undocumented = {name for name, field in schema.items() if "description" not in field}
    assert undocumented <= {
        "lm_head_bias", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "router_bias",
    }  # fmt: skip
