"""A place for one run of a coding agent: its own home and working directory. No process outlives the run."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

TIMEOUT_S = 600
NOTE = "The word is kumquat-4711.\n"
DEAD_PROXY = "http://127.0.0.1:9"  # for what an agent asks of the internet; nothing listens there


class AgentPlace:
    """`home` has the agent's settings, and `directory` is where it works; `note` is a file in it that holds NOTE."""

    def __init__(self, root: Path) -> None:
        self.home, self.directory = root / "home", root / "work"
        self.home.mkdir()
        self.directory.mkdir()
        self.note = self.directory / "note.txt"
        self.note.write_text(NOTE)

    def write_settings(self, name: str, text: str) -> Path:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def run(self, command: list[str | Path], env: dict[str, str] | None = None, proxy: str | None = DEAD_PROXY) -> str:
        """Run an agent to its end, and return its stdout. Fails if the agent fails or takes TIMEOUT_S."""
        returned, printed, errors = self.run_any(command, env, proxy)
        assert returned == 0, f"{printed}\n{errors}"
        return printed

    def run_any(
        self, command: list[str | Path], env: dict[str, str] | None = None, proxy: str | None = DEAD_PROXY
    ) -> tuple[int, str, str]:
        """Run an agent to its end. Returns its exit status, stdout and stderr. Fails if it takes TIMEOUT_S.

        Afterwards no process that the agent started is left, not even one that has left its process group.
        """
        inherited = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        if proxy is not None:
            inherited |= {"HTTPS_PROXY": proxy, "NO_PROXY": "127.0.0.1"}
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=self.directory,
            env=inherited | {"HOME": str(self.home)} | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            printed, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self._kill_detached()
            process.wait()
        return process.returncode, printed, errors

    def _kill_detached(self) -> None:
        """Kill the processes whose HOME is this one."""
        own = f"HOME={self.home}".encode()
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if own in environ.read_bytes().split(b"\0"):
                    os.kill(int(environ.parent.name), signal.SIGKILL)
