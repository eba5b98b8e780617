from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swap_prune.gradients import DenseGradients
from swap_prune.methods import (
    CombinatorialBrainSurgeon,
    OptimalBrainDamage,
    Stage,
    WoodFisher,
)
from swap_prune.methods.cbs import RemovalSearch
from swap_prune.regression import Budget

LAYERS = (slice(0, 12), slice(12, 30))
METHODS = (
    OptimalBrainDamage(),
    WoodFisher(damping=1e-3, block_size=5),
    CombinatorialBrainSurgeon(damping=1e-3),
)


def make_stage(n: int, p: int, k: int, seed: int = 0, layers=None) -> Stage:
    generator = torch.Generator().manual_seed(seed)
    return Stage(
        gradients=DenseGradients(torch.randn(n, p, generator=generator)),
        w_bar=torch.randn(p, generator=generator),
        budget=Budget.over_all(p, k),
        samples_per_row=1,
        remaining=0,
        layers=layers or (slice(0, p),),
        held_out_losses=None,
    )


def fisher(stage: Stage, damping: float) -> torch.Tensor:
    """`GᵀG / n + λ I` in float64, formed outright."""
    G = stage.gradients.rows().double()
    return G.T @ G / len(G) + damping * torch.eye(G.shape[1], dtype=torch.float64)


def removal_cost(stage: Stage, removed, damping: float) -> float:
    """`½ w_Rᵀ F w_R` in float64."""
    w = torch.zeros(len(stage.w_bar), dtype=torch.float64)
    index = torch.as_tensor(removed)
    w[index] = stage.w_bar[index].double()
    return float(0.5 * w @ fisher(stage, damping) @ w)


def test_obd_keeps_the_largest_diagonal_saliencies():
    stage = make_stage(7, 10, 4)
    w, _ = OptimalBrainDamage().prune(stage)
    G, w_bar = stage.gradients.rows(), stage.w_bar
    saliency = [float(w_bar[i] ** 2 * sum(G[:, i] ** 2) / 7 / 2) for i in range(10)]
    kept = sorted(range(10), key=lambda i: -saliency[i])[:4]
    assert sorted(w.nonzero().flatten().tolist()) == sorted(kept)
    assert torch.equal(w[kept], w_bar[kept])


@pytest.mark.parametrize(("n", "block_size"), [(40, 20), (6, 20), (40, 4), (6, 7), (1, 20)])
def test_woodfisher_against_the_dense_inverse(n, block_size):
    stage, damping = make_stage(n, 20, 8, seed=n, layers=(slice(0, 9), slice(9, 20))), 0.01
    F, w_bar = fisher(stage, damping), stage.w_bar.double()
    saliency, moves = torch.zeros(20, dtype=torch.float64), []
    for layer in stage.layers:
        for start in range(layer.start, layer.stop, block_size):
            block = slice(start, min(start + block_size, layer.stop))
            inverse = torch.linalg.inv(F[block, block])
            for i, q in enumerate(range(block.start, block.stop)):
                saliency[q] = w_bar[q] ** 2 / (2 * inverse[i, i])
                moves.append((q, block, -w_bar[q] / inverse[i, i] * inverse[:, i]))
    kept = saliency.topk(8).indices.sort().values
    expected = w_bar.clone()
    for q, block, move in moves:
        if q not in kept:
            expected[block] += move
    w, chosen = WoodFisher(damping, block_size).prune(stage)
    assert torch.equal(w.nonzero().flatten(), kept)
    torch.testing.assert_close(w[kept], expected[kept].float(), rtol=1e-4, atol=1e-5)
    assert chosen == {"damping": damping, "block_size": block_size}


def test_woodfisher_is_the_optimal_brain_surgeon_for_a_single_weight():
    stage, damping = make_stage(30, 8, 7, seed=3), 0.05
    w, _ = WoodFisher(damping, block_size=8).prune(stage)
    F, w_bar = fisher(stage, damping), stage.w_bar.double()

    def best_without(q):
        rest = [i for i in range(8) if i != q]
        shift = torch.linalg.solve(F[rest][:, rest], F[rest, q] * w_bar[q])
        delta = torch.zeros(8, dtype=torch.float64)
        delta[rest], delta[q] = shift, -w_bar[q]
        return float(0.5 * delta @ F @ delta), w_bar + delta

    _, expected = min((best_without(q) for q in range(8)), key=lambda pair: pair[0])
    torch.testing.assert_close(w, expected.float(), rtol=1e-4, atol=1e-5)


def test_cbs_update_is_the_joint_minimum_on_its_support():
    stage, damping = make_stage(25, 12, 5, seed=4), 0.02
    w, chosen = CombinatorialBrainSurgeon(damping).prune(stage)
    F, w_bar = fisher(stage, damping), stage.w_bar.double()
    kept, cut = w.nonzero().flatten(), (w == 0).nonzero().flatten()
    shift = torch.linalg.solve(F[kept][:, kept], F[kept][:, cut] @ w_bar[cut])
    torch.testing.assert_close(w[kept], (w_bar[kept] + shift).float(), rtol=1e-3, atol=1e-4)
    assert chosen["damping"] == damping


@pytest.mark.parametrize("damping", [1e-3, 0.1])
def test_no_swap_improves_the_removed_set(damping):
    optimal = 0
    for seed in range(30):
        stage = make_stage(5, 8, 4, seed)
        search = RemovalSearch(stage, damping)
        search.run()
        removed = search.removed.nonzero().flatten().tolist()
        value = removal_cost(stage, removed, damping)
        assert search.objective() == pytest.approx(value, rel=1e-4)
        swapped = (
            [i for i in removed if i != out] + [j]
            for out in removed
            for j in range(8)
            if j not in removed
        )
        assert value <= min(removal_cost(stage, s, damping) for s in swapped) * (1 + 1e-3)
        every = (removal_cost(stage, s, damping) for s in combinations(range(8), 4))
        optimal += value <= min(every) * (1 + 1e-3)
    # A set that no single swap improves need not be the best of the 70, but here it mostly is.
    assert optimal >= 20


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 12),
    k=st.integers(1, 29),
    damping=st.sampled_from([1e-5, 1e-3, 0.1]),
    per_layer=st.booleans(),
)
def test_the_search_never_raises_the_objective(seed, n, k, damping, per_layer):
    stage = make_stage(n, 30, k, seed, LAYERS)
    if per_layer:
        stage.budget = Budget.per_layer(LAYERS, k)
    search = RemovalSearch(stage, damping)
    first = removal_cost(stage, search.removed.nonzero().flatten(), damping)
    search.run()
    last = removal_cost(stage, search.removed.nonzero().flatten(), damping)
    # Magnitudes, the start, may be the best set already; float32 holds G w to seven digits.
    assert last <= first * (1 + 1e-6)
    assert int(search.removed.sum()) == 30 - k


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 12), k=st.integers(1, 30))
def test_sparsity_is_exact_and_pruned_weights_stay_pruned(method, seed, n, k):
    stage = make_stage(n, 30, k, seed, LAYERS)
    stage.w_bar[torch.randperm(30, generator=torch.Generator().manual_seed(seed))[:10]] = 0
    w, _ = method.prune(stage)
    assert int((w != 0).sum()) == min(k, 20)
    assert not bool((w[stage.w_bar == 0] != 0).any())


@pytest.mark.parametrize("method", METHODS)
def test_budgets_by_layer_are_kept(method):
    stage = make_stage(9, 30, 10, 5, LAYERS)
    stage.budget = Budget.per_layer(LAYERS, 10)
    # A whole layer out of proportion: a global ranking would empty the other.
    stage.w_bar[LAYERS[0]] *= 100
    w, _ = method.prune(stage)
    assert [int((w[layer] != 0).sum()) for layer in LAYERS] == list(stage.budget.counts)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "matrix", [torch.zeros(4, 30), torch.ones(1, 30), torch.full((3, 30), 1e8)]
)
def test_degenerate_gradients_give_finite_weights(method, matrix):
    stage = make_stage(4, 30, 11, 6, LAYERS)
    stage.gradients = DenseGradients(matrix)
    w, _ = method.prune(stage)
    assert torch.isfinite(w).all()
    assert int((w != 0).sum()) == 11


def test_without_a_cut_nothing_moves():
    for method in METHODS:
        stage = make_stage(6, 30, 30, 7, LAYERS)
        w, _ = method.prune(stage)
        assert torch.equal(w, stage.w_bar)
