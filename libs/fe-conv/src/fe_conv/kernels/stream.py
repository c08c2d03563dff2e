"""What a walk reads of an array, chunk by chunk: loaded into registers, or copied to shared memory ahead of its turn.

Functions marked ``cute.jit`` branch or loop on the device; the others only compose while compiling.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute

from fe_runtime.cute.ring import ThreadRing

from .setup import Setup
from .values import load_piece

__all__ = ["Stream", "advance", "ring_of", "settle", "start"]


@dataclass(frozen=True, slots=True)
class Stream:
    """The vectors of a thread's channels in an array (B, T, D) from the walk's first token on.

    ``tokens`` of them are in the array, counted from the first; the walk looks at ``wanted``.
    """

    setup: Setup
    array: cute.Tensor
    first: cute.Tensor
    tokens: Int32
    wanted: Int32
    ring: ThreadRing | None

    @staticmethod
    def of(
        setup: Setup, array: cute.Tensor, place: tuple[Int32, Int32, Int32], wanted: Int32, ring: ThreadRing | None
    ) -> Stream:
        """Return the stream at a place: row of the batch, first token and vector of channels."""
        batch, token, index = place
        first = cute.local_tile(array[batch, token, None], (setup.launch.vector,), (index,))
        left = Int32(array.shape[1]) - token
        return Stream(setup, array, first, left, cutlass.min(wanted, left), ring)

    def beyond(self, place: cute.Pointer, number: Int64 | int) -> cute.Pointer:
        """Return the place of the vector ``number`` tokens after the one at a place."""
        divisor = 8 * place.alignment // self.array.element_type.width
        return place + cute.assume(self.array.stride[1] * number, divby=divisor)  # else 0 would not be a multiple

    def after(self, place: cute.Pointer) -> cute.Pointer:
        """Return the place of the next chunk."""
        return self.beyond(place, self.setup.launch.unroll)

    def vector(self, place: cute.Pointer, number: Int64 | int) -> cute.Tensor:
        """Return the vector ``number`` tokens after the one at a place."""
        return cute.make_tensor(self.beyond(place, number), self.first.layout)

    def chunk(self, place: cute.Pointer, back: int = 0) -> list[cute.Tensor]:
        """Return the vectors of the chunk at a place, or of as many tokens that begin ``back`` tokens before it."""
        return [self.vector(place, u - back) for u in range(self.setup.launch.unroll)]

    def read(self, number: Int32, place: cute.Pointer, targets: list[cute.Tensor], limit: Int32 | None = None) -> None:
        """Take the first vectors of a chunk into registers, from its stage, or without stages from memory at ``place``.

        ``limit``: how many of them there are; the others repeat the last, or are anything.
        """
        launch, alignment = self.setup.launch, self.setup.problem.load_alignment
        for u, target in enumerate(targets):
            if self.ring is not None:
                target.store(self.ring.slot(u, number % launch.stages).load())
            else:
                token = u if limit is None else Int64(cutlass.min(Int32(u), limit - 1))
                load_piece(self.vector(place, token), target, alignment)


def ring_of(setup: Setup, allocator: cutlass.memory.SmemAllocator) -> ThreadRing | None:
    """Allocate the room in which chunks arrive ahead of their turn; ``None`` where threads load into registers."""
    launch = setup.launch
    if not launch.stages:
        return None
    thread, _, _ = cute.arch.thread_idx()
    shape = (launch.vector, launch.unroll, launch.threads, launch.stages)
    return ThreadRing.of(allocator, setup.dtype, shape, thread, setup.problem.load_alignment)


def start(streams: tuple[Stream, ...]) -> tuple[cute.Pointer, ...]:
    """Start the copies of the first chunks, all but one of those for which there is room.

    Returns
    -------
    tuple of Pointer
        Where the next chunk is, in each array.
    """
    ahead = tuple(stream.first.iterator for stream in streams)
    for number in range(streams[0].setup.launch.stages - 1):
        _fetch(streams, Int32(number), ahead)
        ahead = _next(streams, ahead)
    return ahead


def advance(streams: tuple[Stream, ...], number: Int32, ahead: tuple[cute.Pointer, ...]) -> tuple[cute.Pointer, ...]:
    """Start the copies of the chunk at ``ahead``, and wait for those of chunk ``number``; both where there are stages.

    The chunk ahead takes the place of the one before ``number``, which this thread is done with. Without stages it is
    chunk ``number`` itself, to be loaded.

    Returns
    -------
    tuple of Pointer
        Where the chunk after the one ahead is, in each array.
    """
    stages = streams[0].setup.launch.stages
    if stages:
        _fetch(streams, number + (stages - 1), ahead)
        cute.arch.cp_async_wait_group(stages - 1)
    return _next(streams, ahead)


def _next(streams: tuple[Stream, ...], places: tuple[cute.Pointer, ...]) -> tuple[cute.Pointer, ...]:
    return tuple(stream.after(place) for stream, place in zip(streams, places, strict=True))


def settle(streams: tuple[Stream, ...]) -> None:
    """Wait for all copies."""
    if streams[0].setup.launch.stages:
        cute.arch.cp_async_wait_group(0)


@cute.jit
def _fetch(streams: tuple[Stream, ...], number: Int32, places: tuple[cute.Pointer, ...]) -> None:
    """Start the copies of a chunk, as far as it exists, as one more group of copies."""
    launch = cutlass.const_expr(streams[0].setup.launch)
    begin, stage = number * launch.unroll, number % launch.stages
    if begin < streams[0].wanted:
        if begin + launch.unroll <= streams[0].tokens:
            for stream, place in zip(streams, places, strict=True):
                for u, source in enumerate(stream.chunk(place)):
                    stream.ring.fetch(source, u, stage)
        else:
            for u in cutlass.range_constexpr(launch.unroll):
                if begin + u < streams[0].tokens:
                    for stream, place in zip(streams, places, strict=True):
                        stream.ring.fetch(stream.vector(place, u), u, stage)
    cute.arch.cp_async_commit_group()
