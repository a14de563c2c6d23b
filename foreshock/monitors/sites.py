"""Where a model's attention lives: the projections, head layout and callable of every layer.

First stop of attach: probes read live weights through the `AttentionSite`s that `discover` returns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

Masters = Mapping[nn.Parameter, Tensor]
"""float32 master copies of low-precision parameters, by parameter, same shape."""

_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("c_q", "c_k", "c_v"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
)
_FUSED = ("c_attn", "qkv", "Wqkv")
_HEADS = ("heads", "num_heads", "n_heads", "n_head", "num_attention_heads")
_HEAD_DIM = ("head_dim", "d_head", "attention_head_size")
_CALL = "attend"


class SitesUnknown(ValueError):
    """The model's attention was not located; the message shows the `sites=` that would say where it is."""


@dataclass(frozen=True)
class SiteSpec:
    """Tells `discover` where attention is.

    `module` is a pattern over module names (`*` matches anything); `q`, `k`, `v` name its projections, the
    same name three times where one holds the rows [q; k; v]; `call` names the attribute that is its attention
    callable, None where it calls `F.scaled_dot_product_attention`. `kv_heads` defaults to `heads`.
    """

    module: str
    q: str
    k: str
    v: str
    heads: int
    kv_heads: int | None = None
    call: str | None = None


@dataclass(frozen=True, eq=False)
class AttentionSite:
    """One attention layer. `q`, `k`, `v` are views of the live weights, never copies.

    `call` names the attribute of `module` that holds its attention callable; None where the module calls
    `F.scaled_dot_product_attention` in its forward. `block_mlp` is the module of `mlp`.
    """

    layer: int
    name: str
    module: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    call: str | None
    projections: tuple[str, str, str]
    block_mlp: nn.Module | None

    def q(self, masters: Masters | None = None) -> Tensor:
        """(heads, head_dim, d_model), detached; of the master copy where `masters` has one."""
        return self._rows(0, self.heads, masters)

    def k(self, masters: Masters | None = None) -> Tensor:
        """(kv_heads, head_dim, d_model), as `q`."""
        return self._rows(1, self.kv_heads, masters)

    def v(self, masters: Masters | None = None) -> Tensor:
        """(kv_heads, head_dim, d_model), as `q`."""
        return self._rows(2, self.kv_heads, masters)

    @property
    def q_parameter(self) -> nn.Parameter:
        """The parameter that holds the query rows (and the others' where the projection is fused)."""
        return _weight(self.module, self.projections[0])

    @property
    def mlp(self) -> nn.Parameter | None:
        """The first linear weight of the same block outside the attention, the yardstick of its updates."""
        return None if self.block_mlp is None else self.block_mlp.weight  # type: ignore[return-value]

    def _rows(self, part: int, heads: int, masters: Masters | None) -> Tensor:
        weight = _weight(self.module, self.projections[part])
        whole: Tensor = (masters or {}).get(weight, weight).detach()
        fused = self.projections[0] == self.projections[1]
        start = (0, self.heads, self.heads + self.kv_heads)[part] * self.head_dim if fused else 0
        return whole[start : start + heads * self.head_dim].view(heads, self.head_dim, -1)


def discover(model: nn.Module, sites: Sequence[SiteSpec] | None = None) -> list[AttentionSite]:
    """Every attention layer, in the model's order.

    Knows separate q/k/v linears (GQA from their sizes) and one linear with rows [q; k; v]; looks through
    DistributedDataParallel and `torch.compile` wrappers. Raises SitesUnknown where nothing fits, a given
    pattern matches nothing, or a layout is not supported (transposed Conv1D, sharded weights).
    """
    modules = {
        re.sub(r"(^|\.)_orig_mod(?=\.|$)", "", n).lstrip("."): m for n, m in _unwrap(model).named_modules()
    }
    if sites is None:
        found = [(n, spec) for n, m in modules.items() for spec in _guess(n, m)]
        if not found:
            raise SitesUnknown(_advice(modules))
    else:
        found = []
        for spec in sites:
            hits = [(n, spec) for n in modules if fnmatchcase(n, spec.module)]
            if not hits:
                raise SitesUnknown(f"no module is named {spec.module!r}. {_advice(modules)}")
            found += hits
    return [_site(layer, name, spec, modules) for layer, (name, spec) in enumerate(found)]


def _unwrap(model: nn.Module) -> nn.Module:
    while [name for name, _ in model.named_children()] in (["module"], ["_orig_mod"]):
        model = next(model.children())
    return model


def _guess(name: str, module: nn.Module) -> Iterator[SiteSpec]:
    def has(n: str) -> bool:
        return hasattr(getattr(module, n, None), "weight")

    names = next((t for t in _SEPARATE if all(map(has, t))), None)
    fused = next(filter(has, _FUSED), None)
    heads = _number(module, _HEADS)
    if heads is None or not (names or fused):
        return
    call = _CALL if callable(getattr(module, _CALL, None)) else None
    if names:
        q, k = (_weight(module, n) for n in names[:2])
        head_dim = _number(module, _HEAD_DIM) or q.shape[0] // heads
        yield SiteSpec(name, *names, heads, k.shape[0] // head_dim, call)
    elif fused:
        yield SiteSpec(name, fused, fused, fused, heads, heads, call)


def _number(module: nn.Module, names: Sequence[str]) -> int | None:
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            if isinstance(value := getattr(owner, name, None), int):
                return value
    return None


def _weight(module: nn.Module, path: str) -> nn.Parameter:
    return attrgetter(path)(module).weight  # type: ignore[no-any-return]


def _site(layer: int, name: str, spec: SiteSpec, modules: Mapping[str, nn.Module]) -> AttentionSite:
    module, kv_heads, names = modules[name], spec.kv_heads or spec.heads, (spec.q, spec.k, spec.v)
    where = f"attention {name!r}"
    shapes = []
    for n in names:
        try:
            owner = attrgetter(n)(module)
            weight: Any = owner.weight
        except AttributeError as error:
            raise SitesUnknown(
                f"{where} has no projection {n!r} with a weight. {_advice(modules)}"
            ) from error
        if type(owner).__name__ == "Conv1D":
            raise SitesUnknown(f"{where}: {n} is a Conv1D, whose weight is transposed; this is unsupported")
        if hasattr(weight, "placements") or weight.ndim != 2:
            raise SitesUnknown(
                f"{where}: the weight of {n} is sharded (DTensor or flat); this is unsupported"
            )
        shapes.append(tuple(weight.shape))
    parts = (spec.heads, kv_heads, kv_heads)
    fused = names[0] == names[1]
    head_dim = shapes[0][0] // (sum(parts) if fused else spec.heads)
    rows = [sum(parts) * head_dim] * 3 if fused else [p * head_dim for p in parts]
    if [s[0] for s in shapes] != rows or spec.heads % kv_heads or len({s[1] for s in shapes}) > 1:
        raise SitesUnknown(
            f"{where}: weights {shapes} of {names} do not split into {spec.heads} query and {kv_heads} "
            f"key-value heads. {_advice(modules)}"
        )
    return AttentionSite(
        layer, name, module, spec.heads, kv_heads, head_dim, spec.call, names, _mlp(name, modules)
    )


def _mlp(attention: str, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    block = attention.rpartition(".")[0]
    if not block or isinstance(modules[block], nn.ModuleList):
        return None
    for name, module in modules.items():
        inside = name.startswith(block + ".") and not name.startswith(attention + ".")
        if inside and isinstance(module, nn.Linear) and name.rpartition(".")[2] not in ("gate", "router"):
            return module
    return None


def _advice(modules: Mapping[str, nn.Module]) -> str:
    """What looks like attention here, and the argument that would name it."""
    linears: dict[str, dict[str, Any]] = {
        name: {
            n: m for n, m in module.named_children() if getattr(getattr(m, "weight", None), "ndim", 0) == 2
        }
        for name, module in modules.items()
        if "attn" in f"{name} {type(module).__name__}".lower().replace("attention", "attn")
    }
    name, children = max(linears.items(), key=lambda item: len(item[1]), default=("", {}))
    if not children:
        name, children, seen = "blocks.0.attn", {}, "no module with attention in its name has linear children"
    else:
        sizes = ", ".join(f"{n} {tuple(m.weight.shape)}" for n, m in children.items())
        seen = f"{name!r} ({type(modules[name]).__name__}) looks like attention and has {sizes}"
    marks = {x: re.compile(f"(^|_){x}|{x}$|qkv", re.IGNORECASE) for x in "qkv"}
    picks = [next(filter(mark.search, children), f"{x}_proj") for x, mark in marks.items()]
    heads = (_number(modules[name], _HEADS) if name in modules else None) or 8
    pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
    return (
        f"Foreshock found: {seen}. Say where attention is, for instance sites=[SiteSpec(module={pattern!r}, "
        f"q={picks[0]!r}, k={picks[1]!r}, v={picks[2]!r}, heads={heads}, kv_heads={heads}, call=None)]"
    )
