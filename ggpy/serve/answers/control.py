"""Control of answers under way: ends the reasoning of one that a client names.

Nothing here knows HTTP or the form of any API.
"""

from __future__ import annotations

from ...sampling import ReasoningBudget
from ..errors import RETRY_AFTER, ApiError
from .worker import EngineWorker

NOT_RUNNING = "no answer with this id is under way"
NOT_ARMED = "the request of this answer did not set reasoning_control, or it can have no reasoning"


async def end_reasoning(worker: EngineWorker, name: str) -> str:
    """End the reasoning of the answers with this name, where it goes on; returns why that cannot
    be, "" where it can. ApiError 503 after `close` of the worker.
    """
    named = [ticket for ticket in worker.tickets if ticket.name == name]
    if not named:
        return NOT_RUNNING
    masks = [ticket.sequence.sampler.mask for ticket in named]
    budgets = [mask for mask in masks if isinstance(mask, ReasoningBudget)]
    if not budgets:
        return NOT_ARMED

    def end() -> None:
        for budget in budgets:
            budget.end_soon()

    try:
        await worker.call(end)
    except RuntimeError as error:
        raise ApiError(503, str(error), retry_after=RETRY_AFTER) from None
    return ""
