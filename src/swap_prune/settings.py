"""What a run can be told: the settings, their checks, and what fills in those not given."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from swap_prune import transport
from swap_prune.errors import InputError
from swap_prune.methods import Auto
from swap_prune.metric import Metric
from swap_prune.noise import Noise
from swap_prune.prunable import Selector, selectors
from swap_prune.training import FineTuning

METHODS = ("magnitude", "obd", "wf", "cbs", "lr", "ewr")
# Methods that choose settings on held-out samples and go on correcting weights after the last cut.
REGRESSIONS = ("lr", "ewr")
# The settings that only some methods have.
PARTS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("wf", "cbs", *REGRESSIONS): ("damping",),
    REGRESSIONS: (
        "first_order",
        "selection",
        "memory",
        "discount",
        "metric",
        "block_size",
        "reconstruction",
        "audit",
        "screen",
    ),
    ("ewr",): ("epsilon", "relative", "mixture", "coupling", "derivative", "alternations"),
}
# The identity is a method of its own, LR.
COUPLINGS = tuple(name for name in transport.COUPLINGS if name != "identity")
# At most this many samples are held out, and at most this fraction of the data.
HELD_OUT_SAMPLES = 1000
HELD_OUT_FRACTION = 0.2
# With fewer held out, what seems better is chance: cutting by magnitude is safer.
FEW_HELD_OUT = 10
# More would never end; the paper has 15.
MOST_STAGES = 10_000
# A stage's rows and the samples of one, where the data have as many.
MOST_ROWS = 1000
MOST_SAMPLES_PER_ROW = 16
# Rows that memory="auto" makes up to, a stage's own and those that stand for earlier stages', and
# the least of the latter (docs/noise_experiments.md).
ROWS_IN_ALL = 1000
LEAST_MEMORY = 50
# Most numbers in them: 2 GiB. While a stage is solved there are three of each, so they count as two
# of a stage's own rows, of which there is one copy.
MEMORY_NUMBERS = 2**29
COPIES = 2
# Weights of a block that make up for those cut among them (docs/choices.md).
BLOCK_SIZE = 100


@dataclass(frozen=True)
class Settings:
    """Everything that, with the model and the data, fixes a run. See `prune` for the meaning."""

    sparsity: float
    method: str = "ewr"
    stages: int | None = None
    schedule: str | tuple[float, ...] = "cubic"
    correcting: int | None = None
    samples: int | None = None
    samples_per_row: int | None = None
    held_out: int | None = None
    damping: float | Auto = "auto"
    first_order: float | Auto = "auto"
    epsilon: float | Auto = "auto"
    relative: bool = True
    mixture: float | Auto = "auto"
    coupling: str = "sinkhorn"
    derivative: str = "exact"
    selection: str = "saliency"
    alternations: int = 3
    memory: int | Auto | None = None
    discount: float = 0.0
    metric: Metric | Auto | None = None
    block_size: int | None = None
    reconstruction: bool | None = None
    contamination: float | Auto | None = None
    audit: bool | None = None
    screen: bool | None = None
    per_layer: bool = False
    batchnorm: str = "auto"
    include: tuple[Selector, ...] | None = None
    exclude: tuple[Selector, ...] = ()
    seed: int = 0
    fine_tuning: FineTuning | None = None
    noise: tuple[Noise, ...] = ()


def check(settings: Settings) -> None:
    """Raise an InputError for a value that no run can use."""
    _check_number("sparsity", settings.sparsity, "a number in [0, 1)", lambda v: 0 <= v < 1)
    for name, accepted in (
        ("method", METHODS),
        ("coupling", COUPLINGS),
        ("derivative", ("exact", "printed")),
        ("selection", ("saliency", "iht")),
        ("batchnorm", ("auto", "always", "never")),
    ):
        value = getattr(settings, name)
        if value not in accepted:
            raise InputError(f"{name}={value!r} is unknown; accepted are {', '.join(accepted)}")
    for name, least in (
        ("stages", 1),
        ("correcting", 0),
        ("samples", 1),
        ("samples_per_row", 1),
        ("held_out", 0),
        ("alternations", 1),
        ("memory", 0),
        ("block_size", 0),
        ("seed", 0),
    ):
        value = getattr(settings, name)
        optional = Settings.__dataclass_fields__[name].default is None
        automatic = name == "memory"
        if (optional and value is None) or (automatic and value == "auto"):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
            or_auto = ", or 'auto'" if automatic else ""
            limit = " and below 2**63" if isinstance(value, int) and value >= 2**63 else ""
            raise InputError(
                f"{name}={value!r} must be a whole number of at least {least}{limit}{or_auto}"
            )
    if settings.stages is not None and settings.stages > MOST_STAGES:
        raise InputError(f"stages={settings.stages} must be at most {MOST_STAGES:,}")
    for name in ("relative", "per_layer", "audit", "screen", "reconstruction"):
        value = getattr(settings, name)
        unset = value is None and Settings.__dataclass_fields__[name].default is None
        if not unset and not isinstance(value, bool):
            raise InputError(f"{name}={value!r} must be True or False")
    if settings.derivative == "printed" and settings.coupling != "sinkhorn":
        raise InputError(
            f"coupling={settings.coupling!r} has no part in the printed derivative, which smooths "
            "with the entropic plan; leave coupling at 'sinkhorn'"
        )
    for name, described, accepts in (
        ("damping", "a positive number", lambda v: 0 < v < math.inf),
        ("first_order", "a number of at least 0", lambda v: 0 <= v < math.inf),
        ("epsilon", "a number of at least 0", lambda v: v >= 0),
        ("mixture", "a number in [0, 1]", lambda v: 0 <= v <= 1),
        ("metric", "a number in [0, 1], 'layers'", lambda v: 0 <= v <= 1),
        ("contamination", "a number in [0, 1)", lambda v: 0 <= v < 1),
    ):
        value = getattr(settings, name)
        unset = value is None and Settings.__dataclass_fields__[name].default is None
        named = value == "auto" or (name == "metric" and value == "layers")
        if not named and not unset:
            _check_number(name, value, f"{described}, or 'auto'", accepts)
    _check_number("discount", settings.discount, "a number in [0, 2]", lambda v: 0 <= v <= 2)
    for methods, names in PARTS.items():
        for name in names:
            value, default = getattr(settings, name), Settings.__dataclass_fields__[name].default
            # What the regressions add to the paper's can be left out by a zero, with any method.
            absent = value == 0 and methods is REGRESSIONS
            if value != default and not absent and settings.method not in methods:
                raise InputError(
                    f"{name}={value!r} has no part in method={settings.method!r}; "
                    f"{', '.join(methods)} {'have' if len(methods) > 1 else 'has'} it"
                )
    if settings.correcting and not isinstance(settings.schedule, str):
        raise InputError(
            f"correcting={settings.correcting} has no part in a schedule of one's own; repeat its "
            "last sparsity instead"
        )


def plain(value: Any) -> Any:
    """NumPy's and torch's numbers and arrays, alone, in lists or in dicts, as Python's."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    return value.tolist() if isinstance(value, (np.generic, np.ndarray, Tensor)) else value


def _check_number(name: str, value: Any, described: str, accepts: Any) -> None:
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not numeric or not accepts(value):
        raise InputError(f"{name}={value!r} must be {described}")


def default_held_out(available: int) -> int:
    """How many of the samples are held out if nobody says how many."""
    return min(HELD_OUT_SAMPLES, max(1, int(available * HELD_OUT_FRACTION)))


def resolve(given: Settings, available: int) -> Settings:
    """Fill in what depends on the amount of data; raise when there is too little of it."""
    asked = (given.samples or 1) * (given.samples_per_row or 1)
    held_out = given.held_out
    if held_out is None:
        held_out = min(default_held_out(available), max(0, available - asked))
    if asked + held_out > available:
        rows = (
            f"samples={given.samples or 1} rows of samples_per_row={given.samples_per_row or 1}"
            if asked > 1
            else "a row of one"
        )
        held = f" and held_out={held_out}" if held_out else ""
        raise InputError(
            f"{rows}{held} need {asked + held_out} samples; calibration holds {available}"
        )
    chosen_by_loss: dict[str, Any] = {
        "damping": given.damping,
        "first_order": given.first_order,
        "metric": given.metric,
    }
    if given.method == "ewr":
        chosen_by_loss |= {"epsilon": given.epsilon, "mixture": given.mixture}
    if given.method not in REGRESSIONS:
        chosen_by_loss = {}
    chosen_by_loss["contamination"] = given.contamination or 0.0
    automatic = [name for name, value in chosen_by_loss.items() if value == "auto"]
    if held_out == 0 and automatic:
        fewer = "fewer samples" if available > 1 else "more calibration samples"
        if given.held_out == 0:
            fewer = "held_out a larger number"
        raise InputError(
            f"held_out is 0 of {available} calibration samples, but {automatic[0]}='auto' is "
            f"chosen on held-out samples; give {fewer}, or a number for {', '.join(automatic)}"
        )
    contamination = given.contamination
    if contamination is None:
        contamination = "auto" if given.method == "ewr" and held_out else 0.0
    metric = given.metric
    if metric is None and given.method in REGRESSIONS:
        metric = "auto" if held_out else 0.0
    memory = given.memory
    if memory is None:
        memory = "auto" if given.method == "ewr" else 0
    block_size = given.block_size
    if block_size is None and given.method in REGRESSIONS:
        block_size = BLOCK_SIZE if held_out else 0
    if block_size and not held_out:
        raise InputError(
            f"block_size={block_size} needs held-out samples to choose a damping by, and held_out "
            "is 0; give block_size=0"
        )
    if given.screen and not held_out:
        raise InputError(
            "screen=True needs held-out samples to find outliers by, and held_out is 0; give "
            "screen=False"
        )
    reconstruction = given.reconstruction
    if reconstruction is None:
        reconstruction = given.method == "ewr" and held_out > 0
    if reconstruction and not held_out:
        raise InputError(
            "reconstruction=True needs held-out samples to choose a damping by, and held_out is 0; "
            "give reconstruction=False"
        )
    pool = available - held_out
    samples = given.samples or min(MOST_ROWS, pool // (given.samples_per_row or 1))
    schedule = given.schedule
    own = isinstance(schedule, (list, tuple))
    stages = given.stages or (len(schedule) if own and schedule else 15)
    correcting = given.correcting
    if correcting is None:
        correcting = 2 * stages // 5 if given.method in REGRESSIONS and not own else 0
    return replace(
        given,
        stages=stages,
        schedule=tuple(schedule) if isinstance(schedule, list) else schedule,
        correcting=correcting,
        memory=memory,
        metric=metric,
        block_size=block_size,
        reconstruction=reconstruction,
        contamination=contamination,
        audit=given.method == "ewr" if given.audit is None else given.audit,
        screen=given.method == "ewr" and held_out > 0 if given.screen is None else given.screen,
        samples=samples,
        samples_per_row=given.samples_per_row or min(MOST_SAMPLES_PER_ROW, pool // samples),
        held_out=held_out,
        include=None if given.include is None else selectors("include", given.include),
        exclude=selectors("exclude", given.exclude),
    )


def remembered_rows(samples: int, p: int, spare: int) -> int:
    """How many rows of earlier stages memory="auto" remembers.

    Args:
        samples: a stage's own rows.
        p: the prunable weights.
        spare: the rows that the machine can hold beside the stage's own.
    """
    affordable = max(LEAST_MEMORY, MEMORY_NUMBERS // p)
    return max(0, min(max(LEAST_MEMORY, ROWS_IN_ALL - samples), affordable, spare // COPIES))


def describe(settings: Settings) -> dict[str, Any]:
    """The settings as JSON can hold them."""
    described = asdict(settings)
    described["noise"] = [noise.describe() for noise in settings.noise]
    for name in ("include", "exclude"):
        if described[name] is not None:
            described[name] = [s if isinstance(s, str) else s.__name__ for s in described[name]]
    return described
