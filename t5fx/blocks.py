"""Group sites into blocks: a block is the nearest repeated ancestor of a site, and its sites are chosen together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .site import Site


def assign_blocks(sites: Sequence[Site], classes: Mapping[str, str]) -> list[Site]:
    """Fill in ``block``, ``block_index`` and ``blocks`` of every site.

    Args:
        sites: in order of execution.
        classes: the class name of every module, by qualified name.

    The nearest repeated ancestor is the closest element of a list (its name ends in a number) whose class occurs in
    more than one such element; failing that the closest ancestor of a class that occurs more than once; failing that
    the closest element of a list (of one block); failing that the owner.  Only blocks that hold a convertible site are
    numbered, in order of execution.
    """
    chains = [_ancestors(site.owner) for site in sites]
    elements = Counter(_classes_of({p for chain in chains for p in chain if _is_element(p)}, classes))
    strict = Counter(_classes_of({p for chain in chains for p in chain[1:]}, classes))
    named = []
    for site, chain in zip(sites, chains, strict=True):
        block = next((p for p in chain if _is_element(p) and elements[classes.get(p, p)] > 1), None)
        if block is None:
            block = next((p for p in chain[1:] if strict[classes.get(p, p)] > 1), None)
        if block is None:
            block = next((p for p in chain if _is_element(p)), site.owner)
        named.append(replace(site, block=block))
    order = list(dict.fromkeys(site.block for site in named if site.convertible))
    index = {block: i for i, block in enumerate(order)}
    return [replace(site, block_index=index.get(site.block, -1), blocks=len(order)) for site in named]


def _ancestors(name: str) -> list[str]:
    """``a.b.c`` -> [``a.b.c``, ``a.b``, ``a``]."""
    parts = name.split(".") if name else []
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _is_element(path: str) -> bool:
    return path.rpartition(".")[2].isdigit()


def _classes_of(paths: set[str], classes: Mapping[str, str]) -> list[str]:
    return [classes.get(path, path) for path in paths]
