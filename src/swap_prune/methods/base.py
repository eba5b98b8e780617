"""What a stage offers a pruning method, and what it gets back.

A method sees the gradients at the current weights, the number of weights that may stay, and the
loss on held-out calibration samples. It returns new weights and what it chose on the way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from swap_prune.gradients import GradientOperator
from swap_prune.reconstruction import Moments
from swap_prune.regression import Budget

Auto = Literal["auto"]


@dataclass
class Stage:
    """What a method is given.

    Attributes:
        gradients: G (n, p) at `w_bar`, which the method may overwrite; None for a method that
            needs none.
        w_bar: the current weights (p,).
        budget: how many weights may stay.
        samples_per_row: m, the samples that each row of G averages.
        remaining: how many stages follow this one.
        layers: the slice of the weights of each layer.
        held_out_losses: the model's losses on groups of held-out samples with the weights given,
            whose mean is that of all; None when nothing is held out.
        input_moments: the second moments of each layer's inputs at `w_bar`, None where it has none;
            takes a pass over the samples of the stage.
        drawn: the part of the calibration samples, those held out apart, that the rows are of;
            with 1 every stage has the same.
    """

    gradients: GradientOperator | None
    w_bar: Tensor
    budget: Budget
    samples_per_row: int
    remaining: int
    layers: tuple[slice, ...]
    held_out_losses: Callable[[Tensor], Tensor] | None
    input_moments: Callable[[], list[Moments | None]] | None = None
    drawn: float = 0.0


class Method(ABC):
    """A way to choose which weights stay and what they become."""

    needs_gradients: ClassVar[bool] = True

    @abstractmethod
    def prune(self, stage: Stage) -> tuple[Tensor, dict[str, Any]]:
        """New weights (p,) within the budget, and the settings chosen."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What later stages depend on, tensors and values for JSON; empty without memory."""
        return {}, {}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take up what `state` gave."""
        assert not tensors
        assert not values
