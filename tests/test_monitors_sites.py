from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from foreshock.monitors.sites import SiteSpec, SitesUnknown, discover


class Lab(nn.Module):
    """The lab's attention: separate linears and a callable attribute."""

    def __init__(self, d: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.heads, self.head_dim = heads, d // heads
        self.attend = lambda q, k, v: q


class Llama(nn.Module):
    """Head counts in a config, fewer key-value heads."""

    def __init__(self, d: int = 16, heads: int = 4, kv: int = 2) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=heads)
        self.head_dim = d // heads
        self.q_proj = nn.Linear(d, d)
        self.k_proj, self.v_proj = (nn.Linear(d, kv * d // heads) for _ in range(2))


class Fused(nn.Module):
    def __init__(self, d: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.n_head = heads
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)


class Conv1D(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(d, 3 * d))


class Odd(nn.Module):
    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.num_heads = 4
        self.make_q, self.make_k, self.make_v = (nn.Linear(d, d) for _ in range(3))


class Block(nn.Module):
    def __init__(self, attn: nn.Module, d: int = 16) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(d), attn
        self.mlp = nn.ModuleDict({"up": nn.Linear(d, 4 * d), "down": nn.Linear(4 * d, d)})


def model(kind: type[nn.Module], layers: int = 2) -> nn.Module:
    net = nn.Module()
    net.embed = nn.Embedding(8, 16)
    net.blocks = nn.ModuleList(Block(kind()) for _ in range(layers))
    return net


def same_memory(view: torch.Tensor, parameter: torch.Tensor) -> bool:
    return view.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


def test_the_lab_model_is_found_with_its_callable_and_its_mlp() -> None:
    net = model(Lab)
    sites = discover(net)
    assert [(s.layer, s.name, s.heads, s.kv_heads, s.head_dim, s.call) for s in sites] == [
        (0, "blocks.0.attn", 4, 4, 4, "attend"),
        (1, "blocks.1.attn", 4, 4, 4, "attend"),
    ]
    assert sites[1].mlp is net.blocks[1].mlp["up"].weight
    assert sites[0].q_parameter is net.blocks[0].attn.q_proj.weight
    assert sites[0].module is net.blocks[0].attn


def test_grouped_heads_come_from_the_sizes_of_the_linears() -> None:
    net = model(Llama)
    site = discover(net)[0]
    assert (site.heads, site.kv_heads, site.call) == (4, 2, None)
    assert site.q().shape == (4, 4, 16)
    assert site.k().shape == site.v().shape == (2, 4, 16)
    assert torch.equal(site.v()[1], net.blocks[0].attn.v_proj.weight[4:8])


def test_a_fused_projection_is_cut_into_rows_of_q_k_v() -> None:
    net = model(Fused)
    site, weight = discover(net)[0], net.blocks[0].attn.c_attn.weight
    assert torch.equal(site.q().flatten(0, 1), weight[:16])
    assert torch.equal(site.k().flatten(0, 1), weight[16:32])
    assert torch.equal(site.v().flatten(0, 1), weight[32:])


@pytest.mark.parametrize("kind", [Lab, Llama, Fused])
def test_views_share_memory_with_the_live_weights_and_follow_a_replaced_parameter(kind: type) -> None:
    net = model(kind)
    site = discover(net)[0]
    assert same_memory(site.q(), site.q_parameter)
    assert not site.q().requires_grad
    owner = getattr(site.module, site.projections[0])
    owner.weight = nn.Parameter(torch.full_like(owner.weight, 7.0))
    assert site.q().eq(7).all()


def test_masters_take_the_place_of_the_parameter_they_copy() -> None:
    site = discover(model(Fused).bfloat16())[0]
    master = site.q_parameter.detach().float() + 1
    assert torch.equal(site.k({site.q_parameter: master}).flatten(0, 1), master[16:32])


@pytest.mark.parametrize("name", ["module", "_orig_mod"])
def test_wrappers_are_looked_through(name: str) -> None:
    inner, outer = model(Lab), nn.Module()
    outer.add_module(name, inner)
    assert [s.name for s in discover(outer)] == ["blocks.0.attn", "blocks.1.attn"]


def test_blocks_that_were_compiled_one_by_one_keep_their_names() -> None:
    net = model(Lab)
    compiled = nn.Module()
    compiled._orig_mod = net.blocks[0]
    net.blocks[0] = compiled
    sites = discover(net)
    assert [s.name for s in sites] == ["blocks.0.attn", "blocks.1.attn"]
    assert sites[0].mlp is net.blocks[0]._orig_mod.mlp["up"].weight


def test_an_explicit_pattern_names_what_discovery_does_not_know() -> None:
    spec = SiteSpec("blocks.*.attn", "make_q", "make_k", "make_v", heads=8, kv_heads=4)
    net = model(Odd)
    for block in net.blocks:
        block.attn.make_k, block.attn.make_v = nn.Linear(16, 8), nn.Linear(16, 8)
    assert [(s.heads, s.kv_heads, s.head_dim) for s in discover(net, [spec])] == [(8, 4, 2)] * 2


def test_a_fused_projection_may_be_grouped_when_named() -> None:
    net = nn.Module()
    net.attn = nn.Module()
    net.attn.proj = nn.Linear(16, 32)
    site = discover(net, [SiteSpec("attn", "proj", "proj", "proj", heads=4, kv_heads=2)])[0]
    assert site.head_dim == 4
    assert torch.equal(site.v().flatten(0, 1), net.attn.proj.weight[24:])
    assert site.mlp is None


def test_an_unknown_model_is_answered_with_the_argument_that_fixes_it() -> None:
    net = model(Odd)
    for block in net.blocks:
        block.self_attention = block.attn
        del block.attn
    with pytest.raises(SitesUnknown) as error:
        discover(net)
    text = str(error.value)
    assert "blocks.0.self_attention" in text
    assert "make_q (16, 16)" in text
    spec = SiteSpec("blocks.*.self_attention", "make_q", "make_k", "make_v", heads=4, kv_heads=4, call=None)
    shown = ", ".join(f"{name}={value!r}" for name, value in vars(spec).items())
    assert f"sites=[SiteSpec({shown})]" in text
    assert len(discover(net, [spec])) == 2


def test_a_model_without_attention_is_answered_with_an_example() -> None:
    with pytest.raises(SitesUnknown, match=r"no module with attention .* sites=\[SiteSpec\("):
        discover(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (SiteSpec("layers.*", "q_proj", "k_proj", "v_proj", 4), "no module is named 'layers.*'"),
        (SiteSpec("blocks.*.attn", "wq", "k_proj", "v_proj", 4), "has no projection 'wq'"),
        (SiteSpec("blocks.*.attn", "q_proj", "k_proj", "v_proj", 5), "do not split into 5 query"),
        (SiteSpec("blocks.*.attn", "q_proj", "k_proj", "v_proj", 4, 3), "and 3 key-value heads"),
    ],
)
def test_a_wrong_pattern_says_what_is_wrong(spec: SiteSpec, message: str) -> None:
    with pytest.raises(SitesUnknown) as error:
        discover(model(Lab), [spec])
    assert message in str(error.value)


def test_layouts_that_are_not_supported_are_named() -> None:
    net = model(Fused)
    net.blocks[0].attn.c_attn = Conv1D(16)
    with pytest.raises(SitesUnknown, match="Conv1D"):
        discover(net)
    net = model(Lab)
    net.blocks[1].attn.k_proj.weight = nn.Parameter(torch.zeros(256))
    with pytest.raises(SitesUnknown, match="sharded"):
        discover(net)


def test_the_gate_of_a_mixture_is_not_taken_for_the_mlp() -> None:
    net = model(Lab, 1)
    net.blocks[0].mlp = nn.ModuleDict({"gate": nn.Linear(16, 4), "expert": nn.Linear(16, 64)})
    assert discover(net)[0].mlp is net.blocks[0].mlp["expert"].weight
