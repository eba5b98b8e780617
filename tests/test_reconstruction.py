"""Layers' outputs: moments against explicit patches, solutions against dense least squares."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from swap_prune import InputError, prune, reconstruction
from swap_prune.methods.blocks import compensated
from swap_prune.prunable import select_weights
from swap_prune.reconstruction import Moments, input_moments, reconstructed


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def moments_of(layer: nn.Module, inputs: torch.Tensor) -> Moments:
    (found,) = input_moments(layer, select_weights(layer), inputs, generator())
    assert found is not None
    return found


def outputs_squared(layer: nn.Module, inputs: torch.Tensor) -> float:
    """The sum of the squares of all outputs of a layer without bias, by the layer itself."""
    with torch.no_grad():
        return float(layer(inputs).double().square().sum())


LAYERS = [
    (nn.Linear(5, 4, bias=False), (30, 5)),
    (nn.Linear(5, 4, bias=False), (6, 7, 5)),
    (nn.Conv1d(4, 6, 3, padding=1, stride=2, bias=False), (8, 4, 11)),
    (nn.Conv2d(3, 4, 3, padding=1, bias=False), (5, 3, 6, 7)),
    (nn.Conv2d(3, 4, (3, 2), padding="same", dilation=2, bias=False), (5, 3, 8, 9)),
    (nn.Conv2d(4, 6, 3, groups=2, stride=2, bias=False), (5, 4, 9, 9)),
    (nn.Conv2d(4, 4, 3, groups=4, padding=1, padding_mode="reflect", bias=False), (5, 4, 6, 6)),
    (nn.Conv3d(2, 3, 2, bias=False), (4, 2, 4, 3, 5)),
]


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda x: str(x))
def test_moments_give_the_squares_of_the_outputs(layer, shape):
    # Σ over outputs and places of (w · a)² is the sum of w A w: by the layer's own forward pass.
    inputs = torch.randn(shape, generator=generator())
    found = moments_of(layer, inputs)
    groups, blocks, _, _ = found.mean.shape
    assert blocks == 1
    w = layer.weight.detach().double().view(groups, -1, found.inputs)
    total = torch.einsum("god,gde,goe->", w, found.mean[:, 0].double(), w) * found.vectors
    assert float(total) == pytest.approx(outputs_squared(layer, inputs), rel=1e-4)


def test_a_draw_of_the_patches_is_unbiased(monkeypatch):
    layer = nn.Conv2d(3, 4, 3, padding=1, bias=False)
    inputs = torch.randn(200, 3, 16, 16, generator=generator())
    every = moments_of(layer, inputs)
    monkeypatch.setattr(reconstruction, "VECTORS", 5000)
    some = moments_of(layer, inputs)
    assert 5000 <= some.vectors < 5100 < every.vectors == 10_000
    assert torch.allclose(some.mean, every.mean, atol=0.1)


def test_layers_without_moments():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Linear(4, 4)
            self.unused = nn.Linear(4, 4)
            self.tied = nn.Embedding(4, 4)
            self.out = nn.Linear(4, 4)
            self.out.weight = self.tied.weight

        def forward(self, x):
            return self.out(self.used(x))

    model = Odd()
    weights = select_weights(model, include=["used", "unused", "out"])
    moments = input_moments(model, weights, torch.randn(9, 4), generator())
    found = dict(zip(weights.names, moments, strict=True))
    assert found["used.weight"] is not None
    assert found["unused.weight"] is None  # never called
    assert found["tied.weight"] is None  # an embedding's too


class Called(nn.Module):
    """A layer that is called in some way, after one that is called as usual."""

    def __init__(self, call) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.call = call

    def forward(self, x):
        return self.call(self.second, self.first(x))


@pytest.mark.parametrize(
    ("call", "readable"),
    [
        (lambda layer, x: layer(input=x), True),
        (lambda layer, x: layer(x[:, None, None])[:, 0, 0], True),
        (lambda layer, x: x + layer(x[:0]).sum(), False),  # idle, as an expert may be
        (lambda layer, x: torch.vmap(layer)(x), False),
        (lambda layer, x: layer(torch.nested.as_nested_tensor([x])).to_padded_tensor(0)[0], False),
    ],
    ids=["by keyword", "one by one", "on nothing", "vmap", "nested"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_ways_to_call_a_layer(call, readable):
    model = Called(call)
    found = input_moments(model, select_weights(model), torch.randn(9, 4), generator())
    assert found[0] is not None
    assert (found[1] is not None) is readable
    if readable:
        assert found[1].vectors == 9
    data = torch.randn(60, 4), torch.randint(0, 4, (60,))
    assert prune(model, data, sparsity=0.5, stages=2, samples=20, samples_per_row=1).nonzeros == 16


def test_a_model_that_can_not_have_hooks_has_no_moments():
    class Shy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            assert not self.layer._forward_hooks
            return self.layer(x)

    model = Shy()
    assert input_moments(model, select_weights(model), torch.randn(9, 4), generator()) == [None]
    assert not model.layer._forward_hooks


def test_samples_need_not_be_the_first_dimension_of_a_layers_input(monkeypatch):
    monkeypatch.setattr(reconstruction, "VECTORS", 1000)
    for call, expected in (
        (lambda layer, x: layer(x.transpose(0, 1)).mean(0), 1000),
        (lambda layer, x: layer(x.reshape(-1, 1, 4)).view(x.shape).mean(1), 1000),
    ):
        model = Called(call)
        weights = select_weights(model, include="second")
        (found,) = input_moments(model, weights, torch.randn(300, 5, 4), generator())
        assert expected <= found.vectors <= 1010


def test_a_layer_called_twice_has_the_inputs_of_both_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(self.layer(x))

    model, inputs = Twice(), torch.randn(20, 3)
    with torch.no_grad():
        both = torch.cat([inputs, model.layer(inputs)])
    found = moments_of(model, inputs)
    assert found.vectors == 40
    assert torch.allclose(found.mean[0, 0], both.T @ both / 40, atol=1e-5)


def test_moments_leave_the_model_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    input_moments(model, select_weights(model), torch.randn(8, 3, 6, 6), generator())
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@given(st.integers(0, 10_000), st.sampled_from([1e-4, 1e-2, 1.0]), st.floats(0.05, 0.95))
def test_solutions_are_those_of_least_squares(seed, damping, kept):
    # An oracle without A: the stacked system of all inputs and the damping, output by output.
    random = torch.Generator().manual_seed(seed)
    outputs, d, n = 5, 7, 40
    inputs = torch.randn(n, d, generator=random) @ torch.randn(d, d, generator=random)
    w_bar = torch.randn(outputs * d, generator=random)
    support = (torch.rand(outputs * d, generator=random) < kept).nonzero().flatten()
    mean = inputs.T @ inputs / n
    (found,) = reconstructed(
        w_bar, support, [slice(0, outputs * d)], [Moments(mean[None, None], d, n)], [damping]
    )
    stays = torch.zeros(outputs * d, dtype=torch.bool)
    stays[support] = True
    scale = math.sqrt(damping * float(mean.diagonal().mean()))
    for w, target, inside in zip(
        found.view(outputs, d), w_bar.view(outputs, d).double(), stays.view(outputs, d), strict=True
    ):
        assert not w[~inside].any()
        if inside.any():
            a = inputs.double() / math.sqrt(n)
            left = torch.cat([a[:, inside], scale * torch.eye(int(inside.sum())).double()])
            right = torch.cat([a @ target, scale * target[inside]])
            best = torch.linalg.lstsq(left, right[:, None]).solution[:, 0]
            assert torch.allclose(w[inside].double(), best, atol=1e-3 * float(target.abs().max()))


@pytest.mark.parametrize("numbers", [1, 50, 10_000])
def test_solutions_do_not_depend_on_how_many_are_solved_at_once(monkeypatch, numbers):
    layer = nn.Conv2d(4, 6, 3, groups=2, bias=False)
    found = moments_of(layer, torch.randn(20, 4, 8, 8, generator=generator()))
    w_bar = layer.weight.detach().flatten()
    support = torch.randperm(len(w_bar), generator=generator())[:40].sort().values
    arguments = (w_bar, support, [slice(0, len(w_bar))], [found], [1e-3, 1e-1])
    expected = reconstructed(*arguments)
    monkeypatch.setattr(reconstruction, "NUMBERS_AT_ONCE", numbers)
    assert torch.allclose(reconstructed(*arguments), expected, atol=1e-6)


def test_inputs_beyond_the_limit_are_seen_in_blocks(monkeypatch):
    layer, inputs = nn.Linear(7, 3, bias=False), torch.randn(50, 7, generator=generator())
    w_bar, support = layer.weight.detach().flatten(), torch.tensor([0, 2, 5, 6, 8, 9, 13, 15, 20])
    monkeypatch.setattr(reconstruction, "MOST_INPUTS", 5)
    found = moments_of(layer, inputs)
    assert found.mean.shape == (1, 2, 4, 4)  # four inputs and three
    (solution,) = reconstructed(w_bar, support, [slice(0, 21)], [found], [1e-2])
    stays = torch.zeros(21, dtype=torch.bool)
    stays[support] = True
    parts = [x.view(3, 7).split((4, 3), 1) for x in (w_bar, stays, solution)]
    for columns, old, inside, new in zip(inputs.split((4, 3), 1), *parts, strict=True):
        size = columns.shape[1]  # each block as if it were a layer of its own
        (expected,) = reconstructed(
            old.flatten(), inside.flatten().nonzero().flatten(), [slice(0, 3 * size)],
            [Moments((columns.T @ columns / 50)[None, None], size, 50)], [1e-2],
        )  # fmt: skip
        assert torch.allclose(new.flatten(), expected, atol=1e-5)


def test_nothing_moves_without_a_cut_without_moments_or_without_inputs():
    w_bar = torch.randn(12, generator=generator())
    everything, some = torch.arange(12), torch.tensor([0, 3, 7])
    mean = torch.eye(4)[None, None] + 0.5
    kept = torch.zeros(12)
    kept[some] = w_bar[some]
    for support, moments, expected in (
        (everything, Moments(mean, 4, 100), w_bar),
        (some, None, kept),
        (some, Moments(torch.zeros(1, 1, 4, 4), 4, 100), kept),
    ):
        (found,) = reconstructed(w_bar, support, [slice(0, 12)], [moments], [1e-3])
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kept", [2, 7])
def test_a_group_of_channels_without_inputs_does_not_stop_the_others(kept):
    """As a dead channel before a depthwise convolution; by either of the two ways to solve."""
    a = torch.rand(2, 50, 9)
    a[0] = 0
    moments = Moments((a.mT @ a / 50)[:, None], 9, 50)
    w = torch.arange(1.0, 19.0)
    support = torch.tensor([i for i in range(18) if i % 9 < kept])
    found = reconstructed(w, support, [slice(0, 18)], [moments], [1e-3])[0]
    alone = Moments(moments.mean[1:], 9, 50)
    wanted = reconstructed(w[9:], support[support >= 9] - 9, [slice(0, 9)], [alone], [1e-3])[0]
    torch.testing.assert_close(found[9:], wanted)
    assert torch.equal(found[:kept], w[:kept])


def test_few_inputs_are_joined_with_earlier_ones(monkeypatch):
    monkeypatch.setattr(reconstruction, "VECTORS", 100)
    fresh, earlier = (Moments(torch.full((1, 1, 2, 2), v), 2, 60) for v in (1.0, 4.0))
    both = fresh.joined(earlier)
    assert both.vectors == 100
    assert torch.allclose(both.mean, torch.full((1, 1, 2, 2), (60 * 1 + 40 * 4) / 100))
    enough = Moments(fresh.mean, 2, 100)
    assert enough.joined(earlier) is enough


def digits_like() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )
    x = torch.randn(400, 1, 6, 6)
    y = (x.flatten(1)[:, :4] + 0.5 * x.flatten(1)[:, 4:8]).argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), (x, y)


def test_a_run_says_what_it_chose():
    model, data = digits_like()
    settings = {"sparsity": 0.8, "stages": 4, "samples": 40, "samples_per_row": 1}
    for method, has in (("ewr", True), ("lr", False)):
        result = prune(model, data, method=method, **settings)
        assert result.settings["reconstruction"] is has
        assert any("reconstruction_damping" in line for line in result.history) is has
        assert result.nonzeros == round(0.2 * (8 * 9 + 4 * 8 * 36))
    result = prune(model, data, method="lr", reconstruction=True, **settings)
    assert any(line.get("reconstruction_damping") for line in result.history)


@pytest.mark.parametrize("helps", [True, False])
def test_blocks_are_tried_where_layers_are_no_help(monkeypatch, helps):
    model, data = digits_like()
    calls = []

    def counted(*arguments):
        calls.append(1)
        return compensated(*arguments)

    monkeypatch.setattr("swap_prune.methods.wasserstein._Trial.improves", lambda *_: helps)
    monkeypatch.setattr("swap_prune.methods.wasserstein.compensated", counted)
    prune(model, data, sparsity=0.8, stages=2, correcting=0, samples=40, samples_per_row=1)
    assert len(calls) == (0 if helps else 2)


def test_bad_values_are_named():
    model, data = digits_like()
    with pytest.raises(InputError, match="reconstruction='yes' must be True or False"):
        prune(model, data, sparsity=0.5, reconstruction="yes")
    with pytest.raises(InputError, match="reconstruction=True needs held-out samples"):
        prune(
            model, data, sparsity=0.5, reconstruction=True, held_out=0, damping=0.1, first_order=1,
            epsilon=0.1, mixture=0.5, metric=0.0, block_size=0,
        )  # fmt: skip
    with pytest.raises(InputError, match="reconstruction=True has no part in method='wf'"):
        prune(model, data, sparsity=0.5, method="wf", reconstruction=True)


@pytest.mark.parametrize("settings", [{"method": "lr", "reconstruction": True}, {"memory": 0}])
def test_resuming_without_remembered_rows(tmp_path, monkeypatch, settings):
    model, data = digits_like()
    settings |= {"sparsity": 0.8, "stages": 4, "samples": 40, "samples_per_row": 1}
    whole = prune(model, data, **settings)
    count = []

    def interrupted(*arguments):
        count.append(1)
        if len(count) == 2:
            raise KeyboardInterrupt
        return reconstructed(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr("swap_prune.methods.wasserstein.reconstructed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prune(model, data, directory=tmp_path / "run", **settings)
    resumed = prune(model, data, directory=tmp_path / "run", **settings)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor)
