"""How is a request's life run without a task of its own? As a coroutine that goes on in the turn of whoever ends its waiting.

An asyncio task begins in a later turn of the loop, and so does every step after a wait: 14 µs a request, a fifth of all it costs. An
`Errand` begins at once, and a `Bell` goes on with it in the very call that rings it: the callback of the engine's socket.

    Errand(coroutine) ──▶ … await bell ‖ bell.ring() ──▶ … await future ‖ the loop's next turn ──▶ … ended

Futures are awaited as in a task. What must know the task that it runs in (`asyncio.timeout` does) gets one: `in_task`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class Bell:
    """Something to wait for, once, by one errand."""

    __slots__ = ("_errand", "rung")

    def __init__(self) -> None:
        self._errand: Errand | None = None
        self.rung = False

    def ring(self) -> None:
        """Whoever waits goes on before this returns. Harmless when it has been rung before."""
        self.rung = True
        errand, self._errand = self._errand, None
        if errand is not None:
            errand.step()

    def wait(self, errand: Errand) -> None:
        """From now on, ringing goes on with this errand."""
        self._errand = errand

    def leave(self) -> None:
        """Nobody waits any more."""
        self._errand = None

    def __await__(self) -> Generator[Bell, None, None]:
        if not self.rung:
            yield self


class Errand:
    """Runs a coroutine to its end, or until `cancel`."""

    __slots__ = ("_cancelled", "_coroutine", "_ended", "_waits_for", "over")

    def __init__(self, coroutine: Coroutine[Any, None, None], ended: Callable[[Errand, BaseException | None], None]) -> None:
        """`step` begins; at the end, `ended` is told what the coroutine raised (CancelledError, when it was cancelled), or None."""
        self._coroutine = coroutine
        self._ended = ended
        self._waits_for: Bell | asyncio.Future[Any] | None = None
        self._cancelled = False
        self.over = False

    def step(self, error: BaseException | None = None) -> None:
        """Run until it waits again."""
        self._waits_for = None
        try:
            waits_for = self._coroutine.send(None) if error is None else self._coroutine.throw(error)
        except StopIteration:
            self.over = True
            self._ended(self, None)
        except (Exception, asyncio.CancelledError) as raised:  # noqa: BLE001  whoever owns the errand judges it
            error = None  # else it holds this frame, and this frame it
            self.over = True
            self._ended(self, raised)
        else:
            self._wait(waits_for)

    def cancel(self) -> None:
        """Raise CancelledError where it waits, now or, if what it waits for takes its time to end, as soon as that has ended."""
        match self._waits_for:
            case Bell() as bell:
                bell.leave()
                self.step(asyncio.CancelledError())
            case asyncio.Future() as future if future.cancel():
                pass  # its callback goes on
            case _:
                self._cancelled = True

    # inside

    def _wait(self, waits_for: Any) -> None:  # noqa: ANN401  whatever a coroutine yields
        self._waits_for = waits_for
        if type(waits_for) is Bell:
            waits_for.wait(self)
            if self._cancelled:
                self.cancel()
        elif waits_for is None:  # a bare turn of the loop: asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(self._go_on)
        else:
            waits_for._asyncio_future_blocking = False  # noqa: SLF001  how a task tells a future that it has been understood
            waits_for.add_done_callback(self._go_on)
            if self._cancelled and waits_for.cancel():
                self._cancelled = False

    def _go_on(self, _: object = None) -> None:
        if self._cancelled:
            self._cancelled = False
            self.step(asyncio.CancelledError())
        else:
            self.step()


async def in_task(coroutine: Coroutine[Any, Any, T], undo: Callable[[T], object] | None = None) -> T:
    """The result of something that has to run in a task, which is cancelled with the errand; `undo` gets a result that comes too late."""
    task = asyncio.get_running_loop().create_task(coroutine)
    try:
        return await task
    except asyncio.CancelledError:
        if undo is not None and task.done() and not task.cancelled() and task.exception() is None:
            undo(task.result())
        raise
