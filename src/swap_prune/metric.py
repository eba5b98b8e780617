"""The norm in which the regression holds weights near `w_bar`.

The paper's damping, `λ/2 ‖w - w_bar‖²`, holds all weights alike: a hundred rows for a million
weights then rank weights by their magnitude alone, and move most those that the loss feels most.
Here a weight is held by its own curvature too,

    λ/2 Σ_i D_i (w_i - w_bar_i)²,    D_i = (1 - κ) + κ d_i / mean(d),    d_i = mean_k G_ki²

so that on its own a weight's saliency is between its magnitude (κ = 0) and the optimal brain
damage's `w_i² d_i` (κ = 1). With `u_i = w_i √D_i` and `G_ki / √D_i` this is the plain ridge again,
and nothing else of the regression has to know.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows and columns squared at once: few enough to stay in the processor's cache.
BLOCK = (64, 4096)


def scales(rows: Tensor, present: Tensor, share: float) -> Tensor:
    """`1/√D` (p,), the factors of the columns of G.

    They are normalised so that the weights present have the mean curvature that they had, and a
    damping means as much as without them.

    Args:
        rows: G (n, p).
        present: which weights (p,) have not been cut.
        share: κ in [0, 1].
    """
    curvature = _mean_squares(rows)
    mean = curvature[present].mean()
    if not mean > 0:
        return torch.ones_like(curvature)
    # At κ = 1 a weight that no row feels would not be held at all; float32 needs it to be.
    metric = ((1 - share) + share * curvature / mean).clamp_min(torch.finfo(rows.dtype).eps)
    return (metric * (curvature / metric)[present].mean() / mean).rsqrt()


def _mean_squares(rows: Tensor) -> Tensor:
    """The mean square (p,) of each column."""
    parts = [
        torch.stack([part.square().sum(0) for part in columns.split(BLOCK[0])]).sum(0)
        for columns in rows.split(BLOCK[1], dim=1)
    ]
    return torch.cat(parts) / len(rows)
