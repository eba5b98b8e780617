from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swap_prune import transport
from swap_prune.gradients import DenseGradients
from swap_prune.methods.base import Stage
from swap_prune.methods.wasserstein import DAMPING_RANGE, FIRST_DAMPING, WassersteinRegression
from swap_prune.regression import (
    Budget,
    SupportRidge,
    hard_threshold_descent,
)


def problem(n: int, p: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    G = DenseGradients(torch.randn(n, p, generator=generator))
    w_bar = torch.randn(p, generator=generator)
    targets = G @ w_bar - 0.5 + 0.1 * torch.randn(n, generator=generator)
    return G, w_bar, targets


def objective(G, targets, w, w_bar, damping):
    """`1/(2n) ‖G w - t‖² + λ/2 ‖w - w_bar‖²` in float64."""
    misfit = G.rows().double() @ w.double() - targets.double()
    delta = (w - w_bar).double()
    return float(misfit.square().mean() / 2 + damping / 2 * delta.square().sum())


def dense_minimum(G, targets, w_bar, support, damping):
    """The oracle: normal equations on the support, in float64."""
    n = G.shape[0]
    A = G.rows()[:, support].double()
    H = A.T @ A / n + damping * torch.eye(len(support), dtype=torch.float64)
    b = A.T @ targets.double() / n + damping * w_bar[support].double()
    w = torch.zeros(len(w_bar), dtype=torch.float64)
    w[support] = torch.linalg.solve(H, b)
    return w.float()


@pytest.mark.parametrize(("n", "p"), [(6, 30), (30, 6), (1, 4), (8, 8)])
@pytest.mark.parametrize("damping", [1e-3, 0.1, 10.0])
def test_back_solve_is_the_minimum_on_the_support(n, p, damping):
    G, w_bar, targets = problem(n, p, 0)
    support = torch.arange(0, p, 2)
    ridge = SupportRidge(G, w_bar, support)
    v = ridge.dual(targets, damping)
    w = ridge.weights(v)
    expected = dense_minimum(G, targets, w_bar, support, damping)
    torch.testing.assert_close(w, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ridge.predictions(v).float(), G @ w, rtol=1e-3, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 12), p=st.integers(2, 30), data=st.data())
def test_the_gram_matrix_of_fewer_columns_is_that_of_all_less_that_of_the_others(n, p, data):
    G, w_bar, _ = problem(n, p, 3)
    everything = torch.arange(0, p, 2)
    kept = data.draw(st.lists(st.sampled_from(everything.tolist()), min_size=1, unique=True))
    support = torch.tensor(sorted(kept))
    gram = SupportRidge(G, w_bar, everything).gram_of(support)
    if gram is None:
        assert 2 * len(support) <= len(everything)
    else:
        torch.testing.assert_close(gram, G.columns(support).gram(), rtol=1e-4, atol=1e-4)


def test_first_order_term_is_a_shift_of_the_targets():
    G, w_bar, _ = problem(12, 7, 1)
    w = w_bar.clone().requires_grad_(True)
    alpha, damping = 0.3, 0.05
    full = (
        (G.rows() @ (w - w_bar)).square().mean() / 2
        + alpha * G.rows().mean(0) @ (w - w_bar)
        + damping / 2 * (w - w_bar).square().sum()
    )
    (slope,) = torch.autograd.grad(full, w)
    minimum = SupportRidge(G, w_bar, torch.arange(7))
    step = minimum.weights(minimum.dual(G @ w_bar - alpha, damping)) - w_bar
    hessian = G.rows().T @ G.rows() / 12 + damping * torch.eye(7)
    torch.testing.assert_close(step, -torch.linalg.solve(hessian, slope), rtol=1e-3, atol=1e-5)


def test_saliency_is_the_rise_of_the_objective():
    G, w_bar, targets = problem(20, 9, 2)
    damping, everything = 0.02, torch.arange(9)
    ridge = SupportRidge(G, w_bar, everything)
    scores = ridge.saliency(targets, damping)
    lowest = objective(G, targets, ridge.weights(ridge.dual(targets, damping)), w_bar, damping)
    for i in range(9):
        rest = everything[everything != i]
        w = dense_minimum(G, targets, w_bar, rest, damping)
        rise = objective(G, targets, w, w_bar, damping) - lowest
        assert float(scores[i]) == pytest.approx(rise, rel=2e-2, abs=1e-5)


def test_printed_gradient_vanishes_at_the_smoothed_solution():
    G, w_bar, targets = problem(15, 8, 3)
    support, damping = torch.tensor([0, 2, 3, 7]), 0.1
    smoother = transport.smoothing(targets.double(), 0.1)
    ridge = SupportRidge(G, w_bar, support)
    w = ridge.weights(ridge.smoothed_dual(targets, damping, smoother))
    residual = smoother.float() @ (G @ w - targets)
    slope = (G.T @ residual / 15 + damping * (w - w_bar))[support]
    assert slope.abs().max() < 1e-4
    same = ridge.smoothed_dual(targets, damping, torch.eye(15, dtype=torch.float64))
    torch.testing.assert_close(same, ridge.dual(targets, damping), rtol=1e-5, atol=1e-8)


def test_a_damping_with_which_nothing_moves_is_no_place_to_search_from():
    G, w_bar, _ = problem(30, 8, 2)
    rows = 0.1 * G.rows()  # of usual curvatures, so that dampings are in units of 1

    def prune(method, w, k, losses):
        gradients, budget = DenseGradients(rows.clone()), Budget.over_all(8, k)
        return method.prune(Stage(gradients, w, budget, 1, 1, (slice(0, 8),), losses))

    fixed = {"first_order": 0.0, "metric": 0.0}
    method = WassersteinRegression(**fixed)
    w, chosen = prune(method, w_bar, 6, lambda u: (u - w_bar)[u != 0].norm()[None])
    assert chosen["damping"] > DAMPING_RANGE[1] / 3
    wanted, _ = prune(WassersteinRegression(damping=FIRST_DAMPING, **fixed), w, 4, None)
    # Flat around what the first stage ended with, so no search would come away from there.
    _, chosen = prune(method, w, 4, lambda u: ((u - wanted).norm() > 1e-3).double()[None])
    assert chosen["damping"] == FIRST_DAMPING


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 12), damping=st.sampled_from([1e-3, 0.1, 1.0]))
def test_thresholding_never_raises_the_objective_and_keeps_the_budget(seed, k, damping):
    G, w_bar, targets = problem(10, 12, seed)
    budget = Budget.over_all(12, k)
    w = budget.threshold(w_bar)
    before = objective(G, targets, w, w_bar, damping)
    for iterations in (1, 2, 5, 20):
        w = hard_threshold_descent(G, targets, w_bar, budget, damping, iterations)
        after = objective(G, targets, w, w_bar, damping)
        assert int((w != 0).sum()) <= k
        assert after <= before * (1 + 1e-9)
        before = after


@pytest.mark.parametrize("seed", range(8))
def test_close_to_brute_force_over_supports(seed):
    n, p, k, damping = 12, 9, 4, 0.05
    G, w_bar, targets = problem(n, p, seed)

    def value(support):
        w = dense_minimum(G, targets, w_bar, torch.as_tensor(support), damping)
        return objective(G, targets, w, w_bar, damping)

    every = sorted(value(support) for support in combinations(range(p), k))
    budget = Budget.over_all(p, k)
    everything = SupportRidge(G, w_bar, torch.arange(p))
    by_saliency = value(budget.select(everything.saliency(targets, damping)))
    descended = hard_threshold_descent(G, targets, w_bar, budget, damping).nonzero().flatten()
    # Of 126 supports; a support at random would be near the middle, at place 63.
    assert sum(v < by_saliency * (1 - 1e-6) for v in every) < 40
    assert sum(v < value(descended) * (1 - 1e-6) for v in every) < 40


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    epsilon=st.sampled_from([0.0, 0.05, 0.5, 5.0, float("inf")]),
    mixture=st.sampled_from([0.3, 1.0]),
)
def test_alternation_never_raises_the_full_objective(seed, epsilon, mixture):
    """Transport cost + epsilon KL + damping, with the diagonal coupling mixed in."""
    G, w_bar, _ = problem(14, 10, seed)
    y = (G @ w_bar).double()
    support, damping = torch.arange(0, 10, 3), 0.05
    ridge = SupportRidge(G, w_bar, support)
    v = ridge.dual(y, damping)
    values = []
    for _ in range(6):
        x = ridge.predictions(v)
        plan = transport.couple(x, y, epsilon, tolerance=1e-10)
        diagonal = float((x - y).square().mean())
        divergence = 0.0 if plan.epsilon == float("inf") else plan.epsilon * plan.divergence
        values.append(
            (1 - mixture) * diagonal
            + mixture * (plan.cost + divergence)
            + damping * float((ridge.weights(v) - w_bar).double().square().sum())
        )
        v = ridge.dual((1 - mixture) * y + mixture * plan.targets, damping)
    for before, after in pairwise(values):
        assert after <= before * (1 + 1e-6) + 1e-9


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    cuts=st.lists(st.floats(0, 0.99), min_size=1, max_size=6),
)
@example(sizes=[4, 23, 23, 53], cuts=[1 - 66 / 103, 1 - 64 / 103])
def test_no_layer_grows_from_stage_to_stage(sizes, cuts):
    # Shares of 66 are (2, 15, 15, 34), of 64 (3, 14, 14, 33): the first layer has but two left.
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    layers = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    most = None
    for cut in sorted(cuts):
        k = max(1, round((1 - cut) * sum(sizes)))
        counts = Budget.per_layer(layers, k, most).counts
        assert sum(counts) == k
        assert all(a <= b for a, b in zip(counts, most or sizes, strict=True))
        most = counts


def test_budgets_are_exact():
    scores = torch.tensor([5.0, 1.0, 4.0, 3.0, 2.0, 9.0])
    assert Budget.over_all(6, 2).select(scores).tolist() == [0, 5]
    layers = [slice(0, 4), slice(4, 6)]
    per_layer = Budget.per_layer(layers, 3)
    assert per_layer.counts == (2, 1)
    assert per_layer.select(scores).tolist() == [0, 2, 5]
    for k in range(1, 7):
        budget = Budget.per_layer(layers, k)
        assert sum(budget.counts) == k
        assert min(budget.counts) >= (1 if k > 1 else 0)
    tiny = Budget.per_layer([slice(0, 100), slice(100, 106)], 5)
    assert tiny.counts == (4, 1)
    # The shares of MLPNet's layers are 31.0, 0.8 and 0.2 of a weight.
    layers = [slice(0, 31360), slice(31360, 32160), slice(32160, 32360)]
    assert Budget.per_layer(layers, 32).counts == (30, 1, 1)
    assert Budget.over_all(6, 4).select(torch.tensor([1.0, -torch.inf, 2.0] * 2)).tolist() == [
        0, 2, 3, 5,
    ]  # fmt: skip


def test_degenerate_problems_stay_finite():
    w_bar = torch.tensor([1.0, -2.0, 0.5])
    for matrix in (torch.zeros(4, 3), torch.ones(1, 3), torch.ones(5, 3)):
        G = DenseGradients(matrix)
        ridge = SupportRidge(G, w_bar, torch.arange(3))
        y = G @ w_bar
        assert torch.isfinite(ridge.saliency(y, 0.01)).all()
        assert torch.isfinite(ridge.weights(ridge.dual(y - 1, 0.01))).all()
        w = hard_threshold_descent(G, y, w_bar, Budget.over_all(3, 2), 0.01)
        assert int((w != 0).sum()) == 2


@settings(max_examples=30, deadline=None)
@given(n=st.integers(2, 40), count=st.integers(1, 12), seed=st.integers(0, 99))
def test_leading_directions_hold_almost_as_much_curvature_as_the_eigenvectors(n, count, seed):
    count = min(count, n)
    rows = torch.randn(n, 50, generator=torch.Generator().manual_seed(seed))
    # Eigenvalues that fall as those of gradients do.
    G = DenseGradients(rows * torch.logspace(0, -2, 50))
    ridge = SupportRidge(G, torch.ones(50), torch.arange(50))
    found = ridge.leading(count)
    torch.testing.assert_close(found.T @ found, torch.eye(count, dtype=torch.float64))
    best = torch.linalg.eigvalsh(ridge.gram)[-count:].sum()
    assert float((found * (ridge.gram @ found)).sum()) > 0.99 * float(best)


def test_a_gram_matrix_that_rounding_made_indefinite_is_still_solved():
    G, w_bar, targets = problem(4, 9, 0)
    gram = G.gram()
    values, vectors = torch.linalg.eigh(gram)
    values[0] = -1e-6
    broken = SupportRidge(G, w_bar, torch.arange(9), (vectors * values) @ vectors.T)
    v = broken.dual(targets, 1e-9)
    assert torch.isfinite(v).all()
    right = targets.double() - broken.start
    expected = vectors @ ((vectors.T @ right) / (values.clamp_min(0) + 4e-9))
    torch.testing.assert_close(v, expected, rtol=1e-6, atol=0)
    assert torch.isfinite(broken.saliency(targets, 1e-9)).all()
