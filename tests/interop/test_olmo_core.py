"""The package that `emit --to olmo-core` writes, run by the real OLMo-core on a CPU; and its JSON read back.

Right values: our ledger's counts, our initial deviations, and our model's logits, gradients and training with the same
weights. OLMo-core sends tokens to their experts by triton kernels, which need a GPU; plain torch does that one step.
"""

import importlib
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from smelt_budget.emit import folder
from smelt_budget.emit.launch import Layout
from smelt_budget.emit.olmo_core import OLMO_CORE
from smelt_budget.emit.target import Job, lines
from smelt_budget.emit.training import training
from smelt_budget.errors import BadInput
from smelt_budget.ledger import Ledger, Setting
from smelt_budget.model import Transformer, initialise
from smelt_budget.model.initialise import deviation
from smelt_budget.model.router import auxiliary_loss, correct
from smelt_budget.spec.model import checked
from smelt_budget.spec.read import read
from smelt_budget.verify.pair import read_pair

pytest.importorskip("olmo_core", reason="ai2-olmo-core is not installed")
from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.moe.parallel_mlp import ParallelDroplessMLP
from olmo_core.script_utils import ExperimentConfig

pytestmark = pytest.mark.filterwarnings("ignore:Grouped GEMM not available.*:UserWarning")

PLAIN = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
DENSE = {k: v for k, v in PLAIN.items() if "experts" not in k and not k.startswith("moe")}
LOOP = {"start": 2, "stop": 6, "visits": 2, "residual_scale": 0.5}
CASES = {
    "plain": {},
    "qk-norm by head": {"qk_norm": "head"},
    "qk-norm over all heads": {"qk_norm": "full"},
    "three visits, whole stack": {"loop": {"start": 0, "stop": 8, "visits": 3, "residual_scale": 1 / 3}},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "attention_output_bias": True, "lm_head_bias": True},
    "shared expert": {"shared_expert_intermediate_size": 48, "mlp_bias": True},
    "dense layers": {"mlp_only_layers": [0, 3], "intermediate_size": 160, "qk_norm": "head"},
    "dense": {**DENSE, "intermediate_size": 96},
    "sections": {"core": {"num_key_value_heads": 1, "num_experts": 12}},
    "sigmoid router": {"scoring_func": "sigmoid", "routed_scaling_factor": 2.5},
    "scores as they are": {"norm_topk_prob": False},
    "windows": {"layer_types": ["full_attention", "sliding_attention"] * 4, "sliding_window": 5},
    "one window": {"sliding_window": 7},
    "part of each head rotates": {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
    "pairs rotate": {"rope_interleave": True, "rope_theta": 1e6},
    "stretched": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "stretched by wavelength": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "multipliers": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "layer norm": {"norm": "layer_norm"},
    "layer norm without bias": {"norm": "layer_norm_no_bias"},
    "sinks": {"attention_sinks": True},
}
names = itertools.count()


def job_of(fields, balance="aux", layout=None, context=64, **told):
    """The case as a twin, and as a baseline without its loop."""
    base = {} if "vocab_size" in fields else PLAIN
    twin = checked({**base, "loop": LOOP, **fields})
    baseline = twin.replace(loop=None, core=None)
    asked = training(
        baseline, twin, context, tokens=context * 320, batch_sequences=8, balance=balance, rates=(1e-3, 2e-3)
    )
    return Job(f"olmo_{next(names)}", baseline, twin, asked.model_copy(update=told), layout)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a job's package and gives the folder it lies in."""

    def write(job):
        lines(OLMO_CORE, job)
        place = tmp_path / job.name
        folder.write(place, OLMO_CORE.emit(job).files, force=False)
        monkeypatch.syspath_prepend(place)
        importlib.invalidate_caches()
        return place

    return write


@pytest.fixture
def on_cpu(monkeypatch):
    """Tokens go to their experts by plain torch."""
    dispatched = vars(importlib.import_module("olmo_on_cpu"))["dispatched"]
    monkeypatch.setattr(ParallelDroplessMLP, "forward", dispatched)


sys.path.append(str(Path(__file__).parent))


def config_of(place, job, arm):
    """The real config object of an arm."""
    return ExperimentConfig.from_json(place / job.name / f"{arm}.json")


def ours_of(spec):
    """Our model, drawn, and nothing left at its start value: gains, biases and corrections too."""
    model = initialise(Transformer(spec), 3)
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if weight.ndim == 1:
                size = 0.02 if name.endswith("correction_bias") else 0.3
                weight.add_(size * torch.randn(weight.shape, generator=noise))
    return model


def translated(model, tensors=None):
    """Our weights under OLMo-core's names and in its shapes: experts lie one under the other, w2 transposed."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())} if tensors is None else tensors
    out = {}
    places = {
        "embed_tokens": "embeddings",
        "norm": "lm_head.norm",
        "lm_head": "lm_head.w_out",
        "self_attn.q_proj": "attention.w_q",
        "self_attn.k_proj": "attention.w_k",
        "self_attn.v_proj": "attention.w_v",
        "self_attn.o_proj": "attention.w_out",
        "self_attn.q_norm": "attention.q_norm",
        "self_attn.k_norm": "attention.k_norm",
        "self_attn": "attention",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "feed_forward_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.shared_expert.gate_proj": "feed_forward_moe.shared_mlp.w1",
        "mlp.shared_expert.down_proj": "feed_forward_moe.shared_mlp.w2",
        "mlp.shared_expert.up_proj": "feed_forward_moe.shared_mlp.w3",
    }
    for name, x in tensors.items():
        owner, _, leaf = name.rpartition(".")
        block = ""
        if owner.startswith("layers."):
            _, i, owner = owner.split(".", 2)
            block = f"blocks.{i}."
        if owner == "mlp.gate":
            key = "router.score_bias" if leaf.startswith("e_score") else "router.weight"
            out[f"{block}feed_forward_moe.{key}"] = x if x.ndim == 1 else x.flatten()
        elif owner == "mlp.experts" and leaf == "gate_up_proj":
            for half, weight in zip(x.chunk(2, 1), ("w1", "w3"), strict=True):
                out[f"{block}feed_forward_moe.experts.mlp.{weight}"] = half.flatten(0, 1)
        elif owner == "mlp.experts":
            out[f"{block}feed_forward_moe.experts.mlp.w2"] = x.transpose(1, 2).flatten(0, 1)
        else:
            out[f"{block}{places[owner]}.{leaf}"] = x
    if model.spec.tie_word_embeddings:
        out["lm_head.w_out.weight"] = out["embeddings.weight"]
    return out


def built(config, model=None, length=64):
    """OLMo-core's model, with our weights where given."""
    olmo = config.model.build(init_device="cpu")
    olmo.init_weights(max_seq_len=length, device=torch.device("cpu"))
    if model is not None:
        weights = {k: v.detach().clone() for k, v in translated(model).items()}
        olmo.load_state_dict({k: v for k, v in weights.items() if k in olmo.state_dict()})
        assert all(k.endswith("score_bias") for k in weights.keys() - olmo.state_dict().keys())
    return olmo


def within(part, whole, at=""):
    """Every key and value of the one is in the other."""
    if isinstance(part, dict):
        assert isinstance(whole, dict), at
        for key, value in part.items():
            assert str(key) in {str(k) for k in whole}, f"{at}.{key}"
            within(value, next(v for k, v in whole.items() if str(k) == str(key)), f"{at}.{key}")
    elif isinstance(part, list):
        assert len(part) == len(whole), at
        for i, (a, b) in enumerate(zip(part, whole, strict=True)):
            within(a, b, f"{at}[{i}]")
    else:
        assert part == whole, at


@pytest.mark.parametrize("case", CASES)
def test_json_comes_back_from_the_real_classes(written, case):
    """from_json, as_config_dict: every key that we write, with our value; there and back once more is the same."""
    job = job_of(CASES[case])
    place = written(job)
    for arm in ("baseline", "twin"):
        config = config_of(place, job, arm)
        again = config.as_config_dict()
        within(json.loads((place / job.name / f"{arm}.json").read_text()), again)
        assert ExperimentConfig.from_dict(json.loads(json.dumps(again))) == config


def test_key_that_olmo_core_does_not_know_is_refused(written):
    job = job_of({})
    file = written(job) / job.name / "twin.json"
    told = json.loads(file.read_text())
    told["model"]["block"]["feed_forward_moe"]["num_expertz"] = 3
    with pytest.raises(OLMoConfigurationError, match="num_expertz"):
        ExperimentConfig.from_dict(told)


@pytest.mark.parametrize("arm", ["baseline", "twin"])
def test_smelt_example_has_the_ledgers_parameters(written, arm):
    """Exact, in the config's own count and in the model on the meta device; executed layers too."""
    pair = read_pair("examples/smelt.yaml")
    job = Job(f"olmo_smelt_{arm}", pair.baseline, pair.twin, training(pair.baseline, pair.twin, 4096))
    config = config_of(written(job), job, arm)
    model = config.model.build(init_device="meta")
    spec = getattr(pair, arm)
    total = Ledger(spec, Setting.of(spec)).total
    assert config.model.num_params == total
    assert sum(p.numel() for p in model.parameters()) == total
    assert len(model.order) == spec.effective_depth


@pytest.mark.parametrize("case", CASES)
def test_logits_are_our_models(written, on_cpu, case):
    """Same weights, same logits, in fp32, both arms; parameters are the ledger's."""
    job = job_of(CASES[case])
    place = written(job)
    ids = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    for arm in ("baseline", "twin"):
        spec = job.spec(arm)
        model, olmo = ours_of(spec), None
        if job.training.balance != "bias":
            for buffer in model.buffers():
                buffer.zero_()
        olmo = built(config_of(place, job, arm), model)
        with torch.no_grad():
            theirs, right = olmo(ids), model(ids).logits
        torch.testing.assert_close(theirs, right, rtol=1e-4, atol=2e-5)
        assert sum(p.numel() for p in olmo.parameters()) == Ledger(spec, Setting.of(spec)).total


def losses_of(model, routed, told):
    """Balancing as verify has it (rule C24): means over executed layers with experts."""
    moe = [r for r in routed if r is not None]
    aux = torch.stack([auxiliary_loss(r.count_E, r.mean_score_E) for r in moe]).mean()
    z = torch.stack([r.z for r in moe]).mean()
    return told.z * z + (told.auxiliary * aux if told.balance == "aux" else 0)


@pytest.mark.parametrize("case", ["plain", "tied", "shared expert", "dense layers", "sections", "sigmoid router"])
def test_gradients_are_our_models(written, on_cpu, case):
    """Of the loss with the auxiliary and the z-loss, by visit."""
    job = job_of(CASES[case])
    model = ours_of(job.twin)
    for buffer in model.buffers():
        buffer.zero_()
    olmo = built(config_of(written(job), job, "twin"), model).train()
    ids = torch.randint(0, 96, (2, 25), generator=torch.Generator().manual_seed(1))
    olmo(ids[:, :-1], labels=ids[:, 1:].contiguous()).loss.backward()
    out = model(ids[:, :-1], ids[:, 1:])
    (out.losses.mean() + losses_of(model, out.routed, job.training)).backward()
    right = translated(model, {name: p.grad for name, p in model.named_parameters()})
    theirs = {name: p.grad for name, p in olmo.named_parameters()}
    assert theirs.keys() <= right.keys()
    for name, grad in theirs.items():
        size = right[name].abs().max().item()
        torch.testing.assert_close(grad, right[name], rtol=1e-3, atol=1e-6 + 1e-4 * size, msg=name)


@pytest.mark.parametrize("case", ["plain", "sections", "sigmoid router"])
def test_bias_moves_by_the_load_of_all_visits(written, on_cpu, case):
    """Exactly as ours: the sign of the mean load minus the expert's."""
    job = job_of(CASES[case], balance="bias")
    model = ours_of(job.twin)
    olmo = built(config_of(written(job), job, "twin"), model).train()
    ids = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    olmo(ids)
    olmo.post_batch()
    count = {}
    for step, decided in zip(model.order, model(ids).routed, strict=True):
        count[step.layer] = count.get(step.layer, 0) + decided.count_E
    for layer, seen in count.items():
        router = model.layers[layer].mlp.gate
        correct(router, seen, job.training.bias_step)
        assert torch.equal(olmo.blocks[str(layer)].router.score_bias, router.e_score_correction_bias)


@pytest.mark.parametrize("case", CASES)
def test_initial_deviations_are_ours(written, case):
    """Standard deviations within 5 of their own; gains 1, biases and sinks 0 exactly."""
    job = job_of(CASES[case])
    place = written(job)
    for arm in ("baseline", "twin"):
        model = initialise(Transformer(job.spec(arm)), 0)
        tensors = {}
        for name, weight in model.named_parameters():
            std = deviation(model, name, weight)
            tensors[name] = weight if std is None else torch.full_like(weight, std)
        expected = translated(model, tensors)
        for name, found in built(config_of(place, job, arm)).named_parameters():
            right = expected[name]
            if "norm" in name or name.endswith(("bias", "sinks")):
                assert torch.equal(found, right), name
            else:
                off = found.std() / right.flatten()[0] - 1
                assert abs(off) < 5 / (2 * right.numel()) ** 0.5, (name, off)


def test_meter_counts_executed_blocks(written):
    """OLMo-core's count of the unlooped model of the same widths, and the core's once more."""
    job = job_of({"qk_norm": "head"})
    place = written(job)
    once, looped = (config_of(place, job, arm).model.build(init_device="meta") for arm in ("baseline", "twin"))
    core = sum(once.blocks[str(i)].num_flops_per_token(64) for i in range(2, 6))
    assert looped.num_flops_per_token(64) == once.num_flops_per_token(64) + core


def test_optimiser_and_schedule_are_the_recipe(written):
    """Decay on what multiplies a vector, each arm's own peak; warmup, stable, linear decay to 0."""
    job = job_of({"qk_norm": "head", "attention_bias": True, "attention_output_bias": True}, warmup_share=0.1)
    place, told = written(job), job.training
    assert (told.steps, told.warmup_steps, told.decay_steps) == (40, 4, 8)
    for arm, rate in (("baseline", 1e-3), ("twin", 2e-3)):
        config = config_of(place, job, arm)
        module, trainer = config.train_module, config.trainer
        olmo = config.model.build()
        adamw = module.optim.build(olmo)
        decay = {id(p): group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
        vectors = [n for n, p in olmo.named_parameters() if p.ndim == 1 and not n.endswith("router.weight")]
        assert {n: decay[id(p)] for n, p in olmo.named_parameters()} == {
            n: 0.0 if n in vectors else 0.1 for n, _ in olmo.named_parameters()
        }
        assert {(g["lr"], g["betas"], g["eps"]) for g in adamw.param_groups} == {(rate, (0.9, 0.95), 1e-8)}
        assert (trainer.max_duration.value, trainer.hard_stop.value) == (41, 40)
        shares = [module.scheduler.get_lr(1.0, t + 1, trainer.max_duration.value) for t in range(40)]
        right = [(t + 1) / 4 if t < 4 else 1.0 if t < 32 else (40 - t) / 8 for t in range(40)]
        assert shares == pytest.approx(right)
        assert (config.data_loader.global_batch_size, module.max_sequence_length) == (8 * 64, 64)


def trained(job, model, batches):
    """The same steps by our model: losses, and the weights it ends with."""
    told, parameters = job.training, list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": told.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=told.rates[1], betas=told.betas, eps=told.epsilon)
    losses = []
    for step, ids in enumerate(batches):
        optimizer.zero_grad()
        total = 0.0
        for row in ids.split(1):  # one sequence a pass; balancing is by pass, over the tokens of the batch
            out = model(row[:, :-1], row[:, 1:])
            whole = model(row).routed
            share = row.shape[1] / (ids.shape[0] * (row.shape[1] - 1))
            loss = out.losses.sum() / (ids.shape[0] * (row.shape[1] - 1)) + share * losses_of(model, whole, told)
            loss.backward()
            total += out.losses.detach().sum().item() / (ids.shape[0] * (row.shape[1] - 1))
        torch.nn.utils.clip_grad_norm_(parameters, told.clip)
        for group in optimizer.param_groups:
            group["lr"] = told.rates[1] * (0.5, 1.0, 1.0, 0.5)[step]
        optimizer.step()
        losses.append(total)
    return losses


def test_trains_as_our_model_does(written, tmp_path):
    """The emitted train.py in OLMo-core's own harness, auxiliary and z-loss, against our model and AdamW.

    Losses of four steps, and what they changed: within 0.5 % of its norm, for Adam divides small gradients by their
    own size.
    """
    told = {"warmup_share": 0.5, "decay_share": 0.5, "tokens": 4 * 4 * 32, "batch_sequences": 4}
    job = job_of({"qk_norm": "head", "shared_expert_intermediate_size": 48}, context=32, **told)
    place = written(job)
    model = ours_of(job.twin)
    for buffer in model.buffers():
        buffer.zero_()
    before = {k: v.detach().clone() for k, v in translated(model).items()}
    torch.save({k: v for k, v in before.items() if not k.endswith("score_bias")}, tmp_path / "weights.pt")
    (place / "data").mkdir()
    drawn = np.random.default_rng(2).integers(0, 96, 32 * 64, dtype=np.uint8)
    drawn.tofile(place / "data" / "part-0.npy")
    program = [sys.executable, str(Path(__file__).with_name("olmo_on_cpu.py")), job.name, str(tmp_path / "weights.pt")]
    asked = ["twin", "--save-folder", str(tmp_path / "run"), "--train-single", "--data_loader.num_workers=0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*program, str(tmp_path / "result.pt"), *asked],
        check=False,
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = torch.load(tmp_path / "result.pt")
    losses = trained(job, model, result["batches"])
    assert result["rates"] == [{2e-3 * share} for share in (0.5, 1.0, 1.0, 0.5)]
    assert result["losses"] == pytest.approx(losses, rel=1e-4)
    after = translated(model)
    for name, found in result["after"].items():
        off, moved = (found - after[name]).norm(), (after[name] - before[name]).norm()
        assert off < 5e-3 * moved + 1e-7, (name, off, moved)


@pytest.mark.parametrize("case", CASES)
def test_what_is_emitted_is_read_back(written, case):
    """`solve --baseline` on the baseline's file, alone or within the experiment; the twin comes back too."""
    job = job_of(CASES[case])
    place = written(job) / job.name
    for arm in ("baseline", "twin"):
        found = read(str(place / f"{arm}.json"))
        assert found.spec == job.spec(arm)
        assert found.functions == ()
        alone = place / f"alone-{arm}.json"
        alone.write_text(json.dumps(json.loads((place / f"{arm}.json").read_text())["model"]))
        assert read(str(alone)).spec == job.spec(arm).replace(max_position_embeddings=None)


def test_what_olmo_core_cannot_hold_is_named():
    refused = {
        "attention_bias": True,  # q, k and v only: OLMo-core's is on all four
        "shared_expert_gate": True,
        "router_bias": True,
        "expert_bias": True,
        "norms_per_layer": 4,
        "early_exit_gate": True,
        "swiglu_limit": 7.0,
        "attention_multiplier": 0.1,
        "logits_scaling": 8.0,
    }
    for name, value in refused.items():
        more = {"shared_expert_intermediate_size": 8} if name == "shared_expert_gate" else {}
        with pytest.raises(BadInput, match="cannot hold this pair"):
            lines(OLMO_CORE, job_of({name: value, **more}))
    for fields in (
        {"n_group": 4, "topk_group": 2},
        {"layer_types": ["chunked_attention"] * 8, "attention_chunk_size": 7},
    ):
        with pytest.raises(BadInput, match="cannot hold this pair"):
            lines(OLMO_CORE, job_of(fields))
    with pytest.raises(BadInput, match="not whole"):
        OLMO_CORE.emit(job_of({"rope_theta": 10000.5}))
    with pytest.raises(BadInput, match="there are no experts"):
        OLMO_CORE.emit(job_of(CASES["dense"], layout=Layout("local", expert=2)))
    assert math.isclose(job_of({}).training.z, 1e-3)
