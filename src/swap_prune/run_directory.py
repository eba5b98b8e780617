"""What a run leaves on disk: `model.safetensors` and `result.json`, all or nothing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from swap_prune.errors import InputError

MODEL_FILE = "model.safetensors"
RESULT_FILE = "result.json"


def check_output(out: Path, overwrite: bool) -> None:
    """Raise unless a run may be written to the directory `out`."""
    if out.exists() and not out.is_dir():
        raise InputError(f"out={str(out)!r} is a file; give a directory")
    taken = [name for name in (MODEL_FILE, RESULT_FILE) if (out / name).exists()]
    if taken and not overwrite:
        raise InputError(
            f"out={str(out)!r} already has a run ({', '.join(taken)}); "
            "give another directory, or overwrite"
        )
    parent = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not os.access(parent, os.W_OK):
        raise InputError(f"out={str(out)!r} can't be written to: no permission for {parent}")


def write_run(out: Path, model: nn.Module, result: dict[str, Any]) -> None:
    """Write a run; each file appears whole or not at all, the result last."""
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".writing-", dir=out))
    try:
        # Tied weights are written under each of their names, so that any strict loader is content.
        tensors = {key: value.detach().clone() for key, value in model.state_dict().items()}
        save_file({key: value.contiguous() for key, value in tensors.items()}, scratch / MODEL_FILE)
        (scratch / RESULT_FILE).write_text(json.dumps(result, indent=2) + "\n")
        for name in (MODEL_FILE, RESULT_FILE):
            os.replace(scratch / name, out / name)
    except OSError as error:
        raise InputError(f"out={str(out)!r} can't be written to: {error.strerror}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
