"""Couplings between two one-dimensional clouds, and the targets they give (docs/method.md).

The paper's eq. (5) compares `x = G w` and `y = G w_bar` through

    inf over plans P of  sum_ij p_ij (x_i - y_j)^2 + epsilon KL(P || mu nu^T).

For a fixed plan this is a regression of `x` onto the targets `t_i = (P y)_i / mu_i`, so every
coupling here answers with its targets, and builds the (n, m) plan only when asked. `couple` is
the entry point; `smoothing` is the operator of the gradient as the paper prints it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swap_prune.errors import InputError

COUPLINGS = ("sinkhorn", "gaussian", "gaussian-printed", "identity")

Potentials = tuple[Tensor, Tensor]

# Marginals within tolerance do not make the objective right: a coupling has converged only when
# its primal and dual values also agree to this fraction.
_OBJECTIVE_SLACK = 1e-7
# The most a Newton step may change the log of the ratio of two neighbouring columns.
_LONGEST_BOND = 4.0
# Steps without a new lowest error after which rounding is taken to be all that is left.
_PATIENCE = 10
_TINY = 1e-300


@dataclass(frozen=True)
class Coupling:
    """What transport between `x` (n,) and `y` (m,) found.

    Attributes:
        targets: (n,) barycentric projection `t_i = (P y)_i / mu_i`, in the dtype of `x`.
        cost: `sum_ij p_ij (x_i - y_j)^2`.
        divergence: `KL(P || mu nu^T)` in nats.
        epsilon: The absolute epsilon used (0 for exact and identity, infinite for independent).
        marginal_error: Largest absolute error over both marginals (paper, Algorithm 2).
        converged: Whether the tolerance was met; always true for closed forms.
        iterations: Steps taken; 0 for closed forms.
        potentials: `(f, g)` with `p_ij = mu_i nu_j exp((f_i + g_j - (x_i - y_j)^2) / epsilon)`
            for `x` and `y` less their means (the plan does not depend on them), to start from.
    """

    targets: Tensor
    cost: float
    divergence: float
    epsilon: float
    marginal_error: float
    converged: bool
    iterations: int
    potentials: Potentials | None
    _plan: Callable[[], Tensor] = field(repr=False)

    @property
    def objective(self) -> float:
        """`cost + epsilon * divergence`, with `0 * infinity = 0`."""
        if self.epsilon == 0 or self.divergence == 0:
            return self.cost
        return self.cost + self.epsilon * self.divergence

    def plan(self) -> Tensor:
        """Build the plan, (n, m), in the dtype of `x`."""
        return self._plan().to(self.targets.dtype)


def couple(
    x: Tensor,
    y: Tensor,
    epsilon: float,
    *,
    coupling: str = "sinkhorn",
    mu: Tensor | None = None,
    nu: Tensor | None = None,
    relative: bool = True,
    tolerance: float = 1e-6,
    max_iterations: int = 100,
    start: Potentials | None = None,
) -> Coupling:
    """Couple `x` with `y`.

    Args:
        x: (n,) floating-point values.
        y: (m,) floating-point values; for the identity coupling m = n.
        epsilon: Weight of the entropy, from 0 to infinity; the identity coupling has none.
        coupling: `"sinkhorn"` (exact at epsilon 0, independent at infinity), `"gaussian"` (closed
            form, Janati et al. 2020), `"gaussian-printed"` (the paper's Algorithm 3, whose
            covariance is too large: docs/method.md) or `"identity"` (LR).
        mu: (n,) masses of `x`; uniform by default.
        nu: (m,) masses of `y`; uniform by default.
        relative: Whether epsilon is in units of the variance of `y` or, as in the paper, absolute.
        tolerance: Largest marginal error at which Sinkhorn stops.
        max_iterations: Most steps Sinkhorn takes.
        start: Potentials of an earlier coupling, from which Sinkhorn starts.

    Returns:
        The coupling; if Sinkhorn did not converge it is finite all the same, with exact row masses.

    Raises:
        InputError: If an argument can't be used.
    """
    if coupling not in COUPLINGS:
        raise InputError(f"coupling is {coupling!r}; accepted are {', '.join(COUPLINGS)}.")
    epsilon = absolute_epsilon(epsilon, y, nu=nu, relative=relative)
    if coupling == "identity":
        return identity(x, y, mu=mu, nu=nu)
    if coupling != "sinkhorn":
        return gaussian(x, y, epsilon, mu=mu, nu=nu, printed=coupling == "gaussian-printed")
    if epsilon == 0:
        return exact(x, y, mu=mu, nu=nu)
    if math.isinf(epsilon):
        return independent(x, y, mu=mu, nu=nu)
    return sinkhorn(
        x,
        y,
        epsilon,
        mu=mu,
        nu=nu,
        tolerance=tolerance,
        max_iterations=max_iterations,
        start=start,
    )


def absolute_epsilon(
    epsilon: float, y: Tensor, *, nu: Tensor | None = None, relative: bool = True
) -> float:
    """Epsilon in the units of `y` squared: times the variance of `y` under `nu` if relative."""
    if not epsilon >= 0:
        raise InputError(f"epsilon is {epsilon}; accepted is a number from 0 to infinity.")
    values, masses = _cloud("y", y, "nu", nu)
    if not relative or math.isinf(epsilon):
        return float(epsilon)
    return float(epsilon) * _moments(values, masses)[1]


def identity(
    x: Tensor, y: Tensor, *, mu: Tensor | None = None, nu: Tensor | None = None
) -> Coupling:
    """Pair every sample with itself, `P = diag(mu)`: plain linear regression (LR).

    Args:
        x: (n,) values.
        y: (n,) values.
        mu: (n,) masses of `x`; uniform by default.
        nu: (n,) masses of `y`, which must be those of `x`.
    """
    X, a = _cloud("x", x, "mu", mu)
    Y, b = _cloud("y", y, "nu", nu)
    if len(X) != len(Y):
        raise InputError(
            f"y has {len(Y)} values; the identity coupling accepts as many as x has, {len(X)}."
        )
    if not torch.allclose(a, b, atol=1e-9):
        raise InputError("nu differs from mu; the identity coupling accepts equal masses only.")
    return Coupling(
        targets=Y.to(x.dtype),
        cost=float(a @ (X - Y).square()),
        divergence=float(-torch.xlogy(a, a).sum()),
        epsilon=0.0,
        marginal_error=0.0,
        converged=True,
        iterations=0,
        potentials=None,
        _plan=lambda: torch.diag(a),
    )


def independent(
    x: Tensor, y: Tensor, *, mu: Tensor | None = None, nu: Tensor | None = None
) -> Coupling:
    """Couple everything with everything, `P = mu nu^T`: the limit of infinite epsilon."""
    X, a = _cloud("x", x, "mu", mu)
    Y, b = _cloud("y", y, "nu", nu)
    x_mean, x_variance = _moments(X, a)
    y_mean, y_variance = _moments(Y, b)
    return Coupling(
        targets=torch.full_like(X, y_mean).to(x.dtype),
        cost=x_variance + y_variance + (x_mean - y_mean) ** 2,
        divergence=0.0,
        epsilon=math.inf,
        marginal_error=0.0,
        converged=True,
        iterations=0,
        potentials=None,
        _plan=lambda: torch.outer(a, b),
    )


def gaussian(
    x: Tensor,
    y: Tensor,
    epsilon: float,
    *,
    mu: Tensor | None = None,
    nu: Tensor | None = None,
    printed: bool = False,
) -> Coupling:
    """Couple the Gaussians with the moments of `x` and `y` (paper, Algorithm 3, corrected).

    With `psi^2 = epsilon / 2` and `d = sqrt(4 var(x) var(y) + psi^4)` the covariance of the plan
    is `(d - psi^2) / 2`, and the targets are the regression line of `y` on `x`. Cost and
    divergence are those of the Gaussians. `plan` discretises their conditional density.

    Args:
        x: (n,) values.
        y: (m,) values.
        epsilon: Absolute weight of the entropy, not negative.
        mu: (n,) masses of `x`; uniform by default.
        nu: (m,) masses of `y`; uniform by default.
        printed: Whether to take the covariance as the paper prints it, `d / 2`. It exceeds the
            product of the standard deviations, so no plan has it and the divergence is infinite.
    """
    X, a = _cloud("x", x, "mu", mu)
    Y, b = _cloud("y", y, "nu", nu)
    if not epsilon >= 0 or (printed and math.isinf(epsilon)):
        raise InputError(
            f"epsilon is {epsilon}; the Gaussian coupling accepts a number from 0 to infinity, "
            "the printed form a finite one."
        )
    x_mean, x_variance = _moments(X, a)
    y_mean, y_variance = _moments(Y, b)
    psi2 = epsilon / 2
    d = math.hypot(2 * math.sqrt(x_variance) * math.sqrt(y_variance), psi2)
    # (d - psi^2) / 2 without the cancellation that makes it zero for a large epsilon.
    covariance = d / 2 if printed else (2 * x_variance * y_variance / (d + psi2) if d else 0.0)
    slope = covariance / x_variance if x_variance else 0.0
    # The share of the variance of y that x leaves unexplained: 1 - correlation^2.
    unexplained = 1 - slope * covariance / y_variance if y_variance else 1.0
    targets = y_mean + slope * (X - x_mean)

    def plan() -> Tensor:
        if not unexplained > 0:
            raise InputError(
                "A Gaussian plan has no density for the printed covariance or for epsilon 0; "
                "accepted is the corrected form with a positive epsilon."
            )
        if not y_variance:
            return torch.outer(a, b)
        conditional = (Y - targets[:, None]).square() / unexplained
        log_ratio = ((Y - y_mean).square() - conditional) / (2 * y_variance)
        return a[:, None] * torch.softmax(log_ratio + b.log(), dim=1)

    return Coupling(
        targets=targets.to(x.dtype),
        cost=x_variance + y_variance - 2 * covariance + (x_mean - y_mean) ** 2,
        divergence=-math.log(unexplained) / 2 if unexplained > 0 else math.inf,
        epsilon=float(epsilon),
        marginal_error=0.0,
        converged=True,
        iterations=0,
        potentials=None,
        _plan=plan,
    )


def exact(x: Tensor, y: Tensor, *, mu: Tensor | None = None, nu: Tensor | None = None) -> Coupling:
    """Couple by rank, `epsilon = 0`: the north-west corner rule on the sorted values.

    Equal values share their mass evenly, which is the limit of a vanishing epsilon: the result
    does not depend on the order in which samples are given.
    """
    X, a = _cloud("x", x, "mu", mu)
    Y, b = _cloud("y", y, "nu", nu)
    x_values, x_of = torch.unique(X, return_inverse=True)
    y_values, y_of = torch.unique(Y, return_inverse=True)
    x_masses = torch.zeros_like(x_values).index_add(0, x_of, a)
    y_masses = torch.zeros_like(y_values).index_add(0, y_of, b)
    x_levels, y_levels = x_masses.cumsum(0), y_masses.cumsum(0)

    # Between two levels of either distribution function lies the mass of one cell of the plan.
    levels = torch.cat([x_levels, y_levels]).sort().values
    mass = levels.diff(prepend=levels.new_zeros(1))
    middle = levels - mass / 2
    rounding = 1e-14
    mass, middle = mass[mass > rounding], middle[mass > rounding]
    row = torch.searchsorted(x_levels, middle).clamp(max=len(x_values) - 1)
    column = torch.searchsorted(y_levels, middle).clamp(max=len(y_values) - 1)

    row_sums = torch.zeros_like(x_values).index_add(0, row, mass)
    column_sums = torch.zeros_like(y_values).index_add(0, column, mass)
    moments = torch.zeros_like(x_values).index_add(0, row, mass * y_values[column])
    # A value without mass has no cell: it takes the y of its own rank.
    quantile = y_values[torch.searchsorted(y_levels, x_levels).clamp(max=len(y_values) - 1)]
    targets = torch.where(row_sums > 0, moments / row_sums.clamp(min=_TINY), quantile)

    def plan() -> Tensor:
        cells = mass.new_zeros(len(x_values), len(y_values)).index_put((row, column), mass)
        x_share = a / x_masses[x_of].clamp(min=_TINY)
        y_share = b / y_masses[y_of].clamp(min=_TINY)
        return cells[x_of][:, y_of] * torch.outer(x_share, y_share)

    errors = torch.cat([row_sums - x_masses, column_sums - y_masses])
    independent_mass = x_masses[row] * y_masses[column]
    return Coupling(
        targets=targets[x_of].to(x.dtype),
        cost=float(mass @ (x_values[row] - y_values[column]).square()),
        divergence=max(float(mass @ (mass / independent_mass).log()), 0.0),
        epsilon=0.0,
        marginal_error=float(errors.abs().max()),
        converged=True,
        iterations=0,
        potentials=None,
        _plan=plan,
    )


def sinkhorn(
    x: Tensor,
    y: Tensor,
    epsilon: float,
    *,
    mu: Tensor | None = None,
    nu: Tensor | None = None,
    tolerance: float = 1e-6,
    max_iterations: int = 100,
    start: Potentials | None = None,
) -> Coupling:
    """Couple with an entropy (paper, eq. (4) and Algorithm 2), in the log domain and in float64.

    The fixed point of Sinkhorn's updates is found by Newton's method on the dual of `y`, the rows
    being normalised at every step, with a Sinkhorn update wherever a Newton step does not help.
    One dimension makes both ends of that cheap: the dual of epsilon 0 is known by sorting and is
    the start (it is where a schedule of decreasing epsilons would end, so none is needed), and
    conjugate gradients are preconditioned by the resistance of a path (`_newton_direction`).

    Args:
        x: (n,) values.
        y: (m,) values.
        epsilon: Absolute weight of the entropy, positive and finite. Below the rounding error of
            the products `x_i y_j` the answer is the exact coupling.
        mu: (n,) masses of `x`; uniform by default.
        nu: (m,) masses of `y`; uniform by default.
        tolerance: Largest marginal error at which to stop; primal and dual objective must agree
            to 1e-7 as well.
        max_iterations: Most steps taken.
        start: Potentials of an earlier coupling with `y`, used if better than those of epsilon 0.
    """
    X, a = _cloud("x", x, "mu", mu)
    Y, b = _cloud("y", y, "nu", nu)
    if not 0 < epsilon < math.inf:
        raise InputError(f"epsilon is {epsilon}; Sinkhorn accepts a positive finite number.")
    if start is not None and start[1].shape != Y.shape:
        raise InputError(
            f"start is for {len(start[1])} values of y; accepted are potentials for {len(Y)}."
        )
    x_mean, y_mean = _moments(X, a)[0], _moments(Y, b)[0]
    x_size, y_size = X.abs().max(), Y.abs().max()
    X, Y, shift = X - x_mean, Y - y_mean, x_mean - y_mean
    # Values are rounded before they are centred: of equal ones far from zero, dust is left.
    products = torch.maximum(x_size * Y.abs().max(), X.abs().max() * y_size)
    if epsilon < torch.finfo(X.dtype).eps * float(products):
        return exact(x, y, mu=mu, nu=nu)
    order = torch.argsort(Y)
    problem = _Problem(X, Y[order], a, b[order], epsilon, shift)

    state = problem.state(_exact_dual(X, Y[order], a, b[order]))
    if start is not None:
        g = start[1].to(Y)[order]
        state = max(state, problem.state(g - problem.nu @ g), key=lambda s: s.dual)
    iterations, lowest, stalled = 0, state.error, 0
    while not state.converged(tolerance) and iterations < max_iterations and stalled < _PATIENCE:
        state = _newton_step(state) or state.sinkhorn_step()
        iterations += 1
        stalled = 0 if state.error < lowest else stalled + 1
        lowest = min(lowest, state.error)

    row_means = state.average(problem.y)
    scatter = (state.average(problem.y.square()) - row_means.square()).clamp(min=0)
    cost = float(a @ ((X + shift - row_means).square() + scatter))
    sorted_g, place = state.g, order.argsort()

    def plan() -> Tensor:
        # Built anew, so that a coupling that is kept does not keep its kernel.
        again = problem.state(sorted_g)
        return again.kernel.mul_((a / again.sums)[:, None])[:, place]

    return Coupling(
        targets=(row_means + y_mean).to(x.dtype),
        cost=cost,
        divergence=max((state.dual + state.gap - cost) / epsilon, 0.0),
        epsilon=float(epsilon),
        marginal_error=state.error,
        converged=state.converged(tolerance),
        iterations=iterations,
        potentials=(state.f, sorted_g[place]),
        _plan=plan,
    )


def smoothing(
    y: Tensor,
    epsilon: float,
    *,
    masses: Tensor | None = None,
    relative: bool = True,
    tolerance: float = 1e-9,
) -> Tensor:
    """Return `S = n P`, (n, n), for the entropic plan P of `y` to itself (docs/method.md).

    The gradient as the paper prints it, `G^T S (x - y)`, is that of a regression on the averaged
    rows `S^1/2 G`. S is symmetric, positive semi-definite and doubly stochastic; at epsilon
    0 it is the identity, at infinity it averages. With masses it is `D^-1/2 P D^-1/2`, D their
    diagonal matrix, which acts on rows times the roots of their masses.

    Args:
        y: (n,) values.
        epsilon: Weight of the entropy, from 0 to infinity.
        masses: (n,) masses of `y`; uniform by default.
        relative: Whether epsilon is in units of the variance of `y` or absolute.
        tolerance: Largest error of a row sum of S.
    """
    n = len(y)
    if epsilon == 0:
        return torch.eye(n, dtype=y.dtype, device=y.device)
    masses = torch.full_like(y, 1 / n) if masses is None else masses
    level = absolute_epsilon(epsilon, y, nu=masses, relative=relative)
    coupling = couple(y, y, level, mu=masses, nu=masses, relative=False, tolerance=tolerance / n)
    roots = masses.sqrt()
    if coupling.potentials is None:
        return coupling.plan() / torch.outer(roots, roots).clamp(min=_TINY)
    f, g = coupling.potentials
    # f and g agree up to a constant and the tolerance; their mean makes S symmetric, and positive
    # as the Gaussian kernel is.
    log_scale = (f + g) / 2
    distances = (y.to(f)[:, None] - y.to(f)).square()
    kernel = ((log_scale[:, None] + log_scale - distances) / level).exp()
    return (kernel * torch.outer(roots, roots).to(f)).to(y.dtype)


@dataclass(frozen=True)
class _Problem:
    """Centred clouds, `y` in ascending order, their masses, epsilon, and the distance of means."""

    x: Tensor
    y: Tensor
    mu: Tensor
    nu: Tensor
    epsilon: float
    shift: float

    def state(self, g: Tensor) -> "_State":
        """Return the plan that the potential `g` of `y` gives when every row has its mass."""
        # -(x - y)^2 = 2 x y - x^2 - y^2, and what depends on the row alone drops out.
        bias = (g - self.y.square()) / self.epsilon
        scores = self._scores(bias + self.nu.log())
        top = scores.amax(dim=1)
        kernel = scores.sub_(top[:, None]).exp_()
        sums = kernel.sum(dim=1)
        log_sums = top + sums.log()
        largest = bias.abs().max() + 2 / self.epsilon * self.x.abs().max() * self.y.abs().max()
        if float(largest) < 1e-3:
            # A large epsilon would magnify the rounding error of a sum that is 1 and a little.
            log_sums = torch.log1p(torch.expm1(self._scores(bias)) @ self.nu)
        return _State(self, g, self.x.square() - self.epsilon * log_sums, kernel, sums)

    def _scores(self, bias: Tensor) -> Tensor:
        return torch.addr(bias.expand(len(self.x), -1), self.x * (2 / self.epsilon), self.y)


class _State:
    """The plan `diag(mu / sums) kernel`, exact in its rows, and what Newton needs of it."""

    def __init__(self, problem: _Problem, g: Tensor, f: Tensor, kernel: Tensor, sums: Tensor):
        self.problem, self.g, self.f, self.kernel, self.sums = problem, g, f, kernel, sums
        self.columns = kernel.T @ (problem.mu / sums)
        self.gradient = problem.nu - self.columns
        self.error = float(self.gradient.abs().max())
        self.dual = float(problem.mu @ f + problem.nu @ g) + problem.shift**2
        # Primal less dual objective.
        self.gap = -float(self.gradient @ g)

    def converged(self, tolerance: float) -> bool:
        return self.error <= tolerance and abs(self.gap) <= _OBJECTIVE_SLACK * self.dual

    def average(self, values: Tensor) -> Tensor:
        """Mean of `values` (m,) over each row's conditional distribution, (n,)."""
        return (self.kernel @ values) / self.sums

    def curvature(self, direction: Tensor) -> Tensor:
        """Negative Hessian of the dual, `diag(P^T 1) - P^T diag(1 / mu) P`, times epsilon."""
        weights = self.problem.mu / self.sums
        return self.columns * direction - self.kernel.T @ (weights * self.average(direction))

    def moved(self, step: Tensor) -> "_State":
        """Return the state after a step (m,) in units of epsilon."""
        return self.problem.state(self.g + self.problem.epsilon * step)

    def sinkhorn_step(self) -> "_State":
        """Scale the columns to their masses."""
        nu, columns = self.problem.nu.clamp(min=_TINY), self.columns.clamp(min=_TINY)
        step = (nu / columns).log()
        return self.moved(step - self.problem.nu @ step)


def _newton_step(state: _State) -> _State | None:
    """Take a Newton step of a length at which the dual still rises; None if none is found."""
    direction = _newton_direction(state)
    slope = float(state.gradient @ direction)
    if not slope > 0:
        return None
    length = 1.0
    for _ in range(4):
        trial = state.moved(length * direction)
        # The slope along a concave function falls: its sign tells, free of the rounding that
        # values of the dual suffer, whether the step went past the maximum.
        end = float(trial.gradient @ direction)
        if end >= -slope / 2:
            return trial
        length *= max(0.1, slope / (slope - end))
    return None


def _newton_direction(state: _State) -> Tensor:
    """Solve `curvature(d) = gradient` for d (m,) by preconditioned conjugate gradients.

    The curvature is the Laplacian of a graph whose nodes are the sorted values of `y`. Smooth
    functions see it as a path, of which we know the flow that the potential `y` itself drives, so
    also each bond's resistance; a path is solved by two cumulative sums. Rough functions see the
    diagonal. The sum of both inverses preconditions well at every epsilon.
    """
    y, nu = state.problem.y, state.problem.nu
    diagonal = torch.maximum(state.columns, 1e-6 * nu).clamp(min=_TINY)
    flow = -state.curvature(y).cumsum(0)[:-1]
    resistance = y.diff() / flow.clamp(min=max(1e-13 * float(flow.abs().sum()), _TINY))

    def precondition(residual: Tensor) -> Tensor:
        smooth = torch.zeros_like(residual)
        smooth[1:] = -(residual.cumsum(0)[:-1] * resistance).cumsum(0)
        return residual / diagonal + smooth - nu @ smooth

    direction = torch.zeros_like(y)
    residual = state.gradient - state.gradient.sum() * state.columns
    preconditioned = precondition(residual)
    search = preconditioned
    product = float(residual @ preconditioned)
    enough = 1e-4 * product
    for _ in range(100):
        if not product > enough:
            break
        image = state.curvature(search)
        bend = float(search @ image)
        if not bend > 0:
            break
        direction = direction + (product / bend) * search
        residual = residual - (product / bend) * image
        preconditioned = precondition(residual)
        previous, product = product, float(residual @ preconditioned)
        search = preconditioned + (product / previous) * search

    # A bond that carries almost nothing asks for a huge step, far outside the quadratic model.
    bonds = direction.diff().clamp(-_LONGEST_BOND, _LONGEST_BOND)
    direction = torch.cat([bonds.new_zeros(1), bonds.cumsum(0)])
    return direction - nu @ direction


def _exact_dual(x: Tensor, y: Tensor, mu: Tensor, nu: Tensor) -> Tensor:
    """Return the potential (m,) of the sorted `y` for epsilon 0, from the quantiles of `x`.

    Between neighbours `y_j`, `y_k` it rises by `(y_k - y_j) (y_k + y_j - 2 q)` with q the value of
    x at their common level. Where that level falls between two values of x the potential is not
    unique, and the midpoint gives both marginals the same error.
    """
    values, order = x.sort()
    levels, cuts = mu[order].cumsum(0), nu.cumsum(0)[:-1]
    rounding, last = 1e-12, len(x) - 1
    below = values[torch.searchsorted(levels, cuts - rounding).clamp(max=last)]
    above = values[torch.searchsorted(levels, cuts + rounding).clamp(max=last)]
    rises = y.diff() * (y[1:] + y[:-1] - below - above)
    g = torch.cat([y.new_zeros(1), rises.cumsum(0)])
    return g - nu @ g


def _cloud(
    name: str, values: Tensor, masses_name: str, masses: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Check a cloud and its masses; return both in float64, the masses summing to 1."""
    if values.dim() != 1 or len(values) == 0 or not values.is_floating_point():
        raise InputError(
            f"{name} has shape {tuple(values.shape)} and dtype {values.dtype}; accepted is a "
            "non-empty vector of floating-point numbers."
        )
    values = values.detach().double()
    if not values.isfinite().all():
        raise InputError(f"{name} holds NaN or infinite values; accepted are finite numbers.")
    if masses is None:
        return values, torch.full_like(values, 1 / len(values))
    if masses.shape != values.shape:
        raise InputError(
            f"{masses_name} has shape {tuple(masses.shape)}; accepted is one mass for each of the "
            f"{len(values)} values of {name}."
        )
    masses = masses.detach().to(values)
    total = float(masses.sum())
    if not (bool((masses >= 0).all()) and abs(total - 1) < 1e-5):
        raise InputError(
            f"{masses_name} has smallest value {float(masses.min()):g} and sum {total:g}; accepted "
            "are masses that are not negative and sum to 1."
        )
    return values, masses / total


def _moments(values: Tensor, masses: Tensor) -> tuple[float, float]:
    """Mean and (population) variance of `values` under `masses`."""
    mean = masses @ values
    return float(mean), float(masses @ (values - mean).square())
