"""Gradients against finite differences of losses: what is right stays, what is wrong is mended."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from swap_prune import InputError, noise, noise_report, prune, select_weights
from swap_prune.audit import check_rows, correct_rows
from swap_prune.evaluation import cross_entropy, row_losses
from swap_prune.gradients import DenseGradients, gradient_rows


class Problem:
    """A small network, samples, the rows of G and the losses of their samples."""

    def __init__(self, seed: int, n: int = 40, samples_per_row: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).eval()
        self.weights = select_weights(self.model)
        self.w = self.weights.read(self.model)
        self.m = samples_per_row
        count = n * samples_per_row
        self.batch = torch.randn(count, 6), torch.randint(3, (count,))
        self.rows = gradient_rows(
            self.model, self.weights, *self.batch, cross_entropy, samples_per_row
        ).rows()
        self.generator = torch.Generator().manual_seed(seed)

    def losses(self, w: torch.Tensor) -> torch.Tensor:
        self.weights.write(self.model, w)
        return row_losses(self.model, self.batch, cross_entropy, self.m)

    def factors(self, rows: torch.Tensor) -> torch.Tensor:
        return check_rows(DenseGradients(rows), self.losses, self.w, self.generator).factors


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), samples_per_row=st.sampled_from([1, 3]))
def test_right_gradients_stay_to_the_bit(seed, samples_per_row):
    problem = Problem(seed, samples_per_row=samples_per_row)
    rows = problem.rows.clone()
    assert correct_rows(DenseGradients(rows), problem.losses, problem.w, problem.generator) == 0
    assert torch.equal(rows, problem.rows)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), level=st.floats(1, 100))
def test_flipped_and_scaled_rows_become_the_gradients_again(seed, level):
    problem = Problem(seed)
    rows = problem.rows.clone()
    rows[::4] *= -level
    refuted = correct_rows(DenseGradients(rows), problem.losses, problem.w, problem.generator)
    assert refuted == len(rows[::4])
    torch.testing.assert_close(rows, problem.rows, rtol=0.05, atol=1e-3)
    assert torch.equal(rows[1::4], problem.rows[1::4])


def test_rows_of_noise_shrink_as_the_least_squares_has_it():
    problem = Problem(0, n=200)
    rows = problem.rows.clone()
    sizes = problem.rows.norm(dim=1, keepdim=True)
    noisy = torch.randn(100, rows.shape[1])
    rows[:100] += 5 * sizes[:100] * noisy / noisy.norm(dim=1, keepdim=True)
    factors = problem.factors(rows)
    assert (factors[100:] == 1).all()
    assert factors.abs().max() <= 1
    # An error of 25 times the gradient's power asks for 1 / 26.
    assert (factors[:100] != 1).float().mean() > 0.9
    assert factors[:100].median().item() == pytest.approx(1 / 26, abs=0.05)
    mean, wanted = (factors[:, None] * rows).mean(0), problem.rows.mean(0)
    assert (mean - wanted).norm() < 0.5 * (rows.mean(0) - wanted).norm()


def test_moderate_noise_is_left_alone():
    """Four directions tell a small error from none no better than chance."""
    problem = Problem(1, n=200)
    noisy = problem.rows + 0.3 * problem.rows.std(1, keepdim=True) * torch.randn(problem.rows.shape)
    assert (problem.factors(noisy) == 1).float().mean() > 0.95


@pytest.mark.parametrize("wrong", ["most rows", "all rows a little"])
def test_where_no_row_can_be_told_from_another_all_stay(wrong):
    problem = Problem(1, n=60)
    rows = problem.rows.clone()
    if wrong == "most rows":
        rows[:40] *= -2
    else:
        rows += 0.7 * rows.std(1, keepdim=True) * torch.randn(rows.shape)
        rows[:10] *= -5
    before = rows.clone()
    assert correct_rows(DenseGradients(rows), problem.losses, problem.w, problem.generator) == 0
    assert torch.equal(rows, before)


def test_losses_that_are_not_finite_refute_nothing():
    problem = Problem(2)
    everything = problem.losses

    def losses(w: torch.Tensor) -> torch.Tensor:
        found = everything(w)
        found[:3] = torch.inf
        return found

    rows = problem.rows.clone()
    rows[:6] *= -5
    factors = check_rows(DenseGradients(rows), losses, problem.w, problem.generator).factors
    assert (factors[:3] == 1).all()
    assert (factors[3:6] != 1).all()


def test_losses_that_are_bent_within_a_step_refute_nothing():
    problem = Problem(5)
    everything, start = problem.losses, problem.w.clone()
    along = torch.randn(problem.w.shape, generator=problem.generator)

    def losses(w: torch.Tensor) -> torch.Tensor:
        found = everything(w)
        found[:10] += 2e3 * ((w - start) @ along) ** 3
        return found

    rows = problem.rows.clone()
    rows[10:13] *= -5
    audit = check_rows(DenseGradients(rows), losses, problem.w, problem.generator)
    assert audit.refuted.tolist() == [10, 11, 12]


def test_what_rounding_hides_refutes_nothing():
    """A sample that fits perfectly has a loss, and a gradient, below the rounding of its logits."""
    problem = Problem(4)
    rows = 1e-5 * torch.randn(1, problem.rows.shape[1])
    jitter = torch.Generator().manual_seed(0)

    def losses(w: torch.Tensor) -> torch.Tensor:
        return 1e-6 * torch.rand(1, generator=jitter)

    factors = check_rows(DenseGradients(rows), losses, problem.w, problem.generator).factors
    assert (factors == 1).all()


def test_gradients_that_vanish_and_losses_that_do_not_change():
    problem = Problem(3)
    rows = torch.zeros_like(problem.rows)
    flat = check_rows(DenseGradients(rows), lambda _: torch.ones(40), problem.w, problem.generator)
    assert (flat.factors == 1).all()
    assert flat.single


# --- in a run -----------------------------------------------------------------------------------


def data(n: int = 300, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=generator)
    return x, (x[:, :3] + 0.3 * x[:, 3:]).argmax(1)


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


QUICK = {"sparsity": 0.6, "stages": 3, "samples": 60, "samples_per_row": 2}


@pytest.mark.parametrize("method", ["lr", "ewr"])
def test_flipped_rows_change_nothing_in_an_audited_run(method):
    model = Problem(0).model
    given = {"method": method, "audit": True, **QUICK}
    clean = prune(model, data(), **given)
    flipped = noise.build("adversarial", 0.25, 1.0)
    audited = prune(model, data(), noise=flipped, **given)
    assert [line["corrected_rows"] for line in clean.history] == [0, 0, 0]
    assert [line["corrected_rows"] for line in audited.history] == [15, 15, 15]
    difference = (weights_of(audited.model) - weights_of(clean.model)).norm()
    assert difference < 0.02 * weights_of(clean.model).norm()
    unaudited = prune(model, data(), noise=flipped, **{**given, "audit": False})
    assert "corrected_rows" not in unaudited.history[0]
    assert (weights_of(unaudited.model) - weights_of(clean.model)).norm() > 5 * difference


@pytest.mark.parametrize(
    ("kind", "mended"), [("adversarial", "corrected_rows"), ("gradient-rows", "filtered_rows")]
)
def test_rows_are_checked_that_noise_did_not_choose(kind, mended):
    """With the noise's own random numbers the first fifty would all be noisy."""
    given = {**QUICK, "samples": 200, "samples_per_row": 1}
    found = prune(Problem(0).model, data(), noise=noise.build(kind, 0.25, 20.0), **given)
    assert all(45 <= line[mended] <= 50 for line in found.history)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_is_too_coarse_for_an_audit(kind):
    model = Problem(0).model.to(kind)
    x, y = data()
    assert noise_report(model, (x.to(kind), y)).refuted is None
    found = prune(model, (x.to(kind), y), **QUICK)
    assert [line["corrected_rows"] for line in found.history] == [0, 0, 0]


def test_the_audit_is_ewrs_own_unless_asked_for():
    model = Problem(0).model
    for method, audit in (("ewr", True), ("lr", False), ("magnitude", False)):
        assert prune(model, data(), method=method, **QUICK).settings["audit"] is audit
    with pytest.raises(InputError, match="audit=1 must be True or False"):
        prune(model, data(), audit=1, **QUICK)
    with pytest.raises(InputError, match="audit=True has no part in method='wf'; lr, ewr have it"):
        prune(model, data(), audit=True, method="wf", **QUICK)


def test_weights_in_float64_are_restored_to_the_bit():
    problem = Problem(0)
    model = problem.model.double()
    with torch.no_grad():
        model[0].weight += 1e-12
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with problem.weights.kept(model):
        problem.weights.write(model, torch.zeros_like(problem.w))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


class Backwards(torch.autograd.Function):
    """The identity, whose gradient is wrong for some samples."""

    @staticmethod
    def forward(ctx, x, wrong):
        ctx.save_for_backward(wrong)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (wrong,) = ctx.saved_tensors
        return torch.where(wrong, -3 * gradient, gradient), None


class Estimator(nn.Module):
    """Its gradients are wrong for inputs that begin with more than `least`."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.inner, self.least = Problem(0).model, least

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Backwards.apply(self.inner(x), x[:, :1] > self.least)


def test_the_noise_report_counts_them():
    some = int((data()[0][:, 0] > 1).sum())
    right, wrong, all_wrong = (noise_report(Estimator(least), data()) for least in (99, 1, -99))
    assert (right.refuted, wrong.refuted, all_wrong.refuted) == (0, some, 300)
    assert f"{some} of 300 gradients disagree with the changes of the losses: ewr" in str(wrong)
    assert "disagree" not in str(right) + str(all_wrong)
    # Directions are drawn by the seed.
    assert noise_report(Estimator(99), data()) == right


def test_gradients_that_are_not_the_losses_are_said_to_be_once():
    with pytest.warns(UserWarning, match="disagree with the losses' own changes") as caught:
        prune(Estimator(1), data(), **{**QUICK, "samples_per_row": 1})
    assert sum("disagree" in str(warning.message) for warning in caught) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*disagree.*")
        prune(Estimator(1), data(), audit=False, **QUICK)
        prune(Estimator(-99), data(), **QUICK)  # a surrogate of all gradients, left as it is


class Guarded(nn.Module):
    """A backbone that no gradient reaches, and a layer that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head, self.idle = nn.Linear(6, 12), nn.Linear(12, 3), nn.Linear(12, 3)

    def forward(self, x):
        with torch.no_grad():
            hidden = self.backbone(x).tanh()
        return self.head(hidden) + 0 * self.idle(hidden)


@pytest.mark.parametrize("method", ["obd", "wf", "lr", "ewr"])
def test_layers_that_no_gradient_reaches_are_named(method):
    torch.manual_seed(0)
    x, y = torch.randn(100, 6), torch.randint(3, (100,))
    with pytest.raises(InputError, match=r"no gradient reaches backbone.weight, though the loss"):
        prune(Guarded(), (x, y), sparsity=0.5, stages=2, method=method)
    head = prune(Guarded(), (x, y), sparsity=0.5, stages=2, method=method, exclude="backbone")
    assert head.sparsity == 0.5
    prune(Guarded(), (x, y), sparsity=0.5, stages=2, method="magnitude")
