"""MobileNetV1 of Howard et al. (2017)."""

import torch
from torch import Tensor, nn

# Width and stride of the thirteen depthwise-separable blocks.
BLOCKS = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    *[(512, 1)] * 5,
    (1024, 2),
    (1024, 1),
)


class SeparableBlock(nn.Module):
    """A 3×3 convolution of each channel by itself, then a 1×1 convolution across channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        """Build the two convolutions; the depthwise one has the stride."""
        super().__init__()
        self.depthwise = nn.Conv2d(inputs, inputs, 3, stride, padding=1, groups=inputs, bias=False)
        self.bn1 = nn.BatchNorm2d(inputs)
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)

    def forward(self, features: Tensor) -> Tensor:
        """Map (N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        hidden = torch.relu(self.bn1(self.depthwise(features)))
        return torch.relu(self.bn2(self.pointwise(hidden)))


class MobileNetV1(nn.Module):
    """A strided 3×3 convolution, thirteen separable blocks and a linear classifier."""

    def __init__(self, classes: int) -> None:
        """Build the network with a given number of classes."""
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(32)
        inputs = 32
        blocks = []
        for outputs, stride in BLOCKS:
            blocks.append(SeparableBlock(inputs, outputs, stride))
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inputs, classes)
        # In eval mode fresh BatchNorm layers don't rescale, and 27 convolutions with PyTorch's
        # default initialisation would leave nothing of the signal, nor of the gradients.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to logits (N, classes)."""
        features = self.blocks(torch.relu(self.bn1(self.conv1(images))))
        return self.fc(features.mean(dim=(2, 3)))


def mobilenetv1() -> MobileNetV1:
    """MobileNetV1 for ImageNet: images (N, 3, 224, 224)."""
    return MobileNetV1(classes=1000)
