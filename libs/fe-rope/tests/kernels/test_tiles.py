"""The places of all threads of all blocks, computed with Python's integers: each vector once, none outside."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs the kernel language (nvidia-cutlass-dsl)")

from fe_rope.kernels import tiles
from fe_rope.launch import Launch, Problem, candidates, choose

TOKENS = 5


class Threads:
    """Stands for the kernel language: one thread of one block at a time."""

    def __init__(self) -> None:
        self.thread = self.block = 0

    def arch(self) -> Any:
        return SimpleNamespace(thread_idx=lambda: (self.thread, 0, 0), block_idx=lambda: (self.block, 0, 0))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    known = Threads()
    ceil_div = lambda a, b: -(-a // b)  # noqa: E731
    monkeypatch.setattr(tiles, "cute", SimpleNamespace(arch=known.arch(), ceil_div=ceil_div))
    monkeypatch.setattr(tiles, "cutlass", SimpleNamespace(min=min))
    monkeypatch.setattr(tiles, "Int32", int)
    monkeypatch.setattr(tiles, "Int64", int)
    return known


def check(problem: Problem, launch: Launch, threads: Threads) -> None:
    found: Counter[tuple[int, int, int]] = Counter()
    for threads.block in range(tiles.grid(problem, launch, TOKENS)):
        for threads.thread in range(launch.threads):
            tables: dict[int, int] = {}
            for place in tiles.places(problem, launch, TOKENS):
                spot = place.token, place.head, place.column
                assert all(0 <= index < extent for index, extent in zip(spot, extents(problem), strict=True))
                if place.exists:
                    assert tables.setdefault(place.table, place.token) == place.token
                    found[spot] += 1
    tokens, heads, vectors = extents(problem)
    assert len(found) == tokens * heads * vectors
    assert set(found.values()) == {1}


def extents(problem: Problem) -> tuple[int, int, int]:
    return TOKENS, problem.heads, problem.vectors


SHAPES = [(1, 64), (1, 66), (1, 512), (3, 66), (4, 128), (7, 96), (10, 512), (17, 512), (32, 128), (48, 576), (64, 512)]


@pytest.mark.parametrize("shape", [*SHAPES, (1, 20000), (2, 2052), (33, 1026), (100, 64)], ids=str)
def test_every_vector_has_one_place(shape: tuple[int, int], threads: Threads) -> None:
    problem = Problem(*shape)
    check(problem, choose(problem, "sm_90a"), threads)


@pytest.mark.parametrize("shape", [(64, 512), (32, 128), (48, 576), (7, 96)], ids=str)
def test_every_candidate_covers_the_array(shape: tuple[int, int], threads: Threads) -> None:
    problem = Problem(*shape)
    kinds = {(c.threads, c.count, c.tokens, c.heads, c.vectors): c for c in candidates(problem, "sm_90a")}
    for launch in kinds.values():
        check(problem, launch, threads)


@pytest.mark.parametrize(("columns", "lanes"), [(96, 4), (512, 4), (80, 2), (20000, 4)])
def test_a_group_lies_in_neighbouring_lanes(columns: int, lanes: int, threads: Threads) -> None:
    """Threads that share a group to be quantised are neighbours, and all of them exist or none."""
    problem = Problem(3, columns, mode="fp4/32/ue8m0")
    launch = choose(problem, "sm_90a")
    for threads.block in range(tiles.grid(problem, launch, TOKENS)):
        known = []
        for threads.thread in range(launch.threads):
            known.append(tiles.places(problem, launch, TOKENS))
        for first in range(0, launch.threads, lanes):
            for j in range(launch.count):
                group = [known[first + lane][j] for lane in range(lanes)]
                assert len({place.exists for place in group}) == 1
                if group[0].exists:
                    assert [place.column - group[0].column for place in group] == list(range(lanes))
                    assert group[0].column % lanes == 0
                    assert len({(place.token, place.head) for place in group}) == 1
