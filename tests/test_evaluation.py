"""Losses of groups of samples, and what counts as a gain beyond chance."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from swap_prune import InputError, evaluate, evaluation, prune
from swap_prune.evaluation import (
    CHANCE,
    GROUPS,
    MOST_SAMPLES,
    MOST_VECTORS,
    batch_samples,
    cross_entropy,
    group_losses,
    mean_loss,
    row_losses,
)
from swap_prune.gradients import DenseGradients
from swap_prune.methods.wasserstein import WORTHWHILE, Candidate, _Trial
from swap_prune.regression import SupportRidge


@given(samples=st.integers(1, 90))
def test_the_mean_of_the_groups_is_that_of_the_samples(samples):
    torch.manual_seed(samples)
    model, x = nn.Linear(3, 4), torch.randn(samples, 3)
    labels = torch.randint(0, 4, (samples,))
    losses = group_losses(model, (x, labels), cross_entropy)
    expected = cross_entropy(model(x), labels).item()
    assert float(losses.mean()) == pytest.approx(expected, rel=1e-5)
    assert mean_loss(model, (x, labels), cross_entropy) == pytest.approx(expected, rel=1e-5)
    assert len(losses) >= min(samples, GROUPS)


@pytest.mark.parametrize("most", [1, 4, 5, 7, 100])
def test_a_row_has_one_loss_however_many_samples_are_evaluated_at_once(monkeypatch, most):
    monkeypatch.setattr(evaluation, "BATCH_NUMBERS", 2 * most)
    monkeypatch.setattr(evaluation, "MOST_VECTORS", most)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    x, labels = torch.randn(20, 2), torch.randint(3, (20,))
    # No mean over samples: what a row's loss is depends on all of them together.
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]))
    with torch.no_grad():
        expected = [float(weighted(model(x[i : i + 5]), labels[i : i + 5])) for i in (0, 5, 10, 15)]
    found = row_losses(model, (x, labels), weighted, 5)
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_groups_of_a_classifier_are_evaluated_together():
    calls = []

    class Counted(nn.Linear):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    model = Counted(6, 3)
    batch = torch.randn(87, 6), torch.randint(3, (87,))
    losses = group_losses(model, batch, cross_entropy)
    assert calls == [87]
    parts = zip(*(tensor.split(87 // GROUPS) for tensor in batch), strict=True)
    sums = [len(y) * cross_entropy(model(x), y).item() for x, y in parts]
    torch.testing.assert_close(losses * 87 / len(sums), torch.tensor(sums, dtype=torch.float64))


def test_more_samples_at_once_where_each_becomes_one_vector():
    images, tokens = torch.zeros(1, 1, 8, 8), torch.zeros(1, 5, 8)
    perceptron = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    convolution = nn.Sequential(nn.Conv2d(1, 4, 8), nn.Flatten(), nn.Linear(4, 64))
    assert batch_samples(perceptron, images) == MOST_VECTORS
    assert batch_samples(convolution, images) == MOST_SAMPLES
    assert batch_samples(nn.Linear(8, 10), tokens) == MOST_SAMPLES


def test_the_default_loss_is_cross_entropy():
    output, labels = torch.randn(7, 4), torch.tensor([0, 3, 1, 2, 2, 0, 1], dtype=torch.uint8)
    expected = nn.functional.cross_entropy(output, labels.long())
    torch.testing.assert_close(cross_entropy(output, labels), expected)


def test_outputs_of_another_kind_are_those_of_their_group():
    class Mean(nn.Module):
        def forward(self, x):
            return {"mean": x.mean()}

    x, labels = torch.randn(40, 3), torch.zeros(40, dtype=torch.long)
    losses = group_losses(Mean(), (x, labels), lambda out, t: out["mean"])
    torch.testing.assert_close(losses, torch.stack([g.mean() for g in x.split(2)]).double())


def test_counts_are_no_classes():
    model, counts = nn.Linear(3, 1), torch.randint(0, 9, (40,))
    x, loss = torch.randn(40, 3), lambda output, y: (output[:, 0] - y).square().mean()
    score = evaluate(model, (x, counts), loss)
    assert score.top1 is score.top5 is None
    assert score.loss == pytest.approx(loss(model(x), counts).item(), rel=1e-5)


def test_outputs_that_are_more_than_the_samples_are_those_of_their_group():
    class Twice(nn.Module):
        def forward(self, x):
            return torch.cat([x, x])

    x, labels = torch.randn(40, 3), torch.zeros(40, dtype=torch.long)
    losses = group_losses(Twice(), (x, labels), lambda output, y: output.mean())
    torch.testing.assert_close(losses, torch.stack([g.mean() for g in x.split(2)]).double())


def test_a_loss_that_is_no_number_counts_as_infinite():
    batch = (torch.tensor([[1.0], [float("nan")]]), torch.tensor([0, 0]))
    assert mean_loss(nn.Linear(1, 2), batch, cross_entropy) == float("inf")


def test_an_output_that_is_no_number_is_no_right_answer():
    x = torch.tensor([[float("nan")], [1.0]])
    model = nn.Linear(1, 2)
    nn.init.zeros_(model.weight[1:])
    nn.init.ones_(model.weight[:1])
    nn.init.zeros_(model.bias)
    score = evaluate(model, (x, torch.tensor([0, 0])))
    assert (score.top1, score.top5) == (50.0, 50.0)


def test_a_loss_of_minus_infinity_is_no_good_one():
    batch = torch.ones(3, 1), torch.ones(3)
    losses = group_losses(nn.Identity(), batch, lambda x, t: (x[:, 0] - t).abs().log().mean())
    assert torch.isposinf(losses).all()


def test_a_loss_with_class_weights_is_that_of_the_whole_batch():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0]))
    model, x, labels = nn.Linear(3, 2), torch.randn(30, 3), torch.randint(2, (30,))
    assert mean_loss(model, (x, labels), loss) == pytest.approx(loss(model(x), labels).item())


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
    assert not judge([1 - WORTHWHILE / 2] * 2, [1.0] * 2)
    assert judge([1 - 2 * WORTHWHILE] * 2, [1.0] * 2)
    assert judge([1.0, 1.0], [float("inf"), 1.0])
    assert not judge([float("inf"), 1.0], [1.0, 1.0])
    assert not judge([float("inf"), 1.0], [float("inf"), 1.0])


def test_models_without_data_are_refused():
    data = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
    with pytest.raises(InputError, match="parameter weight has no data yet"):
        evaluate(nn.LazyLinear(2), data)
    with pytest.raises(InputError, match="parameter weight is on the meta device"):
        evaluate(nn.Linear(3, 2, device="meta"), data)


def test_rows_of_more_samples_than_a_batch_may_have_outputs_that_can_not_be_joined():
    class WithScalar(nn.Linear):
        def forward(self, x):
            return super().forward(x), self.weight.norm()

    torch.manual_seed(0)
    model, rows = WithScalar(3, 4), 2 * MOST_VECTORS + 1
    x, labels = torch.randn(2 * rows, 3), torch.randint(0, 4, (2 * rows,))

    def loss(output, labels):
        return cross_entropy(output[0], labels) + output[1]

    found = row_losses(model, (x, labels), loss, rows)
    expected = [loss(model(x[part]), labels[part]) for part in (slice(rows), slice(rows, None))]
    torch.testing.assert_close(found, torch.stack(expected).double().detach())


def test_one_group_tells_nothing_of_chance():
    assert not evaluation.beyond_chance(torch.tensor([1.0]), torch.tensor([2.0]))
    assert evaluation.beyond_chance(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.0]))


def square(output, target):
    return ((output - target) ** 2).mean()


def test_a_loss_that_mixes_samples_by_broadcasting_is_told():
    x = torch.randn(40, 3)
    data = x, x.sum(1)
    with pytest.raises(InputError, match=r"together; it must be the batch's mean.*broadcast"):
        prune(nn.Linear(3, 1), data, sparsity=0.5, loss=square)
    model, targets = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), x.sum(1, keepdim=True)
    with pytest.raises(InputError, match=r"outputs \(samples,\) with targets \(samples, 1\) do"):
        prune(model, (x, targets), sparsity=0.5, loss=square)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 5e5])
def test_a_loss_that_knows_of_its_shapes_is_taken(kind, offset):
    def weighted(output, target):
        weights = 1 + (target > offset).float()
        return (weights * (output[:, 0] - target) ** 2).sum() / weights.sum()

    x = torch.randn(60, 3)
    model = nn.Linear(3, 1)
    data = x.to(kind), (x.sum(1) + offset).to(kind)
    for loss in (weighted, lambda output, target: square(output[:, 0], target)):
        result = prune(model.to(kind), data, sparsity=1 / 3, loss=loss, stages=1, method="wf")
        assert result.nonzeros == 2


def test_a_loss_that_weighs_samples_by_their_class_is_a_mean():
    weights = torch.tensor([1.0, 50.0])
    data = torch.randn(40, 3), torch.arange(40) % 2
    loss = nn.CrossEntropyLoss(weight=weights)
    result = prune(nn.Linear(3, 2), data, sparsity=0.5, loss=loss, samples_per_row=4, samples=5)
    assert result.nonzeros == 3


def summed(output, target):
    return ((output - target) ** 2).sum()


def test_data_that_broadcast_are_told_wherever_they_are_given():
    x = torch.randn(40, 3)
    model = nn.Linear(3, 1)
    right, wrong = (x, model(x).detach()), (x, model(x).detach()[:, 0])
    assert evaluate(model, right, loss=square).loss < 1e-9
    with pytest.raises(InputError, match="broadcast"):
        evaluate(model, wrong, loss=square)
    settings = {"sparsity": 0.5, "loss": square, "stages": 1}
    with pytest.raises(InputError, match=r"^test_data can't be used: .*broadcast"):
        prune(model, right, test_data=wrong, **settings)
    with pytest.raises(InputError, match=r"^training_data can't be used: .*broadcast"):
        prune(model, right, training_data=wrong, fine_tuning="default", **settings)


def test_a_sum_is_told_where_the_first_sample_has_no_loss():
    x = torch.randn(40, 3)
    model = nn.Linear(3, 2)
    target = model(x).detach()
    target[7:] += 1.0
    assert evaluate(model, (x, target), loss=square).loss == pytest.approx(33 / 40, abs=1e-5)
    with pytest.raises(InputError, match="two copies of it; it must be the batch's mean"):
        evaluate(model, (x, target), loss=summed)


@pytest.mark.parametrize("name", ["0.bias", "1.running_var"])
def test_a_nan_of_the_model_is_not_blamed_on_a_sample(name):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    dict([*model.named_parameters(), *model.named_buffers()])[name].data[1] = torch.nan
    with pytest.raises(InputError, match=f"the model's (parameter|buffer) {name} holds NaN"):
        prune(model, (torch.randn(40, 3), torch.arange(40) % 2), sparsity=0.5)


@pytest.mark.parametrize("fit", [0.0, 0.01, 1.0])
def test_outputs_n_1_with_targets_n_are_told_however_alike_the_losses(fit):
    """As of a network that was trained by the same mistake, which says nearly the same of all."""
    torch.manual_seed(1)
    x = torch.randn(200, 6)
    y = x[:, 0] + torch.randn(200)
    model = nn.Linear(6, 1)
    with torch.no_grad():
        model.weight.zero_()[0, 0] = 0.1 + fit
    wrong = prune_with(model, x, y)
    with pytest.raises(InputError, match=r"outputs \(samples, 1\) with targets \(samples,\) do"):
        wrong()
    prune_with(model, x, y[:, None])()
    # A loss that knows of the shapes may have them.
    prune_with(model, x, y, lambda o, t: ((o[:, 0] - t) ** 2).mean())()


def prune_with(model, x, y, loss=lambda o, t: ((o - t) ** 2).mean()):
    return lambda: prune(model, (x, y), sparsity=0.5, stages=1, method="lr", loss=loss)


@pytest.mark.parametrize("loss", ["mse", nn.CrossEntropyLoss, 3])
def test_a_loss_that_can_not_be_called_is_told(loss):
    with pytest.raises(InputError, match=r"^loss=.* must be a function of outputs and targets"):
        evaluate(nn.Linear(6, 3), (torch.randn(8, 6), torch.arange(8) % 3), loss)


@pytest.mark.parametrize("labels", [torch.zeros(8).long(), torch.arange(8) % 2])
def test_one_output_needs_a_loss(labels):
    with pytest.raises(InputError, match="has one output; pass loss="):
        evaluate(nn.Linear(6, 1), (torch.randn(8, 6), labels))


def test_a_model_made_in_inference_mode_is_evaluated():
    with torch.inference_mode():
        model = nn.Linear(3, 2)
    data = torch.randn(40, 3), torch.arange(40) % 2
    ordinary = nn.Linear(3, 2)
    ordinary.load_state_dict(model.state_dict())
    assert evaluate(model, data) == evaluate(ordinary, data)
