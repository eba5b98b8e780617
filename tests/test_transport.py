"""Couplings against POT, against each other, and at the edges of what they accept."""

import itertools
import math

import ot
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from swap_prune.errors import InputError
from swap_prune.transport import (
    COUPLINGS,
    couple,
    exact,
    gaussian,
    identity,
    independent,
    sinkhorn,
    smoothing,
)


def masses(size: int, generator: torch.Generator) -> Tensor:
    values = torch.rand(size, dtype=torch.float64, generator=generator) + 0.05
    return values / values.sum()


def clouds(seed: int, n: int = 40, m: int = 30, tails: bool = False) -> tuple[Tensor, ...]:
    """x, y, mu, nu; with heavy tails most of y is tiny and a few values are large."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dtype=torch.float64, generator=generator) * 1.5 + 0.3
    y = torch.randn(m, dtype=torch.float64, generator=generator)
    if tails:
        x, y = x**5, y**5
    return x, y, masses(n, generator), masses(m, generator)


def objective_of(plan: Tensor, x: Tensor, y: Tensor, mu: Tensor, nu: Tensor, epsilon: float):
    cost = (plan * (x[:, None] - y).square()).sum()
    return float(cost + epsilon * torch.xlogy(plan, plan / torch.outer(mu, nu)).sum())


# --- against POT ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("relative", "tails"), [(0.02, False), (0.3, False), (3.0, False), (1.0, True), (10.0, True)]
)
def test_sinkhorn_is_pots(relative: float, tails: bool):
    x, y, mu, nu = clouds(0, tails=tails)
    found = couple(x, y, relative, mu=mu, nu=nu, tolerance=1e-11)
    squares = (x[:, None] - y).square()
    plan = ot.bregman.sinkhorn_log(
        mu.numpy(),
        nu.numpy(),
        squares.numpy(),
        found.epsilon,
        numItermax=50_000,
        stopThr=1e-11,
    )
    plan = torch.from_numpy(plan)
    scale = float(y.std())
    assert found.converged
    torch.testing.assert_close(found.plan(), plan, atol=1e-8, rtol=0)
    torch.testing.assert_close(found.targets, plan @ y / mu, atol=1e-6 * scale, rtol=0)
    assert found.cost == pytest.approx(float((plan * squares).sum()), rel=1e-7)
    expected = objective_of(plan, x, y, mu, nu, found.epsilon)
    assert found.objective == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("seed", range(5))
def test_exact_is_pots(seed: int):
    x, y, mu, nu = clouds(seed)
    found = couple(x, y, 0.0, mu=mu, nu=nu)
    plan = torch.from_numpy(ot.emd_1d(x.numpy(), y.numpy(), mu.numpy(), nu.numpy()))
    torch.testing.assert_close(found.plan(), plan, atol=1e-12, rtol=0)
    torch.testing.assert_close(found.targets, plan @ y / mu, atol=1e-10, rtol=0)
    squares = (x[:, None] - y).square().numpy()
    assert found.cost == pytest.approx(ot.emd2(mu.numpy(), nu.numpy(), squares), rel=1e-10)
    expected = torch.xlogy(plan, plan / torch.outer(mu, nu)).sum()
    assert found.divergence == pytest.approx(float(expected), rel=1e-9)


def test_exact_with_uniform_masses_pairs_by_rank():
    x, y, *_ = clouds(3, n=50, m=50)
    found = exact(x, y)
    torch.testing.assert_close(found.targets[x.argsort()], y.sort().values)
    assert found.divergence == pytest.approx(math.log(50))


# --- properties -------------------------------------------------------------------------------

# Mixtures of scales: most samples tiny, a few large, repeated ones too.
VALUES = st.one_of(
    st.floats(-1, 1), st.floats(-1e3, 1e3), st.sampled_from([0.0, 1e-3, -1e-3, 1.0, 1e3])
)
CLOUD = st.lists(VALUES, min_size=1, max_size=12)
WEIGHTS = st.lists(st.floats(0.01, 1), min_size=12, max_size=12)
RELATIVE = st.sampled_from([0.0, 1e-3, 1e-2, 0.1, 1.0, 10.0, 1e4, math.inf])
property_test = settings(max_examples=60, deadline=None)


def tensors(
    x: list[float], y: list[float], a: list[float], b: list[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mu = torch.tensor(a[: len(x)], dtype=torch.float64)
    nu = torch.tensor(b[: len(y)], dtype=torch.float64)
    as_double = torch.float64
    return (
        torch.tensor(x, dtype=as_double),
        torch.tensor(y, dtype=as_double),
        mu / mu.sum(),
        nu / nu.sum(),
    )


@property_test
@example([0.0, 1.0], [500.0] * 4, [1.0] * 12, [1.0, 1.0, 0.5] + [1.0] * 9, 1e-3)
@given(CLOUD, CLOUD, WEIGHTS, WEIGHTS, RELATIVE)
def test_a_coupling_is_a_coupling(x, y, a, b, epsilon):
    x, y, mu, nu = tensors(x, y, a, b)
    found = couple(x, y, epsilon, mu=mu, nu=nu, tolerance=1e-9)
    plan = found.plan()
    spread = float(y.max() - y.min())
    assert found.converged
    assert (plan >= 0).all()
    torch.testing.assert_close(plan.sum(1), mu, atol=1e-12, rtol=0)
    torch.testing.assert_close(plan.sum(0), nu, atol=2e-9, rtol=0)
    assert found.marginal_error <= 1e-9
    slack = 1e-9 * (1 + spread + float(y.abs().max()))
    torch.testing.assert_close(plan @ y / mu, found.targets, atol=10 * slack, rtol=0)
    assert (found.targets >= y.min() - slack).all()
    assert (found.targets <= y.max() + slack).all()
    assert float(mu @ found.targets) == pytest.approx(float(nu @ y), abs=len(y) * 2 * slack)
    # No coupling does better than the optimal one; that of independence is the easiest to try.
    bound = independent(x, y, mu=mu, nu=nu).cost
    assert found.objective <= bound * (1 + 1e-6) + 1e-12


@property_test
@given(CLOUD, WEIGHTS, RELATIVE)
def test_sinkhorn_beats_the_identity(y, a, epsilon):
    _, y, mu, _ = tensors(y, y, a, a)
    x = y.flip(0) * 0.5
    found = couple(x, y, epsilon, mu=mu, nu=mu, tolerance=1e-9)
    paired = identity(x, y, mu=mu, nu=mu)
    penalty = 0.0 if found.divergence == 0 else found.epsilon * paired.divergence
    assert found.objective <= (paired.cost + penalty) * (1 + 1e-6) + 1e-12 or math.isinf(epsilon)


@property_test
@given(CLOUD, CLOUD, RELATIVE, st.sampled_from(["sinkhorn", "gaussian"]), st.randoms())
def test_order_of_samples_does_not_matter(x, y, epsilon, coupling, random):
    x, y, *_ = tensors(x, y, [1.0] * 12, [1.0] * 12)
    rows, columns = list(range(len(x))), list(range(len(y)))
    random.shuffle(rows)
    random.shuffle(columns)
    first = couple(x, y, epsilon, coupling=coupling, tolerance=1e-10)
    second = couple(x[rows], y[columns], epsilon, coupling=coupling, tolerance=1e-10)
    # The plan is as sharp in x as 1 / epsilon, and so is its response to rounding.
    atol = 1e-5 * (1e-9 + float(y.max() - y.min()))
    torch.testing.assert_close(first.targets[rows], second.targets, atol=atol, rtol=1e-9)


@pytest.mark.parametrize("tails", [False, True])
def test_limits(tails: bool):
    x, y, mu, nu = clouds(1, tails=tails)
    near_zero = couple(x, y, 1e-9, mu=mu, nu=nu)
    at_zero = couple(x, y, 0.0, mu=mu, nu=nu)
    # Of the variance, which the tails make large: the bulk is still smoothed a little.
    atol = 1e-3 * float(y.std())
    torch.testing.assert_close(near_zero.targets, at_zero.targets, atol=atol, rtol=0)
    assert near_zero.objective == pytest.approx(at_zero.cost, rel=1e-5)
    far = couple(x, y, 1e9, mu=mu, nu=nu)
    independent_ = couple(x, y, math.inf, mu=mu, nu=nu)
    torch.testing.assert_close(far.targets, independent_.targets, atol=1e-6, rtol=1e-6)
    assert far.objective == pytest.approx(independent_.cost, rel=1e-7)
    assert independent_.divergence == 0
    assert independent_.objective == independent_.cost


def test_relative_epsilon_is_times_the_variance():
    x, y, mu, nu = clouds(2)
    variance = float(nu @ (y - nu @ y).square())
    first = couple(x, y, 0.1, mu=mu, nu=nu)
    second = couple(x, y, 0.1 * variance, mu=mu, nu=nu, relative=False)
    assert first.epsilon == pytest.approx(second.epsilon)
    torch.testing.assert_close(first.targets, second.targets)


def test_translation_only_moves_targets():
    x, y, *_ = clouds(4)
    first, second = couple(x, y, 0.1), couple(x + 1e6, y - 1e5, 0.1)
    torch.testing.assert_close(second.targets + 1e5, first.targets, atol=1e-8, rtol=0)


# --- accuracy, warm starts, extremes ----------------------------------------------------------


@pytest.mark.parametrize("absolute", [10.0**k for k in range(-3, 9)])
@pytest.mark.parametrize("weighted", [False, True])
def test_finite_where_the_plain_kernel_underflows(absolute: float, weighted: bool):
    generator = torch.Generator().manual_seed(5)
    magnitude = 10 ** torch.empty(2, 120, dtype=torch.float64).uniform_(-3, 3, generator=generator)
    x, y = magnitude * torch.randn(2, 120, dtype=torch.float64, generator=generator).sign()
    mu, nu = (masses(120, generator), masses(120, generator)) if weighted else (None, None)
    found = couple(x, y, absolute, mu=mu, nu=nu, relative=False)
    for value in (found.cost, found.divergence, found.marginal_error, found.objective):
        assert math.isfinite(value)
    assert found.targets.isfinite().all()
    assert found.plan().isfinite().all()
    rows = torch.full_like(x, 1 / 120) if mu is None else mu
    torch.testing.assert_close(found.plan().sum(1), rows, atol=1e-12, rtol=0)
    assert found.marginal_error < 1e-5
    assert found.converged or absolute < 0.1


def test_a_cap_on_iterations_is_reported():
    x, y, mu, nu = clouds(6)
    found = couple(x, y, 0.01, mu=mu, nu=nu, tolerance=1e-12, max_iterations=1)
    assert found.iterations == 1
    assert not found.converged
    assert found.marginal_error > 1e-12
    torch.testing.assert_close(found.plan().sum(1), mu, atol=1e-12, rtol=0)


@pytest.mark.parametrize("relative", [0.01, 0.1, 1.0])
def test_warm_start_is_shorter_and_lands_on_the_same(relative: float):
    x, y, mu, nu = clouds(7, n=100, m=100)
    before = couple(x, y, relative, mu=mu, nu=nu)
    moved = x + 0.01 * torch.sin(10 * x)
    cold = couple(moved, y, relative, mu=mu, nu=nu, tolerance=1e-10)
    warm = couple(moved, y, relative, mu=mu, nu=nu, tolerance=1e-10, start=before.potentials)
    assert warm.converged
    assert warm.iterations < cold.iterations
    torch.testing.assert_close(warm.targets, cold.targets, atol=1e-6, rtol=0)
    again = couple(moved, y, relative, mu=mu, nu=nu, tolerance=1e-9, start=warm.potentials)
    assert again.iterations == 0


def test_a_bad_start_does_no_harm():
    x, y, mu, nu = clouds(8, tails=True)
    g = torch.linspace(-1e4, 1e4, len(y), dtype=torch.float64)
    bad = couple(x, y, 0.01, mu=mu, nu=nu, start=(torch.zeros_like(x), g))
    cold = couple(x, y, 0.01, mu=mu, nu=nu)
    assert bad.iterations == cold.iterations


def test_potentials_give_the_plan():
    x, y, mu, nu = clouds(9)
    found = couple(x, y, 0.1, mu=mu, nu=nu)
    assert found.potentials is not None
    f, g = found.potentials
    distances = ((x - mu @ x)[:, None] - (y - nu @ y)).square()
    plan = torch.outer(mu, nu) * ((f[:, None] + g - distances) / found.epsilon).exp()
    torch.testing.assert_close(plan, found.plan())


@pytest.mark.parametrize("tails", [False, True])
@pytest.mark.parametrize("relative", [0.003, 0.1, 2.0])
def test_alternating_with_regression_never_raises_the_objective(relative: float, tails: bool):
    generator = torch.Generator().manual_seed(10)
    G = torch.randn(80, 10, dtype=torch.float64, generator=generator)
    if tails:
        G = G * torch.randn(80, 1, dtype=torch.float64, generator=generator).abs() ** 4
    y = G @ torch.randn(10, dtype=torch.float64, generator=generator)
    kept = G[:, :6]
    w = torch.zeros(6, dtype=torch.float64)
    values, start = [], None
    for _ in range(25):
        found = couple(kept @ w, y, relative, start=start)
        values.append(found.objective)
        start = found.potentials
        w = torch.linalg.lstsq(kept, found.targets[:, None]).solution[:, 0]
    for before, after in itertools.pairwise(values):
        assert after <= before * (1 + 1e-6)


def test_float32_goes_in_and_out():
    x, y, *_ = clouds(11)
    found = couple(x.float(), y.float(), 0.1)
    assert found.targets.dtype == found.plan().dtype == torch.float32
    torch.testing.assert_close(found.targets, couple(x, y, 0.1).targets.float(), atol=1e-4, rtol=0)


def test_a_model_in_training_leaves_no_graph():
    x, y, *_ = clouds(12)
    assert not couple(x.requires_grad_(), y, 0.1).targets.requires_grad


# --- the Gaussian closed form -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "corrected", "printed"),
    [(1.0, 3.463, 3.713), (10.0, 1.969, 4.469), (50.0, 0.537, 13.04)],
)
def test_closed_form_against_sinkhorn(epsilon: float, corrected: float, printed: float):
    """Design section 1, error 2: the printed covariance exceeds the bound, the right one agrees."""
    levels = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    normal = torch.special.ndtri(levels)
    # The figures are of samples whose standard deviations have this product, not quite 1.5 * 2.5.
    bound = 3.705
    normal = normal / normal.std(correction=0) * (bound / (1.5 * 2.5)) ** 0.5
    x, y = 1.5 * normal, 2.5 * normal

    def covariance(coupling: str) -> float:
        found = couple(x, y, epsilon, coupling=coupling, relative=False)
        return float((x * found.targets).mean())

    assert covariance("gaussian") == pytest.approx(corrected, abs=1e-3)
    assert covariance("sinkhorn") == pytest.approx(corrected, abs=1.5e-2)
    assert covariance("gaussian-printed") == pytest.approx(printed, abs=1e-2)
    assert covariance("gaussian-printed") > bound > covariance("gaussian")


def test_closed_form_reports_what_sinkhorn_finds():
    levels = (torch.arange(500, dtype=torch.float64) + 0.5) / 500
    normal = torch.special.ndtri(levels)
    x, y = 1.5 * normal + 1, 2.5 * normal
    closed = couple(x, y, 1.0, coupling="gaussian")
    found = couple(x, y, 1.0)
    assert closed.cost == pytest.approx(found.cost, rel=0.02)
    assert closed.divergence == pytest.approx(found.divergence, rel=0.02)
    assert (closed.plan() - found.plan()).abs().sum() < 0.05
    torch.testing.assert_close(closed.plan().sum(1), torch.full_like(x, 1 / 500))


def test_closed_form_at_its_limits():
    x, y, mu, nu = clouds(13)
    line = gaussian(x, y, 0.0, mu=mu, nu=nu)
    variance = float(nu @ (y - nu @ y).square())
    assert float(mu @ (line.targets - mu @ line.targets).square()) == pytest.approx(variance)
    assert line.objective == line.cost
    flat = couple(x, y, math.inf, coupling="gaussian", mu=mu, nu=nu)
    torch.testing.assert_close(flat.targets, (nu @ y).expand_as(x))
    assert flat.objective == pytest.approx(independent(x, y, mu=mu, nu=nu).cost)
    printed = gaussian(x, y, 1.0, printed=True)
    assert math.isinf(printed.divergence)
    with pytest.raises(InputError, match="density"):
        printed.plan()


# --- the smoothing operator -------------------------------------------------------------------


@pytest.mark.parametrize("tails", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 1e-4, 0.01, 0.1, 1.0, 100.0, math.inf])
def test_smoothing_is_symmetric_doubly_stochastic_and_positive(epsilon: float, tails: bool):
    _, y, *_ = clouds(14, m=60, tails=tails)
    S = smoothing(y, epsilon)
    torch.testing.assert_close(S, S.T, atol=0, rtol=0)
    torch.testing.assert_close(S.sum(1), torch.ones_like(y), atol=1e-8, rtol=0)
    assert (S >= 0).all()
    assert torch.linalg.eigvalsh(S).min() > -1e-10
    if 0 < epsilon < math.inf:
        plan = couple(y, y, epsilon, tolerance=1e-11).plan()
        torch.testing.assert_close(S, len(y) * plan, atol=1e-6, rtol=0)


def test_smoothing_at_its_limits():
    y = torch.tensor([1.0, 1.0, 2.0])
    torch.testing.assert_close(smoothing(y, 0.0), torch.eye(3))
    torch.testing.assert_close(smoothing(y, math.inf), torch.full((3, 3), 1 / 3))
    torch.testing.assert_close(smoothing(torch.ones(3), 0.1), torch.full((3, 3), 1 / 3))


def test_smoothed_rows_give_the_printed_gradient():
    """G^T S (x - y) is the gradient of half the squared residual of the rows S^1/2 G."""
    generator = torch.Generator().manual_seed(15)
    G = torch.randn(20, 5, dtype=torch.float64, generator=generator)
    w_bar, w = torch.randn(2, 5, dtype=torch.float64, generator=generator)
    S = smoothing(G @ w_bar, 0.1)
    values, vectors = torch.linalg.eigh(S)
    rows = (vectors * values.clamp(min=0).sqrt()) @ vectors.T @ G
    w.requires_grad_()
    (0.5 * (rows @ w - rows @ w_bar).square().sum()).backward()
    printed = G.T @ S @ (G @ (w.detach() - w_bar))
    torch.testing.assert_close(w.grad, printed)


# --- degenerate input and errors --------------------------------------------------------------


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("epsilon", [0.0, 1e-12, 0.1, 1e8])
def test_degenerate_clouds(coupling: str, relative: bool, epsilon: float):
    cases = {
        "one sample": ([2.0], [3.0]),
        "all y equal": ([1.0, 2.0, 3.0], [0.1, 0.1, 0.1]),
        "all x equal": ([0.1, 0.1, 0.1], [1.0, 2.0, 3.0]),
        "everything equal": ([0.1, 0.1, 0.1], [0.1, 0.1, 0.1]),
        "identical samples": ([1.0, 1.0, 5.0, 5.0], [1.0, 1.0, 5.0, 5.0]),
        "outliers": ([1e-6, 2e-6, 0.0, 1e6], [0.0, 1e-9, 2e-9, -1e7]),
    }
    for name, (x, y) in cases.items():
        x, y = torch.tensor(x), torch.tensor(y)
        found = couple(x, y, epsilon, coupling=coupling, relative=relative)
        assert found.targets.isfinite().all(), name
        assert math.isfinite(found.cost), name
        assert not math.isnan(found.objective), name
        # With |x y| / epsilon beyond 1e13 rounding alone keeps the marginals from the tolerance.
        assert found.converged or name == "outliers", name
        if coupling == "sinkhorn":
            assert found.plan().isfinite().all(), name
            assert found.divergence >= 0, name
        if coupling in ("sinkhorn", "gaussian") and name in ("all y equal", "all x equal"):
            torch.testing.assert_close(found.targets, y.mean().expand(3), msg=name)


def test_ties_share_their_mass():
    found = exact(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([5.0, 7.0, 1.0]))
    torch.testing.assert_close(found.targets, torch.tensor([7.0, 3.0, 3.0]))
    torch.testing.assert_close(found.plan().sum(0), torch.full((3,), 1 / 3))


@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 0.1, 10.0, math.inf])
def test_samples_without_mass(epsilon: float):
    x, y, mu, nu = clouds(16)
    mu[::3], nu[::4] = 0, 0
    mu, nu = mu / mu.sum(), nu / nu.sum()
    found = couple(x, y, epsilon, mu=mu, nu=nu, tolerance=1e-9)
    some, others = mu > 0, nu > 0
    fewer = couple(x[some], y[others], epsilon, mu=mu[some], nu=nu[others], tolerance=1e-9)
    assert found.converged
    assert found.targets.isfinite().all()
    torch.testing.assert_close(found.targets[some], fewer.targets, atol=1e-6, rtol=0)
    assert found.objective == pytest.approx(fewer.objective, rel=1e-6)
    torch.testing.assert_close(found.plan().sum(1), mu, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epsilon": -1.0}, "epsilon is -1"),
        ({"epsilon": math.nan}, "epsilon is nan"),
        ({"coupling": "wasserstein"}, "coupling is 'wasserstein'; accepted are sinkhorn"),
        ({"x": torch.tensor([1.0, math.nan])}, "x holds NaN"),
        ({"y": torch.tensor([1.0, math.inf])}, "y holds NaN or inf"),
        ({"x": torch.ones(2, 2)}, r"x has shape \(2, 2\)"),
        ({"x": torch.ones(0)}, "x has shape"),
        ({"y": torch.tensor([1, 2])}, "y has shape .* dtype torch.int64"),
        ({"mu": torch.tensor([1.5, -0.5])}, "mu has smallest value -0.5"),
        ({"nu": torch.tensor([0.5, 0.6])}, "nu has smallest value 0.5 and sum 1.1"),
        ({"mu": torch.ones(3) / 3}, r"mu has shape \(3,\)"),
        ({"start": (torch.zeros(3), torch.zeros(3))}, "start is for 3 values"),
        ({"coupling": "identity", "y": torch.ones(3)}, "y has 3 values"),
        ({"coupling": "identity", "mu": torch.tensor([0.1, 0.9])}, "nu differs from mu"),
        ({"coupling": "gaussian-printed", "epsilon": math.inf}, "epsilon is inf"),
    ],
)
def test_errors_name_the_argument(arguments: dict, message: str):
    call = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([1.0, 3.0]), "epsilon": 0.1}
    with pytest.raises(InputError, match=message):
        couple(**(call | arguments))


def test_sinkhorn_alone_needs_a_positive_epsilon():
    with pytest.raises(InputError, match="epsilon is 0"):
        sinkhorn(torch.ones(2), torch.ones(2), 0)


def test_identity_is_lr():
    x, y, mu, _ = clouds(17, n=30, m=30)
    found = couple(x, y, 1.0, coupling="identity", mu=mu, nu=mu)
    torch.testing.assert_close(found.targets, y)
    torch.testing.assert_close(found.plan(), torch.diag(mu))
    assert found.objective == found.cost == pytest.approx(float(mu @ (x - y).square()))
    assert found.divergence == pytest.approx(float(-(mu * mu.log()).sum()))


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(2, 12),
    epsilon=st.sampled_from([0.0, 0.05, 1.0, math.inf]),
    seed=st.integers(0, 99),
)
def test_smoothing_with_masses_is_the_plan_between_their_roots(n, epsilon, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(n, generator=generator, dtype=torch.float64)
    masses = torch.rand(n, generator=generator, dtype=torch.float64) + 0.1
    masses /= masses.sum()
    smoother = smoothing(y, epsilon, masses=masses)
    plan = couple(y, y, epsilon, mu=masses, nu=masses, tolerance=1e-10).plan()
    roots = masses.sqrt()
    torch.testing.assert_close(smoother, plan / torch.outer(roots, roots), atol=1e-6, rtol=1e-5)
    # A constant residual is left as it is, whatever the masses.
    torch.testing.assert_close(smoother @ roots, roots, atol=1e-6, rtol=1e-5)
    uniform = torch.full_like(y, 1 / n)
    torch.testing.assert_close(smoothing(y, epsilon, masses=uniform), smoothing(y, epsilon))
