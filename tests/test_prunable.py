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


@pytest.mark.parametrize(
    "norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm]
)
def test_a_weight_that_is_made_from_others_is_not_passed_over(norm):
    net = nn.Sequential(norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    with pytest.raises(InputError, match=r"the weight of 0 .* is made from other parameters"):
        select_weights(net)
    assert select_weights(net, exclude="0").names == ("1.weight",)
    assert select_weights(net, include="1").names == ("1.weight",)


def test_what_is_cut_of_tiny_float64_weights_is_zero():
    net = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1e-60, 0.1]], dtype=torch.float64))
    weights = select_weights(net)
    weights.write(net, weights.read(net))
    assert net.weight.tolist() == [[0.0, 0.1]]


@pytest.mark.parametrize("include", [nn.LSTM, "LSTM", "rnn", "rnn.*"])
def test_an_lstm_is_chosen_by_its_matrices(include):
    model = nn.ModuleDict({"rnn": nn.LSTM(3, 4), "head": nn.Linear(4, 2)})
    assert select_weights(model, include).names == ("rnn.weight_ih_l0", "rnn.weight_hh_l0")


def test_attention_is_chosen_by_its_packed_projections():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2)})
    assert select_weights(model, nn.MultiheadAttention).names == ("attention.in_proj_weight",)


@pytest.mark.parametrize("include", ["*", "L*"])
def test_patterns_leave_the_scales_of_norms_alone(include):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    assert select_weights(model, include).names == ("0.weight", "2.weight")
    assert select_weights(model, "LayerNorm").names == ("1.weight",)


def test_a_compiled_model_is_told():
    with pytest.raises(InputError, match="_orig_mod"):
        select_weights(torch.compile(nn.Linear(3, 2)))
