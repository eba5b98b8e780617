"""Theory as tests: what the method rests on, and which of the paper's statements hold.

A test states what is true; where the paper says otherwise the docstring says so. Convergence of
the solvers, their agreement with POT and the closed form are in test_transport.py; descent of the
alternation and the smoothed solve in test_regression.py.
"""

import itertools
import math
from functools import cache

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.sample_complexity import (
    EPSILONS,
    LAWS,
    SIZES,
    curve,
    first_order_variance,
    sample,
    slope,
    targets_of_laws,
    transport_of_laws,
)
from swap_prune.gradients import DenseGradients
from swap_prune.methods.base import Stage
from swap_prune.methods.wasserstein import WassersteinRegression
from swap_prune.regression import Budget, SupportRidge
from swap_prune.transport import couple, exact, identity, independent, smoothing

SEED = st.integers(0, 10**6)
SIZE = st.integers(1, 12)
RELATIVE = st.sampled_from([0.0, 1e-3, 0.03, 0.3, 3.0, 100.0, math.inf])
property_test = settings(max_examples=50, deadline=None)


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def random_plan(seed: int, n: int, m: int) -> Tensor:
    """Any coupling at all: whatever its marginals are, it couples those; half its cells empty."""
    weights = draw(seed, n, m).clamp(min=0) + torch.eye(n, m, dtype=torch.float64) * 0.1
    weights[:, 0] += 0.01
    weights[0] += 0.01
    return weights / weights.sum()


def clouds(seed: int, n: int, m: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, y of varied scale, and masses of both."""
    plan = random_plan(seed, n, m)
    scale = 10 ** draw(seed + 1, 2)
    return scale[0] * draw(seed + 2, n), scale[1] * draw(seed + 3, m), plan.sum(1), plan.sum(0)


def double_sum(plan: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (plan * (x[:, None] - y).square()).sum()


def divergence_of(plan: Tensor, mu: Tensor, nu: Tensor) -> float:
    return float(torch.xlogy(plan, plan / torch.outer(mu, nu)).sum())


# --- 1. the barycentric identity --------------------------------------------------------------


def barycentre(plan: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row masses, targets, and the variance of y within each row, of a plan."""
    mu = plan.sum(1)
    targets = plan @ y / mu
    return mu, targets, (plan * (y - targets[:, None]).square()).sum(1) / mu


@property_test
@given(SEED, SIZE, SIZE, st.sampled_from(["random", "exact", "sinkhorn", "unfinished"]))
def test_cost_is_a_regression_onto_the_targets_plus_a_constant(seed, n, m, kind):
    """Σ π_ij (x_i - y_j)² = Σ μ_i (x_i - t_i)² + Σ μ_i Var(y | i), for any plan and any x.

    The last term has no x in it: it is the constant, also when x moves and the plan stays.
    """
    x, y, mu, nu = clouds(seed, n, m)
    if kind == "random":
        plan = random_plan(seed, n, m)
    else:
        iterations = 1 if kind == "unfinished" else 100
        epsilon = 0.0 if kind == "exact" else 0.05
        found = couple(x, y, epsilon, mu=mu, nu=nu, max_iterations=iterations)
        plan = found.plan()
    mass, targets, scatter = barycentre(plan, y)
    for moved in (x, 3 * x - 1, x.flip(0)):
        regression = mass @ (moved - targets).square()
        torch.testing.assert_close(double_sum(plan, moved, y), regression + mass @ scatter)
    if kind != "random":
        size = float(x.abs().max() + y.abs().max())
        torch.testing.assert_close(found.targets, targets, atol=1e-9 * size, rtol=1e-9)
        expected = float(mass @ (x - found.targets).square() + mass @ scatter)
        assert found.cost == pytest.approx(expected, rel=1e-9, abs=1e-9 * size**2)


@property_test
@given(SEED, SIZE, SIZE)
def test_the_other_barycentre_leaves_no_constant(seed, n, m):
    """Averaging x instead leaves Σ ν_j Var(x | j), which moves with x.

    So of the two halves of the paper's eq. (10b), read with averages for x' and y', only the one
    that averages y has the derivative of the whole.
    """
    assume(n > 1)
    x, y, *_ = clouds(seed, n, m)
    plan = random_plan(seed, n, m)
    mass, sources, scatter = barycentre(plan.T, x)
    torch.testing.assert_close(
        double_sum(plan, x, y), mass @ (sources - y).square() + mass @ scatter
    )
    doubled = barycentre(plan.T, 2 * x)[2]
    torch.testing.assert_close(doubled, 4 * scatter)
    assert mass @ scatter > 0


# --- 2. LR as the diagonal special case, and the derivative -----------------------------------


def regression_problem(seed: int, n: int = 9, p: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """G (n, p), w_bar (p,) and another w (p,)."""
    return draw(seed, n, p), draw(seed + 1, p), draw(seed + 2, p)


def derivative_of_double_sum(plan: Tensor, G: Tensor, w: Tensor, w_bar: Tensor) -> Tensor:
    """By autograd, the plan held fixed."""
    w = w.clone().requires_grad_()
    return torch.autograd.grad(double_sum(plan, G @ w, G @ w_bar), w)[0]


def exact_derivative(plan: Tensor, G: Tensor, w: Tensor, w_bar: Tensor) -> Tensor:
    return 2 * G.T @ (plan.sum(1) * (G @ w) - plan @ (G @ w_bar))


def printed_derivative(plan: Tensor, G: Tensor, w: Tensor, w_bar: Tensor) -> Tensor:
    return 2 * G.T @ plan @ (G @ w - G @ w_bar)


@property_test
@given(SEED)
def test_lr_is_the_diagonal_plan(seed):
    """Objective, targets and derivatives of the plan I/n are LR's (paper, eq. (7))."""
    G, w_bar, w = regression_problem(seed)
    x, y, n = G @ w, G @ w_bar, len(G)
    paired = identity(x, y)
    plan = paired.plan()
    torch.testing.assert_close(plan, torch.eye(n, dtype=torch.float64) / n)
    torch.testing.assert_close(paired.targets, y)
    assert paired.objective == pytest.approx(float((x - y).square().mean()))
    torch.testing.assert_close(double_sum(plan, x, y), (x - y).square().mean())
    lr = 2 / n * G.T @ (x - y)
    for derivative in (derivative_of_double_sum, exact_derivative, printed_derivative):
        torch.testing.assert_close(derivative(plan, G, w, w_bar), lr)


@pytest.mark.parametrize("coupling", ["identity", "sinkhorn"])
def test_the_solver_makes_the_derivative_vanish(coupling: str):
    """The ridge onto a plan's targets is the minimum of that plan's Q; LR's for the plan I/n."""
    G, w_bar, w = regression_problem(0)
    support, damping, n = torch.tensor([0, 2, 3, 7]), 0.05, len(G)
    found = couple(G @ w, G @ w_bar, 0.1, coupling=coupling, tolerance=1e-12)
    ridge = SupportRidge(DenseGradients(G), w_bar, support)
    solution = ridge.weights(ridge.dual(found.targets, damping))
    penalty = 2 * damping * (solution - w_bar)
    total = derivative_of_double_sum(found.plan(), G, solution, w_bar) + penalty
    assert total[support].abs().max() < 1e-8
    lr = 2 / n * G.T @ (G @ (solution - w_bar)) + penalty
    assert (lr[support].abs().max() < 1e-8) == (coupling == "identity")


def test_the_method_with_diagonal_smoothing_is_lr():
    """As mixture 0 is (test_pruning.py), so is the printed form with S = I, at epsilon 0."""
    G, w_bar, _ = regression_problem(1, n=12)
    budget, layers = Budget.over_all(9, 4), (slice(0, 9),)

    def stage():
        return Stage(DenseGradients(G.clone()), w_bar, budget, 1, 0, layers, None)

    fixed = {"damping": 0.05, "first_order": 0.0, "metric": 0.0}
    lr, _ = WassersteinRegression(**fixed).prune(stage())
    printed, _ = WassersteinRegression(
        **fixed, coupling="sinkhorn", derivative="printed", epsilon=0.0, mixture=1.0
    ).prune(stage())
    torch.testing.assert_close(printed, lr)


@property_test
@given(SEED)
def test_the_printed_derivative_is_right_for_diagonal_plans_only(seed):
    """∇ = 2 Gᵀ (diag(μ) x - Π y); the printed 2 Gᵀ Π (x - y) lacks Gᵀ (diag(μ) - Π) G w.

    With G invertible that vanishes for every w only if Π is diagonal.
    """
    G, w_bar, w = regression_problem(seed)
    plan = random_plan(seed, 9, 9)
    oracle = derivative_of_double_sum(plan, G, w, w_bar)
    torch.testing.assert_close(exact_derivative(plan, G, w, w_bar), oracle)
    lacking = G.T @ (plan.sum(1).diag() - plan) @ G
    torch.testing.assert_close(
        oracle - printed_derivative(plan, G, w, w_bar), 2 * lacking @ w, atol=1e-10, rtol=1e-9
    )
    assert torch.linalg.matrix_norm(lacking) > 1e-3
    diagonal = plan.sum(1).diag()
    torch.testing.assert_close(
        printed_derivative(diagonal, G, w, w_bar),
        derivative_of_double_sum(diagonal, G, w, w_bar),
    )


def test_the_curvature_is_lrs_for_every_plan_but_not_as_printed():
    """ "The original covariance remains intact" (paper, section 3): true of Q, whose second
    derivative is 2 Gᵀ diag(μ) G whatever the plan; the printed derivative's is 2 Gᵀ Π G, which
    for the independent plan is the mean gradient's outer product, of rank one."""
    G, w_bar, w = regression_problem(3)
    n = len(G)
    plans = [f(G @ w, G @ w_bar).plan() for f in (identity, exact, independent)]
    for plan in plans:
        found = torch.autograd.functional.hessian(
            lambda v, plan=plan: double_sum(plan, G @ v, G @ w_bar), w
        )
        torch.testing.assert_close(found, 2 / n * G.T @ G)
    mean = G.mean(0)
    torch.testing.assert_close(2 * G.T @ plans[-1] @ G, 2 * torch.outer(mean, mean))


@pytest.mark.parametrize("relative", [0.5, 2.0])
def test_re_optimising_the_plan_leaves_the_derivative(relative: float):
    """Envelope theorem: with the plan optimal, how it follows w does not enter the derivative.

    Oracle: autograd through all of Sinkhorn's iterations and into the objective they end at.
    """
    G, w_bar, direction = regression_problem(4, n=10, p=5)
    # Near enough for plain Sinkhorn to converge.
    w = w_bar + 0.2 * direction
    y = G @ w_bar
    epsilon = relative * float(y.var(correction=0))
    mu = torch.full_like(y, 0.1)
    v = w.clone().requires_grad_()
    distances = ((G @ v)[:, None] - y).square()
    g = torch.zeros_like(y)
    for _ in range(1000):
        f = -epsilon * torch.logsumexp((g - distances) / epsilon + mu.log(), dim=1)
        g = -epsilon * torch.logsumexp((f[:, None] - distances) / epsilon + mu.log()[:, None], 0)
    plan = torch.outer(mu, mu) * ((f[:, None] + g - distances) / epsilon).exp()
    objective = (plan * distances).sum() + epsilon * torch.xlogy(plan, plan / 0.01).sum()
    (oracle,) = torch.autograd.grad(objective, v)
    found = couple(G @ w, y, relative, tolerance=1e-13)
    assert found.objective == pytest.approx(objective.item(), rel=1e-7)
    expected = exact_derivative(found.plan(), G, w, w_bar)
    torch.testing.assert_close(expected, oracle, rtol=1e-5, atol=1e-6)
    printed = printed_derivative(found.plan(), G, w, w_bar)
    assert (printed - oracle).norm() > 0.1 * oracle.norm()


# --- 3. averaged gradients --------------------------------------------------------------------


def covariance(rows: Tensor, masses: Tensor) -> Tensor:
    centred = rows - masses @ rows
    return centred.T @ (masses[:, None] * centred)


@property_test
@given(SEED, SIZE, SIZE)
def test_averaged_rows_vary_no_more_in_any_direction(seed, n, m):
    """Rows diag(1/μ) Π G under μ against rows G under ν, for any coupling (Jensen).

    Uniform masses make nΠ doubly stochastic. This counts all variance, the signal's with the
    noise's: it is no gain by itself, since at epsilon = infinity nothing of either is left.
    """
    G, plan = draw(seed, m, 4), random_plan(seed, n, m)
    averaged = plan @ G / plan.sum(1)[:, None]
    before, after = covariance(G, plan.sum(0)), covariance(averaged, plan.sum(1))
    assert torch.linalg.eigvalsh(before - after).min() > -1e-12
    assert after.trace() <= before.trace() + 1e-12


@pytest.mark.parametrize("epsilon", [0.0, 0.01, 0.1, 1.0, math.inf])
def test_independent_noise_is_reduced_by_the_squared_norm_of_the_smoothing(epsilon: float):
    """E‖S N‖² / E‖N‖² = ‖S‖_F² / n, between 1/n and 1, for noise N that S has not seen."""
    n = 30
    S = smoothing(draw(0, n), epsilon)
    factor = float(S.square().sum()) / n
    assert 1 / n - 1e-9 <= factor <= 1 + 1e-9
    if epsilon in (0.0, math.inf):
        assert factor == pytest.approx(1 if epsilon == 0 else 1 / n)
    noise = draw(1, n, 20_000)
    assert float((S @ noise).square().sum() / noise.square().sum()) == pytest.approx(
        factor, rel=0.02
    )


def test_noise_that_the_plan_has_seen_is_reduced_less():
    """The paper's proof takes the coefficients as given, but the plan depends on y = G w_bar.

    Neighbours by a noisy y are alike in their noise along w_bar: of it, averaging leaves at least
    about the noise's share of the variance of y (here one half), however many neighbours there
    are. Across w_bar the factor of independent noise holds.
    """
    n, p = 300, 200
    w_bar = torch.zeros(p, dtype=torch.float64)
    w_bar[0] = 1
    along, across, factors = [], [], []
    for seed in range(5):
        clean, noise = draw(seed, n, p), draw(100 + seed, n, p)
        S = smoothing((clean + noise) @ w_bar, 0.05)
        factors.append(S.square().sum() / n)
        left = (S @ noise).square().sum(0) / noise.square().sum(0)
        along.append(left[0])
        across.append(left[1:].mean())
    factor = float(torch.stack(factors).mean())
    assert factor < 0.05
    assert float(torch.stack(across).mean()) == pytest.approx(factor, rel=0.05)
    assert float(torch.stack(along).mean()) == pytest.approx(0.5, abs=0.05)


# --- 4. epsilon from zero to infinity ---------------------------------------------------------

PATH = (0.0, 1e-3, 0.01, 0.1, 0.3, 1.0, 3.0, 30.0, 1e3, math.inf)


@settings(max_examples=25, deadline=None)
@given(SEED, SIZE, SIZE)
def test_cost_rises_and_divergence_falls_along_epsilon(seed, n, m):
    """And how fast either end is reached (the ends themselves: test_transport.py, test_limits).

    Comparing the plan of epsilon with those of 0 and of infinity in either's objective gives
    cost - W2² ≤ ε (KL_0 - KL_ε) and KL_ε ≤ (cost_∞ - cost) / ε; by Pinsker the targets are then
    within half the range of y times √(2 KL_ε) of the mean.
    """
    x, y, mu, nu = clouds(seed, n, m)
    path = [couple(x, y, relative, mu=mu, nu=nu, tolerance=1e-11) for relative in PATH]
    # Of the plan: the reported one divides a difference of costs, and its rounding, by epsilon.
    divergences = [divergence_of(found.plan(), mu, nu) for found in path]
    first, last = path[0], path[-1]
    # Primal and dual objective agree to 1e-7.
    slack = 1e-6 * last.cost + 1e-12
    for before, after in itertools.pairwise(path):
        assert before.cost <= after.cost + slack
        assert before.objective <= after.objective + slack
    for before, after in itertools.pairwise(divergences):
        assert before >= after - 1e-6
    for found, divergence in zip(path[1:-1], divergences[1:-1], strict=True):
        gained = divergences[0] - divergence
        assert found.cost - first.cost <= found.epsilon * gained + slack
        assert found.epsilon * divergence <= last.cost - found.cost + slack
        distance = float(mu @ (found.targets - nu @ y).abs())
        bound = float(y.max() - y.min()) / 2 * math.sqrt(2 * max(divergence, 0))
        assert distance <= bound + 1e-5 * float(y.std(correction=0)) + 1e-12
    torch.testing.assert_close(last.targets, (nu @ y).expand_as(x))


@property_test
@given(SEED, st.integers(2, 12))
def test_a_vanishing_epsilon_pairs_by_rank_not_by_sample(seed, n):
    """The limit is the sorted plan. It is LR's plan I/n only if x and y are in the same order.

    The paper has a small epsilon, and a large n, lead to diag(1/n); that holds only once the
    samples are sorted, which for x = G w and y = G w_bar they are not.
    """
    x, y = torch.arange(n, dtype=torch.float64), draw(seed, n).argsort().double()
    near = couple(x, y, 1e-3)
    torch.testing.assert_close(near.targets, x, atol=1e-6, rtol=0)
    torch.testing.assert_close(near.plan(), exact(x, y).plan(), atol=1e-6, rtol=0)
    paired = identity(x, y)
    same_order = bool((x == y).all())
    assert torch.allclose(near.plan(), paired.plan(), atol=1e-6) == same_order
    assert (near.cost < paired.cost - 1e-6) == (not same_order)


# --- 5. convex combinations -------------------------------------------------------------------


@property_test
@given(SEED, SIZE, RELATIVE, RELATIVE, st.floats(0, 1))
def test_a_convex_combination_of_couplings_is_one_and_so_are_its_targets(seed, n, one, two, share):
    """Cost and targets are the combinations, the divergence is at most theirs (it is convex)."""
    x, y, mu, _ = clouds(seed, n, n)
    couplings = [couple(x, y, e, mu=mu, nu=mu, tolerance=1e-11) for e in (one, two)]
    couplings.append(identity(x, y, mu=mu, nu=mu))
    shares = [(1 - share) * share, share * share, 1 - share]
    plan = sum(s * c.plan() for s, c in zip(shares, couplings, strict=True))
    size = float(y.abs().max())
    assert (plan >= 0).all()
    torch.testing.assert_close(plan.sum(1), mu, atol=1e-9, rtol=0)
    torch.testing.assert_close(plan.sum(0), mu, atol=1e-9, rtol=0)
    targets = sum(s * c.targets for s, c in zip(shares, couplings, strict=True))
    torch.testing.assert_close(plan @ y / mu, targets, atol=1e-7 * size, rtol=0)
    cost = sum(s * c.cost for s, c in zip(shares, couplings, strict=True))
    assert float(double_sum(plan, x, y)) == pytest.approx(cost, rel=1e-6, abs=1e-9 * size**2)
    most = sum(s * divergence_of(c.plan(), mu, mu) for s, c in zip(shares, couplings, strict=True))
    assert divergence_of(plan, mu, mu) <= most + 1e-9


# --- 6. sample complexity ---------------------------------------------------------------------
#
# The paper: the entropy takes the sample complexity of W2² from n^(-1/4) to n^(-1/2). In one
# dimension, where x and y live, there is no such gap: for laws with light tails W2² is estimated at
# n^(-1/2) or better with or without entropy, n^(-1/4) being the worst case of its root W2. What
# the entropy brings (for Gaussians) is less variance of the targets and less bias of the cost, at
# the price of more variance of the cost and of other targets. Curves with more seeds:
# benchmarks/results/sample_complexity.json.

DIFFERENT, EQUAL, COINS = LAWS


@cache
def simulated(law: str, epsilon: float) -> dict:
    return curve(law, epsilon, range(40))


def of_sizes(law: str, epsilon: float, measure: str) -> Tensor:
    """A measure (`curve`) at every size."""
    values = [size[measure] for size in simulated(law, epsilon)["sizes"]]
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_between_different_laws_every_epsilon_has_the_same_rates(epsilon: float):
    """n^(-1/2) for the cost and for the targets, entropy or none; the bias is of order 1/n."""
    slopes = simulated(DIFFERENT, epsilon)["slopes"]
    for measure in ("error", "error_of_root", "deviation", "target_error"):
        assert slopes[measure] == pytest.approx(-0.5, abs=0.12), measure
    bias = of_sizes(DIFFERENT, epsilon, "bias")
    error = of_sizes(DIFFERENT, epsilon, "bias_standard_error")
    if math.isinf(epsilon):
        # Of variances and of the squared distance of means the biases cancel.
        assert (bias.abs() < 3 * error).all()
    else:
        assert slopes["bias"] == pytest.approx(-1, abs=0.2)


def test_between_equal_laws_entropy_makes_the_cost_converge_more_slowly():
    """W2² is of order 1/n (times log log n for Gaussians), so W2 of order n^(-1/2).

    The entropic cost keeps a first-order error, n^(-1/2) once n is large against 1/ε. (Subtracting
    the costs of x to itself and y to itself would cancel it; the paper does not.)
    """
    assert simulated(EQUAL, 0.0)["slopes"]["error"] == pytest.approx(-1, abs=0.15)
    assert simulated(EQUAL, 0.0)["slopes"]["error_of_root"] == pytest.approx(-0.5, abs=0.1)
    assert simulated(EQUAL, math.inf)["slopes"]["error"] == pytest.approx(-0.5, abs=0.12)
    assert first_order_variance(EQUAL, transport_of_laws(EQUAL, 0.0)) == pytest.approx(0)
    assert first_order_variance(EQUAL, transport_of_laws(EQUAL, 1.0)) > 0.1


def test_the_fourth_root_is_that_of_w2_between_atoms():
    """The rate n^(-1/4) exists: for W2, not W2², of equal laws with a gap in their support.

    There W2² is the difference of two frequencies, n^(-1/2). It has a kink where they are equal,
    which the entropy smooths: for this law the entropic cost is the faster one.
    """
    slopes = simulated(COINS, 0.0)["slopes"]
    assert slopes["error_of_root"] == pytest.approx(-0.25, abs=0.08)
    assert slopes["error"] == pytest.approx(-0.5, abs=0.12)
    assert simulated(COINS, 1.0)["slopes"]["error"] < slopes["error"] - 0.15
    assert simulated(COINS, math.inf)["slopes"]["error"] == pytest.approx(-1, abs=0.15)


@pytest.mark.parametrize("law", [DIFFERENT, EQUAL])
def test_targets_vary_less_with_entropy(law: str):
    """The advantage is here: around their own limit, at every n, and more with more entropy."""
    errors = [of_sizes(law, epsilon, "target_error") for epsilon in EPSILONS]
    for less, more in itertools.pairwise(errors):
        assert (more < less).all()


def test_targets_with_entropy_are_others():
    """The price: they are shrunk towards the mean of y, by an amount that n does not lower.

    As estimates of the exact map they are better than the exact coupling's only while n is small.
    """
    x_deviation = LAWS[EQUAL][0][1]
    map_ = transport_of_laws(EQUAL, 0.0)
    shrunk = transport_of_laws(EQUAL, 1.0)
    limit = float((map_.targets - shrunk.targets).abs()[0]) * x_deviation
    errors: dict[float, list[float]] = {0.0: [], 1.0: []}
    for n in (5, SIZES[-1]):
        for epsilon, record in errors.items():
            squares = []
            for seed in range(40):
                generator = torch.Generator().manual_seed(seed)
                x, y = (sample(EQUAL, side, n, generator) for side in (0, 1))
                found = couple(x, y, epsilon, relative=False)
                misfit = found.targets - targets_of_laws(EQUAL, map_, x)
                squares.append(misfit.square().mean())
            record.append(float(torch.stack(squares).mean().sqrt()))
    assert errors[1.0][0] < errors[0.0][0]
    assert errors[1.0][1] > errors[0.0][1]
    assert errors[1.0][1] == pytest.approx(limit, rel=0.15)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_the_variance_of_the_cost_is_that_of_the_potentials(epsilon: float):
    """n Var → Var f(x) + Var g(y), f and g the potentials of the laws (limit theorem)."""
    _, (_, y_deviation) = LAWS[DIFFERENT]
    absolute = epsilon * y_deviation**2 if epsilon else 0.0
    expected = first_order_variance(DIFFERENT, transport_of_laws(DIFFERENT, absolute))
    sizes = torch.tensor(SIZES[1:], dtype=torch.float64)
    found = sizes * of_sizes(DIFFERENT, epsilon, "deviation")[1:].square()
    assert float(found.mean()) == pytest.approx(expected, rel=0.2)


def test_entropy_raises_the_variance_of_the_cost_and_lowers_its_bias():
    """Between Gaussians n Var → 4 s² (σ² + τ²) + 2 (σ² - c)² + 2 (τ² - c)².

    Here s is the distance of the means and c ≤ στ the plan's covariance. As epsilon rises c falls,
    and the variance rises.
    """
    _, (_, y_deviation) = LAWS[DIFFERENT]
    limits = [
        first_order_variance(DIFFERENT, transport_of_laws(DIFFERENT, e * y_deviation**2))
        for e in (0.0, 0.01, 0.1, 1.0, 10.0, math.inf)
    ]
    assert all(less < more for less, more in itertools.pairwise(limits))
    deviations = [of_sizes(DIFFERENT, epsilon, "deviation") for epsilon in EPSILONS]
    biases = [of_sizes(DIFFERENT, epsilon, "bias").abs() for epsilon in EPSILONS]
    for i, j in itertools.pairwise(range(len(EPSILONS))):
        assert (deviations[i] < deviations[j]).all()
        assert (biases[i] > biases[j]).all()


def test_slope_is_the_exponent():
    assert slope([n**-0.3 for n in SIZES]) == pytest.approx(-0.3)


# --- 7. Proposition 1 -------------------------------------------------------------------------


def point_of_proposition_1(x: Tensor, points: Tensor, masses: Tensor) -> Tensor:
    """A point of the convex hull as far from x as the points are in the (squared) mean.

    The mean of the points is no farther (Jensen), the farthest of them no nearer; on the segment
    between the two the squared distance is a parabola, whose root is the answer.
    """
    squares = (points - x).square().sum(1)
    mean = masses @ points
    way = points[squares.argmax()] - mean
    a, b = way @ way, (mean - x) @ way
    lacking = masses @ squares - (mean - x) @ (mean - x)
    if not a > 0:
        return mean
    share = (-b + (b * b + a * lacking).clamp(min=0).sqrt()) / a
    assert -1e-9 <= share <= 1 + 1e-9
    return mean + share * way


@property_test
@given(SEED, st.integers(1, 8), st.integers(1, 4))
def test_proposition_1_says_that_a_point_exists(seed, size, dimension):
    """It does, but it is not the mean under the same masses, which misses by the variance."""
    points, x = draw(seed, size, dimension), 2 * draw(seed + 1, dimension)
    masses = torch.softmax(draw(seed + 2, size), dim=0)
    wanted = masses @ (points - x).square().sum(1)
    found = point_of_proposition_1(x, points, masses)
    torch.testing.assert_close((found - x).square().sum(), wanted)
    mean = masses @ points
    variance = covariance(points, masses).trace()
    torch.testing.assert_close((mean - x).square().sum(), wanted - variance)


def test_the_point_of_proposition_1_moves_with_x():
    """So it is no target to regress onto: held fixed it gives another derivative, unlike t.

    Of points -1 and 1 with equal masses the mean square distance from x is 1 + x², its derivative
    2 x; the mean gives that derivative, the proposition's point 2 √(1 + x²) in size.
    """
    points = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    masses = torch.tensor([0.5, 0.5], dtype=torch.float64)
    for place in (0.25, 2.0):
        x = torch.tensor([place], dtype=torch.float64)
        point = point_of_proposition_1(x, points, masses)
        assert float(point) == pytest.approx(place - math.sqrt(1 + place**2))
        assert float(2 * (x - masses @ points)) == pytest.approx(2 * place)
        assert float(2 * (x - point)) == pytest.approx(2 * math.sqrt(1 + place**2))


def test_neighbourhoods_weigh_what_they_hold_not_one_nth():
    """The paper splits W_x over cells and gives each the weight 1/n; a cell's weight is its mass.

    With the y_i themselves as cells, as the paper has it for samples, each hull is one point and
    none can be chosen that would mend it.
    """
    x, y = torch.zeros(1, dtype=torch.float64), torch.tensor([1.0, 3.0], dtype=torch.float64)
    nu = torch.tensor([0.9, 0.1], dtype=torch.float64)
    cost = couple(x, y, 1.0, nu=nu).cost
    assert cost == pytest.approx(float(nu @ y.square()))
    assert float(y.square().mean()) == pytest.approx(5)
    assert cost == pytest.approx(1.8)
