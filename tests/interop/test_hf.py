"""What `emit --to hf` writes is loaded by transformers and computes what our model computes.

The right values are those of smelt_budget.model with the same weights, the ledger's counts and initialise.py's
deviations. fp32 on a CPU; TOLERANCE is relative to the largest value, measured at most 4e-6.
"""

import json
import runpy
import subprocess
import sys
from dataclasses import fields as fields_of
from pathlib import Path

import numpy as np
import pytest
import torch

from smelt_budget.emit import TARGETS
from smelt_budget.emit.hf import SAME, config
from smelt_budget.emit.target import ARMS, Job, lines
from smelt_budget.emit.training import training
from smelt_budget.emit.weights import alike, from_hf, spec_of
from smelt_budget.errors import BadInput
from smelt_budget.ledger import Ledger, Setting
from smelt_budget.model import Transformer, initialise, load
from smelt_budget.model.initialise import deviation
from smelt_budget.model.router import auxiliary_loss, correct
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.model import checked
from smelt_budget.verify.pair import read_pair

transformers = pytest.importorskip("transformers")
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

transformers.utils.logging.disable_progress_bar()
KIT = runpy.run_path(str(Path(__file__).with_name("emitted_models.py")))
CASES, looped, pair_of, job_of, emitted, run_of, ids_of, apart = (
    KIT[name] for name in ("CASES", "looped", "pair_of", "job_of", "emitted", "run_of", "ids_of", "apart")
)
HELD = [case for case in CASES if case[0] != "windows of 1"]
TOLERANCE = 1e-5
EXAMPLE = Path(__file__).parents[2] / "examples" / "smelt.yaml"
TOY = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "loop": {"start": 2, "stop": 6, "visits": 2, "residual_scale": 0.5},
}


def read(place, **how):
    """The emitted model."""
    return AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True, **how).eval()


def fresh(place):
    """The emitted architecture, weights drawn."""
    return AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(place, trust_remote_code=True), trust_remote_code=True
    )


def slots(output):
    """The cache of an output, under its name in this version."""
    return output.get("cache") or output.past_key_values


@pytest.fixture
def toy(tmp_path):
    """Our toy twin and its emitted folder."""
    model, folder = pair_of(tmp_path, "hf", TOY)
    return model, folder / "twin"


def solved():
    """The example pair as a job."""
    pair = read_pair(EXAMPLE)
    return Job("smelt_pair", pair.baseline, pair.twin, training(pair.baseline, pair.twin, 4096))


@pytest.mark.parametrize("arm", ARMS)
def test_parameters_are_the_ledgers(tmp_path, arm):
    """4.0e9 of them, on the meta device, exactly; and the slots of a cache are the executed layers."""
    job = solved()
    folder = emitted(tmp_path / "pair", "hf", job)
    with torch.device("meta"):
        model = fresh(folder / arm)
    spec = job.spec(arm)
    assert sum(p.numel() for p in model.parameters()) == Ledger(spec, Setting.of(spec)).as_dict()["parameters"]["total"]
    assert len(model.config.order) == spec.effective_depth
    assert not list(model.buffers())


@pytest.mark.parametrize(("kind", "arm"), HELD)
def test_logits_and_greedy_tokens_are_our_models(tmp_path, kind, arm):
    """Logits at every place; looped, also greedy tokens with a dynamic, a static and no cache; a slot an execution."""
    ours, folder = pair_of(tmp_path, "hf", looped(kind, arm))
    theirs, told = AutoModelForCausalLM.from_pretrained(
        folder / "twin", trust_remote_code=True, output_loading_info=True
    )
    assert not told["unexpected_keys"]
    ids = ids_of(ours.spec.vocab_size)
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())
    with torch.no_grad():
        assert apart(theirs(ids).logits, ours(ids).logits) < TOLERANCE
        if arm == "once":
            return
        how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        plain = theirs.generate(ids, use_cache=False, **how)
        assert torch.equal(theirs.generate(ids, **how), plain)
        assert torch.equal(theirs.generate(ids, cache_implementation="static", **how), plain)
        assert len(slots(theirs(ids, use_cache=True)).layers) == ours.spec.effective_depth


@pytest.mark.parametrize(("kind", "arm"), HELD)
def test_the_config_gives_the_spec_back(kind, arm):
    """From what emit writes, also after transformers read it and wrote it."""
    spec = checked(looped(kind, arm))
    asked = training(spec, spec, 64)
    written = config(spec, asked, corrections=spec.router_correction_bias)
    assert alike(spec_of(written, "written")) == alike(spec)
    assert spec_of(written, "written").max_position_embeddings == 64


def test_a_window_of_one_position_is_refused():
    """transformers' dynamic cache keeps all keys there (`[-1 + 1 :]`)."""
    with pytest.raises(BadInput, match="sliding window"):
        lines(TARGETS["hf"], job_of(looped("windows of 1", "sectioned")))


@pytest.mark.parametrize(
    "more", [{"partial_rotary_factor": 0.1}, {"head_dim": 31}, {"lm_head_bias": True, "logits_scaling": 2.0}]
)
def test_what_cannot_be_computed_is_refused(more):
    """By our model and, without loading torch, by the target."""
    with pytest.raises(BadInput):
        Transformer(checked(TOY | more))
    with pytest.raises(BadInput, match="baseline"):
        TARGETS["hf"].emit(job_of(TOY | more))


def test_every_field_of_a_spec_is_emitted():
    """By its own name, or by one of those that `config` and `rope` make."""
    others = {"layer_types", "rope_theta", "rope_scaling", "partial_rotary_factor", "loop", "core"}
    assert {*SAME, *others, "router_correction_bias"} == set(ModelSpec.model_fields)


@pytest.mark.parametrize(("kind", "arm"), HELD)
def test_every_key_is_declared(tmp_path, kind, arm):
    """transformers keeps unknown keys silently, so each must be a field of the config class or of its base."""
    folder = emitted(tmp_path / "pair", "hf", job_of(looped(kind, arm), balance="bias"))
    written = json.loads((folder / "twin" / "config.json").read_text())
    read_back = AutoConfig.from_pretrained(folder / "twin", trust_remote_code=True)
    assert set(written) - {"auto_map", "model_type"} <= {field.name for field in fields_of(read_back)}
    for name in ("loop_num", "num_loops"):  # SGLang multiplies layers by them, whatever the model
        assert not hasattr(read_back, name)


def test_attention_and_experts_in_every_form(toy):
    """Written out, fused; one expert after another, grouped, batched."""
    ours, place = toy
    ids = ids_of(512)
    want = ours(ids).logits
    for attention in ("eager", "sdpa"):
        for experts in ("eager", "grouped_mm", "batched_mm"):
            model = read(place, attn_implementation=attention, experts_implementation=experts)
            assert apart(model(ids).logits, want) < TOLERANCE, (attention, experts)


def test_padding_on_the_left_changes_nothing(toy):
    """A prompt alone, and beside a longer one."""
    _, place = toy
    model, ids = read(place), ids_of(512, 12)
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, :5], mask[1, :5] = 0, 0
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    both = model.generate(padded, attention_mask=mask, **how)
    assert torch.equal(both[1, 12:], model.generate(ids[1:, 5:], **how)[0, 7:])
    assert torch.equal(both[0, 12:], model.generate(ids[:1], **how)[0, 12:])


def test_other_caches_and_beams(toy):
    """A cache made without the config grows as it goes; beams reorder every slot; the bare model has no head."""
    from transformers import AutoModel, DynamicCache

    ours, place = toy
    model, ids = read(place), ids_of(512, 12)
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, use_cache=False, **how)
    name = "cache" if "cache" in model(ids[:, :1], use_cache=True) else "past_key_values"
    cache = DynamicCache()
    assert torch.equal(model.generate(ids, **{name: cache}, **how), plain)
    assert len(cache.layers) == ours.spec.effective_depth
    beams = model.generate(ids, num_beams=3, use_cache=False, **how)
    assert torch.equal(model.generate(ids, num_beams=3, **how), beams)
    bare = AutoModel.from_pretrained(place, trust_remote_code=True)
    assert apart(bare(ids).last_hidden_state @ model.lm_head.weight.T, model(ids).logits) < TOLERANCE


def test_packed_documents_see_themselves_only(toy):
    """Positions that begin again mean another document, as transformers has it without a cache."""
    ours, place = toy
    ids, lengths = ids_of(512, 19), (7, 4, 8)
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(2, -1)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    want = ours(ids, document_BT=document).logits
    assert apart(read(place)(ids, position_ids=positions, use_cache=False).logits, want) < TOLERANCE


def test_saved_and_read_again_nothing_differs(toy, tmp_path):
    """The difference is 0, the code goes along, and the file has the names that ours has."""
    ours, place = toy
    model, ids = read(place), ids_of(512)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(read(tmp_path / "again")(ids).logits, model(ids).logits)
    assert (tmp_path / "again" / "modeling_smelt.py").read_bytes() == (place / "modeling_smelt.py").read_bytes()
    assert from_hf(tmp_path / "again", tmp_path / "back") == ours.spec.replace(max_position_embeddings=64)
    back = load(Transformer(ours.spec), tmp_path / "back").eval()
    for (name, there), here in zip(ours.state_dict().items(), back.state_dict().values(), strict=True):
        assert torch.equal(there, here), name


def test_a_missing_weight_is_an_error(toy):
    """One matrix of one expert, and a whole norm: neither is drawn at random without a word."""
    from safetensors.torch import load_file, save_file

    _, place = toy
    whole = load_file(place / "model.safetensors")
    for name in ("model.layers.3.mlp.experts.5.up_proj.weight", "model.layers.3.input_layernorm.weight"):
        save_file({key: x for key, x in whole.items() if key != name}, place / "model.safetensors", {"format": "pt"})
        with pytest.raises((ValueError, RuntimeError)):
            read(place)


@pytest.mark.parametrize("kind", ["grouped", "biases", "sinks", "latent", "groups", "four norms", "LayerNorm"])
def test_checkpointing_gives_the_same_gradients(tmp_path, kind):
    """Recomputed or kept; and every weight has one but the exit gate's, which nothing reads."""
    _, folder = pair_of(tmp_path, "hf", looped(kind, "sectioned"))
    gradients = []
    for checkpointing in (False, True):
        model = read(folder / "twin").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        ids = ids_of(model.config.vocab_size)
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if "exit_gate" not in name})
    for name, kept in gradients[0].items():
        assert kept is not None, name
        torch.testing.assert_close(gradients[1][name], kept, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["grouped", "groups", "biases"])
def test_balancing_counts_by_visit(tmp_path, kind):
    """Auxiliary and z-loss are verify's means over executed MoE layers; evaluation adds none."""
    ours, folder = pair_of(tmp_path, "hf", looped(kind, "sectioned"))
    model, ids = read(folder / "twin"), ids_of(ours.spec.vocab_size)
    moe = [routed for routed in ours(ids).routed if routed is not None]
    auxiliary = torch.stack([auxiliary_loss(r.count_E, r.mean_score_E) for r in moe]).mean()
    z = torch.stack([r.z for r in moe]).mean()
    plain = model(ids, labels=ids).loss
    out = model.train()(ids, labels=ids)
    assert len(out.router_logits) == len(moe)
    torch.testing.assert_close(out.aux_loss, auxiliary)
    torch.testing.assert_close(out.loss - plain, 0.01 * auxiliary + 0.001 * z, rtol=1e-3, atol=1e-6)


def test_accumulated_steps_weigh_balancing_as_one(toy):
    """Two rows at once, or one after the other as Trainer gives them: CE and balancing keep their proportion."""
    _, place = toy
    model, ids = read(place).train(), ids_of(512, 16, 2)
    targets = torch.tensor(30)
    rows = [model(row, labels=row, num_items_in_batch=targets) for row in ids[:, None]]
    alone = [model(row, labels=row) for row in ids[:, None]]
    torch.testing.assert_close(rows[0].loss + rows[1].loss, (alone[0].loss + alone[1].loss) / 2)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tie_word_embeddings": True, "qk_norm": "full"},
        {"shared_expert_intermediate_size": 64, "shared_expert_gate": True, "mlp_only_layers": (0,)}
        | {"intermediate_size": 96, "attention_bias": True, "router_bias": True, "expert_bias": True},
        {"head_dim": None, "num_key_value_heads": None, "kv_lora_rank": 48, "q_lora_rank": 32}
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32},
    ],
    ids=["plain", "tied", "shared", "latent"],
)
def test_initial_deviations(tmp_path, more):
    """Each matrix's is initialise.py's to 5 standard errors; gains are 1, biases 0. Of drawn files too, exactly."""
    fields = TOY | {"hidden_size": 128, "num_hidden_layers": 4, "loop": TOY["loop"] | {"start": 1, "stop": 3}} | more
    spec = checked(fields)
    ours = Transformer(spec)
    folder = emitted(tmp_path / "pair", "hf", job_of(fields))
    torch.manual_seed(0)
    theirs = {name: x.detach() for name, x in fresh(folder / "twin").named_parameters()}
    for name, weight in ours.named_parameters():
        drawn, std = theirs[name if name.startswith("lm_head") else f"model.{name}"], deviation(ours, name, weight)
        if std is None:
            assert drawn.std(correction=0) == 0, name
            assert float(drawn.flatten()[0]) == (1.0 if "norm" in name and name.endswith("weight") else 0.0), name
        else:
            assert abs(float(drawn.std()) / std - 1) < 5 / (2 * drawn.numel()) ** 0.5, name
    random = emitted(tmp_path / "random", "hf", job_of(fields, weights="random", seed=3))
    initialise(ours, 3)
    for name, weight in read(random / "twin").named_parameters():
        assert torch.equal(weight, ours.get_parameter(name.removeprefix("model."))), name


def test_operations_are_counted_by_visit(toy):
    """6 a token for each weight on each visit, against the ledger's own rows without attention scores."""
    ours, place = toy
    model, spec = read(place), ours.spec
    per_layer = 2 * 64 * 128 + 2 * 64 * 64 + 64 * 8 + 2 * 3 * 64 * 32  # q o, k v, router, 2 experts
    want = 6 * (per_layer * spec.effective_depth + 512 * 64)
    assert model.floating_point_ops({"input_ids": ids_of(512)}) == want * 38


def test_a_step_of_decoding_is_one_graph(tmp_path):
    """With a static cache and grouped experts, as transformers compiles it on a GPU; the graph is run eagerly here."""
    from transformers import StaticCache

    _, folder = pair_of(tmp_path, "hf", looped("grouped", "two visits"))
    model, ids = read(folder / "twin", experts_implementation="grouped_mm"), ids_of(61, 12)
    cache = StaticCache(config=model.config, max_cache_len=16)
    name = "cache" if "cache" in model(ids[:, :1], use_cache=True) else "past_key_values"
    with torch.no_grad():
        model(ids[:, :11], **{name: cache})
        step = torch.compile(model, fullgraph=True, backend="eager")
        got = step(ids[:, 11:], position_ids=torch.tensor([[11]]), **{name: cache}).logits
        assert apart(got[:, -1], model(ids).logits[:, -1]) < TOLERANCE


def test_corrections_stay_in_float32(tmp_path):
    """Read in bfloat16, cast to it: a step of 0.001 must not be lost beside a 1."""
    _, folder = pair_of(tmp_path, "hf", looped("groups", "sectioned"))
    model = read(folder / "twin", dtype=torch.bfloat16)
    for one in (model, model.to(torch.float16), model.float()):
        kinds = {name.rpartition(".")[2]: x.dtype for name, x in one.named_buffers()}
        assert kinds["e_score_correction_bias"] == torch.float32
    assert read(folder / "twin", dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16


def test_hidden_states_and_attention_weights(toy):
    """One of each for every executed layer."""
    ours, place = toy
    out = read(place, attn_implementation="eager")(ids_of(512), output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == ours.spec.effective_depth + 1
    assert len(out.attentions) == ours.spec.effective_depth
    torch.testing.assert_close(out.attentions[0].sum(-1), torch.ones(2, 4, 19))


def test_train_py_trains(tmp_path):
    """Three steps by transformers' Trainer, as the launch files start them; what it saved is read, and loads here."""
    pytest.importorskip("accelerate")
    folder = emitted(tmp_path / "pair", "hf", job_of(TOY, balance="bias"))
    np.random.default_rng(0).integers(0, 512, 5000).astype(np.uint16).tofile(folder / "tokens.bin")
    (folder / "cpu.json").write_text(json.dumps({"use_cpu": True, "logging_steps": 1}))
    command = ["train.py", "twin", "--steps", "3", "--per-device", "2", "--arguments", "cpu.json", "--checkpointing"]
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    log = json.loads((folder / "run-twin" / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    warmup = json.loads((folder / "train.json").read_text())["warmup_steps"]
    rates = [row["learning_rate"] * 64 * warmup for row in log if "loss" in row]
    np.testing.assert_allclose(rates, [0.75, 1.5, 2.25])
    trained = read(folder / "run-twin")
    moved = trained.model.layers[3].mlp.gate.e_score_correction_bias
    assert set(moved.abs().mul(1000).round().tolist()) <= {0.0, 1.0, 2.0, 3.0}
    assert bool(moved.any())
    spec = from_hf(folder / "run-twin", tmp_path / "back")
    ours, ids = load(Transformer(spec), tmp_path / "back").eval(), ids_of(512)
    assert apart(trained(ids).logits, ours(ids).logits) < TOLERANCE


def test_corrections_move_as_ours_do(tmp_path):
    """Against the load of all visits and micro-batches since the last step."""
    ours, folder = pair_of(tmp_path, "hf", looped("groups", "sectioned"))
    model = read(folder / "twin").train()
    for ids in ids_of(61, 19, 4).split(2):
        model(ids)
    loads = {}
    for ids in ids_of(61, 19, 4).split(2):
        for step, routed in zip(ours.order, ours(ids).routed, strict=True):
            loads[step.layer] = loads.get(step.layer, 0) + routed.count_E
    model.move_corrections(0.001)
    for layer, load_E in loads.items():
        correct(ours.layers[layer].mlp.gate, load_E, 0.001)
        want = ours.layers[layer].mlp.gate.e_score_correction_bias
        torch.testing.assert_close(model.model.layers[layer].mlp.gate.e_score_correction_bias, want)


def test_weights_of_a_run_are_those_of_its_proxy(tmp_path):
    """verify trains a smaller pair: that is emitted, with a note; a seed that is not there is named."""
    small = TOY | {"hidden_size": 32}
    run_of(tmp_path / "run", small, seed=2)
    job = job_of(TOY, weights=str(tmp_path / "run"), seed=2)
    made = TARGETS["hf"].emit(job)
    assert "proxy" in made.notes[0]
    assert json.loads(made.files["twin/config.json"])["hidden_size"] == 32
    with pytest.raises(BadInput, match="--seed 2"):
        TARGETS["hf"].emit(job_of(TOY, weights=str(tmp_path / "run")))


def test_shards_and_their_index(tmp_path, monkeypatch):
    """Above 5 GB (here 100 kB) files are split, and read as one."""
    monkeypatch.setattr("smelt_budget.model.weights.SHARD_BYTES", 100_000)
    folder = emitted(tmp_path / "pair", "hf", job_of(TOY, weights="random"))
    assert len(list((folder / "twin").glob("model-*.safetensors"))) > 3
    assert torch.equal(read(folder / "twin").lm_head.weight, initialise(Transformer(checked(TOY)), 0).lm_head.weight)
