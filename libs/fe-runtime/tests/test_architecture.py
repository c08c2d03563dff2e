"""What plans know about architectures; the right values are those of the CUDA programming guide."""

import pytest

from fe_runtime.architecture import architecture_number, shared_memory_per_sm, threads_per_sm


@pytest.mark.parametrize(
    ("arch", "number", "threads", "kilobytes"),
    [("sm_80", 80, 2048, 164), ("sm_90a", 90, 2048, 228), ("sm_100a", 100, 2048, 228), ("sm_120a", 120, 1536, 100)],
)
def test_facts(arch: str, number: int, threads: int, kilobytes: int) -> None:
    assert (architecture_number(arch), threads_per_sm(arch)) == (number, threads)
    assert shared_memory_per_sm(arch) == kilobytes * 1024
