"""Chat templates: what they need works, what they must not do is refused in bounded time and memory."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from mlxbatch.errors import RequestError
from mlxbatch.models.chat_template import ChatTemplate
from mlxbatch.models.template_sandbox import MAX_SECONDS, BoundedEnvironment

MESSAGES: list[dict[str, object]] = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": " Hi "},
    {"role": "assistant", "content": "Yo"},
]


def render(source: str, **arguments: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, **arguments)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] | trim }}{% endfor %}",
         "<s>[system]Be <brief>.[user]Hi[assistant]Yo"),
        ("{% for m in messages if m.role != 'system' %}{{ loop.index0 }}{{ loop.last }}{% endfor %}", "0False1True"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ 'yes' if tools is none and not documents else 'no' }}", "yes"),
        ("{{ {'a': [1, 'é<'], 'b': none} | tojson }}", '{"a": [1, "é<"], "b": null}'),
        ("{{ messages | map(attribute='role') | join('|') }}", "system|user|assistant"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ (messages | length - 1) ~ messages[-1].role.upper() + '!' * 3 }}", "2ASSISTANT!!!"),
        ("{{ messages[1].content.strip().startswith('H') and 'i' in messages[1].content }}", "True"),
        ("{% macro tag(x) %}<{{ x }}>{% endmacro %}{{ tag('a') }}{{ tag('b') }}", "<a><b>"),
        ("{% for k, v in {'x': 1}.items() %}{{ k }}={{ v }}{% endfor %}{{ '%s-%d' % ('a', 2) }}", "x=1a-2"),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "013"),
        ("{% generation %}{{ messages[2].content }}{% endgeneration %}", "Yo"),
        ("{{ missing }}{{ missing is defined }}{{ '{}{}'.format(1, 'b') }}", "False1b"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
    ],
)  # fmt: skip
def test_what_templates_need(source: str, expected: str) -> None:
    assert render(source) == expected


def test_arguments_reach_the_template() -> None:
    assert render(
        "{{ enable_thinking }}{{ add_generation_prompt }}", enable_thinking=False, add_generation_prompt=False
    ) == ("FalseFalse")


def test_a_templates_own_refusal_is_passed_on() -> None:
    with pytest.raises(RequestError, match="no system role here") as caught:
        render("{{ raise_exception('no system role here') }}")
    assert (caught.value.code, caught.value.param) == ("chat_template_error", "messages")


DOUBLING = "{% set ns = namespace(x=%s) %}{% for i in range(60) %}%s{% endfor %}{{ ns.x }}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "too many steps"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}", "recursive loop"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "nested too deeply"),
        ("{{ 'a' * 10**9 }}", "repeats something"),
        ("{{ [['a' * 100000] * 1000] * 1000 }}", "repeats something|larger than"),
        (DOUBLING.replace("%s", "'a'", 1).replace("%s", "{% set ns.x = ns.x ~ ns.x %}"), "larger than"),
        (DOUBLING.replace("%s", "'a'", 1).replace("%s", "{% set ns.x = ns.x + ns.x %}"), "larger than"),
        (DOUBLING.replace("%s", "'a'", 1).replace("%s", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
         "puts out more"),
        (DOUBLING.replace("%s", "[1]", 1).replace("%s", "{% set ns.x = [ns.x, ns.x] %}"), "larger than|steps"),
        ("{{ ('a' * 1000000).replace('a', 'b' * 1000) }}", "more than"),
        ("{{ ('a' * 1000000).join(range(1000) | map('string') | list) }}", "more than|larger than"),
        ("{{ '%1000000000d' % 1 }}", "large width"),
        ("{{ '{:1000000000}'.format(1) }}", "large width"),
        ("{{ '{:{w}}'.format(1, w=1000000000) }}", "large width"),
        ("{{ 'a'.center(1000000000) }}", "reaches for the attribute 'center'"),
        ("{{ 'a' | center(1000000000) }}", "No filter named 'center'"),
        ("{{ 'a\nb' | indent(1000000000) }}", "asks indent for more"),
        ("{{ 2 ** 9999999999 }}", "too large a number"),
        ("{{ (1).to_bytes(1000000000, 'big') }}", "reaches for the attribute 'to_bytes'"),
        ("{{ lipsum(n=1000000) }}", "undefined"),
        ("{{ ''.__class__ }}", "reaches for the attribute '__class__' of a str"),
        ("{{ messages.__class__.__mro__ }}", "reaches for the attribute '__class__' of a list"),
        ("{{ messages['__class__'] }}", "reaches for the attribute '__class__'"),
        ("{{ '{0.__class__}'.format(1) }}", "reaches for the attribute '__class__'"),
        ("{{ '' | attr('__class__') }}", "No filter named 'attr'"),
        ("{{ namespace.__init__.__globals__ }}", "reaches for the attribute"),
        ("{{ raise_exception.__globals__ }}", "reaches for the attribute"),
        ("{{ messages.append(1) }}", "reaches for the attribute 'append'"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ strftime_now('%1000000000Y') }}", "odd format"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
        ("{% if %}", "Expected an expression"),
        ("x" * (1 << 21), "longer than"),
    ],
)  # fmt: skip
def test_what_no_template_may_do(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(source)
    assert MESSAGES[1] == {"role": "user", "content": " Hi "}


@pytest.mark.parametrize("grow", ["{% set ns.x = ns.x ~ ns.x %}", "{% set ns.x = ns.x * 2 %}"])
def test_memory_is_bounded(grow: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            render(DOUBLING.replace("%s", "'abcdefgh'", 1).replace("%s", grow))
        assert tracemalloc.get_traced_memory()[1] < 120 << 20
    finally:
        tracemalloc.stop()


def test_time_is_bounded_whatever_the_steps_cost() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.01  # every look at the clock finds it 10 ms later
        return now

    template = ChatTemplate("{% for i in range(9999) %}{{ i }}{% endfor %}", {}, BoundedEnvironment(clock))
    with pytest.raises(RequestError, match="too many steps"):
        template.render(MESSAGES)
    assert now < MAX_SECONDS + 1


def test_a_long_conversation_is_no_attack() -> None:
    many: list[dict[str, object]] = [{"role": "user", "content": "word " * 200}] * 2000
    source = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content | trim + '\n' }}{% endfor %}"
    started = time.monotonic()
    text = ChatTemplate(source, {}).render(many)
    assert text.count("<|user|>") == 2000
    assert time.monotonic() - started < MAX_SECONDS


def test_each_rendering_has_a_budget_of_its_own() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{{ 'abcdefgh' }}{% endfor %}", {})
    assert {len(template.render(MESSAGES)) for _ in range(7)} == {720_000}
