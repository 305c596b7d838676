"""A gcloud that plays a TPU slice of two hosts on this machine, and writes down what it was asked.

Each host is a home directory; what is copied lands there and commands run there, all hosts at
once. What the request's state is, line by line, and which trainer's run ends how, are files.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

GCLOUD = """#!{python}
import os, pathlib, re, shutil, subprocess, sys
root = pathlib.Path({root!r})
arguments = sys.argv[1:]
with open(root / "calls", "a") as calls:
    calls.write(repr(arguments) + "\\n")
if arguments[:2] == ["storage", "rsync"]:
    source, target = arguments[-2:]
    shutil.copytree(source.replace("gs://", str(root) + "/"), target, dirs_exist_ok=True)
    sys.exit()
kind, verb, name = arguments[2:5]
hosts = sorted(root.glob("host-*"))
if (kind, verb) == ("queued-resources", "create"):
    if (root / "exists").exists():
        sys.exit("ERROR: it exists already")
    (root / "exists").touch()
    for host in hosts:  # new machines, with nothing on them
        shutil.rmtree(host)
        host.mkdir()
elif (kind, verb) == ("queued-resources", "describe"):
    states = (root / "states").read_text().split()
    print(states[0])
    (root / "states").write_text("\\n".join(states[1:] or states))
elif (kind, verb) == ("queued-resources", "delete"):
    (root / "exists").unlink()
elif (kind, verb) == ("tpu-vm", "scp"):
    for host in hosts:
        target = host / arguments[5].partition(":")[2]
        if "--recurse" in arguments:
            shutil.copytree(arguments[4], target / pathlib.Path(arguments[4]).name)
        else:
            shutil.copy(arguments[4], target)
elif (kind, verb) == ("tpu-vm", "ssh"):
    command = next(a for a in arguments if a.startswith("--command=")).partition("=")[2]
    running = [
        subprocess.Popen(
            ["bash", "-c", command],
            cwd=h,
            env={{**os.environ, "HOME": str(h)}},
            start_new_session=True,
        )
        for h in hosts
    ]
    if " run " in command and (root / "break").exists():  # the connection goes, the hosts stay
        (root / "break").unlink()
        while not all((root / f"runs-{{h.name}}").exists() for h in hosts):
            pass
        for process in running:
            os.killpg(process.pid, 9)
        sys.exit(255)
    codes = [process.wait() for process in running]
    sys.exit(next((code for code in codes if code), 0))
else:
    sys.exit("unexpected: " + repr(arguments))
"""

PYTHON = """#!/usr/bin/env bash
# python3.11 -m venv .venv: an interpreter that plays the trainer
mkdir -p .venv/bin
printf '#!/bin/sh\\nexit 0\\n' >.venv/bin/pip
cp {root}/trainer .venv/bin/python
chmod +x .venv/bin/*
"""


class Cloud:
    """`trainer` is shell code in the place of `python -m manus_jax.train`; $RUN is its number."""

    def __init__(self, root: Path, states: str, trainer: str, hosts: int = 2):
        self.root = root
        for number in range(hosts):
            (root / f"host-{number}").mkdir()
        (root / "states").write_text(states)
        bin_directory = root / "bin"
        bin_directory.mkdir()
        scripts = {
            "gcloud": GCLOUD.format(python=sys.executable, root=str(root)),
            "python3.11": PYTHON.format(root=root),
            "sudo": '#!/bin/sh\nexec "$@"\n',
            "mountpoint": "#!/bin/sh\nexit 1\n",
            "gcsfuse": f'#!/bin/sh\necho "$@" >>{root}/mounted\n',
        }
        for name, text in scripts.items():
            (bin_directory / name).write_text(text)
            (bin_directory / name).chmod(0o755)
        (root / "trainer").write_text(
            f'#!/usr/bin/env bash\nhost=$(basename "$HOME")\necho started >>{root}/runs-$host\n'
            f'printf "%s\\n" "$@" >{root}/arguments-$host\nRUN=$(wc -l <{root}/runs-$host)\n'
            f'cd {root}\necho "run $RUN"\n{trainer}\n'
        )

    def environment(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k != "VLLM_API_KEY"}
        return {**kept, "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", **more}

    def calls(self) -> list[list[str]]:
        path = self.root / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [ast.literal_eval(line) for line in lines]

    def verbs(self) -> list[str]:
        """The commands by verb, without looks at the state."""
        return [call[3] for call in self.calls() if call[3] != "describe"]

    def runs(self, host: int = 0) -> int:
        path = self.root / f"runs-host-{host}"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def arguments(self, host: int = 0) -> list[str]:
        return (self.root / f"arguments-host-{host}").read_text().splitlines()


def run(command: list[str], **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload, no-any-return]
