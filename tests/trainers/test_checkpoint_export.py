"""A checkpoint exported later is what the run itself exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agentrl.trainers.checkpoint_export import export_checkpoint
from safetensors.torch import load_file

from agentrl import DataError
from agentrl.cli.main import run

from .rollouts import distance, make_rows, published

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("policy", "sections"),
    [
        ("tied", {}),
        ("vision", {"lora": {"rank": 4}, "model": {"freeze_vision": True}}),
        ("untied", {"lora": {"rank": 4}, "parallel": {"zero_stage": 3}, "optim": {"ema": 0.5}}),
        ("tied", {"model": {"dtype": "bfloat16"}, "parallel": {"zero_stage": 2}, "optim": {"ema": 0.5}}),
        ("vision", {"parallel": {"zero_stage": 3}}),
    ],
)
def test_an_exported_checkpoint_is_what_the_run_exports(
    make_trainer: Make, models: Path, tmp_path: Path, policy: str, sections: dict[str, Any]
) -> None:
    trainer = make_trainer(policy, **sections)
    for step in range(2):
        trainer.train(make_rows(), step)
    saved, wanted, made = (tmp_path / name for name in ("saved", "wanted", "made"))
    for folder in (saved, wanted):
        folder.mkdir()
    trainer.save(saved)
    trainer.export(wanted)
    trained = published(trainer)
    trainer.train(make_rows(), 2)
    (saved / "run.json").write_text("{}")
    assert run(["export", str(saved), str(made), "--model", str(models / policy)]) == 0
    assert sorted(path.name for path in made.rglob("*")) == sorted(path.name for path in wanted.rglob("*"))
    for file in wanted.rglob("*.safetensors"):
        one, other = load_file(file), load_file(made / file.relative_to(wanted))
        assert one.keys() == other.keys() and {t.dtype for t in one.values()} == {t.dtype for t in other.values()}
        assert distance(one, other) == 0.0
    if "optim" in sections:
        export_checkpoint(saved, tmp_path / "last", averaged=False)
        last = load_file(tmp_path / "last" / "model.safetensors")
        assert distance(last, trained) == 0.0 < distance(last, load_file(made / "model.safetensors"))


def test_the_chat_template_of_the_run_goes_with_the_model(make_trainer: Make, tmp_path: Path) -> None:
    """As it was when the run began."""
    template, saved, made = tmp_path / "own.jinja", tmp_path / "saved", tmp_path / "made"
    template.write_text("{{ messages[0].content }} é")
    trainer = make_trainer("tied", model={"chat_template": str(template)})
    template.unlink()
    for folder in (saved, made):
        folder.mkdir()
    trainer.save(saved)
    trainer.export(made)
    export_checkpoint(saved, tmp_path / "later")
    for folder in (made, tmp_path / "later"):
        assert (folder / "chat_template.jinja").read_text() == "{{ messages[0].content }} é"


def test_what_cannot_be_exported(make_trainer: Make, models: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "neither the folder of a checkpoint" in capsys.readouterr().err
    make_trainer("tied").save(tmp_path)
    with pytest.raises(DataError, match="without --optim"):
        export_checkpoint(tmp_path, tmp_path / "out", averaged=True)
    with pytest.raises(DataError, match="does not fit the model"):
        export_checkpoint(tmp_path, tmp_path / "out", model=str(models / "vision"))
