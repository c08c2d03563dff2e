"""Time ``causal_conv1d_update`` as decoding runs it: many layers' states in one CUDA graph, each touched once.

``python update_in_graph.py`` prints a line per case: microseconds per call, and the share of the byte floor (state read
and written, token, output, filter) at the copy bandwidth measured in the same run; flash-linear-attention beside it
where it is installed and the state has its form. ``--json`` records the run, ``--tune`` times the other launches of the
fast kernel too.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fe_conv import causal_conv1d_update
from fe_conv.launch_update import Launch, Problem, candidates, choose, config, split_config
from fe_conv.update import OPERATION
from fe_runtime.bench.machine import run_record
from fe_runtime.compile import cache
from fe_runtime.compile.spec import KernelSpec

LAYERS = 24
REPLAYS = 30
CASES = (("L=4", 4, False), ("L=3", 3, False), ("L=3 channel-last", 3, True))
"""Name, places of a slot, and whether channels are neighbours."""


def main() -> None:
    """Time the cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[512])
    parser.add_argument("--channels", type=int, default=8192)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", type=Path, help="write the record")
    parser.add_argument("--commit", help="recorded instead of the repository's")
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e9:.0f} GB/s")
    cases = []
    for rows in arguments.rows:
        for name, length, channel_last in CASES:
            layers = [make_layer(rows, arguments.channels, length, channel_last) for _ in range(LAYERS)]
            floor = (rows * arguments.channels * (2 * length + 2) + arguments.channels * 4) * 2 / bandwidth
            what = f"N={rows} D={arguments.channels} {name}"
            seconds = time_in_graph([partial(causal_conv1d_update, *layer, activation="silu") for layer in layers])
            peers = time_peers(layers, length)
            print(f"{what}: {describe(seconds, floor)}")
            for peer, peer_seconds in peers.items():
                print(f"  {peer}: {describe(peer_seconds, floor)}, fe is {peer_seconds / seconds:.2f}x as fast")
            times = {"fe": seconds, **peers}
            cases.append({"case": what, "floor_us": floor * 1e6, "us": {who: t * 1e6 for who, t in times.items()}})
            if arguments.tune:
                tune(what, layers, floor)
    if arguments.json:
        write_record(arguments.json, arguments.commit, bandwidth, cases)


def describe(seconds: float, floor: float) -> str:
    """Return a time and its share of the byte floor, in words."""
    return f"{seconds * 1e6:.2f} us, {floor / seconds:.1%} of the floor"


def time_peers(layers: Sequence[Any], length: int) -> dict[str, float]:
    """Return the seconds per call of what else does this work, by name."""
    if length != 4:  # its state holds as many places as the filter
        return {}
    try:
        peer = importlib.import_module("fla.modules.conv.triton.ops").causal_conv1d_update
    except ImportError:
        return {}
    calls = [partial(peer, x, state, None, weight, None, "silu") for x, state, weight in layers]
    return {"flash-linear-attention": time_in_graph(calls)}


def write_record(path: Path, commit: str | None, bandwidth: float, cases: list[dict[str, Any]]) -> None:
    """Write what was measured, and on what."""
    what = "causal_conv1d_update, 24 layers in one CUDA graph, microseconds per call"
    figures = {"copy_gb_per_s": bandwidth / 1e9, "cases": cases}
    record = run_record(what, commit, ("fe-conv", "fla-core")) | figures
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def make_layer(rows: int, channels: int, length: int, channel_last: bool) -> tuple[Any, Any, Any]:
    """Return x, state and weight of a layer."""
    x = torch.randn(rows, channels, device="cuda").bfloat16()
    shape = (rows, length, channels) if channel_last else (rows, channels, length)
    state = torch.randn(shape, device="cuda").bfloat16()
    weight = torch.randn(channels, 4, device="cuda").bfloat16()
    return x, state.transpose(1, 2) if channel_last else state, weight


def tune(what: str, layers: Sequence[Any], floor: float) -> None:
    """Time every valid launch, for slots as aligned as the plan knows and as aligned as they are."""
    plan = OPERATION.plan(OPERATION.bind((*layers[0], None, None, None), {"activation": "silu"}))
    assert plan.kernel is not None
    arch, (problem, _) = plan.kernel.spec.arch, split_config(dict(plan.kernel.spec.config))
    outputs = [torch.empty_like(x) for x, _, _ in layers]
    found: list[tuple[float, Problem, Launch]] = []
    for aligned in dict.fromkeys((problem, replace(problem, state_alignment=16))):
        for launch in candidates(aligned, arch):
            spec = KernelSpec.of(
                "fe_conv.causal_conv1d_update", "fe_conv.kernels.update:build", arch, **config(aligned, launch)
            )
            run = cache.load(spec)
            calls = [partial(run, *layer, out, layer[1]) for layer, out in zip(layers, outputs, strict=True)]
            found.append((time_in_graph(calls, 10), aligned, launch))
    for seconds, aligned, launch in sorted(found, key=lambda entry: entry[0])[:12]:
        chosen = " (chosen)" if launch == choose(aligned, arch) else ""
        print(
            f"  {what} align {aligned.state_alignment}: {seconds * 1e6:.2f} us {floor / seconds:.1%} {launch}{chosen}"
        )


def time_in_graph(calls: Sequence[Callable[[], Any]], replays: int = REPLAYS) -> float:
    """Return the median seconds per call of a graph that makes all the calls."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    return median(seconds_of(graph.replay) for _ in range(replays)) / len(kept)


def copy_bandwidth() -> float:
    """Return the bytes per second, read and written, of copying 2 GB by torch's kernel.

    Not in a graph, where a copy becomes a node of its own kind that is a third slower.
    """
    source = torch.empty(2**29, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median(seconds_of(lambda: target.copy_(source)) for _ in range(REPLAYS))


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the seconds between the start and the end of what a call puts on the stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


if __name__ == "__main__":
    main()
