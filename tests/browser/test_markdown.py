"""The Markdown of answers, in a browser: what it becomes, and what is drawn again while it grows."""

import json
import os
import random
import re
from typing import Any

import pytest
from page_actions import ask, ask_and_wait, attach, documents, reload, wait_for_end
from page_server import MARKDOWN, FakeServer
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

# `made` is what a text becomes when it comes at once; `grown` when it comes in pieces of `size` characters, or of
# random sizes for 0, and calls `each` with the box after every piece. `treeOf` shows where text nodes begin, too.
SCRIPT = """async ({ text, sizes }) => {
    const { MarkdownView } = await import("/page/markdown.js");
    const { AnswerView } = await import("/page/turns.js");
    let state = sizes[0] ?? 0;
    const random = limit => {
        state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
        return Math.floor(state / 2 ** 32 * limit);
    };
    const newBox = () => {
        const box = document.createElement("div");
        box.className = "markdown";
        document.getElementById("messages").append(box);
        return box;
    };
    const made = text => { const box = newBox(); new MarkdownView(box).show(text); return box; };
    const grown = (text, size, each = () => {}) => {
        const box = newBox(), view = new MarkdownView(box);
        for (let start = 0, end; start < text.length; start = end) {
            end = start + (size || 1 + random(9));
            view.append(text.slice(start, end));
            each(box, text.slice(0, end));
        }
        return box;
    };
    const treeOf = node => {
        if (node.nodeType === Node.TEXT_NODE) return JSON.stringify(node.data);
        const own = node.cloneNode();
        own.textContent = "...";
        return own.outerHTML.replace("...", [...node.childNodes].map(treeOf).join(""));
    };
    const differenceIn = (text, size) => {
        const differences = [];
        const box = grown(text, size, (box, shown) => {
            const once = made(shown);
            if (treeOf(box) !== treeOf(once)) differences.push([shown, treeOf(box), treeOf(once)]);
            once.remove();
        });
        box.remove();
        return differences.slice(0, 1);
    };
    BODY
}"""

TEXTS = {
    "all": MARKDOWN,
    "line_ends": MARKDOWN.replace("\n", "\r\n"),
    "lists": "- a\n- b\n  more\n\n  - c\n  - d\n\n- e\n1. x\n2. y\n\n3. z\n   ```\n   code\n\n   ```\nlazy\n-\n--\n---",
    "blanks": "- a\n\n\n- q\n\n**b** c\n- d\n\n  e\n\n f\n\n*g* h\n\n1\n\n2. i\n\n`j` k\n\n# l\nm\n#\n##n\n\n\to\n-\n",
    "fences": "````\n```\n``\n\n```\n````\n~~~js\n```\n~~~\n# H\n```py\nopen\n",
    "tables": "| a | b |\n|---|--:|\n| 1 | 2 |\n| 3 |\n\na | b\n- | -\n1 | \\|2\nthe | row\n- x | y\nend\n| x |\n|--",
    "formulas": "Let \\(a_i\\) be\n\\[\nx\n+ y\n\\]\n$$\n- z\n$$ and\n\n\\[ open\n- no\n\nend",
    "environments": "\\begin{align}\na &= b \\\\\n\\end{align}\n\\[ x \\]\n\\(y\\) $z$\n\\$ 1\n$$ 2 $$ 3\n$$",
    "tasks": "- [x] a\n- [ ] b\n- [",
    "code": '```js\nconst a = `b\n${c}`; /* d\ne */\n```\n```py\nx = """y\n',
    "delimiters": 'a *b **c* d** `e\n`` f` g`` __h_ i__ ~~j~ k~~ $5 to $6 x$ y [l](m "n") o](p) 2*3*4 s_n \\* ![q](r)',
    "scripts": "漢字*強*調https://a.b/c。字 שלום **עולם** [א](https://a.b/c?d=(e)) 😀`😀`\n\nhttp https://a.b, c",
    "nested": "1. a\n\n   b *c*\n   - d\n     > e\n     > f\n     ```\n     g\n     ```\n   h\n" * 2,
    "nested_tasks": "- [ ] i\n\n  j *k*\n- [x]\n  - k\n    l\n- [X] # m\n\n  n\n- [ ]\n- [y] o",
    "one_column": "a |\n--\nb | c\nd\n\n> e |\n> --\n> f |\n",
    "references": "[a] [b][c]\n\n[c]: https://example.org 'd'\n[a]: <e>\n",
    "many": "a\n\n" * 31 + "- b\n- c\n\n**d** e\n\n" * 2 + "```\n" + "f\n\n" * 20 + "```\ng",
    "quotes": "> a\n> - b\n>\n> c\nlazy\n\n> d\n>> e\n>\n\n***\n* * *\n_x_ **y\nz** `a\nb`\n    \n  text",
}


ATOMS = [
    *(
        "\n",
        "\n",
        "\n\n",
        "\r\n",
        " ",
        "  ",
        "    ",
        "\t",
        "a",
        "word ",
        "wort, ",
        "漢字",
        "é",
        "😀",
        "שלום",
        "5",
        "x^2",
    ),
    *(
        "-",
        "- ",
        "* ",
        "1. ",
        "1",
        "2) ",
        "+ ",
        "\n- ",
        "\n   - ",
        "[x] ",
        "[ ] ",
        "> ",
        ">",
        "\n> ",
        "# ",
        "#",
        "###### ",
    ),
    *(
        "*",
        "**",
        "***",
        "_",
        "__",
        "~~",
        "`",
        "``",
        "```",
        "```py\n",
        "~~~",
        "|",
        " | ",
        "---",
        "--",
        "x\n--\n",
        "* * *",
    ),
    *("| a | b |\n|---|:-:|\n", "a | b\n- | -\n", "$", "$$", "\\(", "\\)", "\\[", "\\]", "\\", "\\$", "\\begin{align}"),
    *(
        "\\end{align}",
        "[",
        "]",
        "(",
        ")",
        "[a](b)",
        "![",
        '"',
        ".",
        "!",
        "= 1",
        "<b>",
        "snake_case ",
        "https:",
        "mailto:a",
    ),
]


def run(page: Page, body: str, text: str, *sizes: int) -> Any:
    return page.evaluate(SCRIPT.replace("BODY", body), {"text": text, "sizes": sizes})


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_grows_looks_at_any_time_as_if_it_came_at_once(page: Page, name: str) -> None:
    assert run(page, "return sizes.flatMap(size => differenceIn(text, size))", TEXTS[name], 1, 2, 3, 7, 50, 0, 0) == []


@pytest.mark.parametrize(
    "text",
    [
        "a *b*\n" * 70,
        "> a\n>\n" * 70,
        "- [ ] a\n\n" + "  b\n\n" * 70,
        "- a\n" * 70 + "\n" + "7. b\n" * 70,
        "- [ ] a\n" + "  b\n" * 40 + "- c\n",
        "**a " + "b " * 1100 + "** `c",
        "[a](" + "b" * 2100 + ") *c" + "d\n" * 2100 + "e* f",
        "```\n" + "a" * 2100,
    ],
)
def test_long_text_that_grows_looks_as_if_it_came_at_once(page: Page, text: str) -> None:
    """Texts in which groups of items and lines are filled, and delimiters are too far apart to belong together."""
    assert run(page, "return sizes.flatMap(size => differenceIn(text, size))", text, 97, 31) == []


def test_random_text_that_grows_looks_as_if_it_came_at_once(page: Page) -> None:
    """Texts of a few kinds of atoms each, which together form most kinds of blocks, complete and not."""
    body = """const atoms = JSON.parse(text);
        for (let i = 0; i < 400; i += 1) {
            const chosen = Array.from({ length: 3 + random(8) }, () => atoms[random(atoms.length)]);
            const whole = Array.from({ length: 1 + random(30) }, () => chosen[random(chosen.length)]).join("");
            const [difference] = differenceIn(whole, random(3));
            if (difference) return difference;
        }
        return null;"""
    seed = 1 if os.environ.get("NANOVLLM_TEST_RANDOM", "0") == "0" else random.randrange(2**31)
    assert run(page, body, json.dumps(ATOMS), seed) is None


def test_answer_that_grows_looks_at_any_time_as_if_it_came_at_once(page: Page) -> None:
    """Thinking comes apart from the answer or within it, its tags whole or in parts."""
    answers = [
        [
            ["", "<think>"],
            ["", "\n\na *b*"],
            ["", " c\n\nd </thi"],
            ["", "nk>\n"],
            ["", "\ne *f*"],
            ["", "* </think> g"],
        ],
        [["", " "], ["", "<th"], ["", "ing> a"], ["", " b"], ["", " </think>"], ["", "c"], ["", " d"]],
        [[" ", ""], ["a *b", ""], ["* c", ""], ["", "\n"], ["", "d"], ["", " *e*"], [" f", ""], ["g", "h"]],
        [["a", ""], ["", "<think> "], ["", " b"], ["", " c"], ["d", ""], ["", "</think>"], ["e", ""], ["", "f"]],
    ]
    body = """const shownIn = ({ element }) => [...element.querySelectorAll(".thinking, .markdown")].map(box =>
            box.matches(".markdown") ? treeOf(box) : box.hidden);
        return JSON.parse(text).flatMap(pieces => {
            const view = new AnswerView(), message = { content: "" }, differences = [];
            view.start(message, 0);
            for (const [reasoning, content] of pieces) {
                view.append(content, reasoning);
                view.draw();
                const once = new AnswerView();
                once.show({ ...message }, [], null, "");
                const [seen, wanted] = [view, once].map(shownIn);
                if (JSON.stringify(seen) !== JSON.stringify(wanted)) differences.push([message, seen, wanted]);
            }
            view.end("");
            return differences;
        });"""
    assert run(page, body, json.dumps(answers)) == []


UNITS = {  # what an answer begins with, and what follows again and again
    "paragraphs": ("", "Some *text* with `code` in a paragraph.\n\n"),
    "lines": ("", "A line with *text* of a long paragraph.\n"),
    "list": ("", "- an **item** of `a` list\n"),
    "item": ("1. A\n\n", "   Some *text* in an item.\n\n   - another\n"),
    "quote": ("", "> Some *text* in a quote.\n>\n"),
    "table": ("| a | b |\n|---|---|\n", "| a | **b** |\n"),
    "code": ("```\n", "a line of code\n"),
    "python": ("```python\n", "def f(x): return 'a'  # line\n"),
    "formulas": ("", "Let $x_i$ be \\(\\frac{1}{2}\\).\n\n"),
    "no_spaces": ("", "漢字漢字漢字漢字漢字漢字漢字漢字。\n"),
    "thinking": ("<think>\n", "Some *text* that is thought.\n\n"),
    "after_thinking": ("<think>\n" + "a\n\n" * 200 + "</think>\n\n", "Some *text*.\n\n"),
}


@pytest.mark.parametrize("name", UNITS)
def test_work_of_a_draw_does_not_depend_on_the_length_of_the_answer(page: Page, name: str) -> None:
    """Regression: each draw compared and searched the whole text, and made the whole last block anew."""
    start, unit = UNITS[name]
    early, late = run(
        page,
        """let numCharacters = 0;
        const undo = [], count = (prototype, names, lengthOf) => names.forEach(name => {
            const own = prototype[name];
            prototype[name] = function (...all) { numCharacters += lengthOf(this, all); return own.apply(this, all); };
            undo.push(() => { prototype[name] = own; });
        });
        const read = ["startsWith", "endsWith", "includes", "indexOf", "search", "split", "trim", "trimStart"];
        const view = new AnswerView(), changes = new MutationObserver(() => {}), work = [];
        changes.observe(view.element, { childList: true, characterData: true, subtree: true });
        view.start({ content: "", reasoning: "" }, 0);
        count(String.prototype, read, ({ length }) => length);
        count(RegExp.prototype, ["exec"], (pattern, [{ length }]) => length);
        for (let start = 0; start < text.length; start += 10) {
            numCharacters = 0;
            view.append(text.slice(start, start + 10), "");
            view.draw();
            const numNodes = ({ addedNodes, removedNodes }) => 1 + addedNodes.length + removedNodes.length;
            work.push([numCharacters, changes.takeRecords().reduce((sum, record) => sum + numNodes(record), 0)]);
        }
        undo.forEach(each => each());
        view.end("");
        return [[3 / 8, 1 / 2], [7 / 8, 1]].map(range => {
            const part = work.slice(...range.map(share => share * work.length));
            return [0, 1].map(i => Math.max(...part.map(each => each[i])));
        });""",
        start + unit * 400,
    )
    for most_early, most_late in zip(early, late, strict=True):  # characters that are read, and nodes that are changed
        assert 0 < most_late <= 1.2 * most_early
    assert late[0] < 2000


@pytest.mark.parametrize(
    "unit", ["Some text.\n\n", "- a\n\n# b\n\n", "- a\n", "1. a\n\n", "  a\n\n", "> a\n>\n", "a\n", "a = 1\n\n"]
)
def test_what_is_added_has_few_siblings(page: Page, unit: str) -> None:
    """Regression: a browser laid out all blocks of an answer for each token, or all lines of a long program."""
    text = ("```python\n" if "=" in unit else "- a\n\n") + unit * 500
    most = run(
        page, "return Math.max(...[...grown(text, 500).querySelectorAll('*')].map(e => e.children.length));", text
    )
    assert most <= 64  # 32 in a group; or the first 32, and the groups that follow


def test_selection_in_a_finished_block_survives_what_follows(server: FakeServer, page: Page) -> None:
    """Regression: every 80 ms the answer was made anew, and took the selection with it."""
    server.may_go_on.clear()
    ask(page, "show markdown")
    heading = page.locator(".answer .text h4")
    expect(page.locator(".answer .text p")).to_contain_text("Some")
    heading.evaluate("element => getSelection().selectAllChildren(element)")
    heading.evaluate("element => { element.wasSelected = true; }")
    server.may_go_on.set()
    wait_for_end(page)
    expect(page.locator(".answer .text pre")).to_contain_text("hello")
    assert page.evaluate("String(getSelection())") == "A heading"
    ask_and_wait(page, "one")  # which does not touch it either, though the selection is now in the text field
    assert heading.evaluate("element => element.wasSelected")


def test_selection_in_a_growing_paragraph_survives(page: Page) -> None:
    body = """const box = grown("Some *te", 1), view = new MarkdownView(box);
        view.show("Some *text*, more");
        getSelection().setBaseAndExtent(box.querySelector("p").firstChild, 2, box.querySelector("em").firstChild, 3);
        for (const piece of [" and", " more\\n", "and", " **so**", " on\\n\\n", "- a"]) view.append(piece);
        return [String(getSelection()), box.innerText];"""
    assert run(page, body, "") == ["me tex", "Some text, more and more\nand so on\n\na"]


FORMULAS = [
    r"\(\alpha_i + \beta_j\)",
    r"\[ x^2 * y * z^2 \]",
    r"$$ a_1 * _b * c_2 $$",
    r"$\{x^*y^*\}$",
    "\\[\n  x\n  + y \\\\\n  - z\n\\]",
    "$$\n1\n- 2\n$$",
    "\\begin{align}\na &= b \\\\\n1. &< c\n\\end{align}",
]


@pytest.mark.parametrize("formula", FORMULAS)
def test_formulas_become_mathml(page: Page, formula: str) -> None:
    r"""Regression: \(\alpha\) lost its delimiters, and asterisks and underscores became emphasis."""
    body = """const box = made(text), shown = [...box.querySelectorAll(".math")];
        return [box.innerText, shown.map(e => e.title), shown.map(e => e.firstElementChild.namespaceURI)];"""
    isolated = f"Let\n\n{formula}\n\nand" if "\n" in formula else f"Let **this** be {formula}, and"
    for text in (isolated, formula if "\n" in formula else f"- Let {formula} and"):
        whole, titles, names = run(page, body, text)
        assert titles == [formula] and names == ["http://www.w3.org/1998/Math/MathML"]
        assert text == formula or (whole.startswith("Let") and whole.endswith("and"))
        assert "\\" not in whole and "$" not in whole


def test_formula_looks_like_one(page: Page) -> None:
    text = r"\[ \frac{\partial f}{\partial x_i} = \begin{pmatrix} \mathbf{a} & \sqrt{2} \end{pmatrix} \text{ if } x \]"
    counts = run(
        page,
        "const box = made(text); return ['mfrac', 'msub', 'mtable', 'msqrt'].map(t => box.querySelectorAll(t).length);",
        text,
    )
    assert counts == [1, 1, 1, 1]
    height, line = run(
        page, "return [...made(text + '\\n\\nx').querySelectorAll('.display, p')].map(e => e.offsetHeight);", text
    )
    assert height > 1.5 * line


@pytest.mark.parametrize(
    "text", [r"\(\nosuchcommand{a}\)", r"\(\frac{1}\)", r"$\left( a$", r"\[ a \\", r"$$ x_{1 $$", r"\(a_1_2\)"]
)
def test_what_is_not_latex_is_shown_as_it_was_written(page: Page, text: str) -> None:
    shown = run(page, "const box = made(text); return [box.innerText, box.querySelectorAll('math').length];", text)
    assert shown == [text, 0]


def test_formula_cannot_load_or_link_or_style(page: Page) -> None:
    text = r"\(\href{https://example.org}{a}\) \(\includegraphics{https://example.org/a.png}\) \(\htmlClass{turn}{a}\)"
    assert run(page, "return made(text).querySelectorAll('[href], [src], img, .turn').length;", text) == 0


def test_money_and_brackets_are_not_formulas(page: Page) -> None:
    text = r"It costs $5 or $10, and US$3 to US$4, [1] or \[ alone, \*not\* \$5."
    body = "const box = made(text); return [box.innerText, box.querySelectorAll('.math').length];"
    assert run(page, body, text) == [r"It costs $5 or $10, and US$3 to US$4, [1] or \[ alone, *not* $5.", 0]


def test_arabic_and_hebrew_read_from_right_to_left(page: Page) -> None:
    """Regression: their paragraphs were laid out from left to right, the full stop at the wrong end."""
    hebrew = "שלום עולם."
    table = f"| {hebrew} | b |\n|---|---|\n| c | {hebrew} |"
    text = f"# {hebrew}\n\n{hebrew}\n\nEnglish.\n\n- {hebrew}\n- English\n\n> {hebrew}\n\n{table}"
    directions = run(
        page,
        """return [...made(text).querySelectorAll("h4, p, li, blockquote, th, td")].map(element =>
            [element.tagName, getComputedStyle(element).direction]);""",
        text,
    )
    assert directions == [
        *(["H4", "rtl"], ["P", "rtl"], ["P", "ltr"], ["LI", "rtl"], ["P", "rtl"], ["LI", "ltr"], ["P", "ltr"]),
        *(["BLOCKQUOTE", "rtl"], ["P", "rtl"], ["TH", "rtl"], ["TH", "ltr"], ["TD", "ltr"], ["TD", "rtl"]),
    ]
    attach(page, f"{hebrew}.txt")
    ask(page, hebrew)
    page.get_by_label("Message", exact=True).fill(hebrew)
    wait_for_end(page)
    for selector in ("#question", ".question .text", ".document-name", ".chat-name"):
        assert page.locator(selector).evaluate("element => getComputedStyle(element).direction") == "rtl"
    expect(documents(page)).to_have_count(1)


def test_comparison_of_times_is_in_view(server: FakeServer, page: Page) -> None:
    """Regression: the line below the last answer appeared below the edge, cut in half."""
    server.num_cached_tokens = 0
    ask_and_wait(page, "a\n" * 40 + "one")
    page.evaluate(
        """() => new Promise(resolve => {
            indexedDB.open("nanovllm").onsuccess = ({ target }) => {
                const stores = target.result.transaction("conversations", "readwrite");
                const conversations = stores.objectStore("conversations");
                conversations.getAll().onsuccess = ({ target: { result: [record] } }) => {
                    record.messages[1].firstMs = 1e6;  // however slow this machine is
                    conversations.put(record);
                };
                stores.oncomplete = () => { target.result.close(); resolve(); };
            };
        })"""
    )
    reload(page)
    server.num_cached_tokens = 3072
    expect(page.locator("#speed")).to_be_hidden()
    ask(page, "b\n" * 40 + "two")
    expect(page.locator("#speed")).to_have_text(re.compile("First answer: 1,000 s. Now: "))
    expect(page.locator("#speed")).to_be_in_viewport(ratio=1)


CODE = {
    "python": ('def f(x):  # why\n    """Doc\n    if"""\n    return "a" + 1', "keyword def call f comment #"),
    "js": ("const a = `b\n${c}` /* d\ne */ + null;", "keyword const string ` string b"),
    "rust": ("fn f<'a>(x: &'a str) // y", "keyword fn keyword str comment //"),
    "sql": ("SELECT a FROM b WHERE c = 'd' -- e", "keyword SELECT keyword FROM keyword WHERE string 'd' comment --"),
    "html": ('<a href="b">c</a> <!-- d\ne -->', 'keyword <a string "b" keyword >'),
    "css": (".a { color: #fff; } /* b */", "keyword color comment /*"),
    "bash": ("if true; then echo $#; fi # x", "keyword if keyword then keyword fi comment # x"),
    "diff": ("@@ 1\n+a\n-b\n c", "comment @@ 1 string +a number -b"),
    "nosuchlanguage": ("if (true) // x", ""),
}


@pytest.mark.parametrize("language", CODE)
def test_code_has_colours_and_stays_as_it_is(page: Page, language: str) -> None:
    code, parts = CODE[language]
    shown, said, grown = run(
        page,
        """const code = box => box.querySelector("code"), once = code(made(text));
        const parts = [...once.querySelectorAll(".line > [class]")].map(e =>
            `${e.className.slice(5)} ${e.textContent}`);
        return [once.innerText, parts.join(" "), code(grown(text, 1)).innerHTML === once.innerHTML];""",
        f"```{language}\n{code}\n```",
    )
    assert shown == code and grown
    at = 0
    for part in parts.split():
        at = said.find(part, at)
        assert at >= 0, said
    assert bool(said) == bool(parts)


def test_task_lists_have_boxes(page: Page) -> None:
    text = "- [x] done\n- [ ] to **do**\n- [link] no\n  - [X] nested"
    shown = run(
        page,
        """return [...made(text).querySelectorAll("li")].map(li => {
            const box = li.querySelector(":scope > input, :scope > p > input");
            return [li.innerText.split("\\n")[0].trim(), box && box.checked, box && box.disabled];
        });""",
        text,
    )
    assert shown == [["done", True, True], ["to do", False, True], ["[link] no", None, None], ["nested", True, True]]
