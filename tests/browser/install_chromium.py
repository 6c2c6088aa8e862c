"""Install Chromium with apt-get, unless there is a browser already. Otherwise say what to do. For `make browser`."""

import os
import shutil
import subprocess
import sys

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ADVICE = """\
No Chromium found, and this {why}.
Install Chromium or Google Chrome so that one of these is on the PATH: {names}."""


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def main() -> int:
    if find_browser() is None:
        can_be_root = os.geteuid() == 0 or shutil.which("sudo") is not None
        if shutil.which("apt-get") is None or not can_be_root:
            why = "machine has no apt-get" if can_be_root else "user may not install it"
            print(ADVICE.format(why=why, names=", ".join(BROWSERS)), file=sys.stderr)
            return 1
        install()
    print(f"browser: {find_browser()}")
    return 0 if find_browser() else 1


def install() -> None:
    as_root = [] if os.geteuid() == 0 else ["sudo"]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", "chromium", "fonts-dejavu-core"]):
        subprocess.run([*as_root, "apt-get", "--quiet", *command], env=environment, check=True)


if __name__ == "__main__":
    sys.exit(main())
