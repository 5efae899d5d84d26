"""UnifiedReward (https://arxiv.org/abs/2503.05236): a vision-language model that was trained to judge, served by vLLM.

Value: the number after "Final Score:" in its answer, 1 to 5, divided by 5, which is how flow_grpo and MixGRPO scale it.
Invariant: exactly one such number in an answer that ended by itself; all else is a failure (rule R17).
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field

from digen.rewards.judge import Count, Judge, Seconds
from digen.rewards.judge_server import Served

FINAL = re.compile(r"final\s+score\W*?(-?\d+(?:\.\d+)?)", re.IGNORECASE)
INSTRUCTION = (
    "A text caption and an image that was generated for it. Judge how well the image agrees with the caption and how "
    "good it looks. Name the caption's elements and, for each, whether the image shows it; then give a score from 1 to "
    "5 after 'Final Score:'.\nText Caption: [{prompt}]"
)


class UnifiedReward(Judge):
    """The final score of UnifiedReward on an OpenAI-compatible server, 0.2 to 1."""

    name = "unified-reward"

    def __init__(
        self,
        model: str = "UnifiedReward",
        url: str = "",
        serve: Served = None,
        instruction: str = INSTRUCTION,
        frames: Count = 4,
        max_tokens: Count = 1024,
        concurrency: Count = 8,
        timeout_s: Seconds = 120.0,
        retries: Annotated[int, Field(ge=0)] = 3,
        token_env: str = "",
    ) -> None:
        """Options of the term: those of `judge`.

        instruction: the words here are this project's; those that a release of the model was trained with can be given.
        """
        super().__init__(
            model,
            url,
            serve,
            instruction=instruction,
            frames=frames,
            max_tokens=max_tokens,
            concurrency=concurrency,
            timeout_s=timeout_s,
            retries=retries,
            token_env=token_env,
        )

    def form(self) -> dict[str, Any]:
        """It answers in its own words."""
        return {}

    def value(self, answer: str, target: str | None) -> float:  # noqa: ARG002
        found = FINAL.findall(answer)
        if len(found) != 1:
            raise ValueError(f"{len(found)} final scores in the answer")
        score = float(found[0])
        self.on_scale(score)
        return score / 5
