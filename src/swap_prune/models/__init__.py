"""Networks to prune: a few built in, or the user's own."""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from swap_prune.errors import InputError
from swap_prune.factory import call_factory
from swap_prune.models.efficientnet import efficientnet_lite0, load_published
from swap_prune.models.mlp import digits, mlpnet
from swap_prune.models.mobilenet import mobilenetv1
from swap_prune.models.resnet import resnet20, resnet50, resnet50_cifar
from swap_prune.models.weights import load_weights

__all__ = ["BUILT_IN", "PRETRAINED", "PRUNABLE", "build", "load_weights", "pretrained"]

BUILT_IN: dict[str, Callable[[], nn.Module]] = {
    "digits": digits,
    "efficientnet-lite0": efficientnet_lite0,
    "mlpnet": mlpnet,
    "mobilenetv1": mobilenetv1,
    "resnet20": resnet20,
    "resnet50": resnet50,
    "resnet50-cifar": resnet50_cifar,
}

# fnmatch patterns of the parameters to prune, where these aren't all Linear and Conv weights.
PRUNABLE: dict[str, tuple[str, ...]] = {
    # The paper's 267,264: the 3×3 convolutions of the three stages, without the shortcuts.
    "resnet20": ("layer*.conv?.weight",),
}

# A safetensors file of ours, or what copies somebody else's weights into the network.
PRETRAINED: dict[str, Path | Callable[[nn.Module], None]] = {
    "digits": Path(__file__).with_name("digits.safetensors"),
    "efficientnet-lite0": load_published,
}


def build(name: str) -> nn.Module:
    """Build a network with fresh weights, in eval mode.

    Args:
        name: A key of `BUILT_IN`, or ``package.module:factory``, a function without arguments
            that returns a module.

    Raises:
        InputError: There is no such network.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]().eval()
    if ":" not in name:
        raise InputError(
            f"model {name!r} doesn't exist; {', '.join(BUILT_IN)} "
            "or 'package.module:factory' are accepted"
        )
    model = call_factory("model", name)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model {name!r} returned an object of type {type(model).__name__}; "
            "a torch.nn.Module is expected"
        )
    return model.eval()


def pretrained(name: str) -> nn.Module:
    """Build a network with trained weights, in eval mode.

    Args:
        name: A key of `PRETRAINED`. The weights of ``digits`` come with this package, those of
            ``efficientnet-lite0`` with another, to be installed by the user.

    Raises:
        InputError: There are no weights of that network, or their package is not installed.
    """
    if name not in PRETRAINED:
        raise InputError(
            f"model {name!r} comes without trained weights; {', '.join(PRETRAINED)} are accepted"
        )
    model = build(name)
    source = PRETRAINED[name]
    if isinstance(source, Path):
        load_weights(model, source)
    else:
        source(model)
    return model
