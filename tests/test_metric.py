"""The norm of the damping: against explicit sums, and as the weighted ridge that it stands for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch.nn import functional

from swap_prune import InputError, evaluate, metric, prune
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
    scale = metric.scales(rows, present, share, ())
    d = rows.double().square().mean(0)
    expected = 1 - share + share * d / d[present].mean()
    # Up to one factor, which keeps the mean curvature of the weights present as it was.
    ratio = expected * scale.double().square()
    torch.testing.assert_close(ratio, ratio[:1].expand(p), rtol=1e-3, atol=0)
    assert float((d * scale.double().square())[present].mean()) == pytest.approx(
        float(d[present].mean()), rel=1e-3
    )


def test_a_share_of_zero_changes_nothing():
    scale = metric.scales(gradients(7, 5, 0), torch.ones(5, dtype=torch.bool), 0.0, ())
    torch.testing.assert_close(scale, torch.ones(5))


@pytest.mark.parametrize(
    "rows", [torch.zeros(4, 3), torch.ones(1, 3), torch.tensor([[0.0, 1.0, 1e-30]]).expand(6, 3)]
)
def test_zero_single_and_equal_rows_give_finite_scales(rows):
    for share in (0.0, 0.5, 1.0):
        scale = metric.scales(rows, torch.ones(3, dtype=torch.bool), share, ())
        assert torch.isfinite(scale).all()
        assert (scale > 0).all()


@pytest.mark.parametrize("size", [1e-23, 1e-21, 1e-3, 1e18])
def test_gradients_of_any_size_give_finite_scales(size):
    for share in (0.0, 0.9, 1.0):
        scale = metric.scales(size * gradients(6, 4, 0), torch.ones(4, dtype=torch.bool), share, ())
        assert torch.isfinite(scale).all()
        assert (scale > 0).all()


@pytest.mark.parametrize("method", ["lr", "ewr"])
def test_a_model_that_is_almost_sure_is_pruned(method):
    """Its gradients are so small that their squares leave float32."""
    model = torch.nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[50.0, 1.0, 2.0, 3.0], [-50.0, 3.0, 2.0, 1.0]]))
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    x[:, 0] = x[:, 0].sign()
    result = prune(model, (x, (x[:, 0] < 0).long()), sparsity=0.5, method=method)
    assert result.nonzeros == 4


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
    scale = metric.scales(rows, torch.ones(p, dtype=torch.bool), share, ())
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


def test_what_is_remembered_is_in_the_coordinates_of_the_weights():
    """Two stages with memory: the mean of the rows kept is the mean gradient on the support."""
    p = 8
    w = torch.randn(p, generator=torch.Generator().manual_seed(3))
    method = WassersteinRegression(damping=0.03, first_order=0.0, metric=0.9, memory=20)
    rows = gradients(10, p, 4)
    for k in (6, 4):
        stage = Stage(DenseGradients(rows.clone()), w, Budget.over_all(p, k), 1, 1, (), None)
        w, _ = method.prune(stage)
    tensors, _ = method.state()
    mean = tensors["rows"].double().T @ tensors["ones"]
    torch.testing.assert_close(
        mean, rows.double().mean(0)[tensors["support"]], rtol=1e-4, atol=1e-5
    )


def test_a_rehearsal_keeps_to_the_layers_of_the_budget():
    rows, p, seen = gradients(30, 8, 2), 8, []
    w_bar = torch.randn(p, generator=torch.Generator().manual_seed(3))
    layers = (slice(0, 3), slice(3, 8))

    def losses(w):
        seen.append([int((w[layer] != 0).sum()) for layer in layers])
        return torch.ones(1, dtype=torch.float64)

    stage = Stage(DenseGradients(rows), w_bar, Budget(layers, (2, 4)), 1, 0, layers, losses)
    WassersteinRegression(damping=0.03, first_order=0.0).prune(stage)
    assert seen[: len(METRICS)] == [[2, 3]] * len(METRICS)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"metric": 2}, "metric=2 must be a number in [0, 1], 'layers', or 'auto'"),
        ({"metric": "layer"}, "metric='layer' must be a number in [0, 1], 'layers', or 'auto'"),
        ({"metric": 0.5, "method": "wf"}, "metric=0.5 has no part in method='wf'"),
        ({"metric": "auto", "held_out": 0, "damping": 0.1, "first_order": 1}, "held_out is 0"),
    ],
)
def test_metrics_that_no_run_can_use_are_named(settings, said):
    data = torch.randn(40, 4), torch.randint(2, (40,))
    with pytest.raises(InputError) as error:
        prune(torch.nn.Linear(4, 2), data, sparsity=0.5, samples=10, **settings)
    assert said in str(error.value)


def test_without_held_out_samples_the_metric_is_the_papers():
    data = torch.randn(40, 4), torch.randint(2, (40,))
    fixed = {"held_out": 0, "damping": 0.1, "first_order": 1, "samples": 10}
    result = prune(torch.nn.Linear(4, 2), data, sparsity=0.5, method="lr", **fixed)
    assert result.settings["metric"] == 0


@given(
    n=st.integers(2, 6),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    unit=st.sampled_from([0.01, 0.1, 30.0, 100.0]),
    seed=st.integers(0, 1000),
)
def test_by_layers_no_unit_of_a_layer_matters(n, sizes, unit, seed):
    """With a layer's weights times u, and so its gradients by u, `w √D` is what it was."""
    rows = torch.randn(n, sum(sizes), generator=torch.Generator().manual_seed(seed))
    present = torch.ones(sum(sizes), dtype=torch.bool)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    layers = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    units = torch.ones(sum(sizes))
    units[layers[0]] = unit
    in_units = 1 / metric.scales(rows / units, present, "layers", layers) * units
    plain = 1 / metric.scales(rows, present, "layers", layers)
    torch.testing.assert_close(in_units / in_units[0], plain / plain[0], rtol=1e-3, atol=0)


def test_a_layer_in_which_nothing_is_left_has_no_mean():
    present = torch.tensor([False, False, True, True])
    layers = (slice(0, 2), slice(2, 4))
    assert metric.scales(gradients(5, 4, 0), present, "layers", layers).isfinite().all()


def digits_in_units(unit):
    """A small network for the digits whose first layer takes pixels times `unit`."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images[:1000], dtype=torch.float32) / 16
    labels = torch.tensor(labels[:1000])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    with torch.no_grad():
        model[0].weight /= unit
    return model, (images * unit, labels)


@pytest.mark.parametrize("unit", [1, 255])
def test_auto_goes_by_layers_where_their_scales_differ(unit):
    model, data = digits_in_units(unit)
    settings = {"stages": 5, "samples": 200, "samples_per_row": 4}
    result = prune(model, data, sparsity=0.85, method="lr", **settings)
    assert (result.history[0]["metric"] == "layers") == (unit == 255)
    assert max(result.layer_sparsity.values()) < 1
    assert evaluate(result.model, data).top1 > 90


@pytest.mark.parametrize("method", ["lr", "ewr"])
def test_the_unit_of_the_loss_hardly_matters(method):
    """What no quadratic model depends on, the search for its damping must not either."""
    model, data = digits_in_units(1)
    settings = {"stages": 4, "samples": 200, "samples_per_row": 4, "method": method}
    for unit in (1e-5, 1.0, 1e6):
        result = prune(
            model,
            data,
            sparsity=0.85,
            loss=lambda o, t, c=unit: c * functional.cross_entropy(o, t),
            **settings,
        )
        assert evaluate(result.model, data).top1 > 93
