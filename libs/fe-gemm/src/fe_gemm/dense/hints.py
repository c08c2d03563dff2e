"""The arguments of the dense products that speak of speed only: what the peer allows is checked and has no effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fe_runtime.errors import InvalidArgumentError, explain

__all__ = ["Hints", "up_to_four"]


_NOTHING = object()


def up_to_four(rows: int, columns: int) -> bool:
    """Whether both extents of a cluster are 1, 2 or 4."""
    return rows in (1, 2, 4) and columns in (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Hints:
    """The legal hints of one operation.

    Parameters
    ----------
    operation
        Named in errors.
    tile_n
        Legal widths of a tile; its height is 128 or 256.
    default_cluster
        What ``cluster_shape_mn=None`` means for a height.
    cluster_is_legal, clusters
        Which clusters are legal, in code and in words.
    """

    operation: str
    tile_n: tuple[int, ...]
    default_cluster: Callable[[int], tuple[int, int]]
    cluster_is_legal: Callable[[int, int], bool] = up_to_four
    clusters: str = "have extents of 1, 2 or 4"
    _passed: list[tuple[Any, ...]] = field(default_factory=lambda: [5 * (_NOTHING,)], repr=False, compare=False)
    """One entry: what was checked last, if it cannot change. A wrapper's defaults are the same objects in each call."""

    def check(
        self,
        mma_tiler_mn: object,
        cluster_shape_mn: object,
        vector_f32: object = False,
        ab12_stages: object = None,
        tile_n: tuple[int, ...] = (),
    ) -> None:
        """Check the hints of a call; ``tile_n``: legal widths of this call, if they are others.

        Raises
        ------
        TypeError
            An argument of the wrong kind.
        InvalidArgumentError
            A value outside of the legal ones. A tile of 256 rows needs an even number of cluster rows.
        """
        tile, cluster, vector, stages, widths = self._passed[0]
        is_same_shape = mma_tiler_mn is tile and cluster_shape_mn is cluster and tile_n is widths
        if is_same_shape and vector_f32 is vector and ab12_stages is stages:
            return
        widths = tile_n or self.tile_n
        rows, columns = self._pair("mma_tiler_mn", mma_tiler_mn)
        if rows not in (128, 256) or columns not in widths:
            rule = f"have 128 or 256 rows and {', '.join(map(str, widths))} columns"
            raise self._error("mma_tiler_mn", rule, mma_tiler_mn)
        shape = self.default_cluster(rows)
        if cluster_shape_mn is not None:
            shape = self._pair("cluster_shape_mn", cluster_shape_mn)
        if not self.cluster_is_legal(*shape):
            raise self._error("cluster_shape_mn", self.clusters, shape)
        if rows == 256 and shape[0] % 2:
            raise self._error("cluster_shape_mn", "have an even number of rows for tiles of 256 rows", shape)
        if not isinstance(vector_f32, bool):
            raise self._kind("vector_f32", "a Python bool", vector_f32)
        if ab12_stages is not None and (isinstance(ab12_stages, bool) or not isinstance(ab12_stages, int)):
            raise self._kind("ab12_stages", "a Python int or None", ab12_stages)
        if ab12_stages is not None and ab12_stages < 1:
            raise self._error("ab12_stages", "be positive", ab12_stages)
        if not isinstance(mma_tiler_mn, list) and not isinstance(cluster_shape_mn, list):
            self._passed[0] = mma_tiler_mn, cluster_shape_mn, vector_f32, ab12_stages, tile_n

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


_WITHOUT_EFFECT = "Leave it out: it does not change the result."
