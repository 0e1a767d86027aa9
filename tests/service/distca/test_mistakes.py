"""Common mistakes end each command with one clear message and no traceback."""

from __future__ import annotations

import socket
import sys
import tomllib
from collections.abc import Iterator

import pytest

from core_attention import profiling
from distca import cli
from distca.apps.local.process import LocalProcess
from distca.shown_errors import EXTRAS, shown_error
from tests import ROOT
from tests.support.programs import ran_python

NODE = ("attention-node", "--control-plane=127.0.0.1:1", "--shape=1:1:8:float32")
WIDE = (*NODE[:2], "--shape=128:1:1024:float32")
PROFILE = ("profile", "--shape=1:1:8:float32")
SCHEDULE = ("schedule", "--ranks=3")
PLANE = ("control-plane", "--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0")

BROKEN = {
    "cut.json": b'{"a": [1, 2',
    "cut.pem": b"-----BEGIN CERTIFICATE-----\nMIIB",
    "cut.jsonl": b'{"text": "a"}\n{"text": ',
    "binary.toml": b"\xff\xfe\x00",
}

CASES: list[tuple[tuple[str, ...], str]] = [
    ((*PLANE, "--token-secret={here}/none"), "token_secret {here}/none cannot be used"),
    ((*PLANE, "--tls-certificate={here}/none", "--tls-key={here}/none"), "none: No such file"),
    ((*PLANE, "--tls-certificate={here}/cut.pem", "--tls-key={here}/cut.pem"), "no certificate"),
    ((*PLANE, "--state-dir={here}/cut.pem/x"), "state_dir {here}/cut.pem/x cannot be used"),
    ((*PLANE, "--state-dir=/proc/x"), "state_dir /proc/x cannot be used"),
    ((*PLANE, "--token-secret={here}/cut.jsonl"), "has mode 644"),
    ((*PLANE, "--leader-lock={here}/none/x"), "leader_lock {here}/none/x cannot be used"),
    ((*PLANE, "--address-file={here}/none/x"), "address_file {here}/none/x cannot be used"),
    (("control-plane", "--listen=127.0.0.1:{taken}"), "listen_address 127.0.0.1:{taken}"),
    ((*PLANE[:2], "--metrics-listen=127.0.0.1:{taken}"), "metrics_address 127.0.0.1:{taken}"),
    (("health", "--tls-ca={here}/none"), "none: No such file"),
    (("health", "--tls-ca={here}/cut.pem"), "holds no certificate"),
    (("health", "--address=127.0.0.1:1", "--timeout-seconds=0.2"), "no connection after"),
    (("top", "--once", "--tls-ca={here}/none"), "none: No such file"),
    (("certs", "make", "{here}/cut.pem/x"), "Not a directory"),
    (("doctor", "--skip=nonsense"), "skip is nonsense; the checks are gpu, kernels"),
    (("plan", "--lengths={here}/none"), "does not exist"),
    (("plan", "--profile={here}/cut.json"), "no cost profile"),
    (("schedule", "--output={here}/cut.pem/x"), "Not a directory"),
    (("plan", "--html={here}/cut.pem/x"), "cut.pem/x: Not a directory"),
    (("simulate", "--png={here}/dir"), "dir: Is a directory"),
    ((*PROFILE, "--output={here}/cut.pem/x"), "cut.pem/x: Not a directory"),
    ((*PROFILE, "--output={here}/dir"), "dir: Is a directory"),
    ((*PROFILE, "--output=/proc/none/x"), "/proc/none/x: No such file or directory"),
    (("local", "--data={here}/none"), "is no folder"),
    (("local", "--runs-dir={here}/cut.pem/x"), "cannot be used"),
    ((*NODE, "--buffer-limit-mib=-1"), "--buffer-limit-mib is -1; it must be 0 or more"),
    ((*WIDE, "--buffer-limit-mib=1"), "give 3934720 or more (--buffer-limit-mib 4)"),
    ((*NODE, "--device=cuda:7"), "no kernel runs on device 'cuda:7'"),
    ((*NODE, "--device=foo"), "device is 'foo'; give cpu or cuda:INDEX"),
    ((*PROFILE, "--device=cuda:300"), "device is 'cuda:300'; give cpu or cuda:INDEX"),
    (
        ("train", "--control-plane=127.0.0.1:1", "--run-dir=runs/jöb C"),
        "run_dir, which names the job, is 'jöb C'; give",
    ),
    ((*NODE, "--profile-dir={here}/cut.pem/x"), "profile_dir {here}/cut.pem/x cannot be used"),
    ((*NODE, "--server-id=-rf"), "server_id is '-rf'"),
    (("--config={here}/binary.toml", "health"), "is no TOML"),
    (("nonsense",), "No such command 'nonsense'"),
    (("local", "--nonsense"), "No such option"),
    (("local", "--trainers=0"), "trainers is 0"),
    (("local", "--nodes=0"), "nodes is 0"),
    (("local", "--hidden-size=130"), "hidden_size 130"),
    (("local", "--learning-rate=nan"), "learning_rate is nan"),
    (("local", "--mode=elsewhere"), "'elsewhere'"),
    (("train", "--run-dir=/tmp"), "DISTCA_TRAIN_CONTROL_PLANE"),
    (("control-plane", "--listen=nowhere"), "listen_address is 'nowhere'"),
    (("control-plane", "--tls-key=k.pem"), "tls_certificate"),
    ((*NODE[:2], "--shape=8:2"), "shape is '8:2'"),
    ((*SCHEDULE, "--max-deferred=0"), "max_deferred is 0"),
    ((*SCHEDULE, "--name=1f1b", "--max-deferred=1"), "zero-bubble"),
    ((*SCHEDULE, "--name=gantt"), "'gantt'"),
    (("schedule", "--ranks=0"), "n_stages is 0"),
    ((*SCHEDULE, "--name=interleaved", "--microbatches=5"), "multiple of the ranks"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A folder with files that are broken, and a port that is taken."""
    here = tmp_path_factory.mktemp("mistakes")
    for name, content in BROKEN.items():
        (here / name).write_bytes(content)
    (here / "dir").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield {"here": str(here), "taken": str(taken.getsockname()[1])}


def unwanted(*_: object, **__: object) -> None:
    """Takes minutes, of which a mistake costs none."""
    raise AssertionError("it measures, or starts processes, before it has looked at all options")


@pytest.mark.parametrize(("arguments", "said"), CASES)
def test_a_mistake_is_one_message(
    arguments: tuple[str, ...],
    said: str,
    places: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(profiling, "measure_profile", unwanted)
    monkeypatch.setattr(LocalProcess, "__init__", unwanted)
    monkeypatch.setattr(sys, "argv", ["distca", *(each.format(**places) for each in arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert end.value.code in (1, 2)
    assert said.format(**places) in shown
    assert "Traceback" not in shown


_WITHOUT_PACKAGES = """
import sys
for name in {missing}:
    sys.modules[name] = None
from distca import cli
for arguments in {commands}:
    sys.argv = ["distca", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        print("ended with", end.code, file=sys.stderr)
"""


def test_commands_say_which_extra_they_need() -> None:
    train = ["train", "--control-plane=a:1", "--run-dir=/tmp/none", "--rendezvous=file:///tmp/none"]
    commands = [list(NODE), train, ["profile", "--shape=1:1:8:float32"], ["doctor"]]
    program = _WITHOUT_PACKAGES.format(missing=sorted(EXTRAS), commands=commands)
    done = ran_python(
        program,
        env={"RANK": "0", "WORLD_SIZE": "1", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
    )
    messages = [
        line for line in done.stderr.splitlines() if line.startswith("MissingPackageError: ")
    ]
    assert len(messages) == len(commands), done.stderr
    assert all("distca[" in message for message in messages)
    assert done.stderr.count("ended with 1") == len(commands)
    assert "Traceback" not in done.stderr


def test_every_extra_that_is_named_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {extra for extras in EXTRAS.values() for extra in extras}
    assert named <= project["optional-dependencies"].keys()


def test_defects_keep_their_traceback() -> None:
    def caught(code: str) -> Exception:
        try:
            exec(code)
        except Exception as error:
            return error
        raise AssertionError("nothing was raised")

    for code in ("int('x')", "{}['x']", "import distca.nothing", "raise ValueError('not ours')"):
        assert shown_error(caught(code)) is None
    assert shown_error(caught("import nothing_at_all")) is not None
