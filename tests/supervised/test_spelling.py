"""Which tokens of a conversation are trained, for templates of every known kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage

from agentrl import DataError, Image, Renderer
from agentrl.supervised.spelling import Speller, Spelling

from ..core.templates import FAMILIES, TOOL
from ..core.tokenizers import PADS_PER_IMAGE, FakeProcessor, byte_tokenizer

CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "add", "content": "2"},
    {"role": "assistant", "content": "a2"},
]
WITH_TOOLS = [
    name for name in FAMILIES if name in ("chatml", "thinking", "headers", "inst", "channels", "text_arguments")
]


def chat(*contents: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def spoken(spelling: Spelling, renderer: Renderer) -> list[str]:
    """The text of each run of trained tokens."""
    runs: list[list[int]] = []
    before = False
    for token, trained in zip(spelling.token_ids, spelling.trained, strict=True):
        if trained and not before:
            runs.append([])
        if trained:
            runs[-1].append(token)
        before = trained
    return [renderer.text(run, special=True) for run in runs]


def spell(name: str, messages: Sequence[dict[str, Any]], **options: Any) -> tuple[Spelling, Renderer]:
    renderer = Renderer(FAMILIES[name].tokenizer())
    return Speller(renderer).spell(messages, **options), renderer


@pytest.mark.parametrize("name", FAMILIES)
def test_every_turn_is_trained_with_the_token_that_ends_it(name: str) -> None:
    messages = chat("q1 <|im_end|> a1", "a1", "q2", "a2")
    spelling, renderer = spell(name, messages)
    family = FAMILIES[name]
    turns = spoken(spelling, renderer)
    assert turns[1] in (f"{family.header}a2{family.stop}", f"a2{family.stop}")
    if name in ("thinking", "channels"):
        assert turns[1].startswith(family.header), "the prompt of a rollout stops before it"
    assert len(turns) == 2 and "a1" in turns[0] and "q" not in "".join(turns)
    assert spelling.trained[-1]
    if name != "numbered":  # its text depends on how many messages there are
        for known in (1, 3):
            prompt = renderer.start(messages[:known]).token_ids
            assert spelling.token_ids[: len(prompt)] == prompt
            assert spelling.trained[len(prompt)] and not spelling.trained[len(prompt) - 1]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_are_trained_and_what_tools_answer_is_not(name: str) -> None:
    spelling, renderer = spell(name, TOOL_TURNS, tools=[TOOL])
    call, answer = spoken(spelling, renderer)
    assert "add" in call and '"a": 1' in call and "2" not in call
    assert renderer.special.leading(call[call.rindex("<") :] if name != "inst" else "</s>")
    assert "a2" in answer


def test_a_template_that_leaves_out_calls_is_refused() -> None:
    with pytest.raises(DataError, match="does not show the call of 'add'"):
        spell("vision", TOOL_TURNS, tools=[TOOL])


def test_TOK_06_what_a_template_strips_from_earlier_turns_is_not_trained() -> None:
    messages = chat("q1", "<think>t1</think>a1", "q2", "<think>t2</think>a2", "q3", "<think>t3</think>a3")
    spelling, renderer = spell("thinking", messages)
    assert spoken(spelling, renderer) == ["a1<|im_end|>", "a2<|im_end|>", "<think>\nt3\n</think>\n\na3<|im_end|>"]
    assert "t1" not in renderer.text(spelling.token_ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_turn_that_says_nothing_is_not_trained(name: str) -> None:
    spelling, renderer = spell(name, chat("q1", "", "q2", "yes"))
    (only,) = spoken(spelling, renderer)
    assert only.endswith(f"yes{FAMILIES[name].stop}")


def test_turns_without_weight_and_all_but_the_last_are_left_out() -> None:
    messages = chat("q1", "a1", "q2", "a2", "q3", "a3")
    messages[3]["weight"] = 0
    spelling, renderer = spell("chatml", messages)
    assert spoken(spelling, renderer) == ["a1<|im_end|>", "a3<|im_end|>"]
    spelling, renderer = spell("chatml", messages, last_only=True)
    assert spoken(spelling, renderer) == ["a3<|im_end|>"]
    messages[5]["weight"] = 0
    spelling, renderer = spell("chatml", messages)
    assert spoken(spelling, renderer) == ["a1<|im_end|>"], "nothing after the last trained token is kept"


@pytest.mark.parametrize("history", ["append", "branch"])
def test_TOK_03_one_bos_and_the_prompt_ids_of_a_rollout(history: str) -> None:
    """A tokenizer that adds BOS under a template that prints it; without a template the tokenizer's own stands once."""
    for name in ("inst", "plain_bos"):
        tokenizer = FAMILIES[name].tokenizer()
        bos = tokenizer.bos_token_id
        renderer = Renderer(tokenizer, history=history)
        spelling = Speller(renderer).spell(chat("q", "a", "q2", "a2"))
        prompt = renderer.start(chat("q")).token_ids
        assert list(spelling.token_ids).count(bos) == 1 and prompt.count(bos) == 1
        assert spelling.token_ids[: len(prompt)] == prompt
        plain = Renderer(tokenizer, chat_template="none")
        for joined in (Speller(plain).spell(chat("q", "a", "q2", "a2")), Speller(plain).plain("some text")):
            assert list(joined.token_ids).count(bos) == 1 and joined.token_ids[0] == bos and not joined.trained[0]
        assert Speller(plain).spell(chat("q", "a")).token_ids[:2] == plain.start(chat("q")).token_ids


def test_without_a_template_an_answer_ends_with_the_end_of_sequence() -> None:
    tokenizer = byte_tokenizer(("<s>", "</s>"), bos="<s>", eos="</s>", adds=("<s>",))
    renderer = Renderer(tokenizer, chat_template="none")
    spelling = Speller(renderer).spell(chat("Q: 1+1 A:", " 2"))
    assert spoken(spelling, renderer) == [" 2</s>"]
    assert renderer.text(Speller(renderer).plain("ab").token_ids, special=True) == "<s>ab</s>"


def test_TOK_04_pictures_are_expanded_in_place_and_cut_whole() -> None:
    renderer = Renderer(FakeProcessor(FAMILIES["vision"].tokenizer()))
    pictures = [Image(PILImage.new("RGB", (4, 4), color)) for color in ("red", "blue")]
    messages = [
        {"role": "user", "content": [pictures[0], "what?"]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": ["and ", pictures[1]]},
        {"role": "assistant", "content": "blue"},
    ]
    spelling = Speller(renderer).spell(messages)
    assert spoken(spelling, renderer) == ["red<|im_end|>", "blue<|im_end|>"]
    assert [slot[0] for slot in spelling.slots] == [picture.sha256 for picture in pictures]
    pad = next(iter(renderer.placeholder_ids & set(spelling.token_ids)))
    for _, start, count in spelling.slots:
        assert count == PADS_PER_IMAGE and set(spelling.token_ids[start : start + count]) == {pad}
    second = spelling.slots[1][1]
    inside = spelling.cut(second + 2)
    assert len(inside.slots) == len(inside.images) == 1 and spoken(inside, renderer) == ["red<|im_end|>"]
    assert spelling.cut(spelling.slots[0][1] + 1) == Spelling((), ())
    with pytest.raises(DataError, match="takes none"):
        spell("vision", messages)


HEADERLESS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
TWO_ENDS = (
    "{% for m in messages %}<turn>{{ m.role }}<says>{{ m.content }}"
    "{{ '<said><end>' if m.role == 'assistant' else '<end>' }}{% endfor %}"
    "{{ '<turn>assistant<says>' if add_generation_prompt }}"
)
OPEN_THOUGHT = (
    "{% for m in messages %}<turn>{{ m.role }}\n{% set x = m.content.split('</think>') %}{% if m.role == 'assistant' %}<think>"
    "{{ x[0][7:] if x|length > 1 }}</think>{{ x[-1] }}{% else %}{{ m.content }}{% endif %}<end>{% endfor %}"
    "{{ '<turn>assistant\n<think>\n' if add_generation_prompt }}"
)
ANSWERS_INSIDE = (
    "{% for m in messages %}{% if m.role != 'tool' %}<turn>{{ m.role }}\n{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>{% endfor %}{% if m.tool_calls %}"
    "{% set later = messages[loop.index0 + 1:] %}{% for t in later if t.role == 'tool' %}<answer>{{ t.content }}</answer>"
    "{% endfor %}{% endif %}{{ m.content }}{{ '<end>' if m.content or not m.tool_calls }}{% endif %}{% endfor %}"
    "{{ '<turn>assistant\n' if add_generation_prompt and messages[-1].role != 'tool' }}"
)


def spell_by(template: str, messages: Sequence[dict[str, Any]]) -> tuple[Spelling, Renderer]:
    specials = ("</s>", "<turn>", "<says>", "<said>", "<end>", "<call>", "</call>", "<answer>", "</answer>")
    tokenizer = byte_tokenizer(specials, eos="</s>" if "</s>" in template else "<end>", template=template)
    renderer = Renderer(tokenizer)
    return Speller(renderer).spell(messages), renderer


@pytest.mark.parametrize(
    ("template", "runs"),
    [
        (HEADERLESS, [" a1</s>", " a2</s>"]),
        (TWO_ENDS, ["a1<said><end>", "a2<said><end>"]),
    ],
)
def test_a_turn_is_all_that_a_rollout_would_sample(template: str, runs: list[str]) -> None:
    """The space before it where the prompt ends without one, and both tokens of an end that takes two."""
    messages = chat("q1", "a1", "q2", "a2")
    spelling, renderer = spell_by(template, messages)
    assert spoken(spelling, renderer) == runs
    for known in (1, 3):
        prompt = renderer.start(messages[:known]).token_ids
        assert spelling.token_ids[: len(prompt)] == prompt
        assert spelling.trained[len(prompt)] and not spelling.trained[len(prompt) - 1]


NO_PROMPT = "{% for m in messages %}<turn>{{ m.role }}<says>{{ m.content }}<end>{% endfor %}"
CALL_ALONE = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %}"
    "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.arguments | tojson }} add</s>{% else %} {{ m.content }}</s>"
    "{% endif %}{% elif messages[loop.index0 - 1].tool_calls %}<answer>{{ m.content }}</answer>"
    "{% else %}{{ raise_exception('answers come after calls') }}{% endif %}{% endfor %}"
)


def test_a_template_without_a_prompt_for_replies_shows_a_turn_all_the_same() -> None:
    spelling, renderer = spell_by(NO_PROMPT, chat("q1", "a1", "q2", "a2"))
    assert spoken(spelling, renderer) == ["a1<end>", "a2<end>"]
    spelling, renderer = spell_by(CALL_ALONE, TOOL_TURNS)
    assert spoken(spelling, renderer) == ['<call>{"a": 1} add</s>', " a2</s>"]


def test_a_thought_that_the_prompt_opens_begins_where_the_prompt_ends() -> None:
    messages = chat("q1", "<think>\nhm</think>a1")
    spelling, renderer = spell_by(OPEN_THOUGHT, messages)
    assert spoken(spelling, renderer) == ["hm</think>a1<end>"]
    prompt = renderer.start(messages[:1]).token_ids
    assert spelling.token_ids[: len(prompt)] == prompt and not spelling.trained[len(prompt) - 1]


@pytest.mark.parametrize("content", ["", "let me"])
def test_what_a_tool_answers_within_the_turn_that_called_it_is_not_trained(content: str) -> None:
    """Gemma 4's way; the answer is also what the call says."""
    turns = [
        TOOL_TURNS[0],
        {**TOOL_TURNS[1], "content": content},
        {**TOOL_TURNS[2], "content": '"a": 1'},
        TOOL_TURNS[3],
    ]
    spelling, renderer = spell_by(ANSWERS_INSIDE, turns)
    assert '<answer>"a": 1</answer>' in renderer.text(spelling.token_ids, special=True)
    call, *said, answer = spoken(spelling, renderer)
    assert call == '<call>add{"a": 1}</call>' and answer == "a2<end>"
    assert said == ([f"{content}<end>"] if content else [])


WORDS = st.text(st.sampled_from("ab c\n<|im_start|>assistant\n</think>é{}"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3), st.sampled_from(["chatml", "thinking", "channels"]))
def test_whatever_is_said_the_ids_are_those_of_the_whole_rendering(turns: list[tuple[str, str]], name: str) -> None:
    """The text is the rendering of the whole conversation, and there is a trained run for each turn that says anything."""
    messages = chat(*(text for turn in turns for text in turn))
    spelling, renderer = spell(name, messages)
    safe, _ = renderer.special.escape(messages)
    whole = renderer.special.encode(renderer.template.render(safe, (), reply=False))
    text = renderer.text(whole, special=True)
    assert text.startswith(renderer.text(spelling.token_ids, special=True))
    assert len(spoken(spelling, renderer)) == sum(bool(answer.strip()) for _, answer in turns)
