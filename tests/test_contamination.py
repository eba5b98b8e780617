import pytest
import torch

from swap_prune.contamination import estimate


def mixture(eta: float, sharpness: float, samples: int = 20_000, classes: int = 10):
    """log p_model(label) of labels that are the model's own draw, or blind with probability η."""
    generator = torch.Generator().manual_seed(3)
    logs = (sharpness * torch.randn(samples, classes, generator=generator)).log_softmax(dim=1)
    labels = torch.multinomial(logs.exp(), 1, generator=generator)
    blind = torch.rand(samples, 1, generator=generator) < eta
    anything = torch.randint(classes, (samples, 1), generator=generator)
    return logs.gather(1, torch.where(blind, anything, labels)).flatten()


@pytest.mark.parametrize("sharpness", [2.0, 8.0])
@pytest.mark.parametrize("eta", [0.0, 0.05, 0.25, 0.6])
def test_a_simulated_mixture_is_found(eta, sharpness):
    assert estimate(mixture(eta, sharpness), 10) == pytest.approx(eta, abs=0.02)


def test_it_is_the_maximum_of_the_likelihood():
    logs = mixture(0.2, 4.0, samples=500).double()
    grid = torch.linspace(0, 1, 2001, dtype=torch.float64)[1:-1]
    likelihood = torch.log((1 - grid) * logs.exp()[:, None] + grid / 10).sum(dim=0)
    assert estimate(logs, 10) == pytest.approx(float(grid[likelihood.argmax()]), abs=1e-3)


@pytest.mark.parametrize(
    ("likelihood", "expected"),
    [(0.0, 0.0), (-2000.0, 1.0), (-torch.tensor(10.0).log().item(), 0.1)],
)
def test_ends_are_finite(likelihood, expected):
    # A model that is always right, one that never is, and one that says nothing.
    assert estimate(torch.full((7,), likelihood), 10) == pytest.approx(expected, abs=1e-3)


def test_a_single_sample():
    assert 0 <= estimate(torch.tensor([-1.0]), 3) <= 1
