"""Losses of groups of samples, and what counts as a gain beyond chance."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from swap_prune.evaluation import GROUPS, cross_entropy, group_losses, mean_loss
from swap_prune.gradients import DenseGradients
from swap_prune.methods.wasserstein import CHANCE, WORTHWHILE, Candidate, _Trial
from swap_prune.regression import SupportRidge


@given(samples=st.integers(1, 90))
def test_the_mean_of_the_groups_is_that_of_the_samples(samples):
    torch.manual_seed(samples)
    model, x = nn.Linear(3, 4), torch.randn(samples, 3)
    labels = torch.randint(0, 4, (samples,))
    losses = group_losses(model, (x, labels), cross_entropy)
    expected = cross_entropy(model(x), labels).item()
    assert float(losses.mean()) == pytest.approx(expected, rel=1e-5)
    assert mean_loss(model, (x, labels), cross_entropy) == float(losses.mean())
    assert len(losses) >= min(samples, GROUPS)


def test_a_loss_that_is_no_number_counts_as_infinite():
    batch = (torch.tensor([[1.0], [float("nan")]]), torch.tensor([0, 0]))
    assert mean_loss(nn.Linear(1, 2), batch, cross_entropy) == float("inf")


def judge(losses, others, fraction=WORTHWHILE):
    ridge = SupportRidge(DenseGradients(torch.ones(1, 1)), torch.ones(1), torch.arange(1))
    candidate, other = (
        Candidate(torch.zeros(1), {}, torch.tensor(values, dtype=torch.float64))
        for values in (losses, others)
    )
    return _Trial(ridge, None).improves(candidate, other, fraction)


def test_a_gain_has_to_be_beyond_chance():
    """The same mean gain of 0.1: on all groups alike, or by the luck of one."""
    assert judge([0.9, 0.8, 0.9, 0.8], [1.0, 0.9, 1.0, 0.9])
    assert not judge([0.3, 1.1, 1.1, 1.1], [1.0, 1.0, 1.0, 1.0], 0.0)
    gains = torch.tensor([0.3, 0.1, -0.1, 0.2], dtype=torch.float64)
    error = float(gains.std()) / 2
    for shift in (0.999, 1.001):
        moved = gains - gains.mean() + shift * CHANCE * error
        assert judge((1 - moved).tolist(), [1.0] * 4, 0.0) == (shift > 1)


def test_a_gain_has_to_be_worthwhile_and_infinite_losses_are_the_worst():
    assert not judge([1 - WORTHWHILE / 2], [1.0])
    assert judge([1 - 2 * WORTHWHILE], [1.0])
    assert judge([1.0, 1.0], [float("inf"), 1.0])
    assert not judge([float("inf"), 1.0], [1.0, 1.0])
    assert not judge([float("inf"), 1.0], [float("inf"), 1.0])
