import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swap_prune import InputError, prune
from swap_prune import settings as settings_of
from swap_prune.gradients import DenseGradients, StackedGradients
from swap_prune.methods import wasserstein
from swap_prune.methods.cloud import MOST_SHARE, SPREAD_ROWS, Cloud, RowMemory, _discounted
from swap_prune.regression import SupportRidge
from swap_prune.settings import LEAST_MEMORY
from test_pruning import QUICK, network, samples, trained


def matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def remember(memory: RowMemory, rows: torch.Tensor, w: torch.Tensor):
    cloud = memory.cloud(DenseGradients(rows))
    memory.keep(cloud, SupportRidge(cloud.gradients, w, w.nonzero().flatten()))
    return cloud


def share_of(cloud: Cloud) -> float:
    """The mass of what is remembered."""
    return 1 - float(cloud.ones[: cloud.fresh].square().mean()) * cloud.fresh / len(cloud.ones)


def test_stacked_rows_are_one_matrix():
    blocks, scales = (matrix(3, 8, 0), matrix(5, 8, 1)), (matrix(1, 3, 4)[0], matrix(1, 5, 5)[0])
    stacked = StackedGradients([DenseGradients(block) for block in blocks], scales)
    whole = torch.cat([scale[:, None] * block for block, scale in zip(blocks, scales, strict=True)])
    w, v, support = matrix(1, 8, 2)[0], matrix(1, 8, 3)[0], torch.tensor([0, 3, 4])
    assert stacked.shape == (8, 8)
    torch.testing.assert_close(stacked @ w, whole @ w)
    torch.testing.assert_close(stacked.T @ v, whole.T @ v)
    torch.testing.assert_close(stacked.rows(), whole)
    torch.testing.assert_close(stacked.columns(support).rows(), whole[:, support])
    torch.testing.assert_close(stacked.gram(), (whole @ whole.T).double())


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 12), size=st.integers(1, 40), stages=st.integers(1, 4), kept=st.integers(1, 9)
)
def test_mean_gradient_and_curvature_are_those_of_all_rows_with_decaying_masses(
    n, size, stages, kept
):
    memory, w = RowMemory(size, 0.0), torch.zeros(9)
    w[:kept] = 1.0
    mean, curvature = None, None
    for stage in range(stages):
        rows = matrix(n, 9, stage)
        rows[:, kept:] = 0
        fresh = rows.mean(0), rows.T @ rows / n
        cloud = remember(memory, rows, w)
        total, share = len(cloud.ones), share_of(cloud)
        mean = fresh[0] if mean is None else share * mean + (1 - share) * fresh[0]
        curvature = fresh[1] if curvature is None else share * curvature + (1 - share) * fresh[1]
        if total <= size or n + size > 9:
            # Nothing was lost yet, or the summaries hold every direction that there is.
            torch.testing.assert_close(
                cloud.gradients.T @ (cloud.ones / total).float(), mean, atol=1e-5, rtol=1e-4
            )
        if total <= size:
            seen = cloud.gradients.rows().T @ cloud.gradients.rows() / total
            torch.testing.assert_close(seen, curvature, atol=1e-5, rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(2, 12), drift=st.floats(0, 10), kept=st.integers(1, 9), drawn=st.floats(0, 1))
def test_the_share_is_the_variance_of_the_fresh_mean_over_the_distance_of_the_means(
    n, drift, kept, drawn
):
    memory, w = RowMemory(40, 0.0), torch.zeros(9)
    w[:kept] = 1.0
    before, rows = matrix(n, 9, 0), matrix(n, 9, 1) + drift
    remember(memory, before, w)
    share = share_of(memory.cloud(DenseGradients(rows), drawn))
    before, rows = before[:, :kept].double(), rows[:, :kept].double()
    # Of draws without replacement from a finite population (Cochran 1977, theorem 2.2).
    variance = (1 - drawn) * float(rows.var(dim=0).sum()) / n
    distance = float((rows.mean(0) - before.mean(0)).square().sum())
    assert share == pytest.approx(min(variance / distance, MOST_SHARE), rel=1e-3, abs=1e-6)


def test_where_every_stage_has_all_samples_nothing_is_remembered():
    data = samples(60)
    common = {"sparsity": 0.8, "stages": 5, "samples_per_row": 1, "held_out": 10}
    all_of_them = [prune(trained(), data, samples=50, memory=m, **common) for m in (40, 0)]
    some = [prune(trained(), data, samples=30, memory=m, **common) for m in (40, 0)]
    for (one, other), same in ((all_of_them, True), (some, False)):
        pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs) is same


def test_of_many_rows_some_tell_the_share():
    memory, w = RowMemory(40, 0.0), torch.ones(9)
    remember(memory, matrix(50, 9, 0), w)
    rows = matrix(3 * SPREAD_ROWS + 7, 9, 1) + 0.1
    share = share_of(memory.cloud(DenseGradients(rows)))
    variance = float(rows.var(dim=0).sum()) / len(rows)
    distance = float((rows.mean(0) - matrix(50, 9, 0).mean(0)).square().sum())
    assert share == pytest.approx(variance / distance, rel=0.1)


def test_what_is_remembered_makes_the_mean_more_exact_while_gradients_stay():
    truth, errors = matrix(1, 30, 99)[0], []
    for seed in range(20):
        memory, w = RowMemory(40, 0.0), torch.ones(30)
        for stage in range(6):
            rows = truth + 5 * matrix(20, 30, 100 * seed + stage)
            cloud = remember(memory, rows, w)
        mixed = cloud.gradients.T @ (cloud.ones / len(cloud.ones)).float()
        errors.append([float((mean - truth).square().sum()) for mean in (mixed, rows.mean(0))])
    mixed_error, fresh_error = torch.tensor(errors).mean(0).tolist()
    assert mixed_error < 0.5 * fresh_error


@pytest.mark.parametrize("rows", [torch.ones(1, 5), torch.ones(4, 5), torch.zeros(3, 5)])
def test_rows_without_spread_are_trusted(rows):
    memory, w = RowMemory(4, 0.0), torch.ones(5)
    remember(memory, matrix(6, 5, 0), w)
    assert share_of(memory.cloud(DenseGradients(rows))) == pytest.approx(0, abs=1e-6)


def test_a_summary_keeps_the_mean_and_the_largest_curvatures():
    rows = matrix(40, 30, 0) * torch.linspace(5, 0.01, 30)
    w = torch.ones(30)
    memory = RowMemory(10, 0.0)
    remember(memory, rows, w)
    assert memory.rows is not None
    assert memory.rows.shape == (10, 30)
    torch.testing.assert_close(memory.rows.T @ memory.ones.float(), rows.mean(0), atol=1e-5, rtol=0)
    whole = torch.linalg.svdvals(rows / 40**0.5)
    # Nine directions of the ten are free: interlacing bounds what is lost.
    kept = torch.linalg.svdvals(memory.rows)
    assert bool((kept[:9] >= whole[:9] - 1e-4).all())
    assert bool((kept <= whole[:10] + 1e-4).all())


@pytest.mark.parametrize("discount", [0.0, 0.5])
def test_the_fresh_mean_is_without_what_is_remembered(discount):
    memory, w, rows = RowMemory(8, discount), torch.ones(9), matrix(6, 9, 1)
    remember(memory, matrix(6, 9, 0), w)
    cloud = memory.cloud(DenseGradients(rows))
    assert len(cloud.ones) > cloud.fresh == 6
    mean = cloud.gradients.T @ cloud.fresh_ones.float() / len(cloud.ones)
    torch.testing.assert_close(mean, rows.T @ cloud.masses.float(), atol=1e-6, rtol=1e-5)


def test_few_rows_step_along_their_own_mean_after_a_cut(monkeypatch):
    """Past the first stage: LR with the same memory but a mean of all rows ends elsewhere."""
    asked = {"sparsity": 0.8, "method": "lr", "memory": 40, **QUICK}
    own = prune(trained(), samples(), **asked).model
    monkeypatch.setattr(wasserstein, "OWN_MEAN_BELOW", 0)
    mixed = prune(trained(), samples(), **asked).model
    monkeypatch.setattr(wasserstein, "OWN_MEAN_BELOW", QUICK["samples"] + 1)
    again = prune(trained(), samples(), **asked).model
    ours, others, same = (
        torch.cat([p.flatten() for p in m.parameters()]) for m in (own, mixed, again)
    )
    torch.testing.assert_close(ours, same, atol=0, rtol=0)
    assert not torch.equal(ours, others)


def test_no_memory_hands_the_rows_on():
    memory, rows = RowMemory(0, 0.0), DenseGradients(matrix(4, 6, 0))
    assert memory.cloud(rows).gradients is rows
    memory.keep(memory.cloud(rows), SupportRidge(rows, torch.ones(6), torch.arange(6)))
    assert memory.tensors() == {}


def test_columns_that_were_cut_are_not_missed():
    w = torch.tensor([1.0, 0.0, 1.0, 1.0])
    memory = RowMemory(5, 0.0)
    remember(memory, matrix(3, 4, 0), w)
    cloud = memory.cloud(DenseGradients(matrix(3, 4, 1)))
    later = cloud.gradients.columns(torch.tensor([0, 3])).rows()
    torch.testing.assert_close(later, cloud.gradients.rows()[:, [0, 3]])
    assert bool((cloud.gradients.rows()[3:, 1] == 0).all())


def test_large_models_remember_less_unless_told_to(monkeypatch):
    model = trained()
    numbers = 60 * sum(p.numel() for p in model.parameters() if p.ndim > 1)
    monkeypatch.setattr(settings_of, "MEMORY_NUMBERS", numbers)
    assert prune(model, samples(), sparsity=0.5, **QUICK).settings["memory"] == 60
    assert prune(model, samples(), sparsity=0.5, memory=70, **QUICK).settings["memory"] == 70
    monkeypatch.setattr(settings_of, "MEMORY_NUMBERS", 1)
    assert prune(model, samples(), sparsity=0.5, **QUICK).settings["memory"] == LEAST_MEMORY


@pytest.mark.parametrize(
    ("samples", "p", "spare", "expected"),
    [
        (100, 10**5, 10**5, 900),
        (1000, 10**5, 10**5, 50),
        (100, 10**7, 10**5, 53),
        (100, 10**8, 10**5, 50),
        (100, 10**5, 90, 45),
        (100, 10**5, -5, 0),
    ],
)
def test_what_is_remembered_fits(samples, p, spare, expected):
    assert settings_of.remembered_rows(samples, p, spare) == expected


def test_memory_is_a_setting_of_the_regressions():
    assert prune(trained(), samples(), sparsity=0.5, **QUICK).settings["memory"] == 980
    lr = prune(trained(), samples(), sparsity=0.5, method="lr", memory=7, **QUICK)
    assert lr.settings["memory"] == 7
    lr = prune(trained(), samples(), sparsity=0.5, method="lr", memory="auto", **QUICK)
    assert lr.settings["memory"] == 980
    with pytest.raises(InputError, match="memory=5 has no part in method='magnitude'"):
        prune(network(), samples(), sparsity=0.5, method="magnitude", memory=5)
    for wrong in (-1, 1.5):
        with pytest.raises(InputError, match=r"memory=.* at least 0, or 'auto'"):
            prune(network(), samples(), sparsity=0.5, memory=wrong)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 30), discount=st.floats(0, 2), seed=st.integers(0, 99))
def test_masses_fall_with_the_norm_and_sum_to_one(n, discount, seed):
    rows = matrix(n, 5, seed) * torch.logspace(-20, 6, n)[:, None]
    norms = rows.norm(dim=1).double()
    masses = _discounted(norms, discount)
    assert float(masses.sum()) == pytest.approx(1)
    in_order = masses[norms.argsort()]
    assert bool((in_order.diff() <= 1e-12).all())
    if discount == 0:
        assert masses.tolist() == pytest.approx([1 / n] * n)
    cloud = RowMemory(0, discount).cloud(DenseGradients(rows))
    torch.testing.assert_close(cloud.masses, masses)
    weighted = (masses[:, None] * rows.double()).sum(0)
    torch.testing.assert_close(
        (cloud.gradients.T @ (cloud.ones / n).float()).double(), weighted, rtol=1e-4, atol=1e-4
    )


def test_zero_rows_have_masses_too():
    masses = RowMemory(0, 0.5).cloud(DenseGradients(torch.zeros(4, 3))).masses
    assert masses.tolist() == pytest.approx([0.25] * 4)


def test_zero_rows_leave_the_others_their_masses():
    norms = torch.tensor([0.0, 0.0, 0.0, 1.0, 4.0], dtype=torch.float64)
    masses = _discounted(norms, 0.5)
    assert float(masses.sum()) == pytest.approx(1)
    assert bool((masses[:3] == masses[3]).all())
    assert float(masses[4] / masses[3]) == pytest.approx((1.6 / 4) ** 0.5)


def test_values_without_masses_come_back():
    rows = matrix(6, 5, 0)
    memory, w = RowMemory(4, 0.5), torch.ones(5)
    remember(memory, rows, w)
    cloud = memory.cloud(DenseGradients(rows))
    y = (cloud.gradients @ w).double()
    torch.testing.assert_close(cloud.unscaled(y).float(), rows @ w)
    torch.testing.assert_close(cloud.rescaled(cloud.unscaled(y), y), y)
