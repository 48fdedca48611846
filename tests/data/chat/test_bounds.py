"""Templates of strangers: they reach nothing, and come to an end."""

import datetime
import time

import pytest

from hsap.data.chat import bounds
from hsap.data.chat.render import Refusal, Renderer

MESSAGES = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]


def render(source, name="a test's"):
    return Renderer(source, name, {"bos_token": "<s>"}, datetime.date(2024, 7, 26))(MESSAGES, [], False, False)


ENDLESS = [
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for a in [[[[1]]]] recursive %}{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "{% set turn = 1 %}{% set environment = 1 %}{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}"
    "{% endfor %}",
]
HUGE = [
    "{{ 'a' * 10**12 }}",
    "{{ 10**12 * 'a' }}",
    "{{ [1] * 10**12 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set x = namespace(a=7) %}{% for i in range(99) %}{% set x.a = x.a * x.a %}{% endfor %}",
    "{% set x = namespace(a='aaaa') %}{% for i in range(99) %}{% set x.a = x.a ~ x.a %}{% endfor %}",
    "{% set x = namespace(a='aaaa') %}{% for i in range(99) %}{% set x.a = x.a + x.a %}{% endfor %}",
    "{% set x = namespace(a='aaaa') %}{% for i in range(99) %}{% set x.a = x.a.replace('a', x.a) %}{% endfor %}",
    "{% set x = namespace(a='aaaa') %}{% for i in range(99) %}{% set x.a = x.a | replace('a', x.a) %}{% endfor %}",
    "{% set x = namespace(a='aaaa') %}{% for i in range(99) %}{% set x.a = [x.a, x.a] | join(x.a) %}{% endfor %}",
    "{% set x = namespace(a='aaaa') %}{% for i in range(99) %}{% set x.a = x.a.join([x.a, x.a]) %}{% endfor %}",
    "{{ 'a' | center(10**12) }}",
    "{{ 'a'.ljust(10**12) }}",
    "{{ 'a' | indent(10**12, true) }}",
    "{{ '%999999999999d' % 1 }}",
    "{{ '%*d' % (999999999999, 1) }}",
    "{{ '%999999999999d' | format(1) }}",
    "{{ '{:999999999999}'.format(1) }}",
    "{{ '{:{}}'.format('a', '999999999999') }}",
    "{{ 'abc' | batch(10**12, 'x') | list }}",
    "{{ 'abc' | slice(10**12) | list }}",
]


@pytest.mark.parametrize("source", [*ENDLESS, *HUGE])
def test_a_template_without_end_is_told(source, monkeypatch):
    monkeypatch.setattr(bounds, "MOST_TURNS", 20_000)
    monkeypatch.setattr(bounds, "MOST_CHARACTERS", 1 << 20)
    start = time.process_time()
    with pytest.raises(ValueError, match=r"^chat template a test's.*: it (takes|makes|pads)") as told:
        render(source)
    assert "\n" not in str(told.value) and time.process_time() - start < 20


@pytest.mark.parametrize("source", [
    "{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__ }}", "{{ messages.append(1) }}", "{{ '{0.__class__}'.format(1) }}",
    "{{ lipsum.__globals__ }}", "{{ range(10**9) | list }}", "{% include 'x' %}", "{% import 'os' as os %}",
])  # fmt: skip
def test_a_template_reaches_nothing(source):
    try:
        text = render(source)
    except Refusal:
        return
    assert text == ""


def test_what_templates_do_is_as_jinja_does_it():
    source = (
        "{% macro say(m) %}{{ m.role ~ ':' ~ m['content'] + '!' }}{% endmacro %}{% for m in messages %}{{ say(m) }}"
        "{{ '-' * 3 }}{{ '%s %5.2f' % (loop.index, 1.5) }}{{ 'x'.rjust(3) }}{{ [1, 2] | join(',') }}"
        "{{ 'a b' | replace(' ', '_') }}{{ m.content | indent(2) }}{{ '{}'.format(loop.index0) }}{{ 2 ** 3 * 4 }}"
        "{{ [1, 2, 3] | batch(2) | list }}{% endfor %}"
    )
    one = "{}:{}!---{}  1.50  x1,2a_b{}{}32[[1, 2], [3]]"
    said = [(m["role"], m["content"], i + 1, m["content"], i) for i, m in enumerate(MESSAGES)]
    assert render(source) == "".join(one.format(*each) for each in said)


def test_turns_are_counted_for_each_conversation(monkeypatch):
    monkeypatch.setattr(bounds, "MOST_TURNS", 5)
    renderer = Renderer("{% for m in messages %}{{ m.role }}{% endfor %}", "t", {}, datetime.date(2024, 7, 26))
    for _ in range(9):
        assert renderer(MESSAGES, [], False, False) == "userassistant"
