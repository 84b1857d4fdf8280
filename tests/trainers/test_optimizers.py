from __future__ import annotations

import pytest
import torch
from agentrl.trainers import planned_updates
from agentrl.trainers.optimizers import learning_rate, make_optimizer

from agentrl.config import OptimSection


def test_linear_schedule_counts_planned_updates() -> None:
    planned = planned_updates(prompts=16, n=4, train_batch=16, epochs=2, rollouts=5, episodes=3)
    linear = OptimSection(schedule="linear", min_lr_ratio=0.0)
    assert planned == 120
    assert learning_rate(linear, 1.0, 60, planned) == pytest.approx(0.5)
    assert learning_rate(linear, 1.0, 119, planned) > 0


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedules_end_at_the_minimum_and_stay_there(schedule: str) -> None:
    config = OptimSection.model_validate({"schedule": schedule, "min_lr_ratio": 0.1, "warmup": 4})
    rates = [learning_rate(config, 2.0, update, 20) for update in range(25)]
    assert rates[:5] == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0])
    assert rates[4:21] == sorted(rates[4:21], reverse=True)
    assert rates[20:] == pytest.approx([0.2] * 5)


def test_constant_schedule() -> None:
    assert {learning_rate(OptimSection(schedule="constant"), 3e-4, update, 10) for update in range(20)} == {3e-4}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_weight_decay_is_decoupled_and_spares_vectors(name: str) -> None:
    layer = torch.nn.Linear(3, 3)
    torch.nn.init.ones_(layer.weight)
    torch.nn.init.ones_(layer.bias)
    optimizer = make_optimizer(layer, OptimSection.model_validate({"name": name, "weight_decay": 0.5}), 0.1)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(layer.weight, torch.full((3, 3), 0.95))
    assert torch.allclose(layer.bias, torch.ones(3))
