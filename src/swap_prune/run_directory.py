"""What a run leaves on disk, written so that an interruption at any point loses one stage at most.

    DIR/recipe.yaml              what is run from the command line; absent in runs from Python
    DIR/configuration.json       the resolved settings: fixed when the run begins
    DIR/stages/0001.safetensors  the model after step 1, loadable like any other weights
    DIR/stages/0001.json         history, what the method remembers, checksums; written last
    DIR/model.safetensors        the end
    DIR/result.json

Every file appears whole or not at all. A step counts once its JSON file is there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import tempfile
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
SCRATCH_PREFIX = ".writing-"


@dataclass(frozen=True)
class Step:
    """A saved step of a run.

    Attributes:
        number: counted from 1.
        model: the model's state.
        optimizer: the optimiser's tensors, empty between periods of training.
        values: all else, as JSON holds it.
    """

    number: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    values: dict[str, Any]


class RunDirectory:
    """The directory of one run.

    Args:
        path: the directory; created when something is first written.
        recipe: the text of the recipe that a new run comes from.
    """

    def __init__(self, path: Path | str, recipe: str | None = None) -> None:
        self.path = Path(path)
        self.recipe = recipe

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

    def check_free(self, overwrite: bool) -> None:
        """Raise unless a new run may be written here."""
        out = str(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"out={out!r} is a file; give a directory")
        if self.finished and not overwrite:
            raise InputError(
                f"out={out!r} already has a run ({RESULT_FILE}); "
                "give another directory, or overwrite"
            )
        if self.begun and not overwrite:
            raise InputError(
                f"out={out!r} has an unfinished run; continue it with 'swap-prune resume', "
                "give another directory, or overwrite"
            )
        existing = (self.path, *self.path.absolute().parents)
        parent = next(path for path in existing if path.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise InputError(f"out={out!r} can't be created or written to below {str(parent)!r}")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory for this process; the system lets go of it even after kill -9."""
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            handle = open(self.path / LOCK_FILE, "w")  # noqa: SIM115 - open for the whole run
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InputError(
                    f"out={str(self.path)!r} is in use by another process; wait for it, "
                    "or give another directory"
                ) from error
            for left_over in self.path.rglob(f"{SCRATCH_PREFIX}*"):
                left_over.unlink()  # of a process that was killed while it wrote
            yield
        finally:
            handle.close()

    def clear(self) -> None:
        """Remove the run that is here, and nothing else."""
        with self.lock(), self._writing():
            for name in (RESULT_FILE, CONFIGURATION_FILE, RECIPE_FILE, MODEL_FILE):
                (self.path / name).unlink(missing_ok=True)
            for path in (self.path / STAGES).glob("[0-9]*.*"):
                path.unlink()

    def configure(self, configuration: dict[str, Any]) -> None:
        """Write what is run; raise when another run is here already."""
        configuration = json.loads(_as_json(configuration))
        if not self.begun:
            if self.recipe is not None:
                self._write(self.recipe_path, self.recipe.encode())
            self._write(self.path / CONFIGURATION_FILE, _as_json(configuration).encode())
            return
        present = self.configuration()
        for key in sorted(configuration.keys() | present.keys()):
            there, here = present.get(key), configuration.get(key)
            if isinstance(there, dict) and isinstance(here, dict) and there != here:
                key = next(k for k in sorted(there | here) if there.get(k) != here.get(k))
                there, here = there.get(key), here.get(key)
            if there != here:
                raise InputError(
                    f"out={str(self.path)!r} has a run of another configuration: {key} is "
                    f"{there!r} there and {here!r} here; give another directory, or overwrite"
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
        for suffix, tensors in (("", step.model), (".optimizer", step.optimizer)):
            if tensors:
                name = f"{step.number:04d}{suffix}.safetensors"
                content = save(_storable(tensors))
                self._write(folder / name, content)
                sums[name] = hashlib.sha256(content).hexdigest()
        body = {"step": step.number, "files": sums, "values": step.values}
        text = _as_json({**body, "sha256": _sum(body)})
        self._write(folder / f"{step.number:04d}.json", text.encode())

    def last_step(self) -> Step | None:
        """The latest step saved; raise when its files are not what was written."""
        found = sorted((self.path / STAGES).glob("[0-9][0-9][0-9][0-9].json"))
        if not found:
            return None
        path = found[-1]
        content = self._read_json(path)
        claimed = content.pop("sha256", None)
        if claimed != _sum(content):
            raise self._damaged(path)
        tensors: dict[str, dict[str, Tensor]] = {}
        for name, expected in content["files"].items():
            file = path.parent / name
            if not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != expected:
                raise self._damaged(file)
            tensors["optimizer" if ".optimizer." in name else "model"] = load_file(file)
        return Step(
            content["step"], tensors["model"], tensors.get("optimizer", {}), content["values"]
        )

    def result(self) -> dict[str, Any]:
        """What `finish` wrote."""
        return self._read_json(self.path / RESULT_FILE)

    def finish(self, model: nn.Module, result: dict[str, Any]) -> None:
        """Write the model and, last, the result."""
        self._write(self.path / MODEL_FILE, save(_storable(model.state_dict())))
        self._write(self.path / RESULT_FILE, _as_json(result).encode())

    def _read_json(self, path: Path) -> dict[str, Any]:
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise self._damaged(path) from error

    def _damaged(self, path: Path) -> InputError:
        advice = "delete the directory's run and begin anew"
        if path.parent.name == STAGES:
            advice = f"delete {path.name[:4]}.* there to continue from the step before"
        return InputError(f"file {str(path)!r} is damaged or not what the run wrote; {advice}")

    def _write(self, path: Path, content: bytes) -> None:
        """Write a file that is on the disk, whole, before its name is."""
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=SCRATCH_PREFIX, dir=path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(name, path)
            finally:
                Path(name).unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise InputError(f"out={str(self.path)!r} can't be written to: {error}") from error


def fingerprint(model: nn.Module) -> str:
    """A checksum of the model's parameters and buffers."""
    return hashlib.sha256(save(_storable(model.state_dict()))).hexdigest()


def _storable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    # Tied weights are written under each of their names, so that any strict loader is content.
    return {k: v.detach().cpu().clone().contiguous() for k, v in tensors.items()}


def _sum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain(body), sort_keys=True).encode()).hexdigest()


def _as_json(value: Any) -> str:
    return json.dumps(plain(value), indent=2, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """What JSON can hold: numbers that are not finite become words."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
