"""What does this file say? Text to plain data: YAML 1.2 or JSON, one mapping, nothing executed.

Refused, with the line where the reader knows it: duplicate keys, tabs, tags, aliases (a few lines of them unfold to
gigabytes), more than one document, NaN and infinity, nesting past `DEEPEST`, files past `LARGEST` bytes, anything but
UTF-8.
"""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

from smelt_budget.errors import BadInput

LARGEST = 4 * 2**20  # the largest published config.json, with its quantisation lists, is about 0.3 MB
DEEPEST = 32


def read_text(source: str) -> str:
    """The text of a file, or of standard input for `-`."""
    try:
        if source == "-":
            data = sys.stdin.buffer.read(LARGEST + 1)
        else:
            path = Path(source)
            if path.exists() and not path.is_file():
                raise BadInput(f"{source} is not a file", "fix: give a YAML file, a config.json or a built-in name")
            with path.open("rb") as file:
                data = file.read(LARGEST + 1)
    except OSError as error:
        raise BadInput(f"cannot read {source}: {error.strerror or error}") from None
    if len(data) > LARGEST:
        raise BadInput(f"{source} is larger than {LARGEST // 2**20} MiB, so it is not a model description")
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise BadInput(f"{source} is UTF-16", f"fix: iconv -f UTF-16 -t UTF-8 {source}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{source} is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from None


def parse(text: str, origin: str) -> dict[str, Any]:
    """The one mapping a text holds. JSON where it opens with a brace and reads as JSON, else YAML 1.2."""
    if not text.strip():
        raise BadInput(f"{origin} is empty")
    looks_json = text.lstrip().startswith(("{", "["))
    try:
        data = parse_json(text, origin) if looks_json else parse_yaml(text, origin)
    except RecursionError:
        raise BadInput(f"{origin} is nested too deep to be a model description") from None
    if not isinstance(data, dict):
        raise BadInput(f"{origin} holds {kind_of(data)}, not a mapping of field to value")
    check_plain(data, origin, "", 1)
    return data


def parse_json(text: str, origin: str) -> Any:
    """JSON with no duplicate keys; a flow mapping that is YAML only is read as YAML."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise BadInput(f"{origin}: the key {key!r} stands twice", "fix: keep one of the two")
            seen[key] = value
        return seen

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        try:
            return parse_yaml(text, origin)
        except BadInput:
            raise BadInput(f"{origin} is not JSON: {error.msg}, line {error.lineno} column {error.colno}") from None
    except ValueError as error:  # an integer of more than 4,300 digits
        raise BadInput(f"{origin}: {str(error).split(';')[0]}") from None


def parse_yaml(text: str, origin: str) -> Any:
    """YAML 1.2: 4e9 and 2e-5 are numbers, `no` is a word, 017 is 17."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

    try:
        depth = 0
        for event in YAML(typ="safe", pure=True).parse(text):
            if isinstance(event, AliasEvent):
                raise BadInput(
                    f"{origin}: line {event.start_mark.line + 1} uses a YAML alias (*{event.anchor})",
                    "fix: write the value out; aliases are not read",
                )
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if depth > DEEPEST:
                raise BadInput(f"{origin} is nested more than {DEEPEST} deep")
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1} column {mark.column + 1}" if mark else ""
        problem = (error.problem or error.context or "unreadable").replace("\n", " ")
        hint = ["fix: indent with spaces; YAML does not allow tabs"] if "'\\t'" in problem else []
        raise BadInput(f"{origin} is not YAML: {problem}{where}", *hint) from None
    except YAMLError as error:
        raise BadInput(f"{origin} is not YAML: {str(error).splitlines()[0]}") from None
    except (
        ValueError,
        OverflowError,
        TypeError,
        AttributeError,
        KeyError,
        IndexError,
        AssertionError,
    ) as error:
        # ruamel lets constructor errors through: month 13, base-60 digits, integers of 5,000 digits
        raise BadInput(f"{origin} has a value YAML cannot build: {str(error).splitlines()[0]:.80}") from None


def check_plain(value: Any, origin: str, key: str, depth: int) -> None:
    """Only mappings with text keys, lists, text, numbers, booleans and null; no NaN, no infinity."""
    where = f"{origin}: {key}" if key else origin
    if depth > DEEPEST:
        raise BadInput(f"{where} is nested more than {DEEPEST} deep")
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise BadInput(f"{where}: the key {name!r:.40} is {kind_of(name)}, not text")
            check_plain(inner, origin, name, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            check_plain(inner, origin, key, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadInput(f"{where} is {value}, not a finite number")
    elif not isinstance(value, (str, int, float, bool, type(None))):
        raise BadInput(f"{where} is {kind_of(value)}, which no field takes")


def kind_of(value: Any) -> str:
    """A value's kind, in a user's words."""
    names = {
        dict: "a mapping",
        list: "a list",
        str: "text",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


def as_yaml(data: dict[str, Any], heading: str) -> str:
    """Plain data as YAML 1.2 under a comment; reading it back gives the data."""
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedSeq

    def shaped(value: Any) -> Any:
        """Mappings in blocks, lists of plain values on one line."""
        if isinstance(value, dict):
            return {key: shaped(inner) for key, inner in value.items()}
        if not isinstance(value, list):
            return value
        items = CommentedSeq(shaped(inner) for inner in value)
        if not any(isinstance(inner, (dict, list)) for inner in value):
            items.fa.set_flow_style()
        return items

    yaml = YAML()
    yaml.width = 110
    out = io.StringIO()
    yaml.dump(shaped(data), out)
    return "".join(f"# {line}\n" for line in heading.splitlines()) + out.getvalue()
