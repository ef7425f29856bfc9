"""Several answers as one stream of events, each with the number of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from ..events import Event
from .answer import Answering

Arrived = tuple[int, Event | BaseException | None]  # None: the answer is complete


async def merged(answers: Sequence[Answering]) -> AsyncIterator[tuple[int, Event]]:
    """The events of all answers as they come; the first error ends all."""
    if len(answers) == 1:
        async for only in answers[0]:
            yield 0, only
        return
    arrived: asyncio.Queue[Arrived] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(i, answer, arrived)) for i, answer in enumerate(answers)]
    running = len(tasks)
    try:
        while running:
            i, event = await arrived.get()
            if event is None:
                running -= 1
            elif isinstance(event, BaseException):
                raise event
            else:
                yield i, event
    finally:
        for answer, task in zip(answers, tasks, strict=True):
            answer.cancel()
            task.cancel()


async def _pump(i: int, answer: Answering, arrived: asyncio.Queue[Arrived]) -> None:
    try:
        async for event in answer:
            arrived.put_nowait((i, event))
        arrived.put_nowait((i, None))
    except Exception as error:
        arrived.put_nowait((i, error))


def cancel_all(answers: Sequence[Answering]) -> None:
    """End all answers."""
    for answer in answers:
        answer.cancel()
