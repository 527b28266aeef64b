"""What `emit --to hf-unrolled` writes is a plain qwen3_moe or mixtral with the looped model's logits.

The right values are those of smelt_budget.model with the same weights, fp32, on a CPU; the classes are transformers'.
"""

import json
import runpy
from dataclasses import fields as fields_of
from pathlib import Path

import pytest
import torch

from smelt_budget.emit import TARGETS
from smelt_budget.emit.target import lines
from smelt_budget.emit.unrolled import config, from_unrolled
from smelt_budget.errors import BadInput
from smelt_budget.model import Transformer, load
from smelt_budget.spec.model import checked

transformers = pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM  # noqa: E402

transformers.utils.logging.disable_progress_bar()
KIT = runpy.run_path(str(Path(__file__).with_name("emitted_models.py")))
run_of, job_of, emitted, ids_of, apart, wide = (
    KIT[name] for name in ("run_of", "job_of", "emitted", "ids_of", "apart", "wide")
)
TOLERANCE = 1e-5
TOY = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "intermediate_size": 72,
    "loop": {"start": 1, "stop": 5, "visits": 2, "residual_scale": 0.5},
}
HEADS = {"qk_norm": "head"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
PLAIN = {
    "mixtral": ("mixtral", {}),
    "mixtral, three visits": ("mixtral", {"loop": TOY["loop"] | {"visits": 3, "residual_scale": 1 / 3}}),
    "mixtral, tied, window": ("mixtral", {"tie_word_embeddings": True, "sliding_window": 5}),
    "mixtral, yarn": ("mixtral", {"rope_scaling": YARN}),
    "qwen3_moe": ("qwen3_moe", HEADS),
    "qwen3_moe, four visits": ("qwen3_moe", HEADS | {"loop": TOY["loop"] | {"visits": 4, "residual_scale": 0.25}}),
    "qwen3_moe, dense layers, scores as they are": (
        "qwen3_moe",
        HEADS | {"mlp_only_layers": (0, 2), "norm_topk_prob": False},
    ),
    "qwen3_moe, biases, residual multiplier": (
        "qwen3_moe",
        HEADS | {"attention_bias": True, "attention_output_bias": True, "residual_multiplier": 0.25},
    ),
    "qwen3_moe, window": ("qwen3_moe", HEADS | {"sliding_window": 4, "rms_norm_eps": 1e-3}),
}


def uncorrected(tmp_path, fields):
    """A run without corrections, and its twin."""
    model = run_of(tmp_path / "run", fields)
    for buffer in model.buffers():
        buffer.zero_()
    KIT["save"](model, tmp_path / "run" / "twin" / "seed-0")
    baseline = wide(KIT["unlooped"](fields))
    for buffer in baseline.buffers():
        buffer.zero_()
    KIT["save"](baseline, tmp_path / "run" / "baseline" / "seed-0")
    return model


def unrolled(tmp_path, fields):
    """Our twin and its directory."""
    model = uncorrected(tmp_path, fields)
    job = job_of(fields, weights=str(tmp_path / "run"))
    return model, emitted(tmp_path / "plain", "hf-unrolled", job) / "twin"


@pytest.mark.parametrize("name", PLAIN)
def test_logits_are_the_looped_models(tmp_path, name):
    """All of them, without remote code, with transformers' own class; greedy tokens with a cache too."""
    plain, more = PLAIN[name]
    ours, place = unrolled(tmp_path, TOY | more)
    theirs, told = AutoModelForCausalLM.from_pretrained(place, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert theirs.config.model_type == plain
    assert type(theirs).__module__.startswith("transformers.models.")
    assert len(theirs.model.layers) == ours.spec.effective_depth
    ids = ids_of(512, 24)
    with torch.no_grad():
        assert apart(theirs.eval()(ids).logits, ours(ids).logits) < TOLERANCE
        how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(theirs.generate(ids, **how), theirs.generate(ids, use_cache=False, **how))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe, dense layers, scores as they are"])
def test_the_way_back(tmp_path, name):
    """Also as save_pretrained wrote it: the same bits, for the scale is a power of 2."""
    ours, place = unrolled(tmp_path, TOY | PLAIN[name][1])
    AutoModelForCausalLM.from_pretrained(place).save_pretrained(tmp_path / "again")
    for at, folder in enumerate((place, tmp_path / "again")):
        from_unrolled(folder, ours.spec, tmp_path / f"back-{at}")
        back = load(Transformer(ours.spec), tmp_path / f"back-{at}")
        for (key, there), here in zip(ours.state_dict().items(), back.state_dict().values(), strict=True):
            assert torch.equal(there, here), key


def test_copies_that_differ_have_no_way_back(tmp_path):
    """One step of training moves the copies apart; the layer is named and nothing is written."""
    ours, place = unrolled(tmp_path, TOY)
    model, ids = AutoModelForCausalLM.from_pretrained(place), ids_of(512)
    model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight.sub_(weight.grad, alpha=0.1)
    model.save_pretrained(tmp_path / "trained")
    with pytest.raises(BadInput, match="layer 1: its 2 copies differ"):
        from_unrolled(tmp_path / "trained", ours.spec, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_another_model_has_no_way_back(tmp_path):
    """A wrong depth is named with both values."""
    ours, place = unrolled(tmp_path, TOY)
    deeper = ours.spec.replace(loop=ours.spec.loop.model_dump() | {"visits": 3})
    with pytest.raises(BadInput, match="num_hidden_layers 10; unrolled, this one has 14"):
        from_unrolled(place, deeper, tmp_path / "back")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("sectioned core", {"core": {"num_experts": 12}}),
        ("qk-norm", {"qk_norm": "full"}),
        ("shared expert", {"shared_expert_intermediate_size": 8}),
        ("dense layers", {"mlp_only_layers": (0,)}),
        ("renormalised top-k", {"norm_topk_prob": False}),
        ("router score", {"scoring_func": "sigmoid"}),
        ("router bias", HEADS | {"router_bias": True}),
        ("attention bias", {"attention_bias": True}),
        ("attention sinks", HEADS | {"attention_sinks": True}),
        ("partial rotary", HEADS | {"partial_rotary_factor": 0.5}),
        ("embedding multiplier", {"embedding_multiplier": 2.0}),
        ("norms per layer", HEADS | {"norms_per_layer": 4}),
        ("dense FFN", dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"))),
        ("layer types", {"sliding_window": 4, "layer_types": ("full_attention",) + ("sliding_attention",) * 5}),
    ],
)
def test_refused_by_name(name, more):
    """What neither class has."""
    with pytest.raises(BadInput, match=name):
        lines(TARGETS["hf-unrolled"], job_of(TOY | more))


def test_corrections_are_refused(tmp_path):
    """A run balanced by them chooses experts by something that the plain classes have not."""
    run_of(tmp_path / "run", TOY)
    with pytest.raises(BadInput, match="corrections"):
        TARGETS["hf-unrolled"].emit(job_of(TOY, weights=str(tmp_path / "run")))


@pytest.mark.parametrize("name", PLAIN)
def test_every_key_is_declared(tmp_path, name):
    """By the class or its base, or read under an older name: rope_theta and rope_scaling are transformers 4's."""
    more = PLAIN[name][1]
    written = config(checked(TOY | more), 64)
    place = emitted(tmp_path / "plain", "hf-unrolled", job_of(TOY | more)) / "twin"
    assert json.loads((place / "config.json").read_text()) == written
    read = transformers.AutoConfig.from_pretrained(place)
    declared = {field.name for field in fields_of(read)} | set(read.attribute_map) | set(read.attribute_map.values())
    older = {"model_type", "rope_theta", "rope_scaling", "head_dim", "max_window_layers"}
    assert set(written) - older <= declared
    assert read.head_dim == 32
