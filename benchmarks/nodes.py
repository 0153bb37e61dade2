"""Train on two machines that are emulated on this one, and lose one of them.

    python -m benchmarks.nodes
    python -m benchmarks.nodes --megabits 100 --steps 40 --only bytes

Two network namespaces with a veth pair between them are the machines, each with two ranks: torchrun joins them by its
c10d rendezvous, Gloo moves tensors over the link. The demo's model trains on both.

bytes: the losses are those of one device; what crosses the link in a step is what the program says, but for headers.
dead: all processes of a machine are killed. cut: its link goes down. Either is noticed within the timeout of a step and
5 s, by words that name the ranks that are gone. restart: one rank is killed; all ranks of both machines start again.
elastic: the machine that is left goes on from the checkpoint with a smaller mesh, and takes the other one back when it
returns, with the losses of one device all along.

Needs root and `ip netns`; says so and does nothing where these are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MESH, SMALLER = "dp=2,tp=2", "tp=2"
LINK = "veth"  # the name of the link in each namespace
TIMEOUT_S, SLACK_S = 10, 5
PORT = 29411
CLOSE = 1e-4
ALL = ("bytes", "dead", "cut", "restart", "elastic")
PATIENCE_S = 150
# Each rank writes the bytes that its machine has sent so far, as its data for a step are asked for.
JOB = """
import dataclasses, json, os, sys, time
from pathlib import Path
sys.path.insert(0, {examples!r})
from train_gpt import job as demo

SENT = Path("/sys/class/net/{link}/statistics/tx_bytes")

def job():
    job = demo()
    def data(step):
        if int(os.environ.get("LOCAL_RANK", "0")) == 0 and SENT.exists():
            name = Path({folder!r}) / ("sent-" + os.environ["RANK"])
            with name.open("a") as file:
                file.write(json.dumps([step, int(SENT.read_text()), time.time()]) + "\\n")
        time.sleep({pause})
        return job.data(step)
    return dataclasses.replace(job, data=data, after=None)
"""


def missing() -> str | None:
    """Why two machines cannot be emulated here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        subprocess.run(["ip", "netns", "add", _name(9)], check=True, capture_output=True, timeout=20)
        subprocess.run(["ip", "netns", "del", _name(9)], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return f"`ip netns add` does not work here: {error}"
    return None


def _name(node: int) -> str:
    """The namespace of a machine; of this process alone."""
    return f"autopar{os.getpid()}n{node}"


def _ip(*words: str, node: int | None = None) -> None:
    within = [] if node is None else ["-n", _name(node)]
    subprocess.run(["ip", *within, *words], check=True, capture_output=True, timeout=20)


@contextmanager
def two_machines(megabits: float | None = None) -> Iterator[None]:
    """Two namespaces with a link; both go with the context. megabits: a second, that the link carries."""
    try:
        for node in (0, 1):
            _ip("netns", "add", _name(node))
            _ip("link", "set", "lo", "up", node=node)
        _ip("link", "add", LINK, "netns", _name(0), "type", "veth", "peer", "name", LINK, "netns", _name(1))
        for node in (0, 1):
            _ip("addr", "add", f"{address(node)}/24", "dev", LINK, node=node)
            _ip("link", "set", LINK, "up", node=node)
            if megabits is not None:
                limit = ["tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "400ms"]
                command = ["ip", "netns", "exec", _name(node), "tc", "qdisc", "add", "dev", LINK, "root", *limit]
                subprocess.run(command, check=True, capture_output=True, timeout=20)
        yield
    finally:
        for node in (0, 1):
            subprocess.run(["ip", "netns", "del", _name(node)], capture_output=True, check=False, timeout=20)


def address(node: int) -> str:
    return f"10.77.0.{node + 1}"


@dataclass(slots=True)
class Training:
    """A run over both machines. nodes: torchrun's `--nnodes`."""

    folder: Path
    steps: int
    nodes: str = "2"
    mesh: str = MESH
    restarts: int = 0
    pause: float = 0.0
    more: tuple[str, ...] = ()
    keeps_store: bool = False  # torchrun's agents keep one store; with torch 2.13 no machine can come later then
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        given = {"examples": str(ROOT / "examples"), "link": LINK, "folder": str(self.folder), "pause": self.pause}
        (self.folder / "job.py").write_text(JOB.format(**given))

    def start(self, node: int) -> None:
        """Start a machine's part of torchrun."""
        command = [
            "ip", "netns", "exec", _name(node), sys.executable, "-m", "torch.distributed.run",
            "--nnodes", self.nodes, "--nproc-per-node", "2", "--max-restarts", str(self.restarts),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address(0)}:{PORT}", "--rdzv-id", "nodes",
            "--rdzv-conf", f"is_host={int(node == 0)},last_call_timeout=3,join_timeout=120,keep_alive_interval=1",
            "--local-addr", address(node), "--monitor-interval", "0.2",
            "-m", "autopar", "run", f"{self.folder / 'job.py'}:job", "--mesh", self.mesh, "--steps", str(self.steps),
            "--losses", str(self.folder / "losses"), *self.more,
        ]  # fmt: skip
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LINK, "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(not self.keeps_store)),
        }  # fmt: skip
        out = self.said_by(node).open("ab")
        self.agents[node] = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=ROOT, env=environment, start_new_session=True
        )

    def said_by(self, node: int) -> Path:
        return self.folder / f"said-{node}"

    def kill(self, node: int) -> None:
        """Kill all processes of a machine, as a machine that is turned off would be."""
        found = subprocess.run(["ip", "netns", "pids", _name(node)], capture_output=True, text=True, check=True)
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        self.agents[node].wait()

    def ended(self, node: int, seconds: float = PATIENCE_S) -> int:
        """The exit code of a machine's part, as soon as it ends."""
        return self.agents[node].wait(timeout=seconds)

    def losses(self) -> list[float]:
        path = self.folder / "losses"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["loss"] for line in lines if line.endswith("}")]

    def wait_for(self, steps: int) -> None:
        """Wait until so many steps are done."""
        end = time.monotonic() + PATIENCE_S
        while len(self.losses()) < steps:
            if time.monotonic() > end or all(one.poll() is not None for one in self.agents.values()):
                raise TimeoutError(f"{len(self.losses())} steps of {steps} are done:\n{self.said()}")
            time.sleep(0.1)

    def said(self) -> str:
        paths = [path for path in map(self.said_by, (0, 1)) if path.exists()]
        return "".join(f"{path.name}:\n{path.read_text()[-3000:]}\n" for path in paths)

    def sent(self) -> list[float]:
        """The bytes that the machine of rank 0 sent in each step, from its first to its last."""
        rows = [json.loads(line) for line in (self.folder / "sent-0").read_text().splitlines()]
        marks = {step: count for step, count, _ in rows}
        return [marks[step + 1] - marks[step] for step in sorted(marks) if step + 1 in marks]

    def stop(self) -> None:
        for node, agent in self.agents.items():
            if agent.poll() is None:
                self.kill(node)


def one_device(steps: int) -> list[float]:
    """The losses of plain PyTorch."""
    import torch

    sys.path.insert(0, str(ROOT / "examples"))
    from train_gpt import job  # type: ignore[import-not-found]

    torch.manual_seed(0)
    task = job()
    optimizer, losses = task.make_optimizer(task.model.parameters()), []
    for step in range(steps):
        loss = task.loss_fn(task.model, *task.data(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def crossing_bytes() -> int:
    """What a machine sends over the link in a step, by the program: of each of its two ranks what the axis dp moves,
    in the ring of two ranks that Gloo makes. An all-reduce of two sends each value once."""
    import autopar

    sys.path.insert(0, str(ROOT / "examples"))
    from train_gpt import job

    task = job()
    compiled = autopar.compile(task.model, MESH, loss_fn=task.loss_fn, batch=task.batch, **task.step)
    rows = [row for row in compiled.collectives if row.axis == "dp"]
    assert {row.op for row in rows} <= {"all_reduce", "all_reduce_start"}, rows
    return 2 * sum(row.bytes * row.times for row in rows)


def far(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


# -- what is tried ----------------------------------------------------------------------------------------------------


def measure_bytes(folder: Path, steps: int) -> dict[str, float]:
    """Train on both machines: how far losses are from one device's, and the bytes of a step beside the program's."""
    training = Training(folder, steps)
    try:
        for node in (0, 1):
            training.start(node)
        codes = [training.ended(node) for node in (0, 1)]
        if codes != [0, 0]:
            raise RuntimeError(f"exit codes {codes}:\n{training.said()}")
    finally:
        training.stop()
    sent = sorted(training.sent()[1:])  # the first step compiles what is left, and compares replicas
    return {
        "losses apart by": far(training.losses(), one_device(steps)),
        "bytes a step": sent[len(sent) // 2],
        "bytes by the program": crossing_bytes(),
    }


def lose(folder: Path, how: str) -> dict[str, float | str]:
    """Lose the second machine in the middle: the seconds until the first has ended, and what it said."""
    training = Training(folder, 100_000, pause=0.05, more=("--timeout", str(TIMEOUT_S)))
    try:
        for node in (0, 1):
            training.start(node)
        training.wait_for(5)
        since = time.monotonic()
        if how == "dead":
            training.kill(1)
        else:
            _ip("link", "set", LINK, "down", node=1)
        found = None
        while found is None and training.agents[0].poll() is None and time.monotonic() - since < PATIENCE_S:
            found = re.search(r"rank \d+(?: \([^)]*\))? lost its peers.*\n.*", training.said_by(0).read_text())
            time.sleep(0.1)
        noticed = time.monotonic() - since
        code = training.ended(0)
        return {
            "seconds to the words": noticed, "seconds to the end": time.monotonic() - since, "exit code": code,
            "said": found.group(0)[:400] if found else training.said()[-6000:],
        }  # fmt: skip
    finally:
        training.stop()


def restart(folder: Path, steps: int) -> dict[str, float]:
    """Kill one rank of the second machine: all ranks of both start again, in the store of those before them."""
    training = Training(
        folder, steps, restarts=3, pause=0.1, keeps_store=True,
        more=("--timeout", str(TIMEOUT_S), "--checkpoint", str(folder / "run"), "--every", "2"),
    )  # fmt: skip
    try:
        for node in (0, 1):
            training.start(node)
        training.wait_for(steps // 3)
        since = time.monotonic()
        found = subprocess.run(["ip", "netns", "pids", _name(1)], capture_output=True, text=True, check=True)
        ranks = [pid for pid in map(int, found.stdout.split()) if "autopar" in _command(pid)[2:4]]
        os.kill(ranks[-1], signal.SIGKILL)
        training.wait_for(steps)
        codes = [training.ended(node) for node in (0, 1)]
        if codes != [0, 0]:
            raise RuntimeError(f"exit codes {codes}:\n{training.said()}")
    finally:
        training.stop()
    starts = training.said_by(0).read_text().count("mesh dp=2,tp=2: ")
    return {
        "losses apart by": far(training.losses(), one_device(steps)), "starts": starts,
        "seconds from the kill to the end": time.monotonic() - since,
    }  # fmt: skip


def _command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def elastic(folder: Path, steps: int) -> dict[str, float]:
    """Lose the second machine, go on with the first, take the second one back."""
    training = Training(
        folder, steps, nodes="1:2", mesh=f"{MESH}|{SMALLER}", restarts=5, pause=0.2,
        more=("--timeout", str(TIMEOUT_S), "--checkpoint", str(folder / "run"), "--every", "2"),
    )  # fmt: skip
    try:
        for node in (0, 1):
            training.start(node)
        training.wait_for(steps // 5)
        training.kill(1)
        training.wait_for(2 * steps // 5 + 2)
        alone = len(training.losses())
        training.start(1)
        try:
            codes = [training.ended(node) for node in (0, 1)]
        except subprocess.TimeoutExpired:
            codes = []
        if codes != [0, 0]:
            raise RuntimeError(f"exit codes {codes} after {len(training.losses())} steps:\n{training.said()}")
    finally:
        training.stop()
    meshes = re.findall(r"^mesh (\S+): ", training.said_by(0).read_text(), re.M)
    return {
        "losses apart by": far(training.losses(), one_device(steps)), "steps before the return": alone,
        "meshes": " ".join(meshes),
    }  # type: ignore[dict-item]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=ALL)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--megabits", type=float, help="of the link, a second")
    asked = parser.parse_args()
    why = missing()
    if why is not None:
        print(f"SKIPPED: {why}", flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="autopar-nodes-") as name:
        for what in ALL if asked.only is None else (asked.only,):
            folder = Path(name) / what
            with two_machines(asked.megabits):
                if what == "bytes":
                    found: dict[str, float | str] = {**measure_bytes(folder, asked.steps)}
                elif what in ("elastic", "restart"):
                    found = {**(elastic if what == "elastic" else restart)(folder, 3 * asked.steps)}
                else:
                    found = lose(folder, what)
            print(what, json.dumps(found, indent=2), flush=True)


if __name__ == "__main__":
    main()
