"""Compensation block by block, against dense algebra and the regression over all weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swap_prune import InputError, prune
from swap_prune.gradients import DenseGradients
from swap_prune.methods import WassersteinRegression
from swap_prune.methods import blocks as blocks_module
from swap_prune.methods.base import Stage
from swap_prune.methods.blocks import compensated, neighbours
from swap_prune.methods.wasserstein import BLOCK_DAMPINGS
from swap_prune.regression import Budget, SupportRidge

LAYERS = (slice(0, 13), slice(13, 20))


def problem(n: int, seed: int) -> tuple[DenseGradients, torch.Tensor, torch.Tensor]:
    """G (n, 20), weights of which two are zero already, and a support of nine."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, 20, generator=generator, dtype=torch.float64)
    w_bar = torch.randn(20, generator=generator, dtype=torch.float64)
    w_bar[[3, 14]] = 0.0
    support = torch.multinomial((w_bar != 0).double(), 9, generator=generator).sort().values
    return DenseGradients(rows), w_bar, support


def by_hand(rows, w_bar, support, size, damping):
    """Each block's minimum by a dense solve in the weights that stay."""
    w = torch.zeros_like(w_bar)
    for block in neighbours(w_bar, LAYERS, size):
        kept = block[torch.isin(block, support)]
        cut = block[~torch.isin(block, support)]
        system = rows[:, kept].T @ rows[:, kept] / len(rows) + damping * torch.eye(len(kept))
        right = rows[:, kept].T @ (rows[:, cut] @ w_bar[cut]) / len(rows)
        w[kept] = w_bar[kept] + torch.linalg.solve(system, right)
    return w


@given(
    n=st.integers(1, 12),
    size=st.integers(1, 25),
    at_once=st.integers(1, 3),
    damping=st.floats(1e-3, 10),
    seed=st.integers(0, 50),
)
def test_each_block_is_at_its_minimum(n, size, at_once, damping, seed):
    G, w_bar, support = problem(n, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "NUMBERS_AT_ONCE", at_once * size * n)
        both = compensated(G, w_bar, support, LAYERS, size, [damping, 2 * damping])
    for w, value in zip(both, (damping, 2 * damping), strict=True):
        expected = by_hand(G.rows(), w_bar, support, size, value)
        torch.testing.assert_close(w, expected, rtol=1e-6, atol=1e-8)


def test_one_block_is_the_regression_over_all_weights():
    G, w_bar, support = problem(6, 0)
    (w,) = compensated(G, w_bar, support, (slice(0, 20),), 20, [0.1])
    ridge = SupportRidge(G, w_bar, support)
    torch.testing.assert_close(w, ridge.weights(ridge.dual((G @ w_bar).double(), 0.1)))


def test_blocks_without_a_minimum_stay_as_they_are():
    G, w_bar, support = problem(6, 0)
    vanishing = DenseGradients(torch.zeros_like(G.rows()))
    (w,) = compensated(vanishing, w_bar, support, LAYERS, 5, [0.0])
    assert torch.equal(w[support], w_bar[support])
    assert int((w != 0).sum()) == len(support)


def test_a_regression_around_other_weights_is_damped_towards_them():
    G, w_bar, support = problem(6, 1)
    y = (G @ w_bar).double()
    (centre,) = compensated(G, w_bar, support, LAYERS, 5, [0.1])
    ridge = SupportRidge(G, w_bar, support)
    moved = ridge.around(centre)
    w = moved.weights(moved.dual(y, 0.3))[support]
    columns = G.rows()[:, support]
    slope = columns.T @ (columns @ w - y) / 6 + 0.3 * (w - centre[support])
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-9)
    # The regression it came from is as it was.
    assert torch.equal(ridge.start, (columns @ w_bar[support]).double())


def stage_of(G, w_bar, losses) -> Stage:
    return Stage(
        gradients=DenseGradients(G.rows().clone()),
        w_bar=w_bar,
        budget=Budget.over_all(20, 9),
        samples_per_row=1,
        remaining=0,
        layers=LAYERS,
        held_out_losses=losses,
    )


def test_the_held_out_loss_decides_whether_blocks_are_used():
    G, w_bar, _ = problem(6, 2)
    fixed = {"damping": 0.1, "first_order": 0.0, "metric": 0.0}
    plain, _ = WassersteinRegression(**fixed).prune(stage_of(G, w_bar, None))

    def far_from_plain(w):
        return torch.stack([-(w - plain).norm()])

    def near_plain(w):
        return torch.stack([(w - plain).norm()])

    kept, chosen = WassersteinRegression(**fixed, block_size=5).prune(
        stage_of(G, w_bar, near_plain)
    )
    assert torch.equal(kept, plain)
    assert chosen["block_damping"] is None
    moved, chosen = WassersteinRegression(**fixed, block_size=5).prune(
        stage_of(G, w_bar, far_from_plain)
    )
    # The least damped blocks move furthest.
    assert chosen["block_damping"] == min(BLOCK_DAMPINGS)
    assert not torch.allclose(moved, plain)
    assert torch.equal(moved != 0, plain != 0)


# --- as a setting -------------------------------------------------------------------------------


def model_and_data():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    ).eval()
    return model, (torch.randn(60, 6), torch.randint(3, (60,)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"block_size": -1}, "block_size=-1 must be a whole number of at least 0"),
        ({"block_size": 5, "method": "wf"}, "block_size=5 has no part in method='wf'"),
        (
            {"block_size": 5, "held_out": 0, "damping": 0.1, "first_order": 1, "method": "lr"},
            "block_size=5 needs held-out samples",
        ),
    ],
)
def test_block_sizes_that_no_run_can_use_are_named(settings, said):
    model, data = model_and_data()
    with pytest.raises(InputError) as caught:
        prune(model, data, sparsity=0.5, **settings)
    assert said in str(caught.value)


def test_the_choice_is_in_the_history():
    model, data = model_and_data()
    given = {"sparsity": 0.5, "method": "lr", "stages": 2, "correcting": 0}
    result = prune(model, data, **given)
    assert result.settings["block_size"] == 100
    assert all("block_damping" in line for line in result.history)
    without = prune(model, data, **given, block_size=0)
    assert not any("block_damping" in line for line in without.history)
    # More than a layer has is a whole layer, whatever the memory.
    layers = prune(model, data, **given, block_size=2**60)
    assert layers.nonzeros == result.nonzeros
    unjudged = prune(model, data, **given, held_out=0, damping=0.1, first_order=1)
    assert unjudged.settings["block_size"] == 0
