"""Docs, docstrings and help texts are plain technical English: short sentences, the field's own words."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from docs.pages.sentences import DRAWN, cells, drawn, helps, pages, read, sentences, words

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("atoll", "hostos", "protos", "strategies", "compressors", "coordinator", "worker", "lab")
MAX_WORDS, MAX_READ = 40, 35  # of a docstring or a decision; of what users read
SCREENS_LINES, LINE_CHARS = 100, 110  # of a decision
BANNED = re.compile(r"\b(?:foretold|put off|set aside|is said again|is asked anew|Doorkeeping)\b")
DIALECT = re.compile(
    r"\b(?:foretold|hearkens?|henceforth|thereupon|wherewith|therein|thereof|whilst|ought|drag|toll|"
    r"is to be had|owe[ds]?|lanes?|bidden|heretofore|whosoever|albeit|behooves?|thus far|hitherto)\b"
)
"""Words of our own, or of books, that a user's page, a help text or an error does without."""
DWINDLING = re.compile(r"\b(?:told|whom|said)\b")

STILL = {"README.md": 1, "atoll": 2, "coordinator": 35, "docs": 27, "protos": 2, "strategies": 2, "worker": 9}
"""Uses of told, whom and said in docs and docstrings, by package: they may only shrink."""


_helps = cache(helps)


@cache
def _texts() -> tuple[tuple[str, str], ...]:
    return tuple(_read())


def _read() -> Iterator[tuple[str, str]]:
    """Pages, docstrings, and help texts of options, each with where it stands."""
    for path in pages(decisions=True):
        yield str(path.relative_to(ROOT)), path.read_text()
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "_pb2" in path.name:
                continue
            where = str(path.relative_to(ROOT))
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    yield where, ast.get_docstring(node) or ""
                elif isinstance(node, ast.keyword) and node.arg == "help":
                    yield where, node.value.value if isinstance(node.value, ast.Constant) else ""


def test_no_sentence_has_more_than_forty_words() -> None:
    found = [f"{where}: {s}" for where, text in _texts() for s in sentences(text) if words(s) > MAX_WORDS]
    assert found == []


def _errors() -> Iterator[tuple[str, str]]:
    """Messages of errors as far as the source has them: what is put in is one word."""
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "_pb2" in path.name:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", message(node.exc.args[0])


def message(node: ast.expr) -> str:
    """A string or an f-string of the source, "" for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(message(part) or "X" for part in node.values)
    return ""


def _user_pages() -> list[tuple[str, str]]:
    return [(where, text) for where, text in _texts() if where.endswith(".md") and "decisions/" not in where]


def test_no_sentence_that_users_read_has_more_than_thirty_five_words() -> None:
    read_by_users = _user_pages()
    found = [
        f"{where}: {s}"
        for where, text in [*read_by_users, *_helps()]
        for s in sentences(text)
        if words(s) > MAX_READ
    ]
    assert len(read_by_users) > 30
    assert len(_helps()) > 200
    assert found == []


def test_no_clause_of_an_error_has_more_than_thirty_five_words() -> None:
    errors = list(_errors())
    assert len(errors) > 500
    found = [
        f"{where}: {text}" for where, text in errors for s in re.split(r"[.;:] ", text) if words(s) > MAX_READ
    ]
    assert found == []


def test_a_long_sentence_and_a_long_error_are_seen() -> None:
    long = "word " * (MAX_READ + 1) + "end."
    assert [words(s) > MAX_READ for s in sentences(f"{long} A short one.")] == [True, False]
    node = ast.parse('f"{a} is {b!r}; give another"', mode="eval").body
    assert message(node) == "X is X; give another"


def test_users_meet_no_word_of_a_dialect() -> None:
    texts = [*_user_pages(), *_helps(), *_errors()]
    found = [f"{w}: {m[0]}" for w, text in texts for m in DIALECT.finditer(text)]
    assert found == []


def test_words_that_readers_would_have_to_learn_do_not_come_back() -> None:
    assert [where for where, text in _texts() if BANNED.search(text)] == []


def test_words_that_dwindle_do_not_come_back() -> None:
    uses = Counter(where.split("/")[0] for where, text in _texts() for _ in DWINDLING.findall(text))
    assert {part: n for part, n in uses.items() if n > STILL.get(part, 0)} == {}


def test_a_decision_fits_two_screens() -> None:
    lines = {
        path.name[:3]: sum(max(1, -(-len(line) // LINE_CHARS)) for line in path.read_text().splitlines())
        for path in (ROOT / "docs" / "decisions").glob("*.md")
    }
    assert {decision: n for decision, n in lines.items() if n > SCREENS_LINES} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("One. Two (three) is.", [1, 3]),
        ("- an item\n- another `a b c` item\n\n    code that is none", [2, 3]),
        ("| a | table |\n# heading\nand a\nsentence", [3]),
    ],
)
def test_sentences_are_found_in_paragraphs_and_items(text: str, found: list[int]) -> None:
    assert [words(s) for s in sentences(text)] == found


def test_a_draw_repeats_by_its_seed_and_holds_each_sentence_once() -> None:
    first = drawn(2026)
    assert first == drawn(2026)
    assert first != drawn(2027)
    assert len({sentence for _, sentence in first}) == DRAWN
    assert set(first) <= set(read())


def test_a_draw_has_pages_helps_and_cells_of_prose() -> None:
    where = {w for w, _ in read()}
    assert {
        "README.md",
        "SECURITY.md",
        "docs/cli.md",
        "atoll dev local_steps",
        "atoll-worker join min_batch",
    } <= where
    assert cells("| a name | 2.5 s |\n|---|---|\n| its meaning in some words | `x` |") == [
        "its meaning in some words"
    ]
