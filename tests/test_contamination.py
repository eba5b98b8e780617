import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from swap_prune import InputError, evaluate, prune
from swap_prune.contamination import (
    ContaminatedCrossEntropy,
    estimate,
    log_likelihoods,
    significant,
)
from test_pruning import QUICK, samples, trained, weights_of


def calibrated(n: int, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and labels drawn from the very probabilities that they state."""
    generator = torch.Generator().manual_seed(seed)
    outputs = 3 * torch.randn(n, classes, generator=generator)
    labels = torch.multinomial(outputs.softmax(1), 1, generator=generator).flatten()
    return outputs, labels


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.3, 0.6])
def test_the_estimate_finds_the_fraction_of_labels_drawn_at_random(fraction):
    outputs, labels = calibrated(20_000, 7, seed=1)
    generator = torch.Generator().manual_seed(2)
    chosen = torch.rand(len(labels), generator=generator) < fraction
    labels[chosen] = torch.randint(7, (int(chosen.sum()),), generator=generator)
    assert estimate(log_likelihoods(outputs, labels), 7) == pytest.approx(fraction, abs=0.02)


def test_the_estimate_maximises_the_likelihood():
    outputs, labels = calibrated(300, 4, seed=3)
    labels[:80] = torch.randint(4, (80,), generator=torch.Generator().manual_seed(4))
    loss = [float(ContaminatedCrossEntropy(eta / 1000)(outputs, labels)) for eta in range(900)]
    best = min(range(900), key=loss.__getitem__) / 1000
    assert estimate(log_likelihoods(outputs, labels), 4) == pytest.approx(best, abs=0.002)


def test_labels_that_are_all_impossible_leave_something():
    assert estimate(torch.full((10,), -1e4), 3) == 0.9


@pytest.mark.parametrize("classes", [1, 2, 10])
def test_a_model_without_preferences_says_nothing_about_its_labels(classes):
    assert significant(torch.full((50,), 1 / classes).log(), classes) == 0


def test_what_may_be_chance_is_not_contamination():
    # One held-out sample that the model gets wrong proves nothing, though η = 0.9 fits it best.
    assert estimate(torch.tensor([-3.0]), 10) == 0.9
    assert significant(torch.tensor([-3.0]), 10) == 0
    outputs, labels = calibrated(300, 10, seed=5)
    assert significant(log_likelihoods(outputs, labels), 10) == 0
    labels[:100] = torch.randint(10, (100,), generator=torch.Generator().manual_seed(6))
    assert significant(log_likelihoods(outputs, labels), 10) == pytest.approx(1 / 3, abs=0.1)


def test_a_given_fraction_is_in_the_history_of_a_method_that_draws_nothing():
    result = prune(trained(), samples(), sparsity=0.5, method="magnitude", contamination=0.3)
    assert result.history[0]["contamination"] == 0.3


@settings(max_examples=50, deadline=None)
@given(eta=st.floats(0, 0.9), seed=st.integers(0, 1000), classes=st.integers(2, 9))
def test_the_gradient_is_cross_entropy_times_the_probability_of_a_right_label(eta, seed, classes):
    outputs, labels = calibrated(5, classes, seed)
    outputs, labels = outputs.double().requires_grad_(), torch.zeros_like(labels)
    (ours,) = torch.autograd.grad(5 * ContaminatedCrossEntropy(eta)(outputs, labels), outputs)
    (plain,) = torch.autograd.grad(
        functional.cross_entropy(outputs, labels, reduction="sum"), outputs
    )
    right = (1 - eta) * outputs.softmax(1)[:, 0]
    mass = right / (right + eta / classes)
    torch.testing.assert_close(ours, mass[:, None] * plain)


def test_wrong_labels_cost_ewr_less_than_lr():
    model, test = trained(), samples(2000, 8)
    noisy = {"kind": "labels", "fraction": 0.4}
    lost = {}
    for method in ("lr", "ewr"):
        scores = []
        for seed in range(4):
            result = prune(
                model, samples(600, 2), sparsity=0.7, method=method, noise=noisy, seed=seed,
                stages=5, samples=60, samples_per_row=4, held_out=120,
            )  # fmt: skip
            scores.append(evaluate(result.model, test).loss)
            if method == "ewr":
                assert result.history[0]["contamination"] == pytest.approx(0.6, abs=0.15)
        lost[method] = sum(scores)
    assert lost["ewr"] < lost["lr"]


def test_clean_labels_of_a_calibrated_model_change_nothing():
    model, settings = trained(), {"sparsity": 0.6, "memory": 0, **QUICK}
    clean = prune(model, samples(), **settings)
    assert clean.history[0]["contamination"] == 0
    without = prune(model, samples(), contamination=0.0, **settings)
    assert torch.equal(weights_of(clean.model), weights_of(without.model))


def test_a_given_fraction_needs_no_held_out_samples_but_the_default_loss():
    fixed = {"damping": 0.1, "first_order": 1.0, "held_out": 0, "sparsity": 0.5, **QUICK}
    result = prune(trained(), samples(), method="lr", contamination=0.2, **fixed)
    assert result.history[0]["contamination"] == 0.2
    with pytest.raises(InputError, match="contamination='auto' is chosen on held-out samples"):
        prune(trained(), samples(), method="lr", contamination="auto", **fixed)
    with pytest.raises(InputError, match=r"contamination=0.2 is for the default loss"):
        prune(trained(), samples(), sparsity=0.5, contamination=0.2, loss=functional.cross_entropy)
    for wrong in (1.0, -0.1, "many"):
        with pytest.raises(InputError, match="contamination="):
            prune(trained(), samples(), sparsity=0.5, contamination=wrong)


def test_a_model_that_is_mostly_wrong_does_not_accuse_the_labels():
    """Sure, and no better than a guess: pruning by such masses would be pruning by nothing."""
    outputs = 20 * functional.one_hot(torch.arange(200) % 10, 10).float()
    labels = (torch.arange(200) // 10) % 10
    likelihoods = log_likelihoods(outputs, labels)
    assert estimate(likelihoods, 10) > 0.8
    assert significant(likelihoods, 10) == 0
