import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from swap_prune import InputError
from swap_prune.masks import Mask, apply_masks, make_permanent
from swap_prune.prunable import select_weights


class Tied(nn.Module):
    """Two layers around one weight, and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))) @ self.scale


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None])[0][:, 0]


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))


MODELS = {
    "layers": (layers, ["0.weight", "3.weight"]),
    "tied": (Tied, ["first.weight", "scale"]),
    "tied, by its other name": (Tied, ["second.weight"]),
    "attention": (Attention, ["attention.in_proj_weight", "attention.out_proj.weight"]),
    "recurrent": (Recurrent, ["lstm.weight_ih_l0", "lstm.weight_hh_l0"]),
}
OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01),
}


def build(kind: str, seed: int, density: float = 0.5) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(seed)
    build_model, names = MODELS[kind]
    model = build_model()
    masks = {name: torch.rand(model.get_parameter(name).shape) < density for name in names}
    return model, masks


def train(model: nn.Module, optimiser: torch.optim.Optimizer, steps: int = 4) -> None:
    x = torch.randn(16, 6)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(x), x.roll(1, 1)).backward()
        optimiser.step()


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(sorted(MODELS)),
    optimiser=st.sampled_from(sorted(OPTIMISERS)),
    density=st.sampled_from([0.0, 0.3, 1.0]),
    made_before=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_zeros_stay_in_a_loop_of_the_users_own(kind, optimiser, density, made_before, seed):
    model, masks = build(kind, seed, density)
    parameters = list(model.parameters())
    before = {name: model.get_parameter(name).detach().clone() for name in masks}
    chosen = OPTIMISERS[optimiser](parameters) if made_before else None
    apply_masks(model, masks)
    train(model, chosen or OPTIMISERS[optimiser](model.parameters()))
    x = torch.randn(3, 6)
    output = model.eval()(x)
    make_permanent(model)
    torch.testing.assert_close(model(x), output)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    for name, mask in masks.items():
        weight = model.get_parameter(name).detach()
        pruned = weight[~mask]
        assert torch.equal(pruned, torch.zeros_like(pruned))
        assert not torch.signbit(pruned).any()
        assert (weight[mask] != before[name][mask]).all()


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_a_permanent_model_has_the_names_the_order_and_the_classes_it_had(kind):
    model, masks = build(kind, 0)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    keys, selected = list(model.state_dict()), select_weights(model, ["*"])
    kinds = [type(module) for module in model.modules()]
    apply_masks(model, masks)
    assert "mask" in " ".join(model.state_dict())
    make_permanent(model)
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names
    assert list(model.state_dict()) == keys
    assert select_weights(model, ["*"]) == selected
    assert [type(module) for module in model.modules()] == kinds
    make_permanent(model)
    assert list(model.state_dict()) == keys


def test_tied_weights_stay_tied_and_masked():
    model, masks = build("tied", 0)
    apply_masks(model, masks)
    assert torch.equal(model.second.weight, model.first.weight)
    assert len([module for module in model.modules() if isinstance(module, Mask)]) == 2
    train(model, OPTIMISERS["sgd"](model.parameters()))
    assert not model.second.weight[~masks["first.weight"]].any()
    make_permanent(model)
    assert model.second.weight is model.first.weight


def test_gradients_of_pruned_entries_are_zero_even_where_others_are_infinite():
    layer = nn.Linear(4, 3)
    mask = torch.rand(3, 4) < 0.5
    apply_masks(layer, {"weight": mask})
    (layer(torch.ones(2, 4)) * float("inf")).sum().backward()
    gradient = layer.parametrizations.weight.original.grad
    assert not gradient[~mask].any()
    assert gradient[mask].isinf().all()


@pytest.mark.parametrize("kind", ["layers", "tied", "attention"])
def test_a_copy_of_a_masked_model_lives_a_life_of_its_own(kind):
    model, masks = build(kind, 3)
    apply_masks(model, masks)
    train(model, OPTIMISERS["sgd"](model.parameters()))
    twin = copy.deepcopy(model)
    make_permanent(twin)
    x = torch.randn(5, 6)
    torch.testing.assert_close(twin.eval()(x), model.eval()(x))
    before = {key: value.clone() for key, value in twin.state_dict().items()}
    train(model, OPTIMISERS["sgd"](model.parameters()))
    make_permanent(model)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(twin.state_dict()[key], value) for key, value in before.items())
    for name, mask in masks.items():
        assert not model.get_parameter(name)[~mask].any()
        assert not torch.equal(model.get_parameter(name), twin.get_parameter(name))


def test_a_masked_state_dict_carries_weights_and_masks_to_another_masked_model():
    model, masks = build("layers", 0)
    other, other_masks = build("layers", 1)
    apply_masks(model, masks)
    apply_masks(other, other_masks)
    other.load_state_dict(model.state_dict())
    make_permanent(other)
    make_permanent(model)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_the_masks_given_are_copied_and_parametrisations_of_the_users_own_stay():
    layer = nn.Linear(4, 3)
    nn.utils.parametrize.register_parametrization(layer, "bias", nn.Tanh())
    mask = torch.eye(3, 4).bool()
    apply_masks(layer, {"weight": mask})
    mask[:] = True
    make_permanent(layer)
    assert int((layer.weight != 0).sum()) == 3
    assert layer.bias.abs().max() < 1
    assert nn.utils.parametrize.is_parametrized(layer, "bias")


@pytest.mark.parametrize(
    ("masks", "sentence"),
    [
        ({"0.weigth": torch.ones(8, 6).bool()}, r"'0.weigth', which the model has not: it has 0.w"),
        ({"0.weight": torch.ones(6, 8).bool()}, r"0.weight has shape \(6, 8\).*\(8, 6\)"),
        ({"0.weight": torch.ones(8, 6)}, r"mask of 0.weight is of torch.float32"),
        ({"3.weight": torch.ones(6, 8).bool(), "0.weight": [True]}, r"0.weight is of list"),
    ],
)
def test_masks_that_do_not_fit_leave_the_model_as_it_is(masks, sentence):
    model, _ = build("layers", 0)
    keys = list(model.state_dict())
    with pytest.raises(InputError, match=sentence):
        apply_masks(model, masks)
    assert list(model.state_dict()) == keys


def test_masks_are_applied_once():
    model, masks = build("tied", 0)
    with pytest.raises(InputError, match=r"tied weight 'second.weight' twice"):
        apply_masks(model, masks | {"second.weight": masks["first.weight"]})
    apply_masks(model, masks)
    with pytest.raises(InputError, match="already has masks"):
        apply_masks(model, masks)


def test_what_is_no_model_or_no_masks_is_refused():
    for call in (lambda: apply_masks(None, {}), lambda: make_permanent(None)):
        with pytest.raises(InputError, match="model is of type NoneType"):
            call()
    with pytest.raises(InputError, match="masks is of type list"):
        apply_masks(nn.Linear(2, 2), [1])
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    masks = {"weight": torch.ones(2, 2, dtype=torch.bool)}
    with pytest.raises(InputError, match=r"parameter weight was made .* copy.deepcopy"):
        apply_masks(model, masks)
    apply_masks(copy.deepcopy(model), masks)


class Clamped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(-1, 1)


def test_a_copy_of_a_parametrised_model_is_masked_alone():
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4)
    nn.utils.parametrize.register_parametrization(model[0], "bias", Clamped())
    before = model(x)
    other = copy.deepcopy(model)
    apply_masks(other, {"0.weight": torch.zeros(3, 4, dtype=torch.bool)})
    assert torch.equal(model(x), before)
    make_permanent(other)
    assert torch.equal(other[0].weight, torch.zeros(3, 4))
    assert torch.equal(model(x), before)
