import pytest
import torch
from torch import nn

from swap_prune.errors import InputError
from swap_prune.prunable import select_weights


def model() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(3, 4)
    )
    net[3].weight = net[2].weight
    return net


def test_default_is_the_weights_of_linear_and_conv_layers_with_ties_once():
    weights = select_weights(model())
    assert weights.names == ("0.weight", "2.weight")
    assert weights.size == 18 + 16


@pytest.mark.parametrize(
    ("include", "exclude", "names"),
    [
        (["Conv*"], [], ("0.weight",)),
        ([nn.Embedding, nn.Conv2d], [], ("0.weight", "4.weight")),
        (["3.*"], ["*.bias"], ("2.weight",)),
        # A vector only by a pattern that ends with its name, a module by its own.
        (["[012]*"], [], ("0.weight", "2.weight")),
        (["*weight"], ["Embedding"], ("0.weight", "1.weight", "2.weight")),
        (["3", "1.bias"], [], ("1.bias", "2.weight")),
        (None, ["2.weight"], ("0.weight",)),
        (["*.bias"], [nn.Linear, "BatchNorm2d", "[123].bias"], ("0.bias",)),
    ],
)
def test_include_and_exclude(include, exclude, names):
    assert select_weights(model(), include, exclude).names == names


def test_read_write_and_split_are_inverse():
    net = model()
    weights = select_weights(net)
    w = weights.read(net)
    torch.testing.assert_close(weights.split(w)["2.weight"], net[2].weight.detach())
    weights.write(net, 2 * w)
    torch.testing.assert_close(weights.read(net), 2 * w)
    assert net[3].weight is net[2].weight


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        (["conv9.*"], [], "'conv9.*' in include or exclude matches no weight"),
        (None, [nn.LSTM], "matches no weight"),
        (None, ["*.weight"], "no prunable weight"),
    ],
)
def test_selectors_that_leave_nothing(include, exclude, message):
    with pytest.raises(InputError) as error:
        select_weights(model(), include, exclude)
    assert message in str(error.value)


def test_weights_that_can_not_be_pruned():
    with pytest.raises(InputError, match="has no data yet"):
        select_weights(nn.LazyLinear(3))
    net = nn.Linear(2, 2)
    nn.init.constant_(net.weight, float("nan"))
    with pytest.raises(InputError, match="weight holds NaN"):
        select_weights(net)


def test_one_selector_needs_no_list():
    assert select_weights(model(), "0.weight").names == ("0.weight",)
    assert select_weights(model(), nn.Conv2d).names == ("0.weight",)
    with pytest.raises(InputError, match="include=3 must be"):
        select_weights(model(), 3)
    with pytest.raises(InputError, match="model is of type str"):
        select_weights("model")
