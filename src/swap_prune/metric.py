"""The norm in which the regression holds weights near `w_bar`.

The paper's damping, `λ/2 ‖w - w_bar‖²`, holds all weights alike: a hundred rows for a million
weights then rank weights by their magnitude alone, and move most those that the loss feels most.
Here a weight is held by its own curvature too,

    λ/2 Σ_i D_i (w_i - w_bar_i)²,    D_i = c ((1 - κ) + κ d_i / mean(d)),    d_i = mean_k G_ki²

with c such that the mean curvature stays, and λ means as much for every κ. On its own a weight's
saliency then lies between its magnitude (κ = 0) and the optimal brain damage's `w_i² d_i` (κ = 1).

Both ends of it compare weights of all layers, and with κ < 1 their units matter: a network whose
first layer takes pixels from 0 to 255 has small weights there, and loses them all. By layers,

    D_i = c ((1 - κ) mean_layer(d) + κ d_i) / mean(d),

no unit matters, for with a layer's weights times u its curvatures are divided by u².

With `u_i = w_i √D_i` and `G_ki / √D_i` this is the plain ridge again, and nothing else of the
regression has to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

# κ, or κ = `LAYERS_SHARE` by layers.
Metric = float | Literal["layers"]
LAYERS_SHARE = 0.9
# Rows and columns squared at once: few enough to stay in the processor's cache.
BLOCK = (64, 4096)


def scales(rows: Tensor, present: Tensor, metric: Metric, layers: Sequence[slice]) -> Tensor:
    """`1/√D` (p,), the factors of the columns of G.

    Args:
        rows: G (n, p).
        present: which weights (p,) have not been cut.
        metric: κ in [0, 1], or "layers".
        layers: where each layer's weights are among the p.
    """
    curvature = mean_squares(rows)
    mean = curvature[present].mean()
    # Squares beyond float32 tell nothing of single weights.
    if metric == 0 or not 0 < mean < torch.inf:
        return torch.ones_like(curvature)
    relative = curvature / mean
    usual, share = torch.ones_like(relative), LAYERS_SHARE if metric == "layers" else metric
    if metric == "layers":
        for layer in layers:
            usual[layer] = relative[layer][present[layer]].mean().nan_to_num()
    # At κ = 1 a weight that no row feels would not be held at all; float32 needs it to be.
    unscaled = ((1 - share) * usual + share * relative).clamp_min(torch.finfo(rows.dtype).eps)
    return (unscaled * (relative / unscaled)[present].mean()).rsqrt()


def mean_squares(rows: Tensor) -> Tensor:
    """`d` (p,): the mean square of each column of G (n, p), the empirical Fisher's diagonal."""
    parts = [
        torch.stack([part.square().sum(0) for part in columns.split(BLOCK[0])]).sum(0)
        for columns in rows.split(BLOCK[1], dim=1)
    ]
    return torch.cat(parts) / len(rows)
