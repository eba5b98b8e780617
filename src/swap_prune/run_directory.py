"""What a run leaves on disk: `model.safetensors` and `result.json`, all or nothing."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
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
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"out={str(out)!r} can't be created or written to below {str(parent)!r}")


def write_run(out: Path, model: nn.Module, result: dict[str, Any]) -> None:
    """Write a run; each file appears whole or not at all, the result last."""
    # Tied weights are written under each of their names, so that any strict loader is content.
    tensors = {k: v.detach().cpu().clone().contiguous() for k, v in model.state_dict().items()}
    text = json.dumps(plain(result), indent=2, allow_nan=False) + "\n"
    scratch = None
    try:
        out.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".writing-", dir=out))
        save_file(tensors, scratch / MODEL_FILE)
        (scratch / RESULT_FILE).write_text(text)
        for name in (MODEL_FILE, RESULT_FILE):
            os.replace(scratch / name, out / name)
    except (OSError, SafetensorError) as error:
        raise InputError(f"out={str(out)!r} can't be written to: {error}") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def plain(value: Any) -> Any:
    """What JSON can hold: numbers that are not finite become words."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
