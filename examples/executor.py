"""A way of your own to drive an episode: the model answers, reads its answer again with fresh eyes, and decides.

    agentrl train --agent examples/executor.py:SecondOpinion --data.path questions.jsonl --algo reinforce_pp --model.path MODEL

The review is a conversation of its own, so it has a root of its own in the trajectory, and both are trained.
"""

from __future__ import annotations

from agentrl import AgentExecutorBase, Node, Prompt, RolloutContext, Task, Trajectory


class SecondOpinion(AgentExecutorBase):
    """Rewards a right final answer with 1, wherever it came from."""

    async def execute(self, task: Task, ctx: RolloutContext) -> Trajectory:
        record = ctx.begin(task)
        answer = await self._ask(str(task.prompt), ctx, record)
        said = ctx.renderer.text(answer.token_ids)
        review = await self._ask(f"Question: {task.prompt}\nAnswer: {said}\nGive the right answer.", ctx, record)
        final = ctx.renderer.text(review.token_ids)
        review.reward = float(final.strip() == str(task.label))
        record.metrics["changed_its_mind"] = float(final != said)
        return record

    async def _ask(self, question: str, ctx: RolloutContext, record: Trajectory) -> Node:
        """One turn of a new conversation. What is sampled goes into the record, id for id."""
        prompt: Prompt = ctx.renderer.start([{"role": "user", "content": question}])
        generation = await ctx.generate(prompt.token_ids, images=prompt.images)
        return record.add_sampled(record.add(None, "prompt", prompt.token_ids, prompt.slots), generation)
