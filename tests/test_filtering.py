"""Noise in rows that layers' inputs give away, against dense linear algebra."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from swap_prune import noise, prune, select_weights, stages
from swap_prune.evaluation import cross_entropy
from swap_prune.filtering import Prior, _expected, _outside, filter_rows
from swap_prune.gradients import gradient_rows


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


class Elsewhere(nn.Module):
    """A weight that is used outside its layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(functional.linear(self.inner(x).tanh(), self.inner.weight)))


class TimeFirst(nn.Module):
    """A layer whose inputs do not have samples first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.unflatten(1, (2, 6)).transpose(0, 1)
        return self.outer(torch.tanh(self.inner(steps)).sum(0))


def images_model() -> nn.Module:
    """Groups, a stride, a dilation, paddings and kernels of all kinds."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, groups=2, padding="valid"),
        nn.Tanh(),
        nn.Conv2d(12, 16, (2, 1), dilation=(2, 1)),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16 * 3, 4),
    )


MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 3)),
    "images": images_model,
    "twice": Twice,
    "time-first": TimeFirst,
}


class Problem:
    """A network, samples and the rows of G."""

    def __init__(self, kind: str, seed: int, n: int = 10, m: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = MODELS[kind]().eval()
        self.weights = select_weights(self.model)
        shape = (3, 8, 8) if kind == "images" else (12,)
        self.inputs, self.m = torch.randn(n * m, *shape), m
        targets = torch.randint(3, (n * m,))
        self.rows = gradient_rows(
            self.model, self.weights, self.inputs, targets, cross_entropy, m
        ).rows()

    def filter(self, rows: Tensor) -> int:
        return filter_rows(self.model, self.weights, self.inputs, rows, self.m)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(list(MODELS)), m=st.sampled_from([1, 2]))
def test_gradients_stay_to_the_bit(seed, kind, m):
    problem = Problem(kind, seed, m=m)
    rows = problem.rows.clone()
    assert problem.filter(rows) == 0
    assert torch.equal(rows, problem.rows)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["linear", "images", "twice"]),
    m=st.sampled_from([1, 2]),
    level=st.floats(0.2, 5),
)
def test_noise_is_found_and_filtered_where_it_is(seed, kind, m, level):
    problem = Problem(kind, seed, m=m)
    rows, deviation = problem.rows.clone(), level * float(problem.rows.std())
    rows[::3] += deviation * torch.randn(rows[::3].shape)
    before = (rows - problem.rows).norm()
    assert problem.filter(rows) == len(rows[::3])
    assert (rows - problem.rows).norm() < 0.75 * before
    others = torch.arange(len(rows)) % 3 != 0
    assert torch.equal(rows[others], problem.rows[others])


def inputs_and_rows(seed: int, v: int, zeros: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs U (2, 2, v, 8), some of them zero or alike, and rows (2, 2, 3, 8)."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(2, 2, v, 8, generator=generator, dtype=torch.float64)
    u[0, 0, :zeros] = 0
    u[1, 1, -1] = u[1, 1, 0]
    return u, torch.randn(2, 2, 3, 8, generator=generator, dtype=torch.float64)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), v=st.integers(1, 6), zeros=st.integers(0, 6))
def test_what_is_outside_is_what_least_squares_leaves(seed, v, zeros):
    u, g = inputs_and_rows(seed, v, min(v, zeros))
    whole, outside, entries = _outside(g, u)
    torch.testing.assert_close(whole, g.square().sum((1, 2, 3)))
    for k in range(2):
        left, count = 0.0, 0
        for group in range(2):
            span = torch.linalg.pinv(u[k, group]) @ u[k, group]
            left += float((g[k, group] - g[k, group] @ span).square().sum())
            count += 3 * (8 - int(torch.linalg.matrix_rank(u[k, group])))
        assert float(outside[k]) == pytest.approx(left, rel=1e-4)
        assert float(entries[k]) == pytest.approx(count, rel=1e-4)


def posterior_means(g: Tensor, covariances: Tensor, level: float) -> Tensor:
    """By the textbook's formula, of rows g (groups, 3, 8) with noise of a share of their square.

    The Gaussian prior has the covariances (groups, 8, 8) times what makes up for the rest.
    """
    variance = level * g.square().mean()
    trace = covariances.diagonal(dim1=1, dim2=2).sum()
    prior = (1 - level) * g.square().sum() / (3 * trace) * covariances
    return g @ torch.linalg.inv(prior + variance * torch.eye(8)) @ prior


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), v=st.integers(1, 12), level=st.floats(0.01, 0.5))
def test_what_is_expected_is_the_posterior_mean(seed, v, level):
    u, g = inputs_and_rows(seed, v)
    variance = level * g.square().mean((1, 2, 3))
    found = _expected(g, u, variance)
    for k in range(2):
        wanted = posterior_means(g[k], u[k].mT @ u[k], level)
        torch.testing.assert_close(found[k], wanted, rtol=0.02, atol=0.02)
    mean = (u.mT @ u).mean(0)
    found = Prior(*torch.linalg.eigh(mean)).expected(g, variance)
    wanted = torch.stack([posterior_means(row, mean, level) for row in g])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_rows_that_vanish_and_inputs_that_vanish_are_no_trouble():
    problem = Problem("linear", 0)
    problem.inputs[0] = 0
    rows = torch.randn_like(problem.rows)
    rows[1] = 0
    assert problem.filter(rows) == len(rows) - 1
    assert torch.isfinite(rows).all()
    assert not rows[0, :240].any()  # the first layer's: no input, no gradient
    assert not rows[1].any()


def data(n: int = 600) -> tuple[Tensor, Tensor]:
    """Points of three classes that are easy to tell apart."""
    x = torch.randn(n, 12, generator=torch.Generator().manual_seed(0))
    return x, (x[:, :3] + 0.3 * x[:, 3:6]).argmax(1)


QUICK = {"sparsity": 0.6, "stages": 3, "samples": 60, "samples_per_row": 1, "method": "ewr"}


@pytest.mark.parametrize("kind", ["gradient-entries", "gradient-rows"])
def test_a_run_filters_noise_and_comes_out_nearly_as_without(kind):
    model = Problem("linear", 0).model
    noisy = noise.build(kind, 0.25, 1.0)

    def weights(**given: object) -> Tensor:
        found = prune(model, data(), **QUICK, **given)
        lines = [line.get("filtered_rows") for line in found.history]
        everyone = {"gradient-entries": 60, "gradient-rows": 15}[kind]
        if given.get("noise") and given.get("audit", True):
            assert lines == [everyone] * 3
        return select_weights(found.model).read(found.model)

    clean = weights()
    assert (weights(noise=noisy) - clean).norm() < (
        weights(noise=noisy, audit=False) - clean
    ).norm()


def test_weights_that_are_used_elsewhere_too_are_left_alone():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = prune(Elsewhere().eval(), data(), **QUICK)
    assert [line["filtered_rows"] for line in found.history] == [0, 0, 0]


def test_a_warning_tells_once_of_noise_that_was_not_asked_for(monkeypatch):
    def noisy_rows(*args, **given):
        found = gradient_rows(*args, **given)
        found.rows().add_(0.01 * torch.randn_like(found.rows()))
        return found

    monkeypatch.setattr(stages, "gradient_rows", noisy_rows)
    model = Problem("linear", 0).model
    with pytest.warns(UserWarning, match="60 of 60 gradients at stage 1 have parts that") as caught:
        prune(model, data(), **QUICK)
    assert len(caught) == 1
