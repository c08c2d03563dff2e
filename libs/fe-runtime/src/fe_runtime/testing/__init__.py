"""What the tests of every library share. Frameworks, hypothesis and pytest are imported only by what needs them.

| module | concern |
|---|---|
| ``poison`` | memory that was allocated and never written shows as NaN |
| ``guard`` | arrays inside a buffer of canaries: reads and writes beyond an array show |
| ``tolerance`` | bounds derived from roundings and accumulation, and the comparison with float64 |
| ``codes`` | distance between quantised values in steps of their format |
| ``memory`` | strided arrays, and the same array in another framework |
| ``generate`` | hypothesis strategy: valid calls of a contract |
| ``invalid`` | the calls that a contract must reject, and how |
| ``gpu`` | graph replay, side streams, repeated runs, the machine-wide GPU lock |
| ``plugin`` | pytest plugin: which tests run where, and the recorded GPU run |
"""

from __future__ import annotations

from fe_runtime._lazy import lazy_exports

_HOMES = {
    "codes": ("CodeDistance", "code_distance"),
    "generate": ("Call", "valid_calls"),
    "gpu": ("cuda_graph_replay", "gpu_lock", "repeat_identical", "run_on_side_stream"),
    "guard": ("Guarded", "guarded"),
    "invalid": ("InvalidCall", "assert_rejected", "invalid_calls"),
    "memory": ("strided_array", "to_framework", "to_numpy"),
    "poison": ("poisoned_memory",),
    "tolerance": ("Accumulation", "Closeness", "assert_close", "rounding_bound", "ulp"),
}

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {name: f"{__name__}.{home}:{name}" for home, names in _HOMES.items() for name in names}
)
