"""The arguments of the grouped products that speak of speed only: what the peer allows is checked and has no effect."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_
from typing import Any

from fe_runtime.errors import InvalidArgumentError, explain

__all__ = ["ALIGNMENTS", "Hints"]

ALIGNMENTS = (128, 256)
"""What ``m_aligned`` may promise about the ends of groups. Nothing relies on it: groups may have any size."""
MOST_CLUSTER_BLOCKS = 16
_WITHOUT_EFFECT = "Leave it out: it does not change the result."


@dataclass(frozen=True, slots=True)
class Hints:
    """The legal hints of one operation, or of one of its families of dtypes.

    Parameters
    ----------
    operation
        Named in errors.
    tile_n
        Legal widths of a tile.
    tile_m
        Legal heights of a tile.
    longest
        The largest legal extent of a cluster.
    spans
        Whether a cluster's rows must span 128 or 256 rows of the result.
    """

    operation: str
    tile_n: tuple[int, ...]
    tile_m: tuple[int, ...] = (128, 256)
    longest: int = MOST_CLUSTER_BLOCKS
    spans: bool = True
    _passed: list[tuple[Any, ...]] = field(default_factory=lambda: [()], repr=False, compare=False)
    """One entry: the objects that were checked last, if they cannot change. Defaults are the same ones in each call."""

    def check(
        self,
        mma_tiler_mn: object,
        cluster_shape_mn: object,
        *,
        vector_f32: object = False,
        use_dynamic_sched: object = False,
        m_aligned: object = 256,
        cd_major: object = "n",
    ) -> None:
        """Check the hints of a call.

        Raises
        ------
        TypeError
            An argument of the wrong kind.
        InvalidArgumentError
            A value outside of the legal ones.
        """
        given = (mma_tiler_mn, cluster_shape_mn, vector_f32, use_dynamic_sched, m_aligned, cd_major)
        passed = self._passed[0]
        if passed and all(map(is_, given, passed)):
            return
        self._check(*given)
        if isinstance(mma_tiler_mn, tuple) and isinstance(cluster_shape_mn, (tuple, type(None))):
            self._passed[0] = given

    def _check(
        self,
        mma_tiler_mn: object,
        cluster_shape_mn: object,
        vector_f32: object,
        use_dynamic_sched: object,
        m_aligned: object,
        cd_major: object,
    ) -> None:
        rows, columns = self._pair("mma_tiler_mn", mma_tiler_mn)
        if rows not in self.tile_m or columns not in self.tile_n:
            heights, widths = (" or ".join(map(str, extents)) for extents in (self.tile_m, self.tile_n))
            raise self._error("mma_tiler_mn", f"have {heights} rows and {widths} columns", mma_tiler_mn)
        if cluster_shape_mn is not None:
            self._check_cluster(rows, *self._pair("cluster_shape_mn", cluster_shape_mn))
        for name, value in (("vector_f32", vector_f32), ("use_dynamic_sched", use_dynamic_sched)):
            if not isinstance(value, bool):
                raise self._kind(name, "a Python bool", value)
        if isinstance(m_aligned, bool) or not isinstance(m_aligned, int):
            raise self._kind("m_aligned", "a Python int", m_aligned)
        if m_aligned not in ALIGNMENTS:
            raise self._error("m_aligned", "be 128 or 256", m_aligned)
        if not isinstance(cd_major, str):
            raise self._kind("cd_major", "a Python str", cd_major)
        if cd_major != "n":
            raise self._error("cd_major", 'be "n": results are row-major', cd_major)

    def _check_cluster(self, tile_rows: int, rows: int, columns: int) -> None:
        powers = all(extent > 0 and extent & (extent - 1) == 0 for extent in (rows, columns))
        if not powers or max(rows, columns) > self.longest or rows * columns > MOST_CLUSTER_BLOCKS:
            rule = f"have powers of two up to {self.longest}, of product up to {MOST_CLUSTER_BLOCKS}"
            raise self._error("cluster_shape_mn", rule, (rows, columns))
        if tile_rows == 256 and rows % 2:
            raise self._error("cluster_shape_mn", "have an even number of rows for tiles of 256 rows", (rows, columns))
        if self.spans and (rows // (2 if tile_rows == 256 else 1)) * tile_rows > 256:
            rule = f"span 128 or 256 rows of the result with tiles of {tile_rows} rows"
            raise self._error("cluster_shape_mn", rule, (rows, columns))

    def _pair(self, name: str, value: object) -> tuple[int, int]:
        if not isinstance(value, (tuple, list)) or not all(type(entry) is int for entry in value):
            raise self._kind(name, "a pair of Python ints", value)
        if len(value) != 2:
            raise self._error(name, "have two entries", value)
        return value[0], value[1]

    def _kind(self, name: str, kind: str, value: object) -> TypeError:
        given = f"{type(value).__name__} {value!r}"
        return TypeError(explain(self.operation, name, f"be {kind}", given, _WITHOUT_EFFECT))

    def _error(self, name: str, rule: str, value: object) -> InvalidArgumentError:
        return InvalidArgumentError(explain(self.operation, name, rule, repr(value), _WITHOUT_EFFECT))
