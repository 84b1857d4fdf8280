"""Data for SFT, a reward model and PPO: sums of reasoning-gym with right and wrong answers.

    python examples/preferences.py FOLDER

writes chats_{train,test}.jsonl (prompt, answer), pairs_{train,test}.jsonl (prompt, chosen, rejected) and
prompts_{train,test}.jsonl (prompt). No question is in both halves. docs/supervised.md trains on them.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import reasoning_gym

TEST_SHARE = 0.15
PAIRS_A_QUESTION = 4


def questions() -> list[tuple[str, int]]:
    """Every sum and difference of two one-digit numbers that the generator gives, in a fixed order."""
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    dataset = reasoning_gym.create_dataset("chain_sum", size=2000, seed=0, **options)
    found = {item["question"].rpartition(":")[2].strip(): int(item["answer"]) for item in dataset}
    return sorted(found.items())


def wrong(answer: int, rng: random.Random) -> int:
    """An answer that is off by 10 to 60."""
    return answer + rng.choice((-1, 1)) * rng.randint(10, 60)


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    asked = questions()
    rng.shuffle(asked)
    held_out = round(len(asked) * TEST_SHARE)
    for name, part in (("test", asked[:held_out]), ("train", asked[held_out:])):
        write(folder / f"chats_{name}.jsonl", ({"prompt": q, "answer": str(a)} for q, a in part))
        pairs = [(q, a) for q, a in part for _ in range(PAIRS_A_QUESTION)]
        rows = ({"prompt": q, "chosen": str(a), "rejected": str(wrong(a, rng))} for q, a in pairs)
        write(folder / f"pairs_{name}.jsonl", rows)
        write(folder / f"prompts_{name}.jsonl", ({"prompt": q} for q, _ in part))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
