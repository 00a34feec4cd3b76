"""Mamba: its scan against a loop that a reader can check, and a GPU package by a stand-in."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from amago_model import AgentConfig, ConfigError, MambaConfig
from amago_model.encoders import selective_scan as scans
from amago_model.encoders.mamba import Mamba
from amago_model.encoders.selective_scan import CHUNK, choose_scan, selective_scan

CPU = torch.device("cpu")


def _inputs(n: int, length: int, d: int, s: int, dtype: torch.dtype) -> list[Tensor]:
    u, step = torch.randn(n, length, d), torch.randn(n, length, d)
    a, skip = -torch.rand(s, d) * 4, torch.randn(d)
    b, c = torch.randn(n, length, s), torch.randn(n, length, s)
    delta = torch.nn.functional.softplus(step)
    return [x.to(dtype).requires_grad_() for x in (u, delta, a, b, c, skip)]


def _slow_scan(u, delta, a, b, c, skip):  # type: ignore[no-untyped-def]
    """The recurrence as it is written, in float64."""
    u, delta, a, b, c, skip = (x.double() for x in (u, delta, a, b, c, skip))
    h, rows = torch.zeros(u.shape[0], *a.shape, dtype=torch.float64), []
    for t in range(u.shape[1]):
        decay = torch.exp(delta[:, t, None, :] * a)
        h = decay * h + b[:, t, :, None] * (delta[:, t] * u[:, t])[:, None, :]
        rows.append((c[:, t, :, None] * h).sum(1) + skip * u[:, t])
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK + 5])
def test_the_scan_equals_the_recurrence_forward_and_backward(
    length: int, dtype: torch.dtype
) -> None:
    inputs = _inputs(2, length, 6, 4, dtype)
    ours, slow = selective_scan(*inputs), _slow_scan(*inputs)
    assert ours.dtype == dtype
    weight = torch.randn(slow.shape, dtype=torch.float64)
    gradients = [torch.autograd.grad((y * weight).sum(), inputs) for y in (ours, slow)]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(ours.double(), slow, rtol=tolerance, atol=tolerance)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=10 * tolerance)


def test_no_decay_is_so_strong_and_no_window_so_long_that_the_scan_overflows() -> None:
    inputs = _inputs(1, 300, 3, 2, torch.float32)
    with torch.no_grad():
        inputs[1].mul_(50)
        inputs[2].mul_(torch.tensor([[1e-6], [30.0]]))
    y, slow = selective_scan(*inputs), _slow_scan(*inputs)
    torch.testing.assert_close(y.double(), slow, rtol=1e-4, atol=1e-3)
    for gradient in torch.autograd.grad(y.sum(), inputs):
        assert gradient.isfinite().all()


def test_half_precision_is_scanned_in_float32() -> None:
    inputs = [x.detach() for x in _inputs(2, 40, 4, 4, torch.float32)]
    half = [x.bfloat16() for x in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = selective_scan(*half)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), _slow_scan(*half), rtol=1e-2, atol=1e-2)


def test_channels_begin_with_the_published_decays_and_step_sizes() -> None:
    memory = Mamba(MambaConfig(d_model=32, d_state=5, n_layers=1), 6)
    block = memory.layers[0]
    rates = block.log_rates.exp()
    torch.testing.assert_close(rates, torch.arange(1.0, 6.0)[:, None].expand(5, 64))
    first = torch.nn.functional.softplus(block.step_size.bias.detach())
    assert 0.001 <= float(first.min()) * 1.001 and float(first.max()) <= 0.1 * 1.001
    assert block.step_size.in_features == math.ceil(32 / 16)


def test_a_layer_is_what_the_paper_draws() -> None:
    block = Mamba(MambaConfig(d_model=8, d_state=3, d_conv=2, norm="none"), 8).layers[0].double()
    x, rows = torch.randn(1, 7, 8, dtype=torch.float64), []
    weight, bias = block.convolution.weight[:, 0], block.convolution.bias
    before, h = torch.zeros(16, dtype=torch.float64), torch.zeros(16, 3, dtype=torch.float64)
    for t in range(7):
        into, gate = (block.expand.weight @ x[0, t]).split(16)
        u = weight[:, 0] * before + weight[:, 1] * into + bias
        u, before = u * u.sigmoid(), into
        step, b, c = (block.select.weight @ u).split((1, 3, 3))
        delta = (1 + (block.step_size.weight @ step + block.step_size.bias).exp()).log()
        for s in range(3):
            decay = (-delta * block.log_rates[s].exp()).exp()
            h = h.clone()
            h[:, s] = decay * h[:, s] + delta * b[s] * u
        y = (h @ c + block.skip * u) * gate * gate.sigmoid()
        rows.append(x[0, t] + block.contract.weight @ y)
    torch.testing.assert_close(block(x, "torch")[0], torch.stack(rows))


def test_the_state_of_an_unfinished_episode_does_not_grow() -> None:
    memory = Mamba(MambaConfig(d_model=8, d_state=3, n_layers=2), 4)
    hidden = memory.initial_hidden(5, "cpu")
    before = [hidden.recent.shape, hidden.states.shape]
    for _ in range(9):
        _, hidden = memory.step(torch.randn(5, 1, 4), torch.zeros(5, 1).long(), hidden)
    assert [hidden.recent.shape, hidden.states.shape] == before
    assert before == [(2, 5, 16, 3), (2, 5, 3, 16)]


def test_its_settings_and_weights_come_back_from_a_policy_file(memory_comes_back) -> None:  # type: ignore[no-untyped-def]
    config = MambaConfig(d_model=8, d_state=3, d_conv=2, expand=3, n_layers=2, scan="torch")
    memory_comes_back(config)


# ------------------------------------------------------------------------- mamba-ssm, stood in for


def selective_scan_fn(  # type: ignore[no-untyped-def]
    u,
    delta,
    A,
    B,
    C,
    D=None,
    z=None,
    delta_bias=None,
    delta_softplus=False,
    return_last_state=False,
):
    """With the signature and the shapes of mamba-ssm: u, delta [N, D, L], A [D, S], B [N, S, L]."""
    assert (D, z, delta_bias, delta_softplus, return_last_state) == (None, None, None, False, False)
    assert all(x.is_contiguous() and x.dtype == torch.float32 for x in (u, delta, A, B, C))
    h, rows = torch.zeros(*u.shape[:2], A.shape[1]), []
    for t in range(u.shape[2]):
        driven = (delta[..., t] * u[..., t])[..., None] * B[:, None, :, t]
        h = torch.exp(delta[..., t, None] * A) * h + driven
        rows.append((h * C[:, None, :, t]).sum(-1))
    return torch.stack(rows, dim=2)


@pytest.fixture
def install(monkeypatch):  # type: ignore[no-untyped-def]
    """Make the package importable, on a machine that seems able to run it."""

    def do(function=selective_scan_fn) -> None:  # type: ignore[no-untyped-def]
        module = SimpleNamespace(selective_scan_fn=function)
        monkeypatch.setattr(scans.importlib, "import_module", lambda name: module)  # noqa: ARG005
        monkeypatch.setattr(scans, "_has_kernels", lambda device: True)  # noqa: ARG005
        scans.find_mamba_ssm.cache_clear()
        scans._trial.cache_clear()

    yield do
    monkeypatch.undo()
    scans.find_mamba_ssm.cache_clear()
    scans._trial.cache_clear()


def test_the_package_is_called_as_published_and_equals_torch(install) -> None:  # type: ignore[no-untyped-def]
    install()
    memory = Mamba(MambaConfig(d_model=16, d_state=4, n_layers=2), 6)
    x, time_idx, results = torch.randn(2, 11, 6), torch.arange(11).expand(2, 11), []
    for scan in ("auto", "torch"):
        memory.config = memory.config.replace(scan=scan)
        y = memory(x, time_idx)
        results.append((y, *torch.autograd.grad(y.square().sum(), memory.parameters())))
        assert memory.scan_name == {"auto": "mamba_ssm", "torch": "torch"}[scan]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_package_whose_kernels_fail_is_not_chosen_and_its_reason_is_told(install) -> None:  # type: ignore[no-untyped-def]
    def broken(*args):  # type: ignore[no-untyped-def]
        raise RuntimeError(f"no kernel image for {len(args)} tensors")

    install(broken)
    assert choose_scan("auto", CPU, torch.float32) == "torch"
    with pytest.raises(ConfigError, match=r"'mamba_ssm' cannot.*no kernel image.*scan='torch'"):
        choose_scan("mamba_ssm", CPU, torch.float32)


def test_asking_for_the_absent_package_says_why_and_what_else_there_is() -> None:
    memory = Mamba(MambaConfig(d_model=8, n_layers=1, scan="mamba_ssm"), 4)
    with pytest.raises(ConfigError, match=r"'mamba_ssm' cannot.*not installed.*scan='torch'"):
        memory(torch.randn(1, 3, 4), torch.arange(3)[None])
    auto = Mamba(MambaConfig(d_model=8, n_layers=1), 4)
    assert auto.kernels(CPU, torch.bfloat16) == {"scan": "torch"}


def test_settings_of_mamba_are_refused_where_another_memory_is_chosen() -> None:
    with pytest.raises(ConfigError, match="d_conv: the chosen kind has no such setting.*'mamba'"):
        AgentConfig.from_dict({"trajectory_encoder": {"kind": "gru", "d_conv": 2}})
    with pytest.raises(ConfigError, match="d_state"):
        MambaConfig(d_state=0)
