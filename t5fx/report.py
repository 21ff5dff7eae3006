"""What ``inspect`` and ``report`` return: the sites of a model as a table for people and as plain data."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from .config import TTTConfig
from .site import Site


@dataclass(frozen=True)
class Report:
    """The sites of a model in order of execution.

    Prints as a table (also through rich, which picks the width); ``to_dict()`` is JSON-able.  ``converted`` tells
    whether the model is linearized, so that ``Site.selected`` means something.
    """

    model: str
    sites: tuple[Site, ...]
    config: TTTConfig
    converted: bool = False
    how: str = "dry run"

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __getitem__(self, name: str | int) -> Site:
        if isinstance(name, int):
            return self.sites[name]
        for site in self.sites:
            if site.name == name:
                return site
        raise KeyError(f"no site {name!r}; the sites are {[s.name for s in self.sites]}")

    @property
    def convertible(self) -> tuple[Site, ...]:
        return tuple(site for site in self.sites if site.convertible)

    @property
    def selected(self) -> tuple[Site, ...]:
        return tuple(site for site in self.sites if site.selected)

    def totals(self, chosen: Sequence[Site] | None = None) -> dict[str, int]:
        """FLOPs of all attention sites, softmax throughout and with ``chosen`` (default: selected) as TTT."""
        picked = {s.name for s in (self.selected if chosen is None else chosen)}
        softmax = sum(s.softmax_flops for s in self.sites)
        mixed = sum(s.ttt_flops if s.name in picked else s.softmax_flops for s in self.sites)
        return {"sites": len(picked), "softmax_flops": softmax, "flops": mixed}

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "converted": self.converted,
            "config": self.config.to_dict(),
            "sites": [site.to_dict() for site in self.sites],
            "totals": self.totals(),
        }

    def __rich__(self) -> Group:
        """One row a site; reasons and notes are numbered and said once, below."""
        title = f"{self.model}: {len(self.sites)} attention sites, "
        title += f"{len(self.selected)} converted" if self.converted else f"{len(self.convertible)} convertible"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="bold underline")
        table.add_column("site", overflow="fold", min_width=13)  # the one column that gives way in a narrow terminal
        table.add_column("TTT", no_wrap=True)
        table.add_column("kind", no_wrap=True)
        table.add_column("tokens", justify="right", no_wrap=True)
        table.add_column("layout", no_wrap=True)
        for name in ("heads\nx dim", "mask", "softmax\nFLOPs", "TTT\nFLOPs", "break\neven"):
            table.add_column(name, justify="left" if name == "mask" else "right", no_wrap=True)
        remarks: dict[str, int] = {}
        for s in self.sites:
            tokens = str(s.keys) if s.queries == s.keys else f"{s.queries}<{s.keys}"
            sizes = f"{s.heads}x{s.head_dim}"
            flops = (count(s.softmax_flops), count(s.ttt_flops))
            layout = str(s.layout) if s.layout else "?"
            verdict = self._verdict(s, remarks)
            table.add_row(s.name, verdict, s.kind, tokens, layout, sizes, s.mask, *flops, str(s.break_even_tokens))
        lines = [Text(f"[{number}] {text}", style="dim") for text, number in remarks.items()]
        return Group(table, *lines)

    def _verdict(self, site: Site, remarks: dict[str, int]) -> Text:
        said = [str(site.refusal)] if site.refusal is not None else list(site.notes)
        if site.layout_from == "assumed square" and site.convertible:
            said.append(
                "nothing says how the tokens lie, so they are assumed to be a square grid: check, or pass layout="
            )
        marks = "".join(f" [{remarks.setdefault(text, len(remarks) + 1)}]" for text in said)
        if site.refusal is not None:
            return Text("no" + marks, style="yellow")
        if self.converted and not site.selected:
            return Text("left" + marks)
        return Text("yes" + marks, style="green")

    def __str__(self) -> str:
        buffer = io.StringIO()
        Console(file=buffer, width=120, color_system=None).print(self)
        return buffer.getvalue().rstrip()


def count(number: float) -> str:
    """1234567 -> 1.23M."""
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.0f}"
