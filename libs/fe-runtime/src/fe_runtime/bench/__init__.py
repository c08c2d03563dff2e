"""What ``fe demo``, ``fe bench`` and ``fe compile`` know about an operation, and how they measure it.

| module | concern |
|---|---|
| ``workload`` | :class:`Workload`: what a library declares about one of its operations |
| ``discover`` | the workloads of every installed library |
| ``problem`` | one case of a workload: its arrays, its calls, its plan, its bytes |
| ``places`` | a framework on a device: make arrays there, bring them back, wait |
| ``accuracy`` | relative error against a float64 formula, and the error that rounding may make |
| ``timing`` | medians and spread, by CUDA events or by the host's clock |
| ``limits`` | what this machine can reach: copy bandwidth, matrix product |
| ``machine`` | the machine, the versions and the commit of a record |
| ``demo``, ``run`` | the demonstration; the benchmark of one operation, as a JSON record |
| ``pictures`` | PNGs of both |
"""

from __future__ import annotations

from fe_runtime._lazy import lazy_exports

_HERE = "fe_runtime.bench"

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Case": f"{_HERE}.workload:Case",
        "Expected": f"{_HERE}.workload:Expected",
        "Peer": f"{_HERE}.workload:Peer",
        "Source": f"{_HERE}.workload:Source",
        "Workload": f"{_HERE}.workload:Workload",
        "find_workloads": f"{_HERE}.discover:find_workloads",
    },
)
