"""`nanovllm chat` and `generate --chat` on the built-in model, from a pipe and at a terminal."""

import io
import json
import os
import platform
import pty
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_formats import SAID, write_chat_model
from tiny_models import write_tiny_model, write_tiny_tokenizer
from waiting import LIMIT_S, wait_until

from nanovllm import LLM, SamplingParams
from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli.console import DIM, PLAIN, Conversation, MessageReader, chat_request, print_answers
from nanovllm.errors import RequestError
from nanovllm.models.retrieval_model import HELP, build_retrieval_model

ROOT = Path(__file__).parents[3]
ENGINE = ["--device", "cpu", "--max-model-len", "4096", "--num-kvcache-blocks", "20"]
pytestmark = pytest.mark.usefixtures("cache_directory")
GREEDY = SamplingParams(temperature=0, max_tokens=64)
READ = "0" if platform.machine() == "x86_64" else "63"  # the number of the system call


@pytest.fixture(scope="module")
def llm(cache_directory: Path) -> Iterator[LLM]:
    with LLM(str(build_retrieval_model()), device="cpu", max_model_len=400, num_kvcache_blocks=20) as engine:
        yield engine


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command with this text (or bytes) in a pipe: its exit status, stdout and stderr."""

    def run_command(text: str | bytes, *argv: str) -> tuple[int, str, str]:
        content = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "ascii"))
        status = cli.main([argv[0], "--model", "demo", *ENGINE, *argv[1:]])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_command


# -- from a pipe -------------------------------------------------------------------------------------------------


def test_chat_from_a_pipe_answers_each_line_and_keeps_the_history(run: Run, cache_directory: Path) -> None:
    status, out, err = run("Das Wort ist Überfluß 😀.\n\nWhat is it?\r\nDas Wort ist\n", "chat")
    assert status == 0
    assert out == f"{HELP}\n{HELP}\n Überfluß 😀.\n"
    assert ">>>" not in out + err and "/help" not in err
    assert err.count("prompt tokens") == 3 and "context 1" in err
    assert (cache_directory / "nanovllm").is_dir()


@pytest.mark.gpu
@pytest.mark.alone
def test_chat_on_a_gpu_answers_as_on_a_cpu(run: Run) -> None:
    status, out, _ = run("The passkey is q7m2x9kd.\nThe passkey is\n", "chat", "--device", "cuda")
    assert (status, out) == (0, f"{HELP}\n q7m2x9kd.\n")


def test_chat_turns_are_served_from_the_prefix_cache(run: Run) -> None:
    lines = [f"{number:x}" for number in random.Random(0).sample(range(2**40), 150)]
    text = "\n".join([*lines, "The passkey is q7m2x9kd.", *lines[::-1], "The passkey is "])
    status, out, err = run(f'"""\n{text}"""\nThe passkey is\n', "chat")
    assert (status, out) == (0, "q7m2x9kd.\n q7m2x9kd.\n")
    first, second = (line for line in err.splitlines() if "prompt tokens" in line)
    assert "(0 cached)" in first
    num_cached = int(second.partition("(")[2].partition(" cached)")[0].replace(",", ""))
    num_first = int(first.partition(" prompt")[0].rpartition(" ")[2].replace(",", ""))
    assert num_first > 2048 and num_cached == num_first // 256 * 256  # every whole block of the first turn


def test_chat_system_prompt_is_there_and_stays_after_a_reset(run: Run) -> None:
    messages = "The passkey is\nThe colour is blue.\nThe colour is\n/reset\nThe passkey is\nThe colour is\n"
    status, out, err = run(messages, "chat", "--system", "The passkey is 4711.")
    assert status == 0 and "Started a new conversation." in err
    assert out.splitlines() == [" 4711.", HELP, " blue.", " 4711.", HELP]


def test_chat_messages_of_several_lines_and_commands(run: Run) -> None:
    messages = '"""The passkey is 4711.\nThe colour is blue."""\n/help\nThe colour\n/exit\nThe passkey is\n'
    status, out, err = run(messages, "chat")
    assert status == 0 and out.splitlines() == [HELP, " is blue."]
    assert "/reset" in err and "a message of several lines" in err


def test_chat_reads_documents_before_the_first_question_and_once(run: Run, tmp_path: Path) -> None:
    (tmp_path / "ship.txt").write_bytes("Der Kapitän heißt Haddock.".encode("latin-1"))
    (tmp_path / "two words.txt").write_text("The passkey is 4711.")
    messages = f"Der Kapitän\n/file {tmp_path / 'two words.txt'}\nThe passkey\n/reset\nThe passkey\nDer Kapitän\n"
    status, out, err = run(messages, "chat", "--document", str(tmp_path / "ship.txt"))
    assert status == 0 and "two words.txt: 20 characters. Ask about it." in err
    assert out.splitlines() == [" heißt Haddock.", " is 4711.", HELP, " heißt Haddock."]
    status, _, err = run("/file\n", "chat")
    assert status == 2 and "/file needs the path of a document" in err
    status, _, err = run(f"/file {tmp_path}/none.txt\n", "chat")
    assert status == 2 and "none.txt: No such file" in err
    for path in ("~nosuchuser/x.txt", "a\0b"):  # these ended the chat with a traceback
        status, _, err = run(f"/file {path}\n", "chat")
        assert status == 2 and "is not a path" in err
    status, _, err = run("", "chat", "--document", "-")
    assert status == 2 and "document -: give a file; stdin is for --prompt-file" in err


def test_chat_second_question_about_a_document_is_served_from_the_prefix_cache(run: Run, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(
        "\n".join(f"{number} is a number." for number in range(100)) + "\nThe end is here."
    )
    status, out, err = run("The end\nThe end\n/reset\nThe end is\n", "chat", "--document", str(tmp_path / "log.txt"))
    assert status == 0 and out.splitlines() == [" is here.", " is here.", " here."]
    cached = [
        int(re.findall(r"\(([\d,]+) cached", line)[0].replace(",", "")) for line in err.splitlines() if "cached" in line
    ]
    assert cached[0] == 0 and cached[1] >= 1536 and cached[2] >= 1536


def test_generate_answers_about_documents_through_the_chat_template(run: Run, tmp_path: Path) -> None:
    for name, text in (("a.txt", "The captain is Haddock."), ("b.txt", "The passkey is 4711.")):
        (tmp_path / name).write_text(text)
    documents = [word for name in ("a.txt", "b.txt") for word in ("--document", str(tmp_path / name))]
    status, out, err = run("", "generate", *documents, "--prompt", "The captain", "--system", "Be brief.")
    assert (status, out) == (0, " is Haddock.\n") and "finish reason: stop" in err
    status, _, err = run("", "generate", "--document", str(tmp_path), "--prompt", "x")
    assert status == 2 and "Is a directory" in err


def test_context_of_a_long_document_has_room_for_it(tmp_path: Path) -> None:
    """Without --max-model-len, the chosen context may be shorter than the document."""
    model = str(build_retrieval_model())
    assert cli._context_for(model, "x" * 50_000, None) == 50_000 + cli.ANSWER_ROOM


def test_chat_from_a_pipe_refuses_a_bad_message_and_exits_2(run: Run) -> None:
    for text, message in (
        ("/rest\n", "/rest is not a command; /help lists the commands"),
        ('Hi\n"""\nabc\n', 'begins with """ is not closed; end it with """'),
        (b"Hi\na\xff\n", "line 2 of stdin is not UTF-8 text"),
        (f"{'x' * 5000}\n", "with this message the conversation has 5,"),
    ):
        status, _, err = run(text, "chat")
        assert status == 2 and f"nanovllm: error: {message}" in err.replace("the message that ", "")


def test_model_without_tokenizer_or_template_is_refused_before_its_weights_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: `chat` and `generate` loaded all weights first, and `serve` started without a word."""
    write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    generate = ["generate", "--prompt", "Hi"]
    batch = ["batch", "--input", "rows.jsonl", "--output", "out"]
    for command in (["chat"], generate, [*generate, "--chat"], ["serve"], batch):
        for model in (str(tmp_path), "qwen3-0.6b"):
            assert cli.main([*command, "--model", model, "--device", "cpu"]) == 2
            err = capsys.readouterr().err
            assert f"model '{model}' has no tokenizer" in err and "add the files of the model's tokenizer" in err
            assert ("--skip-tokenizer-init" in err) == (command[0] in ("serve", "batch")), err
    write_tiny_tokenizer(tmp_path)
    jinja = tmp_path / "chat_template.jinja"
    stored = jinja.read_text()
    jinja.unlink()
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = {"name": "rag", "template": "{{ 1 }}"}
    for template, text in ((None, None), ([named], None), (5, None), (" ", None), (stored, "\n")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
        if text is not None:
            jinja.write_text(text)  # replaces the other one
        for command in (["chat"], [*generate, "--chat"]):
            assert cli.main([*command, "--model", str(tmp_path), "--device", "cpu"]) == 2
            assert "has no chat template: " in capsys.readouterr().err
    jinja.unlink()
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": [named, {"name": "default", "template": stored}]})
    )
    assert cli.main(["chat", "--model", str(tmp_path), "--device", "cpu"]) == 2
    assert "model.safetensors is truncated" in capsys.readouterr().err
    assert cli.main([*generate, "--model", str(tmp_path), "--device", "cpu"]) == 2
    assert "model.safetensors is truncated" in capsys.readouterr().err


def test_server_without_a_tokenizer_answers_token_ids_if_asked_to(tmp_path: Path) -> None:
    write_tiny_tokenizer(write_tiny_model(tmp_path))
    with LLM(tmp_path, device="cpu", num_kvcache_blocks=4, skip_tokenizer_init=True) as llm:
        assert llm.tokenizer is None
        assert llm.generate([[1, 2, 3]], use_tqdm=False)[0]["text"] is None


# -- where the context ends --------------------------------------------------------------------------------------


def test_conversation_message_that_does_not_fit_is_refused_and_nothing_is_lost(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(llm, GREEDY, None, stoppable=False)
    conversation.answer("The passkey is 4711.")
    before = list(conversation.messages)
    with pytest.raises(RequestError, match=r"has \d+ tokens .* only 400 fit\. .* shorter one, start .* with /reset"):
        conversation.answer("x" * 400)
    assert conversation.messages == before
    conversation.answer("The passkey is")
    assert capsys.readouterr().out == f"{HELP}\n 4711.\n"


def test_conversation_answer_that_fills_the_context_says_so(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(llm, SamplingParams(temperature=0, max_tokens=None), None, stoppable=False)
    conversation.answer("abcdefgh " * 30)
    captured = capsys.readouterr()
    assert "context 400 of 400" in captured.err
    assert "the context is full" in captured.err and "--max-model-len above 400" in captured.err
    assert captured.out.startswith("abcdefgh abcd")


def test_conversation_larger_than_the_cache_names_the_cache() -> None:
    pool = {"enable_cpu_offload": True, "num_gpu_blocks": 2, "num_cpu_blocks": 1, "kvcache_block_size": 256}
    for options, remedy in (({"num_kvcache_blocks": 1}, "num_kvcache_blocks"), (pool, "num_cpu_blocks")):
        with LLM(str(build_retrieval_model()), device="cpu", max_model_len=4096, **options) as engine:
            conversation = Conversation(engine, GREEDY, None, stoppable=False)
            conversation.answer("A short line.")
            with pytest.raises(RequestError, match=f"257 fit.*with more {remedy}"):
                conversation.answer("x" * 256)


# -- at a terminal -----------------------------------------------------------------------------------------------


class Terminal:
    """`nanovllm chat` with a pseudo-terminal for its stdin; stdout and stderr together come through a pipe."""

    def __init__(self, device: str = "cpu") -> None:
        self._keyboard, slave = pty.openpty()
        flags = f"--model demo --device {device} --max-model-len 40000 --max-tokens 30000"
        argv = [sys.executable, "-m", "nanovllm", "chat", *flags.split()]
        pipes = {"stdin": slave, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(argv, cwd=ROOT, **pipes)
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._keyboard, text.encode())

    def wait_for(self, text: str) -> None:
        """Read until `text` is shown, and forget all up to it."""
        assert self.process.stdout is not None
        while text not in self.shown:
            piece = self.process.stdout.read1()  # type: ignore[attr-defined]
            assert piece, f"{text!r} never came after {self.shown!r}"
            self.shown += piece.decode(errors="replace")
        self.shown = self.shown.partition(text)[2]

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def interrupt_at_the_prompt(self) -> None:
        """Ctrl-C once it reads, as a person would press it: Python may notice one that comes just before only when the
        read is over.
        """
        system_call = Path(f"/proc/{self.process.pid}/syscall")
        wait_until(lambda: system_call.read_text().split()[:2] == [READ, "0x0"])
        self.interrupt()

    def end(self) -> int:
        try:
            return self.process.wait(timeout=LIMIT_S)
        finally:
            self.process.kill()
            os.close(self._keyboard)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.alone])])
def test_chat_ctrl_c_stops_the_answer_and_ctrl_d_ends_the_program(device: str) -> None:
    terminal = Terminal(device)
    terminal.wait_for(">>> ")
    terminal.type("The passkey is q7m2x9kd.\n")
    terminal.wait_for("finish reason: stop")
    terminal.wait_for(">>> ")
    terminal.type("one two three one two three\n")  # goes on like this for 30,000 tokens
    terminal.wait_for("one two three one two three")
    terminal.interrupt()
    terminal.wait_for("finish reason: abort")
    terminal.wait_for(">>> ")
    terminal.type("The passkey is\n")
    terminal.wait_for(" q7m2x9kd.")
    terminal.wait_for(">>> ")
    terminal.type("\x04")  # Ctrl-D
    assert terminal.end() == 0


def test_reader_takes_pasted_lines_as_one_message() -> None:
    """Bug: each line of a pasted text was a message, and got an answer."""
    code = "from nanovllm.entrypoints.cli.console import MessageReader as R; r = R(); print([r.read(), r.read()])"
    keyboard, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "PYTHONPATH": str(ROOT)}
    reader = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    shown = b""
    while b">>> " not in shown:
        shown += os.read(keyboard, 4096)
    assert b"\x1b[?2004h" in shown  # asks the terminal to mark what is pasted
    os.write(keyboard, b"\x1b[200~first\nsecond\n  third\x1b[201~\nnext\n")
    with suppress(OSError):  # Linux reports the end of a terminal's other side as an error
        while piece := os.read(keyboard, 4096):
            shown += piece
    os.close(keyboard)
    assert reader.wait(timeout=LIMIT_S) == 0
    assert b"['first\\nsecond\\n  third', 'next']" in shown


@pytest.mark.slow
def test_chat_ctrl_c_twice_at_the_prompt_ends_the_program() -> None:
    terminal = Terminal()
    terminal.wait_for(">>> ")
    terminal.interrupt_at_the_prompt()
    terminal.wait_for("To end the program, press Ctrl-C again, press Ctrl-D or type /exit.")
    terminal.wait_for(">>> ")
    terminal.type("/nonsense\n")
    terminal.wait_for("/nonsense is not a command")  # and it goes on
    terminal.wait_for(">>> ")
    terminal.interrupt_at_the_prompt()
    terminal.wait_for(">>> ")
    terminal.interrupt_at_the_prompt()
    assert terminal.end() == 130


def test_conversation_stopped_before_its_answer_begins_is_as_it_was(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(llm, GREEDY, "The passkey is 4711.", stoppable=True)
    step, interrupts = llm.step, iter([True])

    def interrupted_step() -> Any:
        if next(interrupts, False):
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm, "step", interrupted_step)
    before = list(conversation.messages)
    conversation.answer("The passkey is")
    assert conversation.messages == before and llm.is_finished()
    conversation.answer("The passkey is")
    assert conversation.messages[-1] == {"role": "assistant", "content": " 4711."}


def test_conversation_answer_that_failed_is_not_kept(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(llm, GREEDY, None, stoppable=False)
    output = llm.generate("Hi", GREEDY, use_tqdm=False)[0]
    failed = output | {"error": "NaN", "finish_reason": "error", "ttft_s": None, "tpot_s": None}
    monkeypatch.setattr("nanovllm.entrypoints.cli.console.stream_answer", lambda *args, **options: failed)
    conversation.answer("Hi")
    assert conversation.messages == []
    assert "finish reason: error" in (err := capsys.readouterr().err) and "the request failed: NaN" in err


def test_generate_answer_that_failed_exits_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the exit status was 0."""

    def fail(llm: LLM, *args: Any) -> Any:
        output = llm.generate("Hi", GREEDY, use_tqdm=False)[0]
        return output | {"error": "NaN", "finish_reason": "error"}

    monkeypatch.setattr(cli, "stream_answer", fail)
    status, _, err = run("", "generate", "--prompt", "Hi")
    assert status == 1 and "nanovllm: the request failed: NaN" in err


def test_conversation_stopped_in_a_pipe_raises(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Conversation(llm, GREEDY, None, stoppable=False).answer("Hi")
    monkeypatch.undo()
    while not llm.is_finished():
        llm.step()


def test_reader_lines_keep_their_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    content = b'a \n  """b\n\n c\n  """\n"""d"""\n""""""\nlast'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    reader = MessageReader()
    assert list(iter(reader.read, None)) == ["a ", "b\n\n c\n  ", "d", "", "last"]


def test_reader_typed_line_that_is_not_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a terminal the conversation then goes on, so this must not be another error."""
    stdin = io.TextIOWrapper(io.BytesIO(b"abc\xff\n"), "utf-8")
    monkeypatch.setattr(stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(RequestError, match="line 1 of stdin is not UTF-8 text"):
        MessageReader().read()


# -- generate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt-oss", "gemma4", "qwen3"])
def test_reasoning_is_on_stderr_and_not_in_the_history(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: an answer of gpt-oss was shown as "analysisI think 1.assistantfinalIt rains."."""
    said = SAID[name]["text"]
    directory = write_chat_model(build_retrieval_model(), tmp_path / "model", name)
    with LLM(str(directory), device="cpu", max_model_len=2048, num_kvcache_blocks=8) as llm:
        conversation = Conversation(llm, GREEDY, None, stoppable=False)
        for turn in range(2):
            conversation.answer(said)
            captured = capsys.readouterr()
            assert captured.out == "It rains.\n" and "Reasoning:\nI think 1.\n\n" in captured.err
            assert conversation.messages[-1] == {"role": "assistant", "content": "It rains."}
            assert len(conversation.messages) == 2 * turn + 2
        prompt, params = chat_request(llm, [{"role": "user", "content": said}], GREEDY)
        print_answers(llm, prompt, replace(params, n=2))
        assert capsys.readouterr().out == "[1]\nIt rains.\n[2]\nIt rains.\n"

        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        monkeypatch.delenv("NO_COLOR", raising=False)
        num_tokens = len(llm.text.encode_prompt(said.partition("I think")[0], add_special_tokens=False))
        conversation = Conversation(llm, GREEDY.with_max_tokens(num_tokens), None, stoppable=False)
        conversation.answer(said)  # ends in the reasoning
        captured = capsys.readouterr()
        assert captured.out == "\n" and f"{DIM}Reasoning:\n{PLAIN}" in captured.err
        assert conversation.messages[-1] == {"role": "assistant", "content": ""}


def test_generate_several_answers_are_numbered(run: Run) -> None:
    """B: `--n 3` was an ambiguous option."""
    flags = ["--prompt", "The passkey is 4711.\nThe passkey", "--n", "2", "--stop", "\n"]
    status, out, err = run("", "generate", *flags)
    assert (status, out) == (0, "[1]\n is 4711.\n[2]\n is 4711.\n")
    assert err.count("finish reason: stop") == 2
    assert run("", "generate", *flags, "--n", "0")[0] == 2


def test_generate_answers_match_a_regex_or_a_schema(run: Run, tmp_path: Path) -> None:
    status, out, _ = run("", "generate", "--prompt", "abc", "--regex", "[0-9]{3}x")
    assert status == 0 and re.fullmatch(r"\d{3}x\n", out)
    schema = '{"enum": ["yes", "no"]}'
    (tmp_path / "schema.json").write_text(schema)
    for path, stdin in ((str(tmp_path / "schema.json"), ""), ("-", schema)):
        status, out, _ = run(stdin, "generate", "--prompt", "abc", "--schema", path)
        assert status == 0 and json.loads(out) in ("yes", "no")
    for flags, message in (
        (["--regex", "[0-9"], "structured_outputs.regex cannot be used"),
        (["--schema", "no/such/file"], "--schema no/such/file: No such file"),
        (["--schema", "-"], "structured_outputs.json"),
    ):
        status, _, err = run("{", "generate", "--prompt", "abc", *flags)
        assert status == 2 and message in err


def test_generate_chat_applies_the_template(run: Run) -> None:
    status, out, _ = run("", "generate", "--chat", "--prompt", "What is the passkey?")
    assert (status, out) == (0, f"{HELP}\n")
    flags = ["--system", "The passkey is 4711.", "--prompt", "The passkey is"]
    assert run("", "generate", "--chat", *flags)[:2] == (0, " 4711.\n")


def test_byte_order_mark_is_not_part_of_a_prompt(run: Run, tmp_path: Path) -> None:
    """Regression: the model got it as a token, and a schema that begins with it was not JSON."""
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfThe passkey is 4711. The passkey is")
    (tmp_path / "schema.json").write_bytes(b'\xef\xbb\xbf{"const": 4711}')
    plain = run("The passkey is 4711. The passkey is", "generate", "--prompt-file", "-")
    assert run("", "generate", "--prompt-file", str(tmp_path / "prompt.txt"))[:2] == plain[:2]
    assert run("\ufeffHi\n", "chat")[:2] == run("Hi\n", "chat")[:2]
    status, out, _ = run("Hi", "generate", "--prompt-file", "-", "--schema", str(tmp_path / "schema.json"))
    assert (status, out.strip()) == (0, "4711")


def test_generate_prompt_file_dash_reads_stdin(run: Run) -> None:
    """M7: "No such file or directory"."""
    text = "Größe: 7 €\nGröße: "
    assert run(text, "generate", "--prompt-file", "-", "--stop", "\n", "--max-tokens", "9")[:2] == (0, "7 €\n")
    latin = text.replace("€", "Fuß").encode("latin-1")
    assert run(latin, "generate", "--prompt-file", "-", "--stop", "\n", "--max-tokens", "9")[:2] == (0, "7 Fuß\n")
    status, _, err = run(b"a\x00b", "generate", "--prompt-file", "-")
    assert status == 2 and "--prompt-file - is not text" in err


def test_demo_model_is_a_directory_of_that_name_or_is_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory goes first, as it does before presets and hub names."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    status, _, err = run("", "generate", "--prompt", "x")
    assert status == 2 and "the built-in model cannot be written" in err and "set XDG_CACHE_HOME" in err
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    status, _, err = run("", "generate", "--prompt", "x")
    assert status == 2 and "no config.json in demo" in err
