"""Rule 2 over the template structures in use: prompt + sampled ids + delta, the same ids as a whole rendering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agentrl import DataError, Generation, Renderer, Span

from .templates import FAMILIES, TOOL
from .tokenizers import byte_tokenizer

RenderersOf = Callable[..., Renderer]
SAME_AS_WHOLE = (
    "chatml",
    "base",
    "thinking",
    "headers",
    "inst",
    "model_role",
    "text_arguments",
    "drops_tools",
    "plain_bos",
    "vision",
    "vision_lists",
)
CALL = {"id": "abc123def", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
OTHER = {"id": "abc123deg", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
RESULT = {"role": "tool", "tool_call_id": "abc123def", "content": "41"}


def sample(renderer: Renderer, text: str, reason: str = "stop") -> Generation:
    ids = renderer.tokenizer(text, add_special_tokens=False).input_ids
    return Generation(tuple(ids), (0.0,) * len(ids), (Span(0, 0, len(ids)),), reason)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


def as_written(renderer: Renderer, messages: Sequence[Any], reply: Any, stop: str) -> Generation:
    """The reply as the template itself writes it, up to and with the token that ends the turn."""
    before = renderer.template.render(messages, ())
    whole = renderer.template.render([*messages, reply], (), reply=False)
    assert whole.startswith(before)
    return sample(renderer, whole[len(before) :].partition(stop)[0] + stop)


@pytest.mark.parametrize("family", SAME_AS_WHOLE)
def test_three_turns_are_the_ids_of_a_whole_rendering(renderer_of: RenderersOf, family: str) -> None:
    renderer, stop = renderer_of(family), FAMILIES[family].stop
    prompt = renderer.start([user("Is it there?")])
    said = [user("Is it there?")]
    for turn in range(3):
        generation = sample(renderer, f"an answer {turn}{stop}")
        extended = renderer.extend(prompt, generation, [user(f"then {turn}\n")])
        assert extended.token_ids[: extended.kept] == prompt.token_ids + generation.token_ids
        said += [assistant(f"an answer {turn}"), user(f"then {turn}\n")]
        assert extended.token_ids == renderer.start(said).token_ids
        assert not extended.branched
        assert list(extended.messages) == said
        prompt = extended


@pytest.mark.parametrize("family", SAME_AS_WHOLE)
def test_the_token_that_ends_a_turn_stands_once(renderer_of: RenderersOf, family: str) -> None:
    renderer, stop = renderer_of(family), FAMILIES[family].stop
    (stop_id,) = renderer.tokenizer(stop, add_special_tokens=False).input_ids
    assert stop_id in renderer.stop_ids
    prompt = renderer.start([user("hi")])
    with_stop = renderer.extend(prompt, sample(renderer, f"yes{stop}"), [user("go")])
    without = renderer.extend(prompt, sample(renderer, "yes", "length"), [user("go")])
    assert with_stop.token_ids == without.token_ids
    assert with_stop.kept == without.kept + 1, "without a sampled stop the delta is whole, and untrained"


def test_a_sample_with_another_stop_id_keeps_both(renderer_of: RenderersOf) -> None:
    renderer = renderer_of("base")
    prompt = renderer.start([user("hi")])
    extended = renderer.extend(prompt, sample(renderer, "yes<|endoftext|>"), [user("go")])
    assert renderer.tokenizer.decode(extended.token_ids[len(prompt) :]).startswith(
        "yes<|endoftext|><|im_end|>\n<|im_start|>user\ngo<|im_end|>\n"
    )


def test_an_empty_sample_is_extended_by_the_whole_delta(renderer_of: RenderersOf) -> None:
    renderer = renderer_of("chatml")
    prompt = renderer.start([user("hi")])
    extended = renderer.extend(prompt, sample(renderer, ""), [user("go")])
    assert renderer.text(extended.token_ids[len(prompt) :], special=True).startswith("<|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize("family", ["chatml", "inst"])
@pytest.mark.parametrize("calls", [(CALL,), (CALL, OTHER)])
def test_all_tool_results_of_a_turn_are_one_delta(
    renderer_of: RenderersOf, family: str, calls: tuple[Any, ...]
) -> None:
    renderer, stop = renderer_of(family), FAMILIES[family].stop
    results = [{"role": "tool", "tool_call_id": call["id"], "content": str(i)} for i, call in enumerate(calls)]
    reply = assistant("", *calls)
    generation = as_written(renderer, [user("add")], reply, stop)
    extended = renderer.extend(renderer.start([user("add")]), generation, [reply, *results])
    assert not extended.branched
    assert extended.token_ids == renderer.start([user("add"), reply, *results]).token_ids


@pytest.mark.parametrize("family", ["chatml", "thinking"])
def test_two_results_share_one_user_block(renderer_of: RenderersOf, family: str) -> None:
    renderer = renderer_of(family)
    prompt = renderer.start([user("add")])
    results = [RESULT, {**RESULT, "tool_call_id": "abc123deg", "content": "42"}]
    extended = renderer.extend(prompt, sample(renderer, "x<|im_end|>"), [assistant("x", CALL, OTHER), *results])
    delta = renderer.text(extended.token_ids[extended.kept :], special=True)
    assert delta == (
        "\n<|im_start|>user\n<tool_response>\n41\n</tool_response>\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_are_printed_in_the_first_prompt_and_never_again(renderer_of: RenderersOf) -> None:
    for family in ("chatml", "headers"):
        renderer = renderer_of(family)
        prompt = renderer.start([user("add")], [TOOL])
        assert renderer.text(prompt.token_ids, special=True).count('"name": "add"') == 1
        extended = renderer.extend(prompt, sample(renderer, f"x{FAMILIES[family].stop}"), [user("go")])
        assert renderer.text(extended.token_ids, special=True).count('"name": "add"') == 1


def test_json_quoted_tool_results_are_recognised(renderer_of: RenderersOf) -> None:
    renderer = renderer_of("headers")
    prompt = renderer.start([user("add")])
    result = {**RESULT, "content": 'say "é"\n'}
    extended = renderer.extend(prompt, sample(renderer, "{}<|eot_id|>"), [assistant("", CALL), result])
    assert not extended.branched
    assert '"say \\"é\\"\\n"<|eot_id|>' in renderer.text(extended.token_ids, special=True)


def test_a_template_that_takes_one_call_a_turn_extends_two_results(renderer_of: RenderersOf) -> None:
    renderer = renderer_of("headers")
    prompt = renderer.start([user("add")])
    extended = renderer.extend(prompt, sample(renderer, "{}<|eot_id|>"), [assistant("", CALL, OTHER), RESULT, RESULT])
    assert not extended.branched
    assert renderer.text(extended.token_ids, special=True).count('ipython<|end_header_id|>\n\n"41"') == 2


# ---------------------------------------------------------------------- channels: a tool message needs its call


def test_a_tool_message_that_needs_its_call_starts_after_the_calls_closing_text(renderer_of: RenderersOf) -> None:
    renderer = renderer_of("channels")
    prompt = renderer.start([user("add")])
    reply = assistant("", CALL)
    generation = as_written(renderer, [user("add")], reply, "<|call|>")
    assert renderer.text(generation.token_ids, special=True).endswith('json<|message|>{"a": 1, "b": "é"}<|call|>')
    extended = renderer.extend(prompt, generation, [reply, RESULT])
    assert not extended.branched
    assert extended.token_ids == renderer.start([user("add"), reply, RESULT]).token_ids
    assert extended.token_ids[: extended.kept] == prompt.token_ids + generation.token_ids


def test_a_malformed_call_that_the_template_needs_still_extends(renderer_of: RenderersOf) -> None:
    renderer = renderer_of("channels")
    broken = {"id": "abc123def", "type": "function", "function": {"name": "", "arguments": '{"a": 1,'}}
    generation = sample(renderer, '<|channel|>commentary<|message|>{"a": 1,<|call|>')
    extended = renderer.extend(renderer.start([user("add")]), generation, [assistant("", broken), RESULT])
    assert not extended.branched
    assert renderer.text(extended.token_ids[extended.kept :], special=True).startswith("<|start|>functions.")


def test_history_turns_end_with_another_token_than_sampled_ones(renderer_of: RenderersOf) -> None:
    renderer = renderer_of("channels")
    prompt = renderer.start([user("hi")])
    extended = renderer.extend(
        prompt, sample(renderer, "<|channel|>final<|message|>yes<|return|>"), [assistant("yes"), user("go")]
    )
    added = renderer.text(extended.token_ids[len(prompt) :], special=True)
    assert added.startswith("<|channel|>final<|message|>yes<|return|><|end|><|start|>user<|message|>go")


def test_a_token_that_only_closes_a_channel_does_not_end_a_turn(renderer_of: RenderersOf) -> None:
    renderer = renderer_of("channels")
    ends = {renderer.tokenizer.convert_ids_to_tokens(i) for i in renderer.stop_ids}
    assert ends == {"<|return|>"}


def test_the_templates_end_of_turn_is_a_stop_id_beside_the_end_of_sequence(renderer_of: RenderersOf) -> None:
    names = {
        family: {renderer_of(family).tokenizer.convert_ids_to_tokens(i) for i in renderer_of(family).stop_ids}
        for family in ("base", "headers", "model_role", "drops_tools", "inst")
    }
    assert names == {
        "base": {"<|endoftext|>", "<|im_end|>"},
        "headers": {"<|end_of_text|>", "<|eot_id|>"},
        "model_role": {"<eos>", "<end_of_turn>"},
        "drops_tools": {"<|endoftext|>", "<|end|>"},
        "inst": {"</s>"},
    }


# ---------------------------------------------------------------------- what a template wants and refuses


def test_arguments_are_text_for_a_template_that_concatenates_them(renderer_of: RenderersOf) -> None:
    renderer = renderer_of("text_arguments")
    reply = assistant("", CALL)
    text = renderer.text(renderer.start([user("add"), reply, RESULT]).token_ids, special=True)
    assert 'add\n{"a": 1, "b": "é"}<|call_end|>' in text
    generation = as_written(renderer, [user("add")], reply, "<|eos|>")
    extended = renderer.extend(renderer.start([user("add")]), generation, [reply, RESULT])
    assert extended.token_ids == renderer.start([user("add"), reply, RESULT]).token_ids


def test_arguments_given_as_json_text_are_an_object_for_other_templates(renderer_of: RenderersOf) -> None:
    renderer = renderer_of("chatml")
    as_text = {**CALL, "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}
    both = [renderer.start([user("add"), assistant("", call), RESULT]).token_ids for call in (CALL, as_text)]
    assert both[0] == both[1]


@pytest.mark.parametrize(
    "opening",
    [[{"role": "system", "content": "s"}, user("x")], [user("x"), assistant("", CALL), RESULT], [user("x"), user("y")]],
)
def test_what_a_template_refuses_is_a_data_error(renderer_of: RenderersOf, opening: list[Any]) -> None:
    with pytest.raises(DataError, match="refuses"):
        renderer_of("model_role").start(opening)


def test_a_refused_tool_message_is_a_data_error_when_extended(renderer_of: RenderersOf) -> None:
    renderer = renderer_of("model_role")
    prompt = renderer.start([user("x")])
    with pytest.raises(DataError, match="refuses"):
        renderer.extend(prompt, sample(renderer, "y<end_of_turn>"), [assistant("y", CALL), RESULT])


@pytest.mark.parametrize("content", ["a long result that is nowhere else", "a", "", "end"])
def test_a_template_that_drops_the_message_branches(renderer_of: RenderersOf, content: str) -> None:
    renderer = renderer_of("drops_tools")
    prompt = renderer.start([user("x")])
    extended = renderer.extend(prompt, sample(renderer, "y<|end|>"), [assistant("y"), {**RESULT, "content": content}])
    assert extended.branched
    assert extended.kept == 0
    assert not renderer.extend(prompt, sample(renderer, "y<|end|>"), [user(content)]).branched


def test_a_delta_that_depends_on_history_branches_into_a_whole_rendering(renderer_of: RenderersOf) -> None:
    renderer = renderer_of("numbered")
    prompt = renderer.start([user("x")])
    extended = renderer.extend(prompt, sample(renderer, "y<|im_end|>"), [user("z")])
    assert extended.branched
    assert extended.token_ids == renderer.start([user("x"), assistant("y"), user("z")]).token_ids
    assert "user 3\nz" in renderer.text(extended.token_ids)


def test_a_tool_delta_that_depends_on_history_branches_too() -> None:
    family = FAMILIES["chatml"]
    counted = family.source.replace("'\\n<tool_response>\\n'", "'\\n<tool_response ' + (loop.index | string) + '>\\n'")
    assert counted != family.source
    renderer = Renderer(byte_tokenizer(family.specials, eos=family.eos, template=counted))
    prompt = renderer.start([user("x")])
    assert renderer.extend(prompt, sample(renderer, "y<|im_end|>"), [assistant("y"), RESULT]).branched
    assert not renderer.extend(prompt, sample(renderer, "y<|im_end|>"), [assistant("y"), user("z")]).branched


def test_an_answer_of_some_other_episode_does_not_settle_a_shape(renderer_of: RenderersOf) -> None:
    renderer = Renderer(FAMILIES["channels"].tokenizer())
    prompt = renderer.start([user("x")])
    lost = renderer.extend(
        prompt,
        sample(renderer, "y<|return|>"),
        [assistant("", CALL, {"function": {"name": "f", "arguments": {}}}), RESULT],
    )
    kept = renderer.extend(prompt, sample(renderer, "y<|call|>"), [assistant("", CALL), RESULT])
    assert (lost.branched, kept.branched) == (True, False)


# ---------------------------------------------------------------------- rule 3: templates that rewrite history


def test_append_keeps_thoughts_that_the_template_would_strip(renderer_of: RenderersOf) -> None:
    renderer = renderer_of("thinking")
    prompt = renderer.start([user("x")])
    thought = sample(renderer, "<think>\nhm\n</think>\n\nyes<|im_end|>")
    extended = renderer.extend(prompt, thought, [user("more")])
    assert not extended.branched
    assert extended.token_ids[: extended.kept] == prompt.token_ids + thought.token_ids
    assert "hm" not in renderer.text(renderer.start(extended.messages).token_ids)


def test_branch_follows_a_template_that_strips_thoughts(renderer_of: RenderersOf) -> None:
    renderer = renderer_of("thinking", history="branch")
    prompt = renderer.start([user("x")])
    thought = sample(renderer, "<think>\nhm\n</think>\n\nyes<|im_end|>")
    extended = renderer.extend(prompt, thought, [user("more")])
    assert extended.branched
    assert "hm" not in renderer.text(extended.token_ids)
    assert extended.token_ids == renderer.start([user("x"), assistant("yes"), user("more")]).token_ids


@pytest.mark.parametrize("family", ["chatml", "thinking", "headers", "model_role"])
def test_branch_extends_where_the_template_rewrites_nothing(renderer_of: RenderersOf, family: str) -> None:
    renderer, stop = renderer_of(family, history="branch"), FAMILIES[family].stop
    prompt = renderer.start([user("x")])
    for turn in range(3):
        generation = sample(renderer, f"yes {turn}{stop}")
        extended = renderer.extend(prompt, generation, [user("more")])
        assert not extended.branched, turn
        assert extended.token_ids[: extended.kept] == prompt.token_ids + generation.token_ids
        assert extended.token_ids == renderer.start(extended.messages).token_ids
        prompt = extended


def test_branch_keeps_ids_that_a_whole_rendering_would_spell_otherwise(renderer_of: RenderersOf) -> None:
    renderer = renderer_of("chatml", history="branch")
    (stop,) = renderer.tokenizer("<|im_end|>").input_ids
    spelled = (*(renderer.tokenizer(letter).input_ids[0] for letter in "an"), stop)
    generation = Generation(spelled, (0.0,) * 3, (Span(0, 0, 3),), "stop")
    prompt = renderer.start([user("x")])
    extended = renderer.extend(prompt, generation, [user("more")])
    assert extended.token_ids[len(prompt) : extended.kept] == spelled


def test_branch_keeps_another_stop_id_beside_the_templates_own(renderer_of: RenderersOf) -> None:
    renderer = renderer_of("base", history="branch")
    prompt = renderer.start([user("x")])
    for _ in range(2):
        prompt = renderer.extend(prompt, sample(renderer, "yes<|endoftext|>"), [user("more")])
        assert not prompt.branched
    assert renderer.text(prompt.token_ids, special=True).count("yes<|endoftext|><|im_end|>\n<|im_start|>user") == 2
