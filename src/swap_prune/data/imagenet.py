"""ImageNet, or any set of images in one folder per class."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from swap_prune.errors import InputError

MEAN = torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1)
STANDARD_DEVIATION = torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1)
CROP, SHORTER_SIDE = 224, 256
TRAIN_FOLDERS = ("train", "calibration")
TEST_FOLDER = "val"
SUFFIXES = (".jpg", ".jpeg", ".png")


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images of one folder per class, decoded when asked for."""

    def __init__(self, folder: Path, labels: dict[str, int]) -> None:
        """List the images.

        Args:
            folder: Holds one folder per class.
            labels: The label of each class folder's name.
        """
        self.samples = [
            (path, labels[path.parent.name])
            for path in sorted(folder.glob("*/*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.samples:
            raise InputError(
                f"folder {str(folder)!r} has no images; one sub-folder per class with "
                f"{', '.join(SUFFIXES)} files is accepted"
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """An image, normalised, (3, 224, 224), and its label."""
        path, label = self.samples[index]
        return read_image(path), label


def read(directory: Path) -> tuple[ImageFolder, ImageFolder]:
    """The training and validation images of a directory.

    Args:
        directory: Holds ``train`` (or ``calibration``) and ``val``, each with one folder per class.
    """
    names = (*TRAIN_FOLDERS, TEST_FOLDER)
    folders = {name: directory / name for name in names if (directory / name).is_dir()}
    train = next((folders[name] for name in TRAIN_FOLDERS if name in folders), None)
    if train is None or TEST_FOLDER not in folders:
        raise InputError(
            f"directory {str(directory)!r} needs a folder 'train' or 'calibration' and a folder "
            f"'val', with one sub-folder per class; it has {', '.join(folders) or 'neither'}"
        )
    test = folders[TEST_FOLDER]
    class_folders = (path for path in (*train.iterdir(), *test.iterdir()) if path.is_dir())
    labels = label_classes(path.name for path in class_folders)
    return ImageFolder(train, labels), ImageFolder(test, labels)


def label_classes(names: Iterable[str]) -> dict[str, int]:
    """Number classes by the names of their folders.

    Folders named by a class index keep it, so that a part of the classes can be used with a model
    of all of them; other names are numbered in alphabetical order.
    """
    ordered = sorted(set(names))
    if all(name.isdecimal() for name in ordered):
        return {name: int(name) for name in ordered}
    return {name: label for label, name in enumerate(ordered)}


def read_image(path: Path) -> Tensor:
    """Decode, crop and normalise an image.

    The shorter side is brought to 256 pixels and the centre cut out, unless the image is a
    224×224 crop already.

    Returns:
        The image, float32, (3, 224, 224).
    """
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    # Pillow raises SyntaxError for some broken PNG files.
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"image {str(path)!r} can't be decoded ({error})") from error
    if image.size != (CROP, CROP):
        image = _centre(image)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return (pixels / 255 - MEAN) / STANDARD_DEVIATION


def _centre(image: Image.Image) -> Image.Image:
    scale = SHORTER_SIDE / min(image.size)
    width, height = (round(side * scale) for side in image.size)
    left, top = (width - CROP) // 2, (height - CROP) // 2
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return resized.crop((left, top, left + CROP, top + CROP))
