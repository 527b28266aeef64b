"""What do the families share? A config.json being read key by key, and the pieces most of them spell alike.

A missing width is an error even where the family's class has a default for it: class defaults are not checkpoint
values (OLMoE's would double the model).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from smelt_budget.errors import BadInput

Fields = dict[str, Any]
REQUIRED: Any = object()

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "experts_per_token", "moe_top_k", "moe_k", "top_k_experts")
MOST_LAYERS = 10_000


class Config:
    """A config.json being read: which keys were taken, so that what is left can be judged."""

    def __init__(self, data: dict[str, Any], origin: str):
        self.data, self.origin = data, origin
        self.taken: set[str] = set()
        self.set_aside: set[str] = set()
        self.functions: list[str] = []
        """Functions without weights that the torch model does otherwise."""

    def unlike(self, what: str) -> None:
        """Note a function without weights that the torch model does otherwise; no weight and no count differs."""
        if what not in self.functions:
            self.functions.append(what)

    def aside(self, *keys: str) -> None:
        """Keys this family's class does not read; listed with the harmless ones."""
        self.set_aside.update(key for key in keys if key in self.data)
        self.taken.update(keys)

    def take(self, key: str, default: Any = REQUIRED) -> Any:
        """A value; null counts as absent. Without a default a missing key is an error."""
        self.taken.add(key)
        value = self.data.get(key)
        if value is None:
            if default is REQUIRED:
                self.fail(f"{key} is missing, and never guessed")
            return default
        return value

    def whole(self, key: str, default: Any = REQUIRED) -> Any:
        """A non-negative integer; booleans, text and floats are not numbers of things."""
        value = self.take(key, default)
        if value is default:
            return value
        if type(value) is not int or value < 0:
            self.fail(f"{key} is {value!r:.40}, not a whole number")
        return value

    def number(self, key: str, default: float) -> float:
        """A number, as a float; for functions without weights, which have defaults."""
        return self.as_number(key, self.take(key, default))

    def as_number(self, key: str, value: Any) -> float:
        """A value of this file as a float."""
        if type(value) not in (int, float):
            self.fail(f"{key} is {value!r:.40}, not a number")
        try:
            return float(value)
        except OverflowError:
            self.fail(f"{key} is a number of {len(str(value))} digits")

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.take(key, default)
        if type(value) is not bool:
            self.fail(f"{key} is {value!r:.40}, not true or false")
        return value

    def items(self, key: str, default: Any = None) -> Any:
        """A list; `None` where the key is absent or null."""
        value = self.take(key, default)
        if value is not default and not isinstance(value, list):
            self.fail(f"{key} is {value!r:.40}, not a list")
        return value

    def one_of(self, keys: tuple[str, ...], default: Any = REQUIRED) -> Any:
        """A whole number that goes by several names; two names with two values are an error."""
        found = {key: self.whole(key) for key in keys if self.data.get(key) is not None}
        self.taken.update(keys)
        if len(set(found.values())) > 1:
            self.fail(", ".join(f"{k} is {v}" for k, v in found.items()) + ": one quantity, two values")
        if not found and default is REQUIRED:
            self.fail(f"{keys[0]} is missing, and never guessed")
        return next(iter(found.values()), default)

    def inner(self, key: str) -> Config:
        """A nested mapping, read on its own; leftovers inside it count as leftovers of the file."""
        value = self.take(key)
        if not isinstance(value, dict):
            self.fail(f"{key} is {value!r:.40}, not a mapping")
        return Config(value, f"{self.origin} {key}")

    def leftover(self) -> Fields:
        """Keys nobody took."""
        return {key: value for key, value in self.data.items() if key not in self.taken}

    def fail(self, what: str) -> NoReturn:
        """Raise with the file named."""
        raise BadInput(f"{self.origin}: {what}")


def base(c: Config) -> Fields:
    """What every family spells alike."""
    layers = c.whole("num_hidden_layers")
    if not 1 <= layers <= MOST_LAYERS:
        c.fail(f"num_hidden_layers is {layers}, not between 1 and {MOST_LAYERS}")
    return {
        "hidden_size": c.whole("hidden_size"),
        "num_hidden_layers": layers,
        "vocab_size": c.whole("vocab_size"),
        "max_position_embeddings": c.whole("max_position_embeddings", None),
        "tie_word_embeddings": c.flag("tie_word_embeddings", False),
    }


def grouped_query(c: Config, *, kv_default: bool = False, head_default: bool = False) -> Fields:
    """Heads. `kv_default`/`head_default`: the class has a number of its own, so an absent key is not derived."""
    if kv_default and "num_key_value_heads" not in c.data:
        c.fail("num_key_value_heads is missing; the class default is not the checkpoint's. Null means all heads")
    if head_default and "head_dim" not in c.data:
        c.fail("head_dim is missing; the class default is not the checkpoint's. Null means hidden_size / heads")
    return {
        "num_attention_heads": c.whole("num_attention_heads"),
        "num_key_value_heads": c.whole("num_key_value_heads", None),
        "head_dim": c.whole("head_dim", None),
    }


def experts(c: Config, width: str) -> Fields:
    """Routed experts under any of their names; `width` is where this family keeps the expert width."""
    count = c.one_of(EXPERTS)
    return {
        "num_experts": count,
        "num_experts_per_tok": c.one_of(TOP_K),
        "moe_intermediate_size": c.whole(width),
    }


def listed_windows(c: Config, fields: Fields, names: dict[str, str] | None = None) -> tuple[str, ...] | None:
    """`layer_types`, every kind checked; a kind that cannot be counted exactly is refused by name."""
    kinds = c.items("layer_types")
    if kinds is None:
        return None
    known = {"full_attention": "full_attention", "sliding_attention": "sliding_attention"} | (names or {})
    for kind in kinds:
        if not isinstance(kind, str) or kind not in known:
            c.fail(f"layer_types has {kind!r:.40}, a layer that cannot be counted exactly here")
    if len(kinds) != fields["num_hidden_layers"]:
        c.fail(f"layer_types lists {len(kinds)} layers, num_hidden_layers is {fields['num_hidden_layers']}")
    return tuple(known[kind] for kind in kinds)


def every_layer_window(c: Config) -> Fields:
    """Mistral-style: one window for all layers, or null for none."""
    return {"sliding_window": c.whole("sliding_window", None) or None}


def qwen_windows(c: Config, fields: Fields, rule: Callable[[int, int], bool]) -> Fields:
    """Qwen's switch: `sliding_window` holds only with `use_sliding_window`; `rule` says in which layers."""
    use, window = c.flag("use_sliding_window", False), c.whole("sliding_window", None)
    kinds = listed_windows(c, fields)
    if kinds is None and use and window:
        first = c.whole("max_window_layers")
        kinds = tuple(
            "sliding_attention" if rule(i, first) else "full_attention" for i in range(fields["num_hidden_layers"])
        )
    if kinds is None or "sliding_attention" not in kinds:
        return {}
    if not use:
        c.fail("layer_types has sliding_attention but use_sliding_window is not true")
    return {"sliding_window": window, "layer_types": kinds}


def sparse_steps(c: Config, fields: Fields) -> tuple[int, ...]:
    """Qwen MoE: layer i routes iff it is not listed dense and (i + 1) divides by decoder_sparse_step."""
    step, listed = c.whole("decoder_sparse_step", 1), c.items("mlp_only_layers", ())
    if step < 1:
        c.fail("decoder_sparse_step is 0")
    if any(type(i) is not int or not 0 <= i < fields["num_hidden_layers"] for i in listed):
        c.fail(f"mlp_only_layers is {listed!r:.40}, not a list of layers below {fields['num_hidden_layers']}")
    return tuple(i for i in range(fields["num_hidden_layers"]) if i in listed or (i + 1) % step)


def with_dense(c: Config, fields: Fields, layers: tuple[int, ...], width: str = "intermediate_size") -> Fields:
    """The listed dense layers and their width; a width no layer uses is left alone."""
    value = c.whole(width, None)
    if not layers:
        c.aside(width)
    if len(layers) == fields["num_hidden_layers"]:  # no layer routes: a dense model
        for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            fields.pop(key, None)
        return {"intermediate_size": value}
    return {"mlp_only_layers": layers, "intermediate_size": value if layers else None}
