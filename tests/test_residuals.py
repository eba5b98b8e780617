"""Gradients by the model's own outputs: the chain rule, and where it is made use of."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, jacrev

from swap_prune import data, models, noise, prune, select_weights
from swap_prune.evaluation import cross_entropy
from swap_prune.gradients import gradient_rows
from swap_prune.residuals import by_own_outputs, linear_loss, outputs, residuals_of


def weighted(output, targets):
    return nn.functional.cross_entropy(output, targets, weight=torch.tensor([1.0, 5.0, 0.2]))


class Problem:
    """A small network, samples, and other weights, with which gradients are taken."""

    def __init__(self, seed: int, samples: int = 12) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).eval()
        self.weights = select_weights(self.model)
        self.w = self.weights.read(self.model)
        self.batch = torch.randn(samples, 6), torch.randint(3, (samples,))
        self.others = self.w * (1 + 0.3 * torch.randn(len(self.w)))

    def own(self, loss=cross_entropy, m=1, seen=None, most_numbers=10**6):
        """What `by_own_outputs` says with the other weights' outputs, or those given."""
        if seen is None:
            self.weights.write(self.model, self.others)
            seen = outputs(self.model, self.batch[0][:4])
            self.weights.write(self.model, self.w)
        return by_own_outputs(self.model, seen, self.batch, loss, m, most_numbers)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10_000),
    m=st.sampled_from([1, 2, 3]),
    loss=st.sampled_from([cross_entropy, weighted]),
)
def test_a_row_is_the_others_jacobian_times_the_models_own_residuals(seed, m, loss):
    problem = Problem(seed)
    inputs, targets = problem.batch
    own = problem.own(loss, m)
    problem.weights.write(problem.model, problem.others)
    rows = gradient_rows(problem.model, problem.weights, *own, linear_loss, m).rows()
    # The oracle: the whole Jacobian, and the residuals of each row by autograd.
    names = problem.weights.names
    others = {name: problem.model.get_parameter(name).detach() for name in names}
    jacobian = jacrev(lambda values: functional_call(problem.model, values, (inputs,)))(others)
    problem.weights.write(problem.model, problem.w)
    for row, part in enumerate(torch.arange(len(targets)).split(m)):
        output = problem.model(inputs[part]).detach().requires_grad_()
        (residual,) = torch.autograd.grad(loss(output, targets[part]), output)
        expected = [torch.einsum("sk,sk...->...", residual, jacobian[n][part]) for n in names]
        torch.testing.assert_close(
            rows[row], torch.cat([part.flatten() for part in expected]), rtol=1e-4, atol=1e-6
        )


@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), m=st.sampled_from([1, 3]))
def test_with_the_models_own_weights_it_is_the_gradient(seed, m):
    problem = Problem(seed)
    inputs, targets = problem.batch
    with torch.no_grad():
        found = residuals_of(problem.model(inputs), targets, weighted, m)
    args = problem.model, problem.weights, inputs
    expected = gradient_rows(*args, targets, weighted, m).rows()
    torch.testing.assert_close(
        gradient_rows(*args, found, linear_loss, m).rows(), expected, rtol=1e-4, atol=1e-6
    )


def test_residuals_are_wanted_only_where_outputs_differ():
    problem = Problem(0)
    assert problem.own() is not None
    same = outputs(problem.model, problem.batch[0][:4])
    assert problem.own(seen=same) is None
    assert problem.own(seen=same * (1 + 1e-6)) is None


def test_what_has_no_residuals_stays_as_it_is():
    problem = Problem(0)
    assert problem.own(most_numbers=2) is None
    assert problem.own(loss=lambda o, t: cross_entropy(o, t) * o.sum().item()) is None

    assert by_own_outputs(problem.model, None, problem.batch, cross_entropy, 1, 100) is None
    assert problem.own(seen=torch.randn(4, 2)) is None


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: {"logits": x},
        lambda x: x.sum(),
        lambda x: x.mean(0),
        lambda x: x.argmax(1),
        lambda x: x[:, : len(x)],  # another width for every size of a batch
        lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
    ],
    ids=["dict", "number", "no samples", "integers", "ragged", "nested"],
)
def test_other_outputs_than_one_tensor_are_left_alone(forward):
    class Model(nn.Module):
        def forward(self, x):
            return forward(x)

    assert outputs(Model(), torch.randn(150, 128)) is None


def test_weight_noise_spoils_rows_less_with_the_models_own_residuals():
    model, (images, labels) = models.pretrained("digits"), data.load("digits").train[:300]
    weights = select_weights(model)
    w = weights.read(model)
    exact = gradient_rows(model, weights, images, labels, cross_entropy).rows()
    generator = torch.Generator().manual_seed(0)
    with noise.AnalogNoise(0.25).weights(model, weights, generator):
        noisy = gradient_rows(model, weights, images, labels, cross_entropy).rows()
        seen = outputs(model, images[:10])
        with weights.kept(model):
            weights.write(model, w)
            own = by_own_outputs(model, seen, (images, labels), cross_entropy, 1, weights.size)
        rows = gradient_rows(model, weights, *own, linear_loss).rows()
    for error in (lambda g: (g.mean(0) - exact.mean(0)).norm(), lambda g: (g - exact).norm()):
        assert error(rows) < 0.5 * error(noisy)


@pytest.mark.parametrize(
    ("method", "analog", "used"),
    [("ewr", True, True), ("ewr", False, False), ("lr", True, False)],
)
def test_a_run_uses_them_where_gradients_are_taken_with_other_weights(method, analog, used):
    result = prune(
        models.pretrained("digits"), data.load("digits").train[:300], sparsity=0.8, method=method,
        stages=2, samples=40, samples_per_row=2,
        noise={"kind": "analog", "level": 0.25} if analog else None,
    )  # fmt: skip
    assert [line.get("own_residuals", False) for line in result.history] == [used] * 2
