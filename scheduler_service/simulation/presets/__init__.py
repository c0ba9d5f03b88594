"""Presets: models, GPUs and clusters as YAML files inside the package, one a file, each number with its source.

A name is that of a packaged file, with - or _; a path that ends in .yaml is a file of the user's with the same fields.
A file may begin with `base: NAME` and then gives only what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import yaml

from scheduler_service.domain import InvalidInputError, Reason
from scheduler_service.simulation.cluster import Cluster, Engine, Recompute
from scheduler_service.simulation.hardware import AttentionKernel, Hardware
from scheduler_service.simulation.models import Attention, Experts, GroupedQuery, Latent, Model

Made = TypeVar("Made")

LARGEST_WHOLE = 1 << 31
"""Below it is every whole number of a preset. Keeps every product of a few inside a double."""

MOST_BASES = 8
"""Files that may build on each other."""

ATTENTION_KINDS: Mapping[str, type[Attention]] = MappingProxyType({"grouped_query": GroupedQuery, "latent": Latent})
"""What `kind` of a model's attention may be."""

CHOICES: Mapping[str, type[StrEnum]] = MappingProxyType({"Engine": Engine, "Recompute": Recompute})
"""Types of fields that hold one of a few words."""


def preset_names(kind: str) -> list[str]:
    """Names of the packaged presets of `kind`: models, hardware or clusters."""
    return sorted(file.name.removesuffix(".yaml") for file in (files(__name__) / kind).iterdir())


def load_model(name: str) -> Model:
    """The model of this name or path. Raises `InvalidInputError` that names the file, the field and the fix."""
    given = read_preset("models", name)
    attention = dict(_mapping(given, "attention", name))
    kind = attention.pop("kind", None)
    if not isinstance(kind, str) or kind not in ATTENTION_KINDS:
        raise invalid(name, f"attention.kind is {kind!r}; choose one of {', '.join(ATTENTION_KINDS)}")
    given["attention"] = build(ATTENTION_KINDS[kind], attention, f"{name}: attention")
    if given.get("experts") is not None:
        given["experts"] = build(Experts, _mapping(given, "experts", name), f"{name}: experts")
    return build(Model, given, name)


def load_hardware(name: str) -> Hardware:
    """The GPU of this name or path. Raises `InvalidInputError` that names the file, the field and the fix."""
    given = read_preset("hardware", name)
    kernel = build(AttentionKernel, _mapping(given, "attention", name), f"{name}: attention")
    return build(Hardware, {**given, "attention": kernel}, name)


def load_cluster(name: str) -> Cluster:
    """The cluster of this name or path. Raises `InvalidInputError` that names the file, the field and the fix."""
    given = read_preset("clusters", name)
    for kind, load in (("model", load_model), ("hardware", load_hardware)):
        if not isinstance(given.get(kind), str):
            raise invalid(name, f"{kind} is {given.get(kind)!r}; give the name of a preset or the path of a .yaml file")
        given[kind] = load(given[kind])
    return build(Cluster, given, name)


def read_preset(kind: str, name: str, bases: int = MOST_BASES) -> dict[str, Any]:
    """The fields of a packaged or a given file, on top of those of its base."""
    if bases == 0:
        raise invalid(name, f"more than {MOST_BASES} files build on each other; is there a circle of `base`?")
    try:
        given = yaml.safe_load(_text(kind, name))
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:  # PyYAML raises them all
        raise invalid(name, f"is no YAML: {error}") from error
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise invalid(name, "holds no mapping of names to values")
    base = given.pop("base", None)
    return given if base is None else _merged(read_preset(kind, str(base), bases - 1), given)


def build(made: type[Made], given: Mapping[str, Any], where: str) -> Made:
    """An object of a frozen dataclass from its fields: none unknown, none missing, numbers where numbers belong."""
    known = {field.name: str(field.type) for field in fields(made)}  # type: ignore[arg-type]
    values = {}
    for name, value in given.items():
        if name not in known:
            raise invalid(where, f"has no field {name!r}; the fields are {', '.join(known)}")
        values[name] = _typed(known[name], value, f"{where}: {name}")
    missing = [
        field.name
        for field in fields(made)  # type: ignore[arg-type]
        if field.name not in given and field.default is MISSING
    ]
    if missing:
        raise invalid(where, f"lacks the field{'s' if len(missing) > 1 else ''} {', '.join(missing)}")
    return made(**values)


def _typed(annotation: str, value: Any, where: str) -> Any:
    """The value as a field of this type holds it, or an error. Fields of our own types are made by then."""
    if value is None and annotation.endswith(" | None"):
        return value
    kind = annotation.removesuffix(" | None")
    if kind == "float" and isinstance(value, str):  # YAML 1.1 reads 640e12, without a sign, as a text
        with suppress(ValueError):
            value = float(value)
    if kind in CHOICES:
        if value not in list(CHOICES[kind]):
            choices = ", ".join(CHOICES[kind])
            raise InvalidInputError(Reason.INVALID_ARGUMENT, f"preset {where} is {value!r}; choose one of {choices}")
        return CHOICES[kind](value)
    types: dict[str, Any] = {"int": int, "float": int | float, "str": str, "bool": bool}
    if not isinstance(value, types.get(kind, object)) or (isinstance(value, bool) and kind in ("int", "float")):
        wanted = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}
        raise InvalidInputError(Reason.INVALID_ARGUMENT, f"preset {where} is {value!r}; give {wanted[kind]}")
    if kind == "int" and value >= LARGEST_WHOLE:
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT, f"preset {where} is too large; give a whole number below {LARGEST_WHOLE:,}"
        )
    return value


def invalid(where: str, message: str) -> InvalidInputError:
    """What is wrong with the preset `where`."""
    return InvalidInputError(Reason.INVALID_ARGUMENT, f"preset {where}: {message}")


def _text(kind: str, name: str) -> str:
    if name.endswith((".yaml", ".yml")):
        try:
            return Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise invalid(name, f"cannot be read: {error}") from error
    packaged = name.replace("-", "_")
    if packaged not in preset_names(kind):
        known = ", ".join(preset_names(kind))
        raise invalid(name, f"is not among the {kind}: {known}; or give the path of a .yaml file")
    return (files(__name__) / kind / f"{packaged}.yaml").read_text(encoding="utf-8")


def _merged(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: _merged(base[name], given[name]) for name in base.keys() & given.keys()
            if isinstance(base[name], dict) and isinstance(given[name], dict)}  # fmt: skip
    return {**base, **given, **both}


def _mapping(given: Mapping[str, Any], field: str, where: str) -> Mapping[str, Any]:
    value = given.get(field)
    if not isinstance(value, dict):
        raise invalid(where, f"{field} is {value!r}; give its fields")
    return value
