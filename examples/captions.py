"""Images with captions: a folder of images with a .txt file of the same name each, or webdataset shards (*.tar).

    pairs = open_pairs(Path("captions"), size=512)
    pairs[0]                                  # (float32 [3, 512, 512] in [-1, 1], "a photo of ...")
    Steps(len(pairs), batch=16, seed=0)       # indices of batch after batch, for a DataLoader

In a shard the members of a sample share the name before the first dot: 0001.jpg and 0001.txt.  Compressed shards are
not read: a sample is found by its place in the file.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

ENDINGS = (".jpg", ".jpeg", ".png", ".webp")


class Pairs(Dataset):
    """``entries``: where the image and its caption are, each as (file, offset, bytes); 0 bytes means the whole file."""

    def __init__(self, entries: list[tuple[tuple[Path, int, int], tuple[Path, int, int]]], size: int) -> None:
        self.entries, self.size = entries, size

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        image, caption = self.entries[index]
        with Image.open(io.BytesIO(_read(image))) as opened:
            fitted = ImageOps.fit(opened.convert("RGB"), (self.size, self.size), Image.Resampling.LANCZOS)
        pixels = torch.from_numpy(np.array(fitted)).movedim(-1, 0)
        return pixels / 127.5 - 1, _read(caption).decode().strip()


def _read(place: tuple[Path, int, int]) -> bytes:
    path, offset, count = place
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(count or -1)


def open_pairs(root: Path, size: int) -> Pairs:
    """All pairs of a folder, of the shards in a folder, or of one shard; images are cut to a square of ``size``."""
    shards = [root] if root.suffix == ".tar" else sorted(root.glob("*.tar"))
    entries = [pair for shard in shards for pair in _in_shard(shard)] if shards else list(_in_folder(root))
    if not entries:
        raise SystemExit(f"{root} holds no pairs: expected NAME{{{','.join(ENDINGS)}}} with NAME.txt, or *.tar of such")
    return Pairs(entries, size)


def _in_folder(root: Path) -> Iterator[tuple]:
    for path in sorted(root.rglob("*")):
        text = path.with_suffix(".txt")
        if path.suffix.lower() in ENDINGS and text.is_file():
            yield (path, 0, 0), (text, 0, 0)


def _in_shard(path: Path) -> Iterator[tuple]:
    images, texts = {}, {}
    with tarfile.open(path, "r:") as shard:
        for member in shard:
            folder, _, name = member.name.rpartition("/")
            stem, _, ending = name.partition(".")
            place = (path, member.offset_data, member.size)
            if f".{ending.lower()}" in ENDINGS:
                images[folder, stem] = place
            elif ending == "txt" and member.size:
                texts[folder, stem] = place
    return ((place, texts[key]) for key, place in images.items() if key in texts)


class Steps:
    """Indices of batch ``first``, ``first + 1``, ... for ever; of several processes each gets its rows.

    The order depends on ``seed`` and the number of the batch alone, so that training can go on from any step.
    """

    def __init__(self, count: int, batch: int, seed: int, *, first: int = 0, rank: int = 0, processes: int = 1) -> None:
        if batch % processes:
            raise SystemExit(f"a batch of {batch} can't be shared by {processes} processes: take a multiple")
        self.count, self.batch, self.seed, self.first = count, batch, seed, first
        self.rank, self.rows = rank, batch // processes

    def __iter__(self) -> Iterator[list[int]]:
        epoch, order = -1, torch.empty(0)
        at = self.first * self.batch
        while True:
            chosen = []
            for place in range(at + self.rank * self.rows, at + (self.rank + 1) * self.rows):
                if place // self.count != epoch:
                    epoch = place // self.count
                    order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + epoch))
                chosen.append(int(order[place % self.count]))
            yield chosen
            at += self.batch
