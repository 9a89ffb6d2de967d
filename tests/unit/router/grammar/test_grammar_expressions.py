"""Expressions that are refused before the engine sees them, and ordinary ones that pass."""

from __future__ import annotations

import time

import pytest

from text_generation_router.grammar.expressions import BadExpression, check_expression, without_anchors


@pytest.mark.parametrize(
    "expression",
    [
        "(a+)+", "(a+)+$", "(a*)*", "(a*)+", "(.*)*$", "((a+))+", "((a+)?)*", "(a|b+)*", "(b+|a)*", "(?:x?a+y*)+", "(a{2,})*",
        "(?P<name>a+)+", "(?i:a+)*", "([a-z]+)*", r"(\w+\s?)*", r"([^\]]+)+", "([[:alpha:]]+)+", "(a+?)+?", "a++", "(a+){2,}",
        r"(\p{L}+)*", "((a*)(b*))*",
    ],
)  # fmt: skip
def test_a_repetition_of_a_repetition_is_refused(expression: str) -> None:
    with pytest.raises(BadExpression, match="repeated without bound"):
        check_expression(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "", "abc", "a+b*", r"^[a-z0-9]+(?:-[a-z0-9]+)*$", r"(\d+,)*\d+", "(a+){1,3}", "([a-z]+ )*", "(ab?)+", r"\(a+\)+",
        "[(a+)]+", r"(\+\*)+", "[a+)*]+", r"(\d{1,3}\.){3}\d{1,3}", ".{0,5000}", "(a|b)*", "a{,3}", "{}", "a{x}", "(", ")",
        "[", "\\", "(?", "a|*", "[]a+]*", r"([^\\(]|\\.)*",
    ],
)  # fmt: skip
def test_ordinary_and_broken_expressions_pass(expression: str) -> None:
    check_expression(expression)


@pytest.mark.parametrize(
    "expression", ["(a{1000}){1000}", "a{20001}", "((a{30}){30}){30}", "a{9999999}", "(ab){0,10001}"]
)
def test_counted_repetitions_are_bounded_as_if_written_out(expression: str) -> None:
    with pytest.raises(BadExpression, match="places"):
        check_expression(expression)


@pytest.mark.parametrize("expression", ["a" * 4097, "(" * 4000, "(a|" * 1000])
def test_length_and_depth_are_bounded(expression: str) -> None:
    with pytest.raises(BadExpression):
        check_expression(expression)


@pytest.mark.parametrize("piece", ["a{", "[", "|", "a{1,", "\\p{", "a?"])
def test_the_scan_is_linear(piece: str) -> None:
    start = time.thread_time()
    check_expression(piece * (4096 // len(piece)))
    assert time.thread_time() - start < 0.5


@pytest.mark.parametrize(
    ("expression", "body"),
    [("^a$", "a"), ("a$", "a"), ("^a", "a"), (r"a\$", r"a\$"), (r"a\\$", r"a\\"), ("", ""), ("^", ""), ("$", ""), ("a^b$c", "a^b$c")],
)  # fmt: skip
def test_anchors_around_an_expression_are_removed(expression: str, body: str) -> None:
    assert without_anchors(expression) == body
