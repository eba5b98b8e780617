"""Objects named on the command line as ``package.module:factory``."""

import importlib
import sys
from pathlib import Path
from typing import Any

from swap_prune.errors import InputError, reason


def call_factory(argument: str, reference: str) -> Any:
    """Import a function and call it without arguments.

    Modules in the current directory can be imported, as with ``python -m``.

    Args:
        argument: The name of the user's argument, for error messages.
        reference: ``package.module:factory``.

    Returns:
        Whatever the function returns.

    Raises:
        InputError: The module or the function doesn't exist, or one of them raised.
    """
    module_name, _, function_name = reference.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    # The code is the user's: whatever it raises is to be told in one sentence.
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{argument} {reference!r} can't be imported ({reason(error)}); "
            "'package.module:factory' is accepted, of a module that is installed or in the current "
            "directory"
        ) from error
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{argument} {reference!r} failed when called without arguments ({reason(error)})"
        ) from error
