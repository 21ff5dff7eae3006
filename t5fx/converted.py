"""The converted sites of a model, also of one that is wrapped, sharded or compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from .api import Record, record_of
from .capture.owner import Conversion, SiteSpec
from .errors import T5fxError
from .site import Site
from .weights import TTTWeights


@dataclass(frozen=True)
class ConvertedSite:
    """One converted site: its name in the report, the module that runs it, and where its new weights are."""

    site: Site
    owner: nn.Module
    spec: SiteSpec

    @property
    def name(self) -> str:
        return self.site.name

    @property
    def weights(self) -> TTTWeights:
        found = self.owner.get_submodule(self.spec.ttt)
        assert isinstance(found, TTTWeights)
        return found

    @property
    def conversion(self) -> Conversion:
        return self.owner._t5fx_owner  # type: ignore[return-value]


def linearized_in(model: nn.Module) -> nn.Module:
    """The linearized model inside of ``model``: itself, or what DDP, ``torch.compile`` or accelerate wrapped.

    Raises:
        T5fxError: there is none.
    """
    found = [m for m in model.modules() if isinstance(m.__dict__.get("_t5fx"), Record)]
    if not found:
        record_of(model)  # raises
    if len(found) > 1:
        raise T5fxError(f"{type(model).__name__} holds {len(found)} linearized models: pass one of them")
    return found[0]


def converted_sites(model: nn.Module) -> list[ConvertedSite]:
    """The converted sites in order of the report.

    Raises:
        T5fxError: the model is not linearized.
    """
    base = linearized_in(model)
    record = record_of(base)
    by_place = {}
    for name, specs in record.owners.items():
        owner = base.get_submodule(name)
        for spec in specs:
            # In a traced GraphModule a site belongs to the module that it was traced from, and its weights are there.
            inner = spec.ttt.rpartition(".")[0]
            by_place[".".join(part for part in (name, inner) if part), spec.index] = (owner, spec)
    return [ConvertedSite(site, *by_place[site.owner, site.index]) for site in record.report.selected]


def by_owner(sites: Sequence[ConvertedSite]) -> list[list[ConvertedSite]]:
    """The same sites, those of one owner together."""
    groups: dict[int, list[ConvertedSite]] = {}
    for site in sites:
        groups.setdefault(id(site.owner), []).append(site)
    return list(groups.values())
