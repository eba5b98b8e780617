"""What a run leaves on disk, written so that an interruption at any point loses one stage at most.

    DIR/recipe.yaml              what is run from the command line; absent in runs from Python
    DIR/configuration.json       the resolved settings: fixed when the run begins
    DIR/stages/0001.safetensors  the model after step 1, loadable like any other weights
    DIR/stages/0001.method.safetensors, 0001.optimizer.safetensors
                                 what a continued run needs besides; of the last two steps only
    DIR/stages/0001.json         history, where the method's searches begin, checksums; written last
    DIR/model.safetensors        the end
    DIR/result.json              of runs from the command line
    DIR/.replaced                the run that is overwritten, until the new one has saved a step

Every file appears whole or not at all. A step counts once its JSON file is there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from swap_prune.errors import InputError

MODEL_FILE = "model.safetensors"
RESULT_FILE = "result.json"
CONFIGURATION_FILE = "configuration.json"
RECIPE_FILE = "recipe.yaml"
STAGES = "stages"
LOCK_FILE = ".lock"
REPLACED = ".replaced"
SCRATCH_PREFIX = ".writing-"
# What to do about a directory that is taken.
INSTEAD = "give another directory, or delete this one (--overwrite on the command line)"
# What is read of a result.
SHOWN = {"prunable", "nonzeros", "configuration"} | {
    f"{name}{suffix}" for name in ("top1", "top5", "loss") for suffix in ("", "_dense")
}
# The tensors of a step, a file each.
PARTS = ("model", "optimizer", "method", "buffers")
# The number of a step in the names of its files.
STEP = "[0-9][0-9][0-9][0-9]"


@dataclass(frozen=True)
class Step:
    """A saved step of a run.

    Attributes:
        number: counted from 1.
        model: the model's state.
        optimizer: the optimiser's tensors, empty between periods of training.
        method: the method's tensors, empty for a method without memory.
        buffers: the model's buffers that are no part of its state.
        values: all else, as JSON holds it.
    """

    number: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    method: dict[str, Tensor]
    buffers: dict[str, Tensor]
    values: dict[str, Any]


class RunDirectory:
    """The directory of one run.

    Args:
        path: the directory; created when something is first written.
        recipe: the text of the recipe that a new run comes from.
        overwrite: whether `configure` begins a run in place of the one that is there.
    """

    def __init__(
        self, path: Path | str, recipe: str | None = None, overwrite: bool = False
    ) -> None:
        self.path = Path(path)
        self.recipe = recipe
        self.overwrite = overwrite

    @property
    def finished(self) -> bool:
        """Whether the result has been written."""
        return (self.path / RESULT_FILE).exists()

    @property
    def recipe_path(self) -> Path:
        """Where the recipe is, if there is one."""
        return self.path / RECIPE_FILE

    @property
    def begun(self) -> bool:
        """Whether a run has been configured here."""
        return (self.path / CONFIGURATION_FILE).exists()

    def check_free(self) -> None:
        """Raise unless a new run may be written here."""
        out = str(self.path)
        self._check_no_file()
        self._check_no_end()
        if self.begun and not self.overwrite:
            how = "'swap-prune resume'" if self.recipe_path.exists() else "prune(directory=...)"
            raise InputError(
                f"the run directory {out!r} has an unfinished run; continue it with {how}, "
                f"{INSTEAD}"
            )
        existing = (self.path, *self.path.absolute().parents)
        parent = next(path for path in existing if path.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise InputError(
                f"the run directory {out!r} can't be created or written to below {str(parent)!r}"
            )

    def _check_no_file(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"the run directory {str(self.path)!r} is a file; give a directory")

    def _check_no_end(self) -> None:
        """Raise if there is a file here that the end of a new run would replace."""
        present = [name for name in (RESULT_FILE, MODEL_FILE) if (self.path / name).exists()]
        if not self.begun and any((self.path / STAGES).glob(f"{STEP}.json")):
            present.append(STAGES)  # of a run that nobody knows the configuration of
        if present and not self.overwrite:
            raise InputError(
                f"the run directory {str(self.path)!r} already has a run "
                f"({', '.join(present)}); {INSTEAD}"
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory for this process; the system lets go of it even after kill -9."""
        self._check_no_file()
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            handle = open(self.path / LOCK_FILE, "w")  # noqa: SIM115 - open for the whole run
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InputError(
                    f"the run directory {str(self.path)!r} is in use by another process; "
                    "wait for it, or give another directory"
                ) from error
            with self._writing():
                for folder in (self.path, self.path / STAGES):
                    for left_over in folder.glob(f"{SCRATCH_PREFIX}*"):
                        left_over.unlink()  # of a process that was killed while it wrote
            yield
        finally:
            handle.close()

    def clear(self) -> None:
        """Remove the run that is here, and nothing else; the caller holds the lock."""
        with self._writing():
            for path in _files_of_run(self.path):
                path.unlink()
            # A recipe with other words was there before.
            written = None if self.recipe is None else self.recipe.encode()
            if self.recipe_path.exists() and self.recipe_path.read_bytes() == written:
                self.recipe_path.unlink()

    def clear_unless_saved(self) -> None:
        """Remove a run that has not one step: what it could not begin with may be mended.

        The run that it was to replace is back then.
        """
        if self.last_step() is not None:
            return
        self.clear()
        self._move(self.path / REPLACED, self.path)

    def _set_aside(self) -> None:
        """Make room for a new run; the one that is here is kept while the new one may yet fail."""
        # What is aside already is a run, and what took its place has not come to a first step.
        if not (self.path / REPLACED).exists():
            self._move(self.path, self.path / REPLACED)
        self.clear()

    def _move(self, source: Path, target: Path) -> None:
        """Move a run to another folder; its own, if it is not this one, goes."""
        # In the directory of a run from Python, a recipe is the user's.
        recipe = [] if source == self.path and self.recipe is None else source.glob(RECIPE_FILE)
        with self._writing():
            for path in (*_files_of_run(source), *recipe):
                destination = target / path.relative_to(source)
                destination.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, destination)
        if source != self.path:
            shutil.rmtree(source, ignore_errors=True)

    def configure(self, configuration: dict[str, Any]) -> None:
        """Write what is run; raise when another run is here already."""
        if self.overwrite and _files_of_run(self.path):
            self._set_aside()
        configuration = json.loads(_as_json(configuration))
        if not self.begun:
            self._check_no_end()
            if self.recipe is not None and (self.overwrite or not self.recipe_path.exists()):
                self._write(self.recipe_path, self.recipe.encode())
            self._write(self.path / CONFIGURATION_FILE, _as_json(configuration).encode())
            return
        present = self.configuration()
        for key in sorted(configuration.keys() | present.keys()):
            there, here = present.get(key), configuration.get(key)
            if isinstance(there, dict) and isinstance(here, dict) and there != here:
                # Others may follow from the method.
                others = sorted(there | here, key=lambda name: (name != "method", name))
                key = next(k for k in others if there.get(k) != here.get(k))
                there, here = there.get(key), here.get(key)
            if there != here:
                raise InputError(
                    f"the run directory {str(self.path)!r} has a run of another configuration: "
                    f"{key} is {there!r} there and {here!r} here; {INSTEAD}"
                )

    def configuration(self) -> dict[str, Any]:
        """What is run here."""
        path = self.path / CONFIGURATION_FILE
        if not self.begun:
            raise InputError(
                f"directory {str(self.path)!r} has no run to continue: it has no "
                f"{CONFIGURATION_FILE}"
            )
        return self._read_json(path)

    def save_step(self, step: Step) -> None:
        """Write a step, its JSON last."""
        folder = self.path / STAGES
        with self._writing():
            folder.mkdir(exist_ok=True)
        sums = {}
        for part in PARTS:
            tensors = getattr(step, part)
            if tensors:
                name = f"{step.number:04d}{_suffix(part)}.safetensors"
                content = save(_storable(tensors))
                self._write(folder / name, content)
                sums[name] = hashlib.sha256(content).hexdigest()
        body = {"step": step.number, "files": sums, "values": step.values}
        text = _as_json({**body, "sha256": _sum(body)})
        self._write(folder / f"{step.number:04d}.json", text.encode())
        with self._writing():
            # What only a continued run needs: the last step's, and one more should that be damaged.
            for part in PARTS[1:]:
                (folder / f"{step.number - 2:04d}{_suffix(part)}.safetensors").unlink(True)
            shutil.rmtree(self.path / REPLACED, ignore_errors=True)

    def last_step(self) -> Step | None:
        """The latest step saved; raise when its files are not what was written."""
        found = sorted((self.path / STAGES).glob(f"{STEP}.json"))
        if not found:
            return None
        path = found[-1]
        content = self._read_json(path)
        claimed = content.pop("sha256", None)
        if claimed != _sum(content):
            raise self._damaged(path)
        tensors: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}
        for name, expected in content["files"].items():
            file = path.parent / name
            if not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != expected:
                raise self._damaged(file)
            part = next(part for part in PARTS if name == f"{path.stem}{_suffix(part)}.safetensors")
            tensors[part] = load_file(file)
        return Step(number=content["step"], values=_with_numbers(content["values"]), **tensors)

    def result(self) -> dict[str, Any]:
        """What `write_result` wrote for a run."""
        path = self.path / RESULT_FILE
        result = self._read_json(path)
        if not result.keys() >= SHOWN:
            raise self._damaged(path)
        return result

    def write_model(self, model: nn.Module) -> None:
        """Write the pruned model."""
        self._write(self.path / MODEL_FILE, save(_storable(model.state_dict())))

    def write_result(self, result: dict[str, Any]) -> None:
        """Write the result, which makes the run a finished one."""
        self._write(self.path / RESULT_FILE, _as_json(result).encode())

    def _read_json(self, path: Path) -> dict[str, Any]:
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise self._damaged(path) from error
        if not isinstance(content, dict):
            raise self._damaged(path)
        return content

    def _damaged(self, path: Path) -> InputError:
        advice = "delete the directory's run and begin anew"
        if path.parent.name == STAGES:
            advice = f"delete {path.name[:4]}.* there to continue from the step before"
        return InputError(f"file {str(path)!r} is damaged or not what the run wrote; {advice}")

    def _write(self, path: Path, content: bytes) -> None:
        with self._writing():
            write_whole(path, content)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"the run directory {str(self.path)!r} can't be written to: {error}"
            ) from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is on the disk, whole, before its name is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile's, which nobody but the owner may read.
    scratch = path.parent / f"{SCRATCH_PREFIX}{secrets.token_hex(8)}"
    try:
        with open(scratch, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _files_of_run(folder: Path) -> list[Path]:
    """The files of the run in a folder but its recipe; whatever else is there is the user's."""
    ends = (folder / name for name in (RESULT_FILE, CONFIGURATION_FILE, MODEL_FILE))
    names = ["json", *(f"{part}.safetensors" for part in PARTS[1:]), "safetensors"]
    steps = (path for name in names for path in (folder / STAGES).glob(f"{STEP}.{name}"))
    return [*(path for path in ends if path.exists()), *steps]


def _suffix(part: str) -> str:
    """What a part of a step is called after its number."""
    return "" if part == PARTS[0] else f".{part}"


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """A checksum of tensors, by name."""
    return hashlib.sha256(save(_storable(tensors))).hexdigest()


def _storable(values: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors among the values of a state dict, which may have `get_extra_state`'s too."""
    # Tied weights are written under each of their names, so that `load_state_dict` is content.
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    return {k: v.detach().cpu().clone().contiguous() for k, v in tensors.items()}


def _sum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(jsonable(body), sort_keys=True).encode()).hexdigest()


def _as_json(value: Any) -> str:
    return json.dumps(jsonable(value), indent=2, allow_nan=False) + "\n"


def jsonable(value: Any) -> Any:
    """What JSON can hold: numbers that are not finite become words."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _with_numbers(value: Any) -> Any:
    """What `jsonable` was given: the words for numbers that are not finite become numbers again."""
    if isinstance(value, dict):
        return {key: _with_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    return float(value) if value in ("inf", "-inf", "nan") else value
