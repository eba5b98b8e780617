"""Memory that is taken once and used again."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


class Buffers:
    """Tensors by their use.

    Taken anew each time, large ones would go back to the system and come from there again, page by
    page, which costs up to a fifth of the time.
    """

    def __init__(self) -> None:
        self._tensors: dict[Any, Tensor] = {}

    def take(self, use: str, like: Tensor, *shape: int) -> Tensor:
        """A tensor of the shape and of the kind of `like`, with whatever was left in it.

        What was taken for the same use before must be done with: it is the same memory.
        """
        size, key = math.prod(shape), (use, like.dtype, like.device)
        if key not in self._tensors or len(self._tensors[key]) < size:
            # Given back first, so that both are never held at once.
            self._tensors.pop(key, None)
            self._tensors[key] = like.new_empty(size)
        return self._tensors[key][:size].view(shape)
