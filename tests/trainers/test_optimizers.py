from __future__ import annotations

from copy import deepcopy

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


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
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


def test_muon_steps_as_torchs_does_and_leaves_the_rest_to_adamw() -> None:
    from agentrl.trainers.muon import PreciseMuon

    torch.manual_seed(0)
    for shape in ((24, 40), (40, 24)):
        start, grads = torch.randn(shape), [torch.randn(shape) for _ in range(3)]
        ends = []
        for kind in (PreciseMuon, torch.optim.Muon):
            weight = torch.nn.Parameter(start.clone())
            optimizer = kind([weight], lr=0.1, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
            for grad in grads:
                weight.grad = grad.clone()
                optimizer.step()
            ends.append(weight.detach())
        assert float((ends[0] - start).abs().max()) > 0.1
        assert torch.allclose(*ends, atol=0.01)


def test_the_groups_of_muon_take_the_rate_and_survive_a_checkpoint() -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 6), torch.nn.Linear(6, 1))
        return model, make_optimizer(model, OptimSection(name="muon", weight_decay=0.1), 0.1)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, lr: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr
        model(torch.arange(5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    muon, adamw = optimizer.halves  # type: ignore[attr-defined]
    assert [tuple(p.shape) for group in muon.param_groups for p in group["params"]] == [(6, 4)]
    assert len([p for group in adamw.param_groups for p in group["params"]]) == 4
    before = [p.detach().clone() for p in model.parameters()]
    step(model, optimizer, 0.0)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    step(model, optimizer, 0.1)
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    other, resumed = made()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    for pair in ((model, optimizer), (other, resumed)):
        step(*pair, 0.05)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_a_warm_up_may_be_a_share_of_the_planned_updates() -> None:
    share, counted = OptimSection(warmup_ratio=0.1), OptimSection(warmup=12)
    rates = [[learning_rate(section, 1.0, update, 120) for update in range(120)] for section in (share, counted)]
    assert rates[0] == rates[1] and rates[0][6] == 0.5 and max(rates[0]) == rates[0][12] == 1.0
