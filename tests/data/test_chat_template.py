"""Chat templates: text and ids as transformers writes them, answers found exactly, mistakes told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.config.errors import FlagError, UserError
from megalite.data.chat_template import Chat, ChatTemplate, UnstableTemplateError, load_chat
from megalite.data.segments import EOD_SIGN
from megalite.data.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from tests.data.chat_files import (
    BRACKET_TEMPLATE,
    CHATML_TEMPLATE,
    CONVERSATION,
    GENERATION_TEMPLATE,
    PLAIN_TEMPLATE,
    REASONING_TEMPLATE,
    SPECIAL,
    SYSTEM,
    UNCLOSED_TEMPLATE,
    chat_tokenizer,
)
from tests.data.corpora import sentencepiece_model

TEMPLATES = {
    "chatml": CHATML_TEMPLATE,
    "brackets": BRACKET_TEMPLATE,
    "generation": GENERATION_TEMPLATE,
    "plain": PLAIN_TEMPLATE,
}
MORE_TEMPLATES = {"reasoning": REASONING_TEMPLATE, "unclosed": UNCLOSED_TEMPLATE}


def chat_of(folder: Path, choice: str | None = None) -> Chat:
    return load_chat(choice, HuggingFaceTokenizer(str(folder)), str(folder))


def conversation(kind: str) -> list[dict[str, str]]:
    return CONVERSATION[1:] if kind == "brackets" else CONVERSATION


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(folder))


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_text_and_prompt_ids_equal_transformers(tmp_path: Path, kind: str, turns: int) -> None:
    folder = chat_tokenizer(tmp_path, TEMPLATES[kind])
    theirs, chat = transformers_tokenizer(folder), chat_of(folder)
    messages = conversation(kind)[:turns]
    for prompt in (False, True):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        signs = chat.template.render(messages, add_generation_prompt=prompt)
        assert signs == expected
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    if kind == "plain":  # blanks before a cut are encoded as in the prompt, not as in the text as a whole
        assert chat.encoder.tokenizer.detokenize(chat.prompt(messages)) == expected
    else:
        assert chat.prompt(messages) == ids


@pytest.mark.parametrize("kind", [*TEMPLATES, "reasoning", "unclosed"])
def test_what_comes_before_an_answer_is_the_prompt_that_generation_sees(tmp_path: Path, kind: str) -> None:
    chat = chat_of(chat_tokenizer(tmp_path, (TEMPLATES | MORE_TEMPLATES)[kind]))
    messages = conversation(kind)
    remaining = iter([n for n, message in enumerate(messages) if message["role"] == "assistant"])
    for sample in chat.template.samples(messages):
        before: list[int] = []
        for piece in chat.encoder.encode(sample):
            if piece.counted:
                assert before == chat.prompt(messages[: next(remaining)])
            before += piece.ids
    assert not list(remaining)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_every_answer_counts_with_its_end_of_turn_and_nothing_else(tmp_path: Path, kind: str) -> None:
    chat = chat_of(chat_tokenizer(tmp_path, TEMPLATES[kind]))
    samples = chat.template.samples(conversation(kind))
    counted = [segment.text for sample in samples for segment in sample if segment.counted]
    answers = [message["content"] for message in CONVERSATION if message["role"] == "assistant"]
    end = EOD_SIGN if kind == "plain" else "<|im_end|>"
    blank = " " if kind == "brackets" else ""
    assert counted == [blank + answer + end for answer in answers]
    eod = chat.encoder.tokenizer.eod
    assert all(chat.encoder.encode(sample)[-1].ids[-1] == eod for sample in samples)
    assert chat.end_of_turn() == eod
    assert len(samples) == (2 if kind == "plain" else 1)


def test_generation_marks_equal_transformers_assistant_mask(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path, GENERATION_TEMPLATE)
    theirs = transformers_tokenizer(folder).apply_chat_template(
        CONVERSATION, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    chat = chat_of(folder)
    pieces = chat.encoder.encode(chat.template.segments(CONVERSATION))
    ids = [i for piece in pieces for i in piece.ids]
    mask = [int(piece.counted) for piece in pieces for _ in piece.ids]
    assert ids == theirs["input_ids"][: len(ids)]
    assert mask == list(theirs["assistant_masks"])[: len(ids)]
    assert not any(list(theirs["assistant_masks"])[len(ids) :])


def test_what_follows_the_last_answer_is_left_out(tmp_path: Path) -> None:
    chat = chat_of(chat_tokenizer(tmp_path))
    more = [*CONVERSATION, {"role": "user", "content": "And now?"}]
    assert chat.template.segments(more) == chat.template.segments(CONVERSATION)


def thinking(reasoning: str, content: str) -> dict[str, str]:
    return {"role": "assistant", "content": f"<think>\n{reasoning}\n</think>\n\n{content}"}


def test_an_answer_is_trained_as_the_template_writes_it_at_its_own_turn(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path, REASONING_TEMPLATE)
    chat, theirs = chat_of(folder), transformers_tokenizer(folder)
    messages = [SYSTEM, CONVERSATION[1], thinking("2 + 2 is 4", "4."), CONVERSATION[3], thinking("why", "Yes.")]
    samples = chat.template.samples(messages)
    assert [[segment.text for segment in sample if segment.counted] for sample in samples] == [
        ["<think>\n2 + 2 is 4\n</think>\n\n4.<|im_end|>"],
        ["<think>\nwhy\n</think>\n\nYes.<|im_end|>"],
    ]
    for sample, turns in zip(samples, (3, 5), strict=True):
        text = theirs.apply_chat_template(messages[:turns], tokenize=False)
        assert "".join(segment.text for segment in sample) == text.rstrip()
    assert "2 + 2 is 4" not in "".join(segment.text for segment in samples[1])


def test_answers_that_the_template_keeps_as_they_are_share_a_sample(tmp_path: Path) -> None:
    chat = chat_of(chat_tokenizer(tmp_path, REASONING_TEMPLATE))
    call = thinking("look it up", "") | {"tool_calls": [{"name": "f", "arguments": {"x": 1}}]}
    tail = [CONVERSATION[3], call, {"role": "tool", "content": "7"}, thinking("so 7", "It's 7.")]
    messages = [CONVERSATION[1], thinking("2 + 2 is 4", "4."), *tail]
    samples = chat.template.samples(messages, tools=[{"name": "f"}])
    assert [sum(segment.counted for segment in sample) for sample in samples] == [1, 2]
    assert chat.template.render(messages, tools=[{"name": "f"}]).startswith("".join(each.text for each in samples[1]))


def test_answers_that_are_not_trained_are_context(tmp_path: Path) -> None:
    for kind, template in (TEMPLATES | MORE_TEMPLATES).items():
        template_of = chat_of(chat_tokenizer(tmp_path / kind, template)).template
        messages, first = conversation(kind), 1 if kind == "brackets" else 2
        whole, chosen = template_of.samples(messages), template_of.samples(messages, trained=[first])
        texts = [[each.text for sample in found for each in sample if each.counted] for found in (whole, chosen)]
        assert len(texts[0]) == 2
        assert texts[1] == texts[0][:1]
        with pytest.raises(UserError, match="no assistant turn is trained"):
            template_of.samples(messages, trained=[])


def test_every_answer_of_a_template_without_end_of_turn_learns_a_stop(tmp_path: Path) -> None:
    chat = chat_of(chat_tokenizer(tmp_path, UNCLOSED_TEMPLATE))
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": "1"}}]}
    messages: list[dict[str, Any]] = [CONVERSATION[1], calls, {"role": "tool", "content": "7"}, *CONVERSATION[2:]]
    answers = [segment.text for sample in chat.template.samples(messages) for segment in sample if segment.counted]
    assert answers == [
        'f\n{"x": "1"}' + EOD_SIGN,
        "\n4, of course.\n\nIsn't it?" + EOD_SIGN,
        "\n👍🏽 def add(a: int, b: int)" + EOD_SIGN,
    ]
    for sample, turns in zip(chat.template.samples(messages), (2, 4, 6), strict=True):
        assert "".join(segment.text for segment in sample) == chat.template.render(messages[:turns]) + EOD_SIGN


def test_arguments_given_as_a_string_are_written_as_the_object_that_they_are(tmp_path: Path) -> None:
    for template in (REASONING_TEMPLATE, UNCLOSED_TEMPLATE):
        chat = chat_of(chat_tokenizer(tmp_path, template))
        as_object, as_string = (
            [
                CONVERSATION[1],
                {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": arguments}]},
            ]
            for arguments in ({"x": "é", "y": [1]}, '{"x": "é", "y": [1]}')
        )
        assert chat.template.samples(as_string) == chat.template.samples(as_object)
        assert '{"x": "é", "y": [1]}' in chat.template.render(as_string)
    openai = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    chat = chat_of(chat_tokenizer(tmp_path, REASONING_TEMPLATE))
    assert '"arguments": {"x": 1}}' in chat.template.render([{"role": "assistant", "tool_calls": [openai]}])
    for broken in ("{", "[1]"):
        calls = [{"name": "f", "arguments": broken}]
        with pytest.raises(UserError, match="arguments of a tool call must be an object"):
            chat.template.render([{"role": "assistant", "content": "", "tool_calls": calls}])


def test_a_prompt_that_the_answer_does_not_continue_is_refused(tmp_path: Path) -> None:
    template = CHATML_TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    with pytest.raises(UnstableTemplateError, match="write answer 1 as the continuation of its own prompt"):
        chat_of(chat_tokenizer(tmp_path, template)).template.segments(CONVERSATION)


def test_the_templates_own_complaint_is_told(tmp_path: Path) -> None:
    chat = chat_of(chat_tokenizer(tmp_path, BRACKET_TEMPLATE))
    with pytest.raises(UserError, match="refuses it: Only user and assistant roles are supported!"):
        chat.template.segments(CONVERSATION)
    for template in ("{{ messages[0].content + 5 }}", "{{ strftime_now('%d') }}"):
        with pytest.raises(UserError, match=r"tokenizer_config\.json (fails|refuses)"):
            chat_of(chat_tokenizer(tmp_path, template)).template.render([SYSTEM])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_can_not_reach_beyond_its_sandbox(tmp_path: Path, attack: str) -> None:
    chat = chat_of(chat_tokenizer(tmp_path, "{% if true %}" + attack + "{% endif %}"))
    with pytest.raises(UserError, match="chat template"):
        chat.template.render([SYSTEM])


def test_the_built_in_template_refuses_tool_calls(tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = [CONVERSATION[1], {"role": "assistant", "tool_calls": [{"name": "f"}]}]
    with pytest.raises(UserError, match="doesn't support tool_calls"):
        chat_of(chat_tokenizer(tmp_path, None), "chatml").template.segments(messages)


@pytest.mark.parametrize("text_ends", [True, False], ids=["every turn is closed", "calls alone are"])
@pytest.mark.parametrize("content", [None, "", " "])
def test_an_answer_of_tool_calls_alone_ends_with_its_end_of_turn_once(
    tmp_path: Path, content: str | None, text_ends: bool
) -> None:
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ (message.content or '') | trim }}"
        "{% for call in message.tool_calls %}{{ call | tojson }}{% endfor %}"
        "{% if message.tool_calls or TEXT_ENDS %}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ).replace("TEXT_ENDS", str(text_ends).lower())
    chat = chat_of(chat_tokenizer(tmp_path, template))
    calls = {"role": "assistant", "content": content, "tool_calls": [{"name": "f"}]}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "q"}, calls, {"role": "tool", "content": "7"}, calls]
    for count in (2, 4):  # it is last, it has others after it
        segments = chat.template.segments(messages[:count])
        answers = [segment.text for segment in segments if segment.counted]
        assert answers == ['{"name": "f"}<|im_end|>'] * (count // 2)
        assert "".join(segment.text for segment in segments) + "\n" == chat.template.render(messages[:count])
        ids = [piece.ids for piece in chat.encoder.encode(segments) if piece.counted]
        assert all(each.count(chat.end_of_turn()) == 1 and each[-1] == chat.end_of_turn() for each in ids)


def test_the_built_in_template_is_chatml_where_the_tokenizer_knows_it(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path, None)
    built_in = chat_of(folder, "chatml")
    own = chat_of(chat_tokenizer(tmp_path / "own"))
    assert built_in.prompt(CONVERSATION[:4]) == own.prompt(CONVERSATION[:4])
    assert built_in.template.segments(CONVERSATION) == own.template.segments(CONVERSATION)


def test_the_built_in_template_ends_turns_with_eod_elsewhere(tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer(sentencepiece_model(tmp_path))
    chat = load_chat("chatml", tokenizer, None)
    pieces = chat.encoder.encode(chat.template.segments(CONVERSATION))
    answers = [piece.ids for piece in pieces if piece.counted]
    texts = [message["content"] for message in CONVERSATION if message["role"] == "assistant"]
    assert answers == [[*tokenizer.tokenize(text), tokenizer.eod] for text in texts]
    assert sum(i == tokenizer.eod for piece in pieces for i in piece.ids) == len(CONVERSATION)
    assert chat.end_of_turn() == tokenizer.eod


@pytest.mark.parametrize("own_tokens", [False, True], ids=["plain text", "tokens that aren't called special"])
def test_an_answer_ends_with_an_id_that_ordinary_text_does_not_hold(tmp_path: Path, own_tokens: bool) -> None:
    folder = chat_tokenizer(tmp_path, eos_token="<|endoftext|>", pad_token=None, bos_token=None)
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = token["content"] == "<|endoftext|>"
    if not own_tokens:  # as GPT-2's: the end of a turn is five ordinary ids
        content["added_tokens"] = content["added_tokens"][:1]
        content["model"]["vocab"] = {
            token.replace("<|im_", "im "): number for token, number in content["model"]["vocab"].items()
        }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    chat = chat_of(folder)
    text = [i for piece in chat.encoder.encode(chat.template.segments(CONVERSATION)) for i in piece.ids]
    end = SPECIAL.index("<|im_end|>" if own_tokens else "<|endoftext|>")
    assert chat.end_of_turn() == text[-1] == end
    tail = chat.encoder.ids("<|im_end|>") + ([] if own_tokens else [end])
    assert text[-len(tail) :] == tail
    marked = chat_of(chat_tokenizer(tmp_path, GENERATION_TEMPLATE.replace("<|im_end|>{% end", "{% end")))
    assert marked.end_of_turn() == SPECIAL.index("<|im_end|>")  # the tokenizer's EOD


@pytest.mark.parametrize("way", ["message.weight", "message['weight']", 'message["weight"]', "message.get('weight')"])
def test_a_template_reads_keys_not_words(way: str) -> None:
    source = "{# weight #}{% set weight = 'weight' %}the weight {{ weight == 'weight' }}"
    assert not ChatTemplate(source, "t", {}).reads("weight")
    read = ChatTemplate(source + "{% for message in messages if " + way + " %}{% endfor %}", "t", {})
    assert read.reads("weight")
    assert read.mentions("messages") and not read.mentions("tools")


def test_where_a_template_is_found(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path, "config")
    assert chat_of(folder).template.render([]) == "config"
    (folder / "chat_template.jinja").write_text("jinja")
    assert chat_of(folder).template.render([]) == "jinja"
    (tmp_path / "mine.txt").write_text("{{ eos_token }}mine")
    assert chat_of(folder, str(tmp_path / "mine.txt")).template.render([]) == "<|im_end|>mine"
    several = [{"name": "rag", "template": "x"}, {"name": "default", "template": "several"}]
    (folder / "chat_template.jinja").unlink()
    chat_tokenizer(tmp_path, None, chat_template=several)
    assert chat_of(folder).template.render([]) == "several"


def test_a_missing_or_broken_template_is_told(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path, None)
    with pytest.raises(FlagError, match=r"no chat template .*--chat-template chatml or a file"):
        chat_of(folder)
    with pytest.raises(UserError, match=r"--chat-template .*none\.jinja: No such file"):
        chat_of(folder, str(tmp_path / "none.jinja"))
    (tmp_path / "bad.jinja").write_text("a\n{% if %}")
    with pytest.raises(UserError, match=r"bad\.jinja, line 2"):
        chat_of(folder, str(tmp_path / "bad.jinja"))
    (tmp_path / "bad.json").write_text(json.dumps(["x"]))
    with pytest.raises(UserError, match=r"bad\.json: not a JSON object"):
        chat_of(folder, str(tmp_path / "bad.json"))


@pytest.mark.parametrize("content", [">", "|im_end|>", "<|im_end|>", " yes ", "n"])
def test_an_answer_that_looks_like_an_end_of_turn_ends_once(content: str) -> None:
    closes = ChatTemplate("{% for m in messages %}<{{ m.content }}<|im_end|>\n{% endfor %}", "t", {})
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": content},
    ]
    answers = [segment.text for segment in closes.segments(messages) if segment.counted]
    assert answers == [f"<{content}<|im_end|>"] * 2
    bare = ChatTemplate("{% for m in messages %}{{ m.content | trim }}\n{% endfor %}", "t", {})
    assert bare.segments(messages[:2])[-1].text == content.strip() + EOD_SIGN
