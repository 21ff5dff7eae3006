"""What ``inspect`` and ``report`` return: the sites of a model as a table for people and as plain data."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

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

    def __rich__(self) -> Table:
        title = f"{self.model}: {len(self.sites)} attention sites, "
        title += f"{len(self.selected)} converted" if self.converted else f"{len(self.convertible)} convertible"
        table = Table(title=title, title_justify="left", row_styles=["", "dim"])
        table.add_column("site", overflow="fold")
        table.add_column("kind")
        table.add_column("tokens", justify="right")
        table.add_column("layout", overflow="fold")
        table.add_column("heads x dim", justify="right")
        table.add_column("mask")
        table.add_column("softmax FLOPs", justify="right")
        table.add_column("TTT FLOPs", justify="right")
        table.add_column("break-even", justify="right")
        table.add_column("converted" if self.converted else "convert", overflow="fold", max_width=60)
        for s in self.sites:
            tokens = str(s.keys) if s.queries == s.keys else f"{s.queries} from {s.keys}"
            layout = str(s.layout) if s.layout else "?"
            if s.layout_from == "assumed square":
                layout += " (assumed)"
            table.add_row(
                s.name,
                s.kind,
                tokens,
                layout,
                f"{s.heads} x {s.head_dim}",
                s.mask,
                count(s.softmax_flops),
                count(s.ttt_flops),
                str(s.break_even_tokens),
                self._verdict(s),
            )
        return table

    def _verdict(self, site: Site) -> str:
        if site.refusal is not None:
            return f"[yellow]refused:[/yellow] {escape(str(site.refusal))}"
        notes = f" ({escape('; '.join(site.notes))})" if site.notes else ""
        if self.converted:
            return ("[green]yes[/green]" if site.selected else "not selected") + notes
        return "[green]yes[/green]" + notes

    def __str__(self) -> str:
        buffer = io.StringIO()
        Console(file=buffer, width=160, color_system=None).print(self)
        return buffer.getvalue().rstrip()


def escape(text: str) -> str:
    return text.replace("[", r"\[")


def count(number: float) -> str:
    """1234567 -> 1.23 M."""
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.0f}"
