"""Residual networks of He et al. (2016): ResNet-20 for CIFAR and ResNet-50."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block; subclasses say what its branch is."""

    expansion: int

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        """Build the shortcut: the identity, or a 1×1 convolution where the shape changes."""
        super().__init__()
        outputs = width * self.expansion
        self.downsample = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        )

    def branch(self, features: Tensor) -> Tensor:
        """The convolutions, (N, inputs, H, W) to (N, width · expansion, H / stride, W / stride)."""
        raise NotImplementedError

    def forward(self, features: Tensor) -> Tensor:
        """Add the branch to the shortcut; same shapes as the branch."""
        return torch.relu(self.branch(features) + self.downsample(features))


class BasicBlock(Block):
    """Two 3×3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        """Build the branch; the first convolution has the stride."""
        super().__init__(inputs, width, stride)
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def branch(self, features: Tensor) -> Tensor:
        """Convolve twice."""
        hidden = torch.relu(self.bn1(self.conv1(features)))
        return self.bn2(self.conv2(hidden))


class Bottleneck(Block):
    """Convolutions 1×1, 3×3 and 1×1, the last one four times as wide."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        """Build the branch; the 3×3 convolution has the stride, as in torchvision."""
        super().__init__(inputs, width, stride)
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)

    def branch(self, features: Tensor) -> Tensor:
        """Narrow, convolve, widen."""
        hidden = torch.relu(self.bn1(self.conv1(features)))
        hidden = torch.relu(self.bn2(self.conv2(hidden)))
        return self.bn3(self.conv3(hidden))


class ResNet(nn.Module):
    """A stem, stages ``layer1``, ``layer2``, ... of residual blocks, and a linear classifier."""

    def __init__(
        self,
        block: type[Block],
        depths: tuple[int, ...],
        width: int,
        classes: int,
        large_images: bool,
    ) -> None:
        """Build the network.

        Args:
            block: The kind of residual block.
            depths: Number of blocks in each stage; every stage after the first halves the image.
            width: Width of the first stage; it doubles at each later one.
            classes: Number of classes.
            large_images: Whether the stem shrinks the image four times (7×7 convolution and
                max-pool, for 224×224) or leaves it (3×3 convolution, for 32×32).
        """
        super().__init__()
        kernel, stride = (7, 2) if large_images else (3, 1)
        self.conv1 = nn.Conv2d(3, width, kernel, stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, padding=1) if large_images else nn.Identity()
        self.stage_names = tuple(f"layer{index + 1}" for index in range(len(depths)))
        inputs = width
        for index, (name, depth) in enumerate(zip(self.stage_names, depths, strict=True)):
            stage_width = width * 2**index
            outputs = stage_width * block.expansion
            first = block(inputs, stage_width, stride=1 if index == 0 else 2)
            others = (block(outputs, stage_width, stride=1) for _ in range(depth - 1))
            self.add_module(name, nn.Sequential(first, *others))
            inputs = outputs
        self.fc = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to logits (N, classes)."""
        features = self.pool(torch.relu(self.bn1(self.conv1(images))))
        for name in self.stage_names:
            features = self.get_submodule(name)(features)
        return self.fc(features.mean(dim=(2, 3)))


def resnet20() -> ResNet:
    """ResNet-20 for CIFAR-10, with 1×1-convolution shortcuts: images (N, 3, 32, 32)."""
    return ResNet(BasicBlock, (3, 3, 3), width=16, classes=10, large_images=False)


def resnet50() -> ResNet:
    """ResNet-50 for ImageNet: images (N, 3, 224, 224)."""
    return ResNet(Bottleneck, (3, 4, 6, 3), width=64, classes=1000, large_images=True)


def resnet50_cifar() -> ResNet:
    """ResNet-50 for CIFAR-10: images (N, 3, 32, 32)."""
    return ResNet(Bottleneck, (3, 4, 6, 3), width=64, classes=10, large_images=False)
