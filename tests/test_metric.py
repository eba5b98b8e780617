"""The norm of the damping: against explicit sums, and as the weighted ridge that it stands for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swap_prune import metric
from swap_prune.gradients import DenseGradients
from swap_prune.methods import Stage, WassersteinRegression
from swap_prune.methods.wasserstein import METRICS
from swap_prune.regression import Budget


def gradients(n: int, p: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, p, generator=generator) * torch.logspace(-2, 1, p)


@given(n=st.integers(1, 150), p=st.integers(1, 12), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_scales_are_the_inverse_root_of_the_metric(n, p, share, seed):
    rows = gradients(n, p, seed)
    present = torch.arange(p) % 3 != 1
    scale = metric.scales(rows, present, share)
    d = rows.double().square().mean(0)
    expected = 1 - share + share * d / d[present].mean()
    # Up to one factor, which keeps the mean curvature of the weights present as it was.
    ratio = expected * scale.double().square()
    torch.testing.assert_close(ratio, ratio[:1].expand(p), rtol=1e-3, atol=0)
    assert float((d * scale.double().square())[present].mean()) == pytest.approx(
        float(d[present].mean()), rel=1e-3
    )


def test_a_share_of_zero_changes_nothing():
    scale = metric.scales(gradients(7, 5, 0), torch.ones(5, dtype=torch.bool), 0.0)
    torch.testing.assert_close(scale, torch.ones(5))


@pytest.mark.parametrize(
    "rows", [torch.zeros(4, 3), torch.ones(1, 3), torch.tensor([[0.0, 1.0, 1e-30]]).expand(6, 3)]
)
def test_zero_single_and_equal_rows_give_finite_scales(rows):
    for share in (0.0, 0.5, 1.0):
        scale = metric.scales(rows, torch.ones(3, dtype=torch.bool), share)
        assert torch.isfinite(scale).all()
        assert (scale > 0).all()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_pruning_minimises_the_weighted_ridge(share):
    """Against the normal equations of the regression with the damping λ D, in float64."""
    rows, p, k, damping = gradients(30, 8, 2), 8, 5, 0.03
    w_bar = torch.randn(p, generator=torch.Generator().manual_seed(3))
    budget, layers = Budget.over_all(p, k), (slice(0, p),)
    stage = Stage(DenseGradients(rows.clone()), w_bar, budget, 1, 0, layers, None)
    method = WassersteinRegression(damping=damping, first_order=0.0, metric=share)
    w, chosen = method.prune(stage)
    assert chosen["metric"] == share
    support = w.nonzero().flatten()
    assert len(support) == k
    scale = metric.scales(rows, torch.ones(p, dtype=torch.bool), share)
    G, targets = rows.double()[:, support], rows.double() @ w_bar.double()
    D = scale.double()[support].pow(-2)
    H = G.T @ G / len(rows) + damping * torch.diag(D)
    right = G.T @ targets / len(rows) + damping * D * w_bar.double()[support]
    torch.testing.assert_close(
        w[support].double(), torch.linalg.solve(H, right), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("best", METRICS)
def test_auto_takes_the_share_of_the_lowest_held_out_loss_once(best):
    """Held-out losses that are lowest for what a cut to a half with this share gives."""
    rows, p = gradients(30, 8, 2), 8
    w_bar = torch.randn(p, generator=torch.Generator().manual_seed(3))
    layers = (slice(0, p),)

    def stage(k, losses=None):
        gradients = DenseGradients(rows.clone())
        return Stage(gradients, w_bar, Budget.over_all(p, k), 1, 0, layers, losses)

    given = WassersteinRegression(damping=0.03, first_order=0.0, metric=best)
    wanted, _ = given.prune(stage(p // 2))
    method = WassersteinRegression(damping=0.03, first_order=0.0)
    w, chosen = method.prune(stage(5, lambda w: (w - wanted).double().abs().sum()[None]))
    assert chosen["metric"] == best
    expected, _ = WassersteinRegression(damping=0.03, first_order=0.0, metric=best).prune(stage(5))
    torch.testing.assert_close(w, expected)
    resumed = WassersteinRegression(damping=0.03, first_order=0.0)
    resumed.restore(*method.state())
    _, later = resumed.prune(stage(4))
    assert later["metric"] == best
