"""Speed of an update, compared with a plain implementation and with the machine's matmul rate.

    python -m benchmarks.update [--size amago1 small ...] [--action discrete] [--device cuda]
                                [--dtype bfloat16] [--compile] [--repeats 7]

For each size, Stepwell's update is compared with the baseline in update_baseline.py. First, loss
and gradient of both are computed on one batch with the same noise. In float32 they must agree to
1e-5, or else in float64 to 1e-8; otherwise this program exits 1. Then both make updates, in
separate processes, in alternation of two seconds each. The result is the median. It contains:

    gemm_fraction   the time that the update's matmuls (flops.py) take alone, at the rates measured
                    here for their shapes, divided by the time of the update
    mfu             the FLOPs of the matmuls per second of the update, divided by the peak rate
                    (--peak-tflops, or the rate measured for a large square matmul)
    peak_megabytes  the memory of an update besides weights, optimiser state and batch
    graphs          on a GPU: the same update replayed as a CUDA graph, as the trainer does by
                    default; first_seconds is the time until the first replay, and
                    reserved_megabytes is all memory that the process has taken from the GPU
    vs_amago        updates per second, divided by those of AMAGO 3.3.0 with the same setting. AMAGO
                    was measured once, on as many cores of a similar machine, not in this run

Imports only amago_model, torch, numpy and safetensors, so it runs from a bare checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amago_model import Agent, Batch, make_agent
from amago_model.runtime.compiling import compiled
from amago_model.runtime.cuda_graphs import WARM_UP, CudaRecorder, GraphedUpdates
from amago_model.runtime.host_memory import keep_freed_memory
from amago_model.runtime.optimizer import clip_gradients, forget_gradients, step_adamw
from benchmarks.flops import Matmul, update_matmuls
from benchmarks.report import write
from benchmarks.update_baseline import Baseline
from benchmarks.update_sizes import SIZES, make_batch

LEARNING_RATE, GRAD_CLIP = 3e-4, 1.0
TOLERANCE = 1e-5
TURN = 2.0
"""Seconds per turn of one side: long enough that the CPU caches hold its data, as in training."""
DEFAULT = [
    *(f"{size}/continuous" for size in ("amago1", "amago2", "amago3", "small", "medium", "long")),
    "small/discrete",
]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one line of the result measures."""

    size: str
    action: str
    device: str
    dtype: str
    windows: int
    threads: int
    compile: bool

    def make(self) -> tuple[Agent, Batch]:
        size = SIZES[self.size]
        spaces = size.spaces(self.action)
        torch.manual_seed(0)
        agent = make_agent(size.config, spaces).to(self.device).train()
        batch = make_batch(size, spaces, self.windows)
        noise = agent.draw_noise(*batch.mask.shape)
        return agent, dataclasses.replace(batch.to(self.device), noise=noise)


class Ours:
    """An update as in the trainer, in one process."""

    def __init__(self, agent: Agent, setting: Setting) -> None:
        self.agent, self.setting = agent, setting
        self.forward: Callable[..., Any] = agent
        if setting.compile:
            self.forward = compiled(agent, setting.device)
        self.parameters = agent.trainable_parameters()
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, fused=True)

    def loss(self, batch: Batch) -> Tensor:
        half = self.setting.dtype == "bfloat16"
        kind = torch.device(self.setting.device).type
        cast = torch.autocast(kind, torch.bfloat16) if half else contextlib.nullcontext()
        with cast:
            return self.forward(batch, detailed=False)[0]  # type: ignore[no-any-return]

    def update(self, batch: Batch) -> Tensor:
        loss = self.loss(batch)
        loss.backward()
        clip_gradients(self.parameters, GRAD_CLIP)
        step_adamw(self.optimizer)
        forget_gradients(self.parameters)
        self.agent.update_targets()
        return loss.detach()

    def named_gradients(self) -> dict[str, Tensor]:
        return {n: p.grad for n, p in self.agent.named_parameters() if p.grad is not None}


class Graphs(Ours):
    """The same update, replayed as a CUDA graph."""

    def __init__(self, agent: Agent, setting: Setting) -> None:
        super().__init__(agent, setting)
        agent.policy.fixed_shapes = True
        self._replayed = GraphedUpdates(
            lambda batch, _: {"loss": super(Graphs, self).update(batch)},
            CudaRecorder(torch.device(setting.device)),
            required=True,
            say=print,
        )

    def update(self, batch: Batch) -> Tensor:
        return self._replayed(batch, False)["loss"]


SIDES: dict[str, Callable[[Agent, Setting], Any]] = {
    "ours": Ours,
    "baseline": lambda agent, _: Baseline(agent, learning_rate=LEARNING_RATE, grad_clip=GRAD_CLIP),
    "graphs": Graphs,
}


def sides(setting: Setting) -> list[str]:
    graphs = setting.device.startswith("cuda") and not setting.compile
    return ["ours", "baseline", *(["graphs"] if graphs else [])]


def differences(setting: Setting, *, double: bool = False) -> dict[str, float]:
    """Relative differences of loss and gradient to the baseline's, with the same weights, batch
    and noise."""
    agent, batch = setting.make()
    losses, gradients = [], []
    for make in (SIDES["ours"], SIDES["baseline"]):
        torch.manual_seed(1)  # dropout
        copy, _ = setting.make()
        copy.load_state_dict(agent.state_dict())
        copy = copy.double() if double else copy
        side = make(copy, setting)
        loss = side.loss(batch)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(side.named_gradients())
    ours, plain = gradients
    assert ours.keys() == plain.keys()
    worst = max(float((ours[k] - plain[k]).norm() / plain[k].norm()) for k in ours)
    norm = torch.stack([x.norm() for x in plain.values()]).norm()
    off = torch.stack([(ours[k] - plain[k]).norm() for k in ours]).norm()
    return {
        "loss": abs(losses[0] - losses[1]) / abs(losses[1]),
        "gradient": float(off / norm),
        "gradient_of_worst_parameter": worst,
    }


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed(action: Callable[[], object], times: int, device: str) -> tuple[float, float]:
    """Mean wall-clock seconds and mean CPU seconds of one call, over `times` calls."""
    _synchronize(device)
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(times):
        action()
    _synchronize(device)
    return (time.perf_counter() - wall) / times, (time.process_time() - processor) / times


def _work(pipe: Connection, name: str, setting: Setting) -> None:
    """The process of one side. It first sends what it needs of memory and for its first updates.
    Then it repeatedly receives a number of updates, makes them and sends the times of one; 0 ends
    it."""
    torch.set_num_threads(setting.threads)
    if name == "ours":
        keep_freed_memory()
    agent, batch = setting.make()
    side = SIDES[name](agent, setting)
    found: dict[str, float | None] = {"peak_megabytes": _memory_of(side, batch, setting.device)}
    _synchronize(setting.device)
    began = time.perf_counter()
    for _ in range(WARM_UP + 2 if name == "graphs" else 2 if setting.compile else 1):
        side.update(batch)
    _synchronize(setting.device)
    found["first_seconds"] = time.perf_counter() - began
    if setting.device.startswith("cuda"):
        found["reserved_megabytes"] = torch.cuda.memory_reserved() / 1e6
    pipe.send(found)
    while times := pipe.recv():
        pipe.send(timed(lambda: side.update(batch), times, setting.device))


def alternate(setting: Setting, repeats: int) -> dict[str, dict[str, Any]]:
    """Median wall-clock and CPU seconds of an update of each side, measured in alternation."""
    context = multiprocessing.get_context("spawn")
    pipes, first = {}, {}
    for name in sides(setting):
        pipes[name], theirs = context.Pipe()
        context.Process(target=_work, args=(theirs, name, setting), daemon=True).start()
        first[name] = pipes[name].recv()

    def run(name: str, times: int) -> tuple[float, float]:
        pipes[name].send(times)
        return pipes[name].recv()  # type: ignore[no-any-return]

    times = {name: max(1, round(TURN / run(name, 2)[0])) for name in pipes}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in pipes}
    for _ in range(repeats):
        for name in pipes:
            seconds[name].append(run(name, times[name]))
    for pipe in pipes.values():
        pipe.send(0)
    return {
        name: {
            "seconds": statistics.median(wall for wall, _ in runs),
            "cpu_seconds": statistics.median(processor for _, processor in runs),
            "all_seconds": [round(wall, 6) for wall, _ in runs],
            **first[name],
        }
        for name, runs in seconds.items()
    }


def _memory_of(side: Any, batch: Batch, device: str) -> float | None:
    for p in side.parameters:  # optimisers allocate their state in the first step
        p.grad = torch.zeros_like(p)
    side.optimizer.step()
    side.optimizer.zero_grad(set_to_none=True)
    if device.startswith("cuda"):
        _synchronize(device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        side.update(batch)
        _synchronize(device)
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    resident = _kilobytes(status, "VmRSS")
    side.update(batch)
    return (_kilobytes(status, "VmHWM") - resident) / 1e3


def _kilobytes(status: Path, name: str) -> int:
    line = next(x for x in status.read_text().splitlines() if x.startswith(name + ":"))
    return int(line.split()[1])


# ---------------------------------------------------------------------------------- the machine


def _rate(x: Matmul, setting: Setting, peak: bool = False) -> float:
    """Measured FLOPs per second of this matmul. On a CPU it has at most 1024 rows, so that the
    operands stay in the cache, unless `peak` is set."""
    dtype = torch.bfloat16 if setting.dtype == "bfloat16" else torch.float32
    rows = x.rows if setting.device.startswith("cuda") or peak else min(x.rows, 1024)
    a = torch.randn(x.batch, rows, x.inner, device=setting.device, dtype=dtype)
    b = torch.randn(x.batch, x.inner, x.columns, device=setting.device, dtype=dtype)
    out = torch.empty(x.batch, rows, x.columns, device=setting.device, dtype=dtype)
    work = 2.0 * x.batch * rows * x.inner * x.columns

    def run() -> None:
        torch.bmm(a, b, out=out)

    run()
    times = min(200, max(3, round(0.01 / max(timed(run, 1, setting.device)[0], 1e-7))))
    return work / min(timed(run, times, setting.device)[0] for _ in range(3))


def machine(setting: Setting, matmuls: list[Matmul], seconds: float) -> dict[str, float]:
    """The cost of the update's matmuls alone, and its fraction of the update's `seconds`."""
    shapes = {dataclasses.replace(x, part="", times=1): x for x in matmuls}
    rates = {shape: _rate(shape, setting) for shape in shapes}
    floor = sum(x.flops / rates[dataclasses.replace(x, part="", times=1)] for x in matmuls)
    flops = sum(x.flops for x in matmuls)
    return {
        "gflops": flops / 1e9,
        "matmul_megabytes": sum(x.bytes for x in matmuls) / 1e6,
        "matmul_seconds_measured": floor,
        "gemm_gflops_per_second": flops / floor / 1e9,
        "gemm_fraction": floor / seconds,
    }


def peak_rate(setting: Setting) -> float:
    """Measured FLOPs per second of a large square matmul."""
    n = 8192 if setting.device.startswith("cuda") else 1024
    return _rate(Matmul("", 1, n, n, n), setting, peak=True)


# ----------------------------------------------------------------------------------- the command


def measure(setting: Setting, repeats: int, peak_tflops: float | None) -> dict[str, Any]:
    """All results for one setting."""
    torch.set_num_threads(setting.threads)
    size = SIZES[setting.size]
    _, batch = setting.make()
    exists = int(batch.mask.sum())
    off, equal = differences(setting), True
    if setting.dtype == "float32" and max(off["loss"], off["gradient"]) > TOLERANCE:
        # Rounding can move an advantage across the filter's threshold; one such advantage exceeds
        # the tolerance. If float64 agrees, the mathematics are the same.
        whole = differences(dataclasses.replace(setting, compile=False), double=True)
        off |= {f"{name}_in_float64": value for name, value in whole.items()}
        equal = max(whole["loss"], whole["gradient"]) <= TOLERANCE / 1000
    measured = alternate(setting, repeats)
    on_cpu = not setting.device.startswith("cuda")
    spaces = size.spaces(setting.action)
    matmuls = update_matmuls(
        size.config,
        spaces,
        setting.windows,
        size.window,
        transitions=exists if on_cpu and not setting.compile else None,
        plain=on_cpu and not setting.compile,
    )
    # The one that the trainer uses by default.
    fastest = measured.get("graphs", measured["ours"])
    seconds = fastest["seconds"]
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, torch.set_num_threads, (setting.threads,)) as pool:
        cost = pool.apply(machine, (setting, matmuls, seconds))
        peak = peak_tflops * 1e12 if peak_tflops else pool.apply(peak_rate, (setting,))
    for side in measured.values():
        side["updates_per_second"] = 1.0 / side["seconds"]
        side["timesteps_per_second"] = exists / side["seconds"]
    return {
        **dataclasses.asdict(setting),
        "window": size.window,
        "transitions": exists,
        "difference": off,
        "equal": equal,
        **measured,
        "speedup": measured["baseline"]["seconds"] / seconds,
        "speedup_cpu_time": measured["baseline"]["cpu_seconds"] / fastest["cpu_seconds"],
        "speedup_of_graphs": measured["ours"]["seconds"] / seconds
        if "graphs" in measured
        else None,
        "vs_amago": None if not size.amago or not on_cpu else 1.0 / seconds / size.amago,
        **cost,
        "peak_gflops_per_second": peak / 1e9,
        "peak_is": "given" if peak_tflops else "measured",
        "mfu": cost["gflops"] * 1e9 / seconds / peak,
    }


def _line(r: dict[str, Any]) -> str:
    ours, plain = r.get("graphs", r["ours"]), r["baseline"]
    amago = f", {r['vs_amago']:.2f}x AMAGO" if r["vs_amago"] else ""
    memory = " / ".join(
        "?" if x["peak_megabytes"] is None else f"{x['peak_megabytes']:.0f}" for x in (ours, plain)
    )
    graphs = ""
    if r["speedup_of_graphs"]:
        graphs = (
            f", {r['speedup_of_graphs']:.2f}x without graphs, first replay after "
            f"{ours['first_seconds']:.1f} s, reserves {ours['reserved_megabytes']:.0f} MB instead "
            f"of {r['ours']['reserved_megabytes']:.0f}"
        )
    return (
        f"{r['size']} {r['action']} ({r['windows']} x {r['window']}, {r['threads']} threads): "
        f"{ours['updates_per_second']:.2f} updates/s, {ours['timesteps_per_second']:.0f} "
        f"timesteps/s; {r['speedup']:.2f}x the baseline ({r['speedup_cpu_time']:.2f}x in processor "
        f"time){amago}{graphs}; {r['gflops']:.2f} GFLOP, "
        f"{100 * r['gemm_fraction']:.0f}% of the GEMM rate, {100 * r['mfu']:.0f}% of peak; "
        f"{memory} MB; gradient off by {r['difference']['gradient']:.1e}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=list(SIZES), nargs="+", help="default: all")
    parser.add_argument("--action", choices=("continuous", "discrete"), default="continuous")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--windows", type=int, help="batch size; default: by size and device")
    parser.add_argument("--threads", type=int, help="default: by size, else all")
    parser.add_argument("--peak-tflops", type=float, help="device peak rate; default: measured")
    args = parser.parse_args()
    # If other programs run, OpenMP threads that spin while they wait slow down both sides.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    chosen = [f"{size}/{args.action}" for size in args.size] if args.size else DEFAULT
    results = []
    for name in chosen:
        key, action = name.split("/")
        size = SIZES[key]
        on_gpu = args.device.startswith("cuda")
        setting = Setting(
            size=key,
            action=action,
            device=args.device,
            dtype=args.dtype,
            windows=args.windows or (size.windows_gpu if on_gpu else size.windows_cpu),
            threads=args.threads or size.threads or os.cpu_count() or 1,
            compile=args.compile,
        )
        results.append(measure(setting, args.repeats, args.peak_tflops))
        print(_line(results[-1]), flush=True)
    label = "_".join(
        ["update", *(args.size or []), *([] if args.action == "continuous" else [args.action])]
        + [args.device] * (args.device != "cpu")
        + [args.dtype] * (args.dtype != "float32")
        + ["compiled"] * args.compile
    )
    path = write(label, {"torch": torch.__version__, "results": results})
    print(f"written to {path}")
    unequal = [r["size"] for r in results if not r["equal"]]
    if unequal:
        print(f"loss or gradient differ by more than {TOLERANCE}: {', '.join(unequal)}")
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main())
