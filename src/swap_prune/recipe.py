"""Recipes: runs described by YAML files, whose mistakes are told with their line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from swap_prune import data, models, training
from swap_prune import noise as noise_of
from swap_prune import settings as settings_of
from swap_prune.errors import InputError
from swap_prune.schedule import sparsities
from swap_prune.settings import Settings
from swap_prune.training import FineTuning

REQUIRED = ("model", "data", "sparsity")
NULL = "tag:yaml.org,2002:null"
# How much data a run will have isn't known here; this many samples are enough for any defaults.
AMPLE = 100_000

# The fields of a recipe and of its fine_tuning, with the types of their values.
_SETTINGS: dict[str, Any] = get_type_hints(Settings)
_FIELDS: dict[str, Any] = {
    "model": str,
    "data": str,
    "weights": str | None,
    "data_directory": str | None,
    **_SETTINGS,
    "measure_stages": bool,
    "seeds": tuple[int, ...],
}
_NOISE_FIELDS: dict[str, Any] = {"kind": str, "fraction": float, "level": float}
_TRAINING_FIELDS: dict[str, Any] = {"preset": str, **get_type_hints(FineTuning)}


@dataclass(frozen=True)
class Recipe:
    """A run, or one for each of several seeds.

    Attributes:
        model: a built-in name or ``package.module:factory``.
        data: likewise.
        weights: the file of trained weights.
        data_directory: where the data set's files are.
        settings: the keyword arguments of `swap_prune.prune` except the seed. What may be several
            values is a tuple; fine-tuning is the name of a preset, a dict of fields, or None;
            noise is a list of dicts.
        seeds: one for each run.
        measure_stages: whether every stage is measured on the test data.
    """

    model: str
    data: str
    weights: str | None
    data_directory: str | None
    settings: dict[str, Any]
    seeds: tuple[int, ...] = (0,)
    measure_stages: bool = False


class _LineError(Exception):
    """A mistake and the line that it is in."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


def read(path: Path | str) -> Recipe:
    """Read a recipe; paths in it are relative to its own folder, and absolute once read.

    Raises:
        InputError: the file can't be read, or is no recipe.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path} can't be read ({error.strerror}); give a YAML file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} isn't text in UTF-8; give a YAML file") from error
    try:
        return _recipe(_compose(text), Path(path).parent.absolute())
    except _LineError as error:
        raise InputError(f"{path}, line {error.line}: {error}") from error


def dump(recipe: Recipe) -> str:
    """The YAML text of a recipe, from which `read` makes an equal one if its paths are absolute.

    Raises:
        InputError: a setting is an object that YAML has no word for, such as a module type.
    """
    content = {
        "model": recipe.model,
        "data": recipe.data,
        "weights": recipe.weights,
        "data_directory": recipe.data_directory,
        **recipe.settings,
        **({"measure_stages": True} if recipe.measure_stages else {}),
        "seeds": recipe.seeds,
    }
    if isinstance(content.get("fine_tuning"), FineTuning):
        content["fine_tuning"] = asdict(content["fine_tuning"])
    try:
        # Escaped: unescaped, some line separators of Unicode come back as spaces.
        return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=False)
    except yaml.representer.RepresenterError as error:
        refused = error.args[-1]
        raise InputError(
            f"{refused!r} can't be written in a recipe; give names or numbers"
        ) from error


class _Dumper(yaml.SafeDumper):
    """Lists in one line, and no anchors: as one would write a recipe by hand."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_list(dumper: yaml.SafeDumper, values: Sequence[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(tuple, _represent_list)


# --- the file -----------------------------------------------------------------------------------


def _compose(text: str) -> yaml.MappingNode:
    """The nodes of the YAML text, which know their lines; nothing is constructed from them."""
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _LineError(line, "there are characters that YAML doesn't allow in a text") from error
    try:
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = loader.line if mark is None else mark.line
        raise _LineError(line + 1, f"this isn't YAML: {error.problem}") from error
    # PyYAML lets out what Python says of an impossible \U escape or of ten thousand brackets.
    except (ValueError, OverflowError, RecursionError) as error:
        raise _LineError(loader.line + 1, f"this isn't usable YAML: {error}") from error
    if not isinstance(root, yaml.MappingNode):
        found = "the file is empty" if root is None else "the file isn't a mapping"
        line = 1 if root is None else _line(root)
        raise _LineError(line, f"{found}; fields as 'model: resnet20' are expected")
    return root


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


@contextmanager
def _in_line(line: int) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise _LineError(line, str(error)) from error


def _entries(
    mapping: yaml.MappingNode, accepted: dict[str, Any], where: str = ""
) -> Iterator[tuple[str, int, yaml.Node]]:
    """Name, line and value of each field; raise on reaching one that is unknown or repeated."""
    lines: dict[str, int] = {}
    for key, value in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _LineError(_line(key), "the name of a field must be a word")
        name, line = key.value, _line(key)
        if name not in accepted:
            close = difflib.get_close_matches(name, accepted, n=1)
            question = f"did you mean {close[0]!r}? " if close else ""
            known = ", ".join(accepted)
            raise _LineError(line, f"{name!r} is unknown{where}; {question}accepted are {known}")
        if name in lines:
            raise _LineError(line, f"{name!r} is given twice{where}, first in line {lines[name]}")
        lines[name] = line
        yield name, line, value


# --- what it says -------------------------------------------------------------------------------


def _recipe(root: yaml.MappingNode, folder: Path) -> Recipe:
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for name, line, node in _entries(root, _FIELDS):
        with _in_line(line):
            values[name] = _value(name, node)
        lines[name] = line
    for name in REQUIRED:
        if name not in values:
            needed = ", ".join(REQUIRED)
            raise _LineError(_line(root), f"{name!r} is missing; every recipe needs {needed}")
    if "seed" in values and "seeds" in values:
        raise _LineError(
            max(lines["seed"], lines["seeds"]), "seed and seeds are both given; give one"
        )
    settings = {k: v for k, v in values.items() if k in _SETTINGS and k != "seed"}
    try:
        _check_together(settings)
    except InputError as error:
        name = str(error).partition("=")[0]
        raise _LineError(lines.get(name, _line(root)), str(error)) from error
    return Recipe(
        model=values["model"],
        data=values["data"],
        weights=_path(values.get("weights"), folder),
        data_directory=_path(values.get("data_directory"), folder),
        settings=settings,
        seeds=values.get("seeds", (values.get("seed", 0),)),
        measure_stages=values.get("measure_stages", False),
    )


def _path(given: str | None, folder: Path) -> str | None:
    return None if given is None else str(folder / given)


def _value(name: str, node: yaml.Node) -> Any:
    """The value of a field of the recipe; raise unless it can be used."""
    if name == "fine_tuning":
        return _fine_tuning(node)
    if name == "noise":
        return _noise(node)
    value = _convert(name, node, _FIELDS[name])
    if name == "model":
        _check_exists(name, value, models.BUILT_IN)
    elif name == "data":
        _check_exists(name, value, data.BUILT_IN)
    elif name == "seeds":
        _check_seeds(value)
    elif name == "measure_stages" and not isinstance(value, bool):
        raise InputError(f"measure_stages={value!r} must be true or false")
    elif name in _SETTINGS:
        _check_alone(name, value)
    return value


def _fine_tuning(node: yaml.Node) -> str | dict[str, Any] | None:
    if isinstance(node, yaml.SequenceNode):
        raise InputError("fine_tuning is a list; the name of a preset, or fields, are expected")
    if not isinstance(node, yaml.MappingNode):
        preset: str | None = _convert("fine_tuning", node, str | None)
        training.resolve(preset)
        return preset
    values = {}
    for name, line, item in _entries(node, _TRAINING_FIELDS, " in fine_tuning"):
        with _in_line(line):
            values[name] = _convert(name, item, _TRAINING_FIELDS[name])
            training.resolve({name: values[name]})
    return values


def _noise(node: yaml.Node) -> list[dict[str, Any]] | None:
    """One noise or a list of them, as dicts."""
    if isinstance(node, yaml.ScalarNode) and node.tag == NULL:
        return None
    noises = []
    for one in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        if not isinstance(one, yaml.MappingNode):
            raise InputError("noise must be fields as 'kind: labels', or a list of such")
        entries = list(_entries(one, _NOISE_FIELDS, " in noise"))
        values = {name: _convert(name, item, _NOISE_FIELDS[name]) for name, _, item in entries}
        with _in_line(_line(one)):
            noise_of.resolve(values)
        noises.append(values)
    return noises


def _check_exists(name: str, value: str | None, built_in: Sequence[str] | dict[str, Any]) -> None:
    """Raise unless the name is a built-in one or of the form of a factory; import nothing."""
    if value is None or (value not in built_in and ":" not in value):
        raise InputError(
            f"{name}={value!r} doesn't exist; {', '.join(built_in)} "
            "or 'package.module:factory' are accepted"
        )


def _check_seeds(seeds: Any) -> None:
    if not isinstance(seeds, tuple) or not seeds:
        shown = [] if seeds == () else seeds
        raise InputError(f"seeds={shown!r} must be a list of one or more whole numbers")
    for seed in seeds:
        _check_alone("seed", seed)
    if len(set(seeds)) < len(seeds):
        raise InputError(f"seeds={list(seeds)} must be different from each other")


def _check_alone(name: str, value: Any) -> None:
    """Check one setting, the others at their defaults, so that the first mistake is found first."""
    settings_of.check(Settings(**{"sparsity": 0.5, name: value}))


def _check_together(settings: dict[str, Any]) -> None:
    """Check what depends on several settings, but not on the data."""
    tuned = training.resolve(settings.get("fine_tuning"))
    noises = noise_of.resolve(settings.get("noise"))
    given = Settings(**{**settings, "fine_tuning": tuned, "noise": noises})
    settings_of.check(given)
    likely = replace(given, samples=None, samples_per_row=None, held_out=None)
    resolved = settings_of.resolve(likely, AMPLE)
    assert resolved.stages is not None
    assert resolved.correcting is not None
    sparsities(resolved.schedule, resolved.sparsity, resolved.stages, resolved.correcting)


# --- from YAML's words to Python's values ---------------------------------------------------------


def _convert(name: str, node: yaml.Node, hint: Any) -> Any:
    """The value of a node, for a field of a type.

    The type decides how a word is read, not YAML, for which 1e-3 is a string and `no` a boolean.
    A word that doesn't fit the type stays a string, for the field's check to refuse.
    """
    members = _members(hint)
    item = next((get_args(member)[0] for member in members if get_origin(member) is tuple), None)
    if isinstance(node, yaml.ScalarNode):
        value = _scalar(node, members)
        single = item is not None and str in _members(item) and value is not None
        return (value,) if single else value
    if isinstance(node, yaml.SequenceNode) and item is not None:
        return tuple(_convert(name, part, item) for part in node.value)
    kind = "mapping" if isinstance(node, yaml.MappingNode) else "list"
    expected = "a single value" if item is None else "a single value or a list of them"
    raise InputError(f"{name} has a {kind} where {expected} is expected")


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _scalar(node: yaml.ScalarNode, members: tuple[Any, ...]) -> Any:
    if node.tag == NULL:
        return None
    word: str = node.value
    if node.style is not None:  # in quotes, and so a string whatever it looks like
        return word
    if bool in members:
        return yaml.SafeLoader.bool_values.get(word.lower(), word)
    if int in members or float in members:
        return _number(word, int in members)
    return word


def _number(word: str, whole: bool) -> int | float | str:
    """The number that a word writes, as on the command line or as `.inf`; else the word."""
    if whole:
        try:
            return int(word)
        except ValueError:
            pass  # 1e3 is a whole number too
    try:
        value = float(word.lower().replace(".inf", "inf"))
    except ValueError:
        return word
    return int(value) if whole and value.is_integer() else value
