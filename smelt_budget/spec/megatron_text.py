"""Which flags does a Megatron argument file set? A list of words, a launch script or YAML, to {flag: its values}.

    --num-layers 12                        one flag a line, or anything that a shell would split at blanks
    MODEL_ARGS=( --num-layers $LAYERS )    a script's arrays and strings; plain assignments above them are put in
    MODEL_ARGS: {--num-layers: 12}         YAML of Megatron-LM's functional tests
    language_model: {num_layers: 12}       YAML for --yaml-cfg, under the names of TransformerConfig

Nothing is executed. Flags are kept without dashes in front and with dashes inside, as argparse prints them.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from smelt_budget.errors import BadInput

Flags = dict[str, list[str]]
"""By name, the values of each; a switch has none."""

RECOGNISED = re.compile(r"(?:^|[\s('\"])--num[-_]layers[\s=]")
ASSIGNED = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(\"[^\"$`]*\"|'[^']*'|[\w./,:+-]+)\s*$", re.MULTILINE)
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
OPENS = re.compile(r"^[A-Za-z_]\w*\+?=\(?")
RENAMED = {
    "layernorm-epsilon": "norm-epsilon",
    "num-moe-experts": "num-experts",
    "share-embeddings-and-output-weights": "tied",
}
"""TransformerConfig's name, or an older flag's, to the flag's."""


def recognised(text: str) -> bool:
    """Whether a text is words for Megatron's parser: `--num-layers` stands in it, and not as a YAML key."""
    return RECOGNISED.search(text) is not None


def is_yaml_of_arguments(data: dict[str, Any]) -> bool:
    """Whether a mapping is one of the YAML forms."""
    inner = data.get("MODEL_ARGS")
    flat = inner if isinstance(inner, dict) else data
    return "--num-layers" in flat or isinstance(data.get("language_model"), dict)


def flags_of_text(text: str, origin: str) -> Flags:
    """Words of a file or script, sorted to their flags.

    Raises:
        BadInput: quotes do not close, or a flag stands twice with two values.
    """
    text = re.sub(r"\\\r?\n", " ", text)
    script = any(line.strip() and not line.lstrip().startswith(("--", "#")) for line in text.splitlines())
    plain = not script or one_word_a_line(text)
    groups = [split(text, origin)] if plain else script_groups(text, origin)
    sets = {} if plain else assigned(text)
    pairs: list[tuple[str, list[str]]] = []
    for group in groups:
        open_flag = False
        for word in group:
            if word.startswith("--") and word != "--":
                name, equals, value = word[2:].partition("=")
                pairs.append((named(name), [filled(value, sets)] if equals else []))
                open_flag = True
            elif open_flag:
                pairs[-1][1].append(filled(word, sets))
    return once(pairs, origin)


def one_word_a_line(text: str) -> bool:
    """Flag and value each on a line of its own, as argparse's `@file` has them."""
    return all(len(line.split()) <= 1 for line in text.splitlines() if not line.lstrip().startswith("#"))


def split(text: str, origin: str) -> list[str]:
    """Words as a shell makes them; quotes and comments go."""
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise BadInput(f"{origin} cannot be split into words: {error}") from None


def script_groups(text: str, origin: str) -> list[list[str]]:
    """Words that belong together: each command, each array, each string that holds several flags."""
    groups: list[list[str]] = [[]]
    inside, pending = False, ""
    for line in text.splitlines():
        pending += line + "\n"
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:
            continue  # a string over several lines
        pending = ""
        for given in words:
            word = OPENS.sub("", given)
            inside = inside or (word != given and given[: len(given) - len(word)].endswith("("))
            if "--" in word and " " in word.strip():
                groups += [split(word, origin), []]
                continue
            closes = word.count(")") > word.count("(")
            groups[-1] += [word[: word.rindex(")")] if closes else word]
            if closes:
                inside = False
                groups.append([])
        if not inside:
            groups.append([])
    split(pending, origin)
    return [[word for word in group if word] for group in groups]


def assigned(text: str) -> dict[str, str]:
    """Variables that a script sets plainly, and to one value only."""
    values: dict[str, set[str]] = {}
    for name, value in ASSIGNED.findall(text):
        values.setdefault(name, set()).add(value.strip("\"'"))
    return {name: next(iter(found)) for name, found in values.items() if len(found) == 1}


def filled(word: str, sets: dict[str, str]) -> str:
    """A word with those variables in place; any other stays as it is written, and is refused where it matters."""
    return VARIABLE.sub(lambda found: sets.get(found[1] or found[2], found[0]), word)


def once(pairs: list[tuple[str, list[str]]], origin: str) -> Flags:
    """Each flag one time; repeated with other values it is not known which holds."""
    flags: Flags = {}
    for name, values in pairs:
        if flags.setdefault(name, values) != values:
            raise BadInput(
                f"{origin}: --{name} stands twice, with {' '.join(flags[name])!r:.60} and {' '.join(values)!r:.60}",
                "fix: keep one of the two",
            )
    return flags


def named(name: str) -> str:
    """A flag's name: argparse's own."""
    name = name.replace("_", "-")
    return RENAMED.get(name, name)


def flags_of_yaml(data: dict[str, Any]) -> Flags:
    """A YAML form as flags."""
    if "language_model" in data:
        nested = [data["language_model"], data.get("model_parallel")]
        flat = {key: value for key, value in data.items() if not isinstance(value, dict)}
        for block in nested:
            flat |= block if isinstance(block, dict) else {}
        return flags_of_fields(flat)
    inner = data.get("MODEL_ARGS")
    flat = inner if isinstance(inner, dict) else data
    flags: Flags = {}
    for key, value in flat.items():
        if value is not None and value is not False:
            flags[named(key.removeprefix("--"))] = words_of(value)
    return flags


def flags_of_fields(fields: dict[str, Any]) -> Flags:
    """Fields of TransformerConfig: some say with a value what a flag says by being there."""
    flags: Flags = {}
    for key, value in fields.items():
        if value is None:
            continue
        if key == "add_bias_linear":
            flags |= {} if value else {"disable-bias-linear": []}
        elif key == "activation_func":
            flags[str(value)] = []
        elif key == "num_query_groups":
            flags |= {"group-query-attention": [], "num-query-groups": words_of(value)}
        elif value is not False:
            flags[named(key)] = words_of(value)
    if fields.get("group_query_attention") is False:
        flags.pop("group-query-attention", None)
    return flags


def words_of(value: Any) -> list[str]:
    """A YAML value as argparse would see it."""
    if value is True:
        return []
    return [str(inner) for inner in value] if isinstance(value, list) else str(value).split()
