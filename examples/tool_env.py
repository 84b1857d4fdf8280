"""A tool environment of your own: the model asks for prices and adds them up.

agentrl rollout --env examples/tool_env.py:Groceries
"""

import random
import re

from agentrl import Action, Task, ToolEnv, tool

PRICES = {"apple": 3, "bread": 4, "cheese": 7, "milk": 2, "rice": 5}


class Groceries(ToolEnv):
    """What does a short shopping list cost? The prices are only known to the tool."""

    system = "Look up each price with the tool, then answer with the total alone."
    max_turns = 6

    def __init__(self, items: int = 2) -> None:
        super().__init__()
        self.items = items

    @classmethod
    def tasks(cls, split: str = "train", items: int = 2) -> list[Task]:
        draw = random.Random(f"{split}/{items}")
        tasks = []
        for i in range(200 if split == "train" else 20):
            wanted = {name: draw.randint(1, 5) for name in draw.sample(sorted(PRICES), items)}
            prompt = "What do I pay for " + " and ".join(f"{n} {name}" for name, n in wanted.items()) + "?"
            total = sum(PRICES[name] * n for name, n in wanted.items())
            tasks.append(Task(id=f"{split}-{i}", prompt=prompt, label=total, row={"wanted": wanted}))
        return tasks

    @tool
    def price(self, item: str) -> int:
        """Look up what one piece costs.

        Args:
            item: The name in the singular, such as apple.
        """
        if item not in PRICES:
            # The model reads this text, and may try again.
            raise LookupError(f"we do not sell {item}; we have {', '.join(PRICES)}")
        return PRICES[item]

    def reward(self, answer: Action) -> dict[str, object]:
        numbers = re.findall(r"\d+", answer)
        right = bool(numbers) and int(numbers[-1][:9]) == self.task.label
        close = bool(numbers) and abs(int(numbers[-1][:9]) - self.task.label) <= 2
        return {"reward": 1.0 if right else 0.0, "metrics": {"close": close}}
