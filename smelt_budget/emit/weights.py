"""How do weights get from one home to another? As units, read or drawn when a file is written, never all at once.

    random      initialise() of the model, one parameter at a time        -> hf, hf-unrolled
    a run       safetensors that verify trained, one tensor at a time     -> hf, hf-unrolled
    hf          safetensors, also as save_pretrained wrote them           -> a folder that smelt_budget.model loads
    unrolled    the same of a plain class, its copies equal               -> likewise

Names on disk are those of `smelt_budget.model.weights`; mixtral has its own (block_sparse_moe, w1 w2 w3).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smelt_budget.emit.launch import Arm
from smelt_budget.emit.target import ARMS, Content, Job
from smelt_budget.errors import BadInput
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.blocks import Core
from smelt_budget.spec.model import checked

RANDOM = "random"
CORRECTION = "e_score_correction_bias"
MOST_SHOWN = 5
Tensors = dict[str, Any]
"""Name on disk to torch tensor."""


@dataclass(frozen=True)
class Unit:
    """Tensors that come together."""

    names: tuple[str, ...]
    bytes: int
    make: Callable[[], Tensors]

    def renamed(self, named: Callable[[str], str], factor: Callable[[str], float] = lambda name: 1.0) -> Unit:
        """A copy under other names, multiplied by what belongs to the old one."""

        def make() -> Tensors:
            return {named(name): x * factor(name) for name, x in self.make().items()}

        return Unit(tuple(map(named, self.names)), self.bytes, make)


def source(job: Job, arm: Arm) -> list[Unit]:
    """The weights that were asked for, of one arm; those of a run belong to `of_run(job)`."""
    if job.weights == RANDOM:
        return drawn(job.spec(arm), job.seed)
    return stored(job.spec(arm), place(Path(job.weights or ""), arm, job.seed))


def of_run(job: Job) -> tuple[Job, tuple[str, ...]]:
    """The job with the specs that its weights have, and a note where they are not the pair's: verify trains a proxy.

    Raises:
        BadInput: the folder holds no weights of both arms.
    """
    if job.weights is None or job.weights == RANDOM:
        return job, ()
    found = {arm: spec_at(place(Path(job.weights), arm, job.seed)) for arm in ARMS}
    if all(alike(found[arm]) == alike(job.spec(arm)) for arm in ARMS):
        return job, ()
    twin = found["twin"]
    note = (
        f"the weights in {job.weights} are not of this pair but of a proxy (twin: hidden_size {twin.hidden_size}, "
        f"{twin.num_hidden_layers} layers): the proxy is what was emitted"
    )
    return replace(job, baseline=found["baseline"], twin=twin), (note,)


def alike(spec: ModelSpec) -> ModelSpec:
    """The spec without what a model directory cannot tell: a context that was left out, layer kinds that were not."""
    return without_usual_kinds(spec).replace(max_position_embeddings=None)


def without_usual_kinds(spec: ModelSpec) -> ModelSpec:
    """Layer kinds left out where they are what they would be."""
    usual = "full_attention" if spec.sliding_window is None else "sliding_attention"
    return spec.replace(layer_types=None) if set(spec.layer_types or ()) <= {usual} else spec


def place(folder: Path, arm: str, seed: int) -> Path:
    """Where an arm's weights lie: in a run of verify, or in the folder of an earlier emission that was trained.

    Raises:
        BadInput: neither.
    """
    own = folder / arm / f"seed-{seed}"
    if (own / "spec.json").is_file():
        return own
    for emitted in (folder / f"run-{arm}", folder / arm):  # what train.py wrote, before what it began with
        if (emitted / "config.json").is_file() and any(emitted.glob("*.safetensors")):
            return emitted
    seeds = sorted(path.parent.name.removeprefix("seed-") for path in (folder / arm).glob("seed-*/spec.json"))
    raise BadInput(
        f"{folder} holds no trained {arm}" + (f" of seed {seed}" if seeds else ""),
        f"fix: --seed {seeds[0]}" if seeds else "fix: --weights random, or the folder of a run of verify",
    )


def spec_at(folder: Path) -> ModelSpec:
    """The spec of the weights in a folder.

    Raises:
        BadInput: it cannot be read.
    """
    if (folder / "spec.json").is_file():
        return checked(mapping(folder / "spec.json"), str(folder / "spec.json"))
    return spec_of(mapping(folder / "config.json"), str(folder / "config.json"))


def mapping(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        BadInput: it is none.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise BadInput(f"{path} is not a JSON object")
    return data


def spec_of(config: dict[str, Any], origin: str) -> ModelSpec:
    """The spec of an emitted `config.json`, also as save_pretrained wrote it.

    Raises:
        BadInput: it is no config of target hf.
    """
    if config.get("model_type") != "smelt_moe":
        raise BadInput(f"{origin} is a {config.get('model_type')!r:.40}, not a model that target hf emitted")
    fields = {name: config[name] for name in ModelSpec.model_fields if config.get(name) is not None}
    rope = dict(config.get("rope_parameters") or {})
    fields["rope_theta"] = rope.pop("rope_theta", 10_000.0)
    fields["partial_rotary_factor"] = rope.pop("partial_rotary_factor", 1.0)
    if rope.get("rope_type", "default") != "default":
        fields["rope_scaling"] = rope
    fields["router_correction_bias"] = config.get("group_scored_by", 1) == 2
    if config.get("loop_end"):
        fields["loop"] = {
            "start": config.get("loop_start", 0),
            "stop": config["loop_end"],
            "visits": config.get("loop_visits", 1),
            "residual_scale": config.get("loop_residual_scale", 1.0),
        }
        core = {name: config.get(f"core_{name}") for name in Core.model_fields}
        core = {name: value for name, value in core.items() if value is not None}
        fields |= {"core": core} if core else {}
    return without_usual_kinds(checked(fields, origin))


def drawn(spec: ModelSpec, seed: int) -> list[Unit]:
    """What `initialise` would give a model, one parameter at a time; corrections are 0."""
    import torch

    from smelt_budget.model.initialise import initial

    model, units = skeleton(spec), []
    for name, tensor, names in homes(model):

        def make(name: str = name, tensor: Any = tensor) -> Tensors:
            whole = torch.zeros(tensor.shape) if name.endswith(CORRECTION) else initial(model, name, tensor, seed)
            return views(model, name, whole)

        units.append(Unit(names, 4 * tensor.numel(), make))
    return units


def stored(spec: ModelSpec, folder: Path) -> list[Unit]:
    """Weights on disk, checked against the spec by name and shape; experts may also lie together, as in memory.

    Raises:
        BadInput: a file is missing or broken, a name missing, unknown or there twice, a shape another one.
    """
    from smelt_budget.model.weights import FLOATS

    found = opened(folder)
    slices = {name: file.get_slice(name) for name, file in found.items()}
    model, units, problems, known = skeleton(spec), list[Unit](), list[str](), set[str]()
    for name, tensor, names in homes(model):
        whole = outer(name)
        together = whole in found and names != (whole,)
        shapes = (
            {whole: list(tensor.shape)}
            if together
            else {n: list(x.shape) for n, x in views(model, name, tensor).items()}
        )
        known |= shapes.keys()
        absent = [n for n in shapes if n not in found]
        if absent and name.endswith(CORRECTION):
            continue
        problems += [f"missing: {n}" for n in absent]
        for n in shapes.keys() & found.keys():
            if slices[n].get_shape() != shapes[n]:
                problems.append(f"{n} is {slices[n].get_shape()}, the model's is {shapes[n]}")
            if slices[n].get_dtype() not in FLOATS:
                problems.append(f"{n} is {slices[n].get_dtype()}, not a plain float")

        def make(name: str = name, shapes: Any = shapes, together: bool = together) -> Tensors:
            tensors = {n: found[n].get_tensor(n) for n in shapes}
            return views(model, name, tensors[outer(name)]) if together else tensors

        units.append(Unit(names, sum(size(slices[n]) for n in shapes if n in found), make))
    problems += [f"unknown: {n}" for n in found if n not in known]
    if problems:
        more = [f"and {len(problems) - MOST_SHOWN} more"] if len(problems) > MOST_SHOWN else []
        raise BadInput(f"the weights in {folder} are not this model's", *problems[:MOST_SHOWN], *more)
    return units


def opened(folder: Path) -> dict[str, Any]:
    """Every name on disk and the open file that has it.

    Raises:
        BadInput: a file is missing or broken, or a name stands in two.
    """
    from safetensors import SafetensorError, safe_open

    from smelt_budget.model.weights import weight_files

    try:
        files = [safe_open(file, "pt") for file in weight_files(folder)]
    except (SafetensorError, OSError) as error:
        raise BadInput(f"the weights in {folder} cannot be read: {error}") from None
    found = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    twice = sum(len(file.keys()) for file in files) - len(found)
    if twice:
        raise BadInput(f"the weights in {folder} have {twice} names in two files")
    return found


def skeleton(spec: ModelSpec) -> Any:
    """The model without memory: names and shapes."""
    import torch

    from smelt_budget.model import Transformer

    with torch.device("meta"):
        return Transformer(spec)


def homes(model: Any) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Every parameter and correction: its name in our model, its tensor, its names on disk."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, tensor, tuple(views(model, name, tensor))


def views(model: Any, name: str, tensor: Any) -> Tensors:
    """A tensor of our model as those on disk."""
    from smelt_budget.model.weights import disk_views

    return dict(disk_views(model, {name: tensor}))


def outer(name: str) -> str:
    """A name of our model under Hugging Face's prefix."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def size(piece: Any) -> int:
    """Bytes of a tensor on disk."""
    count = 1
    for length in piece.get_shape():
        count *= length
    return count * {"F64": 8, "F32": 4}.get(piece.get_dtype(), 2)


def corrected(units: Iterable[Unit], wanted: bool, spec: ModelSpec) -> list[Unit]:
    """The units with a correction for every router (0 where none is stored), or with none at all."""
    import torch

    kept = [unit for unit in units if wanted or not unit.names[0].endswith(CORRECTION)]
    there = {name for unit in kept for name in unit.names}
    for inner, tensor in skeleton(spec).named_buffers() if wanted else ():
        name, experts = outer(inner), len(tensor)
        if name not in there:
            kept.append(Unit((name,), 4 * experts, lambda name=name, E=experts: {name: torch.zeros(E)}))
    return kept


def has_corrections(units: Iterable[Unit]) -> bool:
    """Whether a run moved any: zeros are not stored."""
    return any(name.endswith(CORRECTION) for unit in units for name in unit.names)


def contents(units: list[Unit]) -> dict[str, Content]:
    """model.safetensors, or shards and their index, each written when its turn comes."""
    from smelt_budget.model.weights import INDEX, SHARD_BYTES, SINGLE

    shards: list[list[Unit]] = [[]]
    for unit in units:
        if shards[-1] and sum(u.bytes for u in shards[-1]) + unit.bytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(unit)
    if len(shards) == 1:
        return {SINGLE: writer(shards[0])}
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    index = {
        "metadata": {"total_size": sum(unit.bytes for unit in units)},
        "weight_map": {
            name: file for file, shard in zip(files, shards, strict=True) for unit in shard for name in unit.names
        },
    }
    made: dict[str, Content] = {file: writer(shard) for file, shard in zip(files, shards, strict=True)}
    return made | {INDEX: json.dumps(index, indent=1) + "\n"}


def writer(units: list[Unit]) -> Callable[[Path], None]:
    """What writes them into one file."""

    def write(path: Path) -> None:
        from safetensors.torch import save_file

        tensors = {name: x.detach().contiguous() for unit in units for name, x in unit.make().items()}
        save_file(tensors, path, {"format": "pt"})

    return write


def from_hf(folder: Path, out: Path) -> ModelSpec:
    """A trained directory of target hf as a folder that our model loads: `spec.json` and safetensors; its spec.

    Raises:
        BadInput: it is no such directory, its weights are not whole, or `out` is taken.
    """
    spec = spec_of(mapping(folder / "config.json"), str(folder / "config.json"))
    put(out, {"spec.json": json.dumps(spec.compact(), indent=1), **contents(stored(spec, folder))})
    return spec


def put(out: Path, files: dict[str, Content]) -> None:
    """Write a new folder."""
    from smelt_budget.emit.folder import write

    write(out, files, force=False)
