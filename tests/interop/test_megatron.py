"""The emitted Megatron files in the real package, on a CPU: counts, logits, gradients, caches, starts, meters.

megatron-core 0.19 (Python 3.12) has the argument parser and the training loop and runs everything here; 0.16 (Python
3.11) has the layers only, and is configured field by field. Both are run without Transformer Engine (`local.txt`).
"""

import contextlib
import copy
import importlib
import importlib.util
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from smelt_budget.emit import folder, launch, megatron_bridge
from smelt_budget.emit.megatron import MEGATRON
from smelt_budget.emit.megatron_flags import arguments, engine, lines_of
from smelt_budget.emit.target import ARMS, Job, lines
from smelt_budget.emit.training import training
from smelt_budget.ledger import CONVENTIONS, Ledger, Setting
from smelt_budget.model.initialise import deviation, initialise
from smelt_budget.model.router import auxiliary_loss
from smelt_budget.model.transformer import Transformer, execution_order
from smelt_budget.spec.megatron_arguments import HARMLESS, UNLIKE
from smelt_budget.spec.megatron_text import named
from smelt_budget.spec.model import checked
from smelt_budget.verify.pair import read_pair

if importlib.util.find_spec("megatron") is None:
    pytest.skip("could not find 'megatron' (megatron-core)", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")  # megatron-core's own, many
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smelt.yaml"
CONTEXT = 32
TOLERANCE = 2e-5
"""Largest difference of fp32 logits of unit size: sums in another order, 12 layers deep (measured: 3e-6)."""

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "vocab_size": 515,  # which 128 does not divide
    "max_position_embeddings": CONTEXT,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
}
DENSE = {name: BASE[name] for name in list(BASE)[:7]} | {"intermediate_size": 48}
LATENT = {name: BASE[name] for name in BASE if name not in ("num_key_value_heads", "head_dim")} | {
    "kv_lora_rank": 24,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "rope_interleave": True,
}
LOOP = {"start": 2, "stop": 6, "visits": 2, "residual_scale": 0.5}
PAIRS = {
    "plain": (BASE, {}),
    "qk-norm": (BASE | {"qk_norm": "head", "rms_norm_eps": 1e-5, "rope_theta": 1e6}, {}),
    "three visits": (BASE, {"loop": {"start": 1, "stop": 7, "visits": 3, "residual_scale": 1 / 3}}),
    "to the end": (BASE, {"loop": {"start": 4, "stop": 8, "visits": 2, "residual_scale": 0.5}}),
    "shared, first dense": (
        BASE
        | {"shared_expert_intermediate_size": 56, "shared_expert_gate": True}
        | {"mlp_only_layers": (0, 3), "intermediate_size": 72},
        {},
    ),
    "sectioned": (BASE | {"qk_norm": "head"}, {"core": {"num_key_value_heads": 1, "num_experts": 12}}),
    "tied": (BASE | {"tie_word_embeddings": True}, {}),
    "not renormalised": (BASE | {"norm_topk_prob": False, "routed_scaling_factor": 2.5}, {}),
    "sigmoid, groups": (
        BASE
        | {"scoring_func": "sigmoid", "router_correction_bias": True, "routed_scaling_factor": 2.5}
        | {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
        {},
    ),
    "softmax, groups": (BASE | {"n_group": 4, "topk_group": 2}, {}),
    "dense": (DENSE, {}),
    "one expert": (BASE | {"num_experts": 1, "num_experts_per_tok": 1}, {}),
    "biased": (
        BASE | {"attention_bias": True, "partial_rotary_factor": 0.5, "rope_interleave": True, "norm": "layer_norm"},
        {},
    ),
    "windowed": (
        BASE | {"sliding_window": 5, "layer_types": ("sliding_attention", "full_attention") * 4},
        {},
    ),
    "interpolated": (BASE | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {}),
    "llama3": (
        BASE
        | {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
        {},
    ),
    "latent": (LATENT, {}),
    "latent, sectioned": (LATENT, {"core": {"kv_lora_rank": 20}}),
}


def job(name, **fields):
    base, own = PAIRS[name]
    baseline, twin = checked(base), checked(base | {"loop": LOOP} | own)
    asked = {key: fields.pop(key) for key in ("balance",) if key in fields}
    return Job("pair", baseline, twin, training(baseline, twin, CONTEXT, 2**14, 8, **asked), **fields)


@pytest.fixture(scope="session")
def megatron():
    """One rank of gloo, and what of megatron-core would look for a GPU."""
    import megatron.core
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    patched = pytest.MonkeyPatch()
    patched.setattr(torch.cuda, "current_device", lambda: "cpu")
    patched.setattr(torch.cuda, "current_stream", lambda *_args: None)
    patched.setattr(CudaRNGStatesTracker, "fork", lambda *_args: contextlib.nullcontext())  # there is no dropout
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 asks for it by a name it does not define
        patched.setattr(moe_utils, "te_general_gemm", None, raising=False)
    if importlib.util.find_spec("megatron.training") is not None:  # help texts, from the sources: half a second each
        from megatron.training.argument_utils import ArgumentGroupFactory

        patched.setattr(ArgumentGroupFactory, "_get_field_docstrings", lambda _self, _kind: {})
    for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        patched.setenv(key, value)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    yield SimpleNamespace(
        core=megatron.core, trains=importlib.util.find_spec("megatron.training") is not None, state=parallel_state
    )
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    patched.undo()


@pytest.fixture
def emitted(tmp_path, monkeypatch):
    """Write a job's folder and import from it."""

    def write(job):
        out = Path(tempfile.mkdtemp(dir=tmp_path)) / "pair"
        folder.write(out, MEGATRON.emit(job).files, force=True)
        monkeypatch.chdir(out)
        monkeypatch.syspath_prepend(str(out))
        for name in ("smelt_layers", "pretrain"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module("smelt_layers")

    return write


def parsed(words, monkeypatch, **changed):
    """Arguments as megatron.training reads and completes them, in fp32 on a CPU."""
    from megatron.training.arguments import parse_args, validate_args

    monkeypatch.setattr(sys, "argv", ["pretrain.py", *words, "--use-cpu-initialization"])
    args = parse_args()
    vars(args).update({"bf16": False} | changed)
    validate_args(args, {})
    return args


def all_words(job, arm):
    """Those of the emitted file and of the engine that needs no GPU."""
    return [*Path(f"{arm}/arguments.txt").read_text().split(), *lines_of(engine("local", job)).split()]


def by_hand(job, arm):
    """The TransformerConfig of the flags, for a megatron-core without the parser."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    flags = {name: values for name, *values in (*arguments(job, arm), *engine("local", job))}
    kind = MLATransformerConfig if "--multi-latent-attention" in flags else TransformerConfig
    names = {"norm_epsilon": "layernorm_epsilon", "num_experts": "num_moe_experts"}
    fields = {"moe_router_dtype": None, "moe_aux_loss_coeff": 0.0}
    for flag, values in flags.items():
        name = flag.removeprefix("--").replace("-", "_")
        name = names.get(name, name)
        if name in kind.__dataclass_fields__:
            fields[name] = literal(*values) if values else True
    off = {
        "--no-persist-layer-norm": "persist_layer_norm",
        "--no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    }
    off |= {"--no-masked-softmax-fusion": "masked_softmax_fusion", "--disable-bias-linear": "add_bias_linear"}
    fields |= {name: False for flag, name in off.items() if flag in flags}
    fields |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "bf16": False}
    return kind(**fields, use_cpu_initialization=True, params_dtype=torch.float32)


def literal(word):
    if word.startswith("["):
        return json.loads(word)
    if "," in word:
        return tuple(map(int, word.split(",")))
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(word)
    return word


def built(megatron, layers, job, arm, monkeypatch, **changed):
    """The arm's GPTModel, from its files alone where there is a parser."""
    from megatron.core.models.gpt import GPTModel

    if megatron.trains:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.training.argument_utils import gpt_config_from_args

        args = parsed(all_words(job, arm), monkeypatch, **changed)
        config = gpt_config_from_args(args)
        return config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    spec, config = job.spec(arm), by_hand(job, arm)
    vars(config).update(changed)
    scaling = spec.rope_scaling
    return GPTModel(
        config,
        getattr(layers, arm)(config),
        vocab_size=spec.vocab_size,
        max_sequence_length=CONTEXT,
        share_embeddings_and_output_weights=spec.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_percent=spec.partial_rotary_factor,
        rotary_base=int(spec.rope_theta),
        rope_scaling=scaling is not None and scaling.rope_type == "llama3",
        seq_len_interpolation_factor=scaling.factor if scaling is not None and scaling.rope_type == "linear" else None,
    )


LEAVES = {
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "self_attn.q_proj.weight": "self_attention.linear_q_proj.weight",  # latent attention only
    "self_attn.q_a_proj.weight": "self_attention.linear_q_down_proj.weight",
    "self_attn.q_a_layernorm.weight": "self_attention.q_layernorm.weight",
    "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
    "self_attn.kv_a_layernorm.weight": "self_attention.kv_layernorm.weight",
    "self_attn.kv_b_proj.weight": "self_attention.linear_kv_up_proj.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "mlp.shared_expert.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "input_layernorm.bias": "input_layernorm.bias",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "post_attention_layernorm.bias": "pre_mlp_layernorm.bias",
}


def as_megatron(model):
    """Our weights under Megatron's names: q, k and v by KV group, gate above up, each expert by itself."""
    ours, spec, found = dict(model.named_parameters()), model.spec, {}
    found["embedding.word_embeddings.weight"] = ours.pop("embed_tokens.weight")
    for leaf in ("weight", "bias"):
        if f"norm.{leaf}" in ours:
            found[f"decoder.final_layernorm.{leaf}"] = ours.pop(f"norm.{leaf}")
    if "lm_head.weight" in ours:
        found["output_layer.weight"] = ours.pop("lm_head.weight")
    for i, layer in enumerate(model.layers):
        own = {
            name.removeprefix(f"layers.{i}."): ours.pop(name) for name in list(ours) if name.startswith(f"layers.{i}.")
        }
        to = f"decoder.layers.{i}."
        attention = layer.self_attn
        for kind in ("weight", "bias") if spec.kv_lora_rank is None else ():
            if f"self_attn.q_proj.{kind}" in own:
                three = (own.pop(f"self_attn.{x}_proj.{kind}").unflatten(0, (attention.g, -1)) for x in "qkv")
                found[f"{to}self_attention.linear_qkv.{kind}"] = torch.cat(list(three), 1).flatten(0, 1)
        for ours_at, theirs in (("mlp.", "mlp."), ("mlp.shared_expert.", "mlp.shared_experts.")):
            if f"{ours_at}gate_proj.weight" in own:
                gate, up = (own.pop(f"{ours_at}{name}_proj.weight") for name in ("gate", "up"))
                found[f"{to}{theirs}linear_fc1.weight"] = torch.cat((gate, up))
        if "mlp.experts.gate_up_proj" in own:
            pairs = zip(own.pop("mlp.experts.gate_up_proj"), own.pop("mlp.experts.down_proj"), strict=True)
            routed = layer.mlp.gate is not None
            for e, (first, second) in enumerate(pairs):
                at = f"{to}mlp.experts.local_experts.{e}." if routed else f"{to}mlp."
                found |= {f"{at}linear_fc1.weight": first, f"{at}linear_fc2.weight": second}
        found |= {to + LEAVES[name]: weight for name, weight in own.items()}
    assert not ours
    return found


def loaded(theirs, ours):
    """Copy our weights; every one of theirs has to be ours."""
    weights = as_megatron(ours)
    assert set(weights) == {name for name, _ in theirs.named_parameters()}
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            weight.copy_(weights[name])
    return weights


def forward(model, ids, labels=None, **given):
    """Logits [B, T, V], or losses [B, T]."""
    T = ids.shape[1]
    mask = torch.ones(1, 1, T, T, dtype=torch.bool).triu(1)
    return model(ids, torch.arange(T).expand_as(ids), mask, labels=labels, **given)


def parameters(spec):
    return Ledger(spec, Setting.of(spec)).as_dict()["parameters"]["total"]


class CausalAttention(torch.nn.Module):
    """In place of Transformer Engine's, the only one that takes keys and values of different sizes."""

    def __init__(self, *_args, softmax_scale=None, **_named):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, *_args, **_named):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return y.permute(2, 0, 1, 3).flatten(2)


def sliding_mask_on_cpu(sq, skv, window):
    """As megatron.core.transformer.utils makes it, which says device="cuda"."""
    whole = torch.ones(sq, skv, dtype=torch.bool)
    return ~whole.triu(skv - sq - window[0]).tril(skv - sq + window[1])


@pytest.fixture
def attends(megatron, monkeypatch):
    """Windows and latent attention on a CPU."""
    import megatron.core.fusions.fused_softmax as softmax
    from megatron.core.models.backends import LocalSpecProvider

    if hasattr(softmax, "get_sliding_window_causal_mask"):
        monkeypatch.setattr(softmax, "get_sliding_window_causal_mask", sliding_mask_on_cpu)

    def latent():
        if not megatron.trains:
            pytest.skip("latent attention of megatron-core 0.16 needs Transformer Engine")
        monkeypatch.setattr(LocalSpecProvider, "core_attention", lambda _self: CausalAttention)

    return latent


@pytest.mark.parametrize(("name", "arm"), list(product(PAIRS, ARMS)))
def test_logits_and_parameters_are_ours(megatron, emitted, attends, monkeypatch, name, arm):
    """fp32 logits within 2e-5 with the same weights; parameters exactly the ledger's."""
    pair = job(name)
    if name.startswith("latent"):
        attends()
    assert all(line.how == "as asked" for line in lines(MEGATRON, pair))
    layers = emitted(pair)
    theirs = built(megatron, layers, pair, arm, monkeypatch).eval()
    ours = initialise(Transformer(pair.spec(arm)), 0).eval()
    assert sum(p.numel() for p in theirs.parameters()) == parameters(pair.spec(arm))
    loaded(theirs, ours)
    for router in (module.gate for module in ours.modules() if getattr(module, "gate", None) is not None):
        router.e_score_correction_bias.uniform_(-0.1, 0.1)
    for mine, layer in zip(ours.layers, theirs.decoder.layers, strict=True):
        if getattr(getattr(layer.mlp, "router", None), "expert_bias", None) is not None:
            layer.mlp.router.expert_bias.copy_(mine.mlp.gate.e_score_correction_bias)
        elif hasattr(mine.mlp, "gate") and mine.mlp.gate is not None:
            mine.mlp.gate.e_score_correction_bias.zero_()
    ids = torch.randint(0, 515, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want, got = ours(ids).logits, forward(theirs, ids)
    assert want.std() > 0.3
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def whole_loss(model, ids, labels, pair):
    """Ours: cross-entropy, auxiliary loss and z-loss, as `verify` adds them up."""
    out = model(ids, labels)
    routed = [r for r in out.routed if r is not None]
    z = pair.training.z * torch.stack([r.z for r in routed]).mean()
    aux = torch.stack([auxiliary_loss(r.count_E, r.mean_score_E) for r in routed]).mean()
    return out.losses.mean() + z + (pair.training.auxiliary * aux if pair.training.balance == "aux" else 0)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("name", "arm", "balance"),
    [
        ("qk-norm", "baseline", "aux"),
        ("qk-norm", "twin", "aux"),
        ("shared, first dense", "twin", "aux"),
        ("sectioned", "twin", "aux"),
        ("sigmoid, groups", "twin", "bias"),
    ],
)
def test_gradients_are_ours(megatron, emitted, monkeypatch, name, arm, balance, recompute):
    """Of cross-entropy, auxiliary loss and z-loss together, all weights, within 1e-5 of the largest of each.

    Recomputing every layer changes nothing, although the core is one call of its first layer.
    """
    pair = job(name, balance=balance)
    layers = emitted(pair)
    if recompute:
        import megatron.core.transformer.transformer_block as block

        module = importlib.import_module("megatron.core.recompute") if megatron.trains else block
        monkeypatch.setattr(module.tensor_parallel, "checkpoint", kept_apart)
    theirs = built(megatron, layers, pair, arm, monkeypatch).train()
    if recompute:
        theirs.config.recompute_granularity, theirs.config.recompute_method = "full", "uniform"
        theirs.config.recompute_num_layers = 1
    ours = initialise(Transformer(pair.spec(arm)), 0)
    loaded(theirs, ours)
    ids = torch.randint(0, 515, (2, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    ids, labels = ids[:, :-1], ids[:, 1:]
    whole_loss(ours, ids, labels, pair).backward()
    forward(theirs, ids, labels).mean().backward()
    weights = dict(ours.named_parameters())
    for weight in weights.values():
        weight.data, weight.grad = weight.grad, None
    for name, want in as_megatron(ours).items():
        got = theirs.get_parameter(name).grad
        assert (got - want).abs().max() < 1e-5 * want.abs().max() + 1e-9, name


def kept_apart(function, _distribute, *inputs):
    """torch's checkpoint in place of Megatron's, which keeps the random state of a GPU."""
    return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=True)


@pytest.mark.parametrize(("name", "arm"), [("plain", "baseline"), ("three visits", "twin"), ("sectioned", "twin")])
def test_a_cache_has_one_slot_for_each_executed_layer(megatron, emitted, monkeypatch, name, arm):
    """Token by token after a prefill equals the whole sequence, within 2e-5; slots are numbered as layers run."""
    from megatron.core.inference.contexts import StaticInferenceContext

    pair = job(name)
    layers = emitted(pair)
    model = built(megatron, layers, pair, arm, monkeypatch).eval()
    for layer in model.decoder.layers:
        layer.self_attention._allocate_memory = partial(memory, layer.self_attention)
    ids = torch.randint(0, 515, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
    cache = StaticInferenceContext(2, CONTEXT)
    found = []
    with torch.no_grad():
        whole = forward(model, ids)
        for start, stop in ((0, 20), *((i, i + 1) for i in range(20, CONTEXT))):
            T = stop - start
            mask = torch.ones(1, 1, T, stop, dtype=torch.bool).triu(1 + start)
            place = torch.arange(start, stop).expand(2, -1)
            given = {"inference_context": cache} | ({} if megatron.trains else {"runtime_gather_output": True})
            found.append(model(ids[:, start:stop], place, mask, **given)[:, -1])
            cache.sequence_len_offset = stop
    assert sorted(cache.key_value_memory_dict) == list(range(1, pair.spec(arm).effective_depth + 1))
    order = [step.layer for step in execution_order(pair.spec(arm))]
    groups = {slot: memory[0].shape[2] for slot, memory in cache.key_value_memory_dict.items()}
    assert [groups[slot + 1] for slot in range(len(order))] == [
        model.decoder.layers[i].config.num_query_groups for i in order
    ]
    torch.testing.assert_close(torch.stack(found, 1), whole[:, 19:], atol=TOLERANCE, rtol=0)


def memory(attention, length, batch, size, dtype):
    """A slot on the CPU."""
    return torch.empty(length, batch, attention.num_query_groups_per_partition, size, dtype=dtype)


@pytest.mark.parametrize("name", ["plain", "shared, first dense", "sectioned", "tied", "latent", "one expert"])
def test_weights_start_as_ours(megatron, emitted, attends, monkeypatch, name):
    """Standard deviations of every matrix of the twin within six of their own errors of 1/sqrt(fan-in) and its kin.

    Norms are 1. The standard deviation of n normal numbers is itself uncertain by 1 / sqrt(2 n) of it.
    """
    pair = job(name)
    if name == "latent":
        attends()
    layers = emitted(pair)
    theirs = built(megatron, layers, pair, "twin", monkeypatch)
    ours = Transformer(pair.twin)
    want = {id(w): deviation(ours, name, w) for name, w in ours.named_parameters()}
    stds = copy.deepcopy(ours)
    with torch.no_grad():
        for mine, other in zip(ours.parameters(), stds.parameters(), strict=True):
            std = want[id(mine)]
            other.fill_(-1.0 if std is None else std)
    for name, std in as_megatron(stds).items():
        weight = theirs.get_parameter(name)
        if weight.ndim < 2:
            assert (weight == 1).all(), name
            continue
        assert abs(weight.std() / std.flatten()[0] - 1) < 6 / math.sqrt(2 * weight.numel()), name
        assert abs(weight.mean()) < 6 * std.flatten()[0] / math.sqrt(weight.numel()), name


RANKS = """
import contextlib, json, sys
from types import SimpleNamespace
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.arguments import parse_args, validate_args

torch.cuda.current_device = lambda: "cpu"
torch.cuda.get_device_properties = lambda *_args: SimpleNamespace(major=9)
CudaRNGStatesTracker.fork = lambda *_args: contextlib.nullcontext()
sys.argv = ["pretrain.py", *open("words").read().split()]
args = parse_args()
args.bf16 = False
with contextlib.redirect_stdout(None):
    validate_args(args, {})
torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel(2, 1, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
torch.manual_seed(parallel_state.get_tensor_model_parallel_rank())
config = gpt_config_from_args(args)
model = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
found = {name: (list(weight.shape), weight.std().item()) for name, weight in model.named_parameters()}
with open(f"found{torch.distributed.get_rank()}", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.skipif(importlib.util.find_spec("megatron.training") is None, reason="needs megatron.training")
def test_shards_start_as_the_whole_does(emitted):
    """Two tensor ranks: the rows of what leads back are split, and half the fan-in is not taken for all of it.

    Experts are whole and shared out, so the two widths are split differently in one layer.
    """
    pair = job("shared, first dense", layout=launch.Layout("local", gpus=2, tensor=2, expert=2))
    pair = replace(pair, **{arm: pair.spec(arm).replace(vocab_size=516) for arm in ARMS})
    emitted(pair)
    words = [word for word in all_words(pair, "twin") if word != "--sequence-parallel"]  # torch's norms have none
    Path("words").write_text(" ".join(words))
    Path("ranks.py").write_text(RANKS)
    paths = os.pathsep.join([str(Path.cwd()), *sys.path])
    env = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ranks.py"]
    done = subprocess.run(run, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    back = (2 * pair.twin.effective_depth) ** -0.5
    for rank in range(2):
        found = json.loads(Path(f"found{rank}").read_text())
        for name, shape, std in (
            ("self_attention.linear_proj.weight", [64, 48], back * 96**-0.5),
            ("mlp.experts.local_experts.0.linear_fc2.weight", [64, 40], back * 40**-0.5),
            ("mlp.shared_experts.linear_fc2.weight", [64, 28], back * 56**-0.5),
            ("self_attention.linear_qkv.weight", [96, 64], 64**-0.5),
            ("mlp.router.weight", [8, 64], 64**-0.5),
        ):
            got = found[f"decoder.layers.2.{name}"]
            assert got[0] == shape, name
            assert abs(got[1] / std - 1) < 6 / math.sqrt(2 * math.prod(shape)), name
        assert abs(found["decoder.layers.0.mlp.linear_fc2.weight"][1] / (back * 72**-0.5) - 1) < 0.1
        assert "decoder.layers.2.mlp.experts.local_experts.4.linear_fc2.weight" not in found


@pytest.mark.skipif(importlib.util.find_spec("megatron.training") is None, reason="needs megatron.training")
def test_the_script_trains_saves_and_goes_on(emitted, unused_tcp_port):
    """pretrain.py in Megatron's own loop: a sectioned twin learns, and its checkpoint holds its weights exactly.

    In fp32 with the plain optimiser, for bf16 and the distributed one ask for tensors of a GPU; that optimiser's next
    step is another one after a restart, of Megatron's own layers too, so one loss is compared.
    """
    pair = job("sectioned")
    emitted(pair)
    gpu_only = ("--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
    words = [word for word in all_words(pair, "twin") if word not in gpu_only]
    Path("words").write_text(" ".join(words))
    given = "--mock-data --distributed-backend gloo --num-workers 0 --log-interval 1 --eval-interval 4 --eval-iters 1"
    given += " --lr-decay-iters 4 --lr-wsd-decay-iters 1 --lr-warmup-iters 1 --save kept --save-interval 2"
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "TORCHDYNAMO_DISABLE": "1"}
    env = os.environ | place | {"MASTER_PORT": str(unused_tcp_port), "PYTHONPATH": os.pathsep.join(sys.path)}
    runner = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("megatron_on_cpu.py"))]

    def losses(*more):
        run = [*runner, "pretrain.py", "@words", *given.split(), "--train-iters", "4", *more]
        done = subprocess.run(run, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return re.findall(r"iteration +(\d)/.* lm loss: (\S+)", done.stdout)

    whole = losses()
    assert [step for step, _ in whole] == ["1", "2", "3", "4"]
    assert float(whole[3][1]) < float(whole[0][1])
    Path("kept/latest_checkpointed_iteration.txt").write_text("2")
    assert losses("--load", "kept")[0] == whole[2]


@pytest.fixture
def unused_tcp_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_what_runs_layers_by_itself_is_refused(megatron, emitted, monkeypatch):
    """Megatron's own ways of walking the layers would run a looped layer once, silently."""
    pair = job("plain")
    layers = emitted(pair)
    config = by_hand(pair, "twin")
    for name, value in (
        ("overlap_moe_expert_parallel_comm", True),
        ("mtp_num_layers", 1),
        ("cuda_graph_impl", "local"),
    ):
        with pytest.raises(ValueError, match=name):
            layers.twin(SimpleNamespace(**vars(config) | {name: value}))


def test_layers_keep_their_names_in_a_checkpoint(megatron, emitted, monkeypatch):
    """A uniform twin is stored as a plain model of its layers, a sectioned one layer by layer."""
    for name in ("plain", "sectioned"):
        pair = job(name)
        layers = emitted(pair)
        model = built(megatron, layers, pair, "twin", monkeypatch)
        group = torch.distributed.group.WORLD
        stored = model.decoder.sharded_state_dict("decoder.", metadata={"dp_cp_group": group})
        shapes = {entry.key: entry.global_shape for entry in stored.values() if hasattr(entry, "global_shape")}
        if name == "plain":
            assert shapes["decoder.layers.self_attention.linear_proj.weight"] == (8, 64, 96)
        else:
            assert {f"decoder.layers.{i}.self_attention.linear_qkv.weight" for i in range(8)} <= set(shapes)
            assert shapes["decoder.layers.2.self_attention.linear_qkv.weight"] == (144, 64)


needs_parser = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None, reason="needs megatron.training (megatron-core >= 0.19)"
)


@needs_parser
@pytest.mark.parametrize(
    ("name", "balance"),
    [*((name, "aux") for name in PAIRS), ("plain", "bias"), ("plain", "none"), ("sigmoid, groups", "bias")],
)
def test_every_flag_is_known_and_kept(megatron, emitted, monkeypatch, name, balance):
    """The real parser takes every word, and validation leaves every value as it was written."""
    pair = job(name, balance=balance, layout=launch.Layout("local", gpus=1))
    emitted(pair)
    for arm in ARMS:
        args = parsed(all_words(pair, arm), monkeypatch)
        assert args.spec == ["smelt_layers", arm]
        assert args.padded_vocab_size == 515
        other = {"norm-epsilon": "layernorm_epsilon", "disable-bias-linear": None, "bf16": None, "tokenizer-type": None}
        for flag, *values in arguments(pair, arm):
            field = other.get(flag[2:], flag[2:].replace("-", "_"))
            if field and len(values) == 1 and hasattr(args, field):
                kept = getattr(args, field)
                assert kept in (*values, literal(*values), [literal(*values)]), flag


READ = """
add-qkv-bias disable-bias-linear ffn-hidden-size group-query-attention hidden-size kv-channels kv-lora-rank
make-vocab-size-divisible-by max-position-embeddings moe-ffn-hidden-size moe-layer-freq
moe-router-enable-expert-bias moe-router-group-topk moe-router-num-groups moe-router-pre-softmax
moe-router-score-function moe-router-topk moe-router-topk-scaling-factor moe-shared-expert-gate
moe-shared-expert-intermediate-size mtp-num-layers multi-latent-attention no-position-embedding norm-epsilon
normalization num-attention-heads num-experts num-layers num-query-groups padded-vocab-size
position-embedding-type q-lora-rank qk-head-dim qk-layernorm qk-pos-emb-head-dim rope-scaling-factor rope-type
rotary-base rotary-interleaved rotary-percent rotary-scaling-factor rotary-seq-len-interpolation-factor
softmax-type spec swiglu tensor-model-parallel-size untie-embeddings-and-output-weights use-rope-scaling
use-rotary-position-embeddings v-head-dim vocab-size window-attn-skip-freq window-size
"""
REFUSED = """
attention-output-gate bert-no-binary-head decoder-num-layers disable-mamba-mem-eff-path encoder-num-layers
experimental-attention-variant heterogeneous-layers-config-encoded-json heterogeneous-layers-config-path
hybrid-layer-pattern hybrid-override-pattern is-hybrid-model linear-attention-freq linear-conv-kernel-dim
linear-key-head-dim linear-num-key-heads linear-num-value-heads linear-value-head-dim logits-load-dir
mamba-head-dim mamba-num-groups mamba-num-heads mamba-state-dim moe-latent-size moe-upcycling-granularity
moe-use-upcycling mrope-section mtp-hybrid-override-pattern onnx-safe openai-gelu
relative-attention-max-distance relative-attention-num-buckets sft squared-relu use-checkpoint-args
use-mp-args-from-checkpoint-args vocab-extra-ids yaml-cfg
"""
"""Other architectures, or arguments that come from elsewhere; beside them every flag of the parts below."""
OTHER_PARTS = ("biencoder", "vision", "rl")


@needs_parser
def test_every_flag_of_the_parser_is_known_to_the_reader():
    """Read, harmless, another function, or refused: nothing of megatron-core 0.19's 800 flags is new to it."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    kept, others = set(), set()
    for group in parser._action_groups:
        options = {named(o[2:]) for action in group._group_actions for o in action.option_strings if o[1] == "-"}
        (others if group.title in OTHER_PARTS else kept).update(options)
    kept = {name for name in kept if name != "help" and "dsa-" not in name}
    read = set(map(named, READ.split()))
    assert kept - HARMLESS - UNLIKE.keys() - read == set(REFUSED.split())
    assert not others & (HARMLESS | UNLIKE.keys() | read)
    assert not HARMLESS & (UNLIKE.keys() | read | set(REFUSED.split()))


@needs_parser
@pytest.mark.parametrize("name", PAIRS)
def test_bridge_makes_the_same_configuration(megatron, emitted, monkeypatch, name):
    """Every field that Bridge's providers share with TransformerConfig has the value that the flags give it."""
    from megatron.training.argument_utils import gpt_config_from_args

    pair = job(name)
    emitted(pair)
    for arm in ARMS:
        config = gpt_config_from_args(parsed(all_words(pair, arm), monkeypatch))
        given = megatron_bridge.model(pair, arm)
        engine_s = {"transformer_impl", "moe_grouped_gemm", "moe_token_dispatcher_type"}
        for field in given.keys() - engine_s - {"should_pad_vocab", "seq_length", "rope_scaling_factor"}:
            value = tuple(given[field]) if field == "window_size" else given[field]
            assert getattr(config, field) == value, field


@needs_parser
def test_the_schedule_is_warmup_stable_decay(megatron, emitted, monkeypatch):
    """Linear up, flat, linear down to 0: each step's rate, exactly as Megatron's scheduler computes it."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    pair = job("plain")
    t = pair.training
    emitted(pair)
    args = parsed(all_words(pair, "twin"), monkeypatch)
    batch = args.global_batch_size
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[]),
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * batch,
        lr_decay_steps=args.lr_decay_iters * batch,
        lr_decay_style=args.lr_decay_style,
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=args.train_iters,
        wd_incr_style="constant",
        wsd_decay_steps=args.lr_wsd_decay_iters * batch,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
    assert args.train_iters == t.steps == 64
    for step in range(1, t.steps + 1):
        scheduler.num_steps = step * batch
        want = min(1, step / max(1, t.warmup_steps), (t.steps - step) / t.decay_steps)
        assert scheduler.get_lr({}) == pytest.approx(want * t.rates[1], abs=1e-15)


@needs_parser
@pytest.mark.parametrize("name", [name for name in PAIRS if name != "windowed"])
def test_the_meter_counts_executed_layers(megatron, emitted, monkeypatch, name):
    """Megatron's own formula through pretrain.py's meter is the ledger's count under the convention `megatron`."""
    pair = job(name)
    emitted(pair)
    pretrain = importlib.import_module("pretrain")
    from megatron.training import training as loop

    for arm in ARMS:
        args = parsed(all_words(pair, arm), monkeypatch)
        meter = pretrain.meter(loop.num_floating_point_operations, sys.modules["smelt_layers"].Arm.named(arm))
        spec = pair.spec(arm)
        ledger = Ledger(spec, Setting.of(spec, CONVENTIONS["megatron"], CONTEXT)).as_dict()
        assert meter(args, 8) == pytest.approx(8 * CONTEXT * ledger["flops"]["training_per_token"], rel=1e-12)


@needs_parser
def test_the_example_is_built_whole(megatron, emitted, monkeypatch):
    """Both arms of examples/smelt.yaml, 4 billion parameters each, on torch's meta device: exactly the ledger's."""
    solved = read_pair(EXAMPLE)
    pair = Job("smelt_pair", solved.baseline, solved.twin, training(solved.baseline, solved.twin, 4096))
    layers = emitted(pair)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "meta")
    for arm in ARMS:
        with torch.device("meta"):
            model = built(megatron, layers, pair, arm, monkeypatch, use_cpu_initialization=False)
        assert sum(p.numel() for p in model.parameters()) == parameters(pair.spec(arm))
        assert len(model.decoder.layers) == 12


@needs_parser
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_pipeline_keeps_the_core_in_one_stage(megatron, emitted, monkeypatch, stages):
    """Each stage builds the layers that `launch.stages` gives it; a layout that cuts the core is refused."""
    from megatron.training.argument_utils import gpt_config_from_args

    layout = launch.Layout("torchrun", gpus=2 * stages, pipeline=stages)
    pair = job("shared, first dense", layout=layout)
    layers = emitted(pair)
    monkeypatch.setenv("WORLD_SIZE", str(layout.gpus))
    config = gpt_config_from_args(parsed(all_words(pair, "twin"), monkeypatch))
    seen = []
    for rank in range(stages):
        monkeypatch.setattr(megatron.state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", rank)
        seen.append([spec.params["number"] for spec in layers.twin(config).layer_specs])
    assert seen == [list(stage) for stage in launch.stages(pair.twin, stages)]
    monkeypatch.setenv("WORLD_SIZE", "2")
    cut = ("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "Ettt|tttttL")
    config = gpt_config_from_args(parsed([*all_words(pair, "twin"), *cut], monkeypatch))
    monkeypatch.setattr(megatron.state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", 1)
    with pytest.raises(ValueError, match="layers 2 to 5 have to be in one pipeline stage"):
        layers.twin(config)
