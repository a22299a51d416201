"""The `grinf` command in a process of its own: start-up, help, refusals, exit codes, one JSON document."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from grinf.cli.app import COMMANDS

ERRORS = "__import__('grinf.errors').errors"
HEAVY = ("torch", "numpy", "pandas", "pyarrow", "transformers", "pydantic", "matplotlib", "cupy", "rich")

HARNESS = """
import sys, types
module = types.ModuleType("grinf.cli.probe")
source = sys.argv.pop(1)
exec(source, module.__dict__)
sys.modules["grinf.cli.probe"] = module
from grinf.cli import app
app.COMMANDS = {"probe": "Probe."}
sys.exit(app.main())
"""


def run(*arguments, cwd=None, env=None, stdout=subprocess.PIPE):
    """Run `grinf` with a clean environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GRINF_")} | (env or {})
    command = [sys.executable, "-m", "grinf", *arguments]
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=cwd, env=clean, check=False
    )


def probe(source, *arguments):
    """Run a command whose body is `source`."""
    command = [sys.executable, "-c", HARNESS, source, "probe", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def raising(expression):
    return f"def command():\n    raise {expression}\n"


def test_help_is_quick_and_loads_nothing_heavy():
    script = (
        "import sys, contextlib, io\nfrom grinf.cli.app import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "    code = main(['--help'])\n"
        "assert code == 0 and 'build-trie' in out.getvalue()\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert finished.stdout.strip() == "[]"
    assert min(seconds) < 0.5  # Of a processor: the clock on the wall also measures what else runs.


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_names_every_command(arguments):
    finished = run(*arguments)
    assert finished.returncode == 0
    assert finished.stderr == ""
    assert all(f"  {name} " in finished.stdout for name in COMMANDS)
    assert "grinf recall --input queries.parquet" in finished.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name):
    finished = run(name, "--help")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith(f"Usage: grinf {name}")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("benhc",), "Did you mean 'bench'?"),
        (("versoin", "--json"), "Did you mean 'version'?"),
        (("doctor", "--modl", "x"), "did you mean --model?"),
        (("doctor", "--model"), "requires an argument"),
        (("doctor", "surplus"), "unexpected extra argument"),
        (("doctor", "--dtype", "float23"), "did you mean 'float32'?"),
    ],
)
def test_a_mistyped_line_is_refused_with_the_way_out(arguments, told, tmp_path):
    finished = run(*arguments, cwd=tmp_path)
    assert finished.returncode == 2
    assert told in finished.stderr
    assert "Traceback" not in finished.stderr
    if "--json" in arguments:
        assert told in json.loads(finished.stdout)["error"]["message"]
    else:
        assert finished.stdout == ""


def test_global_flags_may_stand_anywhere():
    for arguments in (("--json", "version"), ("version", "--json"), ("version", "-q", "--json")):
        document = json.loads(run(*arguments).stdout)
        assert (document["schema"], document["status"], document["exit_code"]) == ("grinf.version/1", "ok", 0)


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_terminal_without_utf_8_is_no_reason_to_fail(flags):
    source = (
        "from grinf.cli.render import CommandResult, Table\n"
        "def command() -> CommandResult:\n"
        "    return CommandResult('probe', {'name': '阴道 é'}, [Table('é', ['名'], [['→']])])\n"
    )
    command = [sys.executable, "-c", HARNESS, source, "probe", *flags]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    finished = subprocess.run(command, capture_output=True, env=env, check=False)
    assert (finished.returncode, finished.stderr) == (0, b"")
    if flags:
        assert json.loads(finished.stdout)["data"]["name"] == "阴道 é"


def test_a_full_disk_under_stdout_is_exit_7():
    with open("/dev/full", "w") as full:
        finished = run("version", stdout=full)
    assert finished.returncode == 7
    assert finished.stderr.startswith("error: no space left")
    assert "Exception ignored" not in finished.stderr


def test_a_reader_that_stops_early_is_no_error():
    script = "import sys; from grinf.cli.app import main; sys.stdin.read(); sys.exit(main(['version']))"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    process.stdin.close()
    assert process.wait() == 0
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize("end", ["return CommandResult('probe', {}, messages=['done'])", "raise ValueError"])
@pytest.mark.parametrize("kind", ["closed", "full", "absent"])
def test_a_job_goes_on_when_nobody_can_read_what_it_says(kind, end):
    source = (
        "import typer\n"
        "from grinf.cli.render import CommandResult\n"
        "def command(context: typer.Context) -> CommandResult:\n"
        "    with context.obj.progress() as on_progress:\n"
        "        for done in range(3):\n"
        "            context.obj.info('so far')\n"
        "            context.obj.warn('look')\n"
        "            on_progress(f'stage {done}', 1, 1)\n"
        f"    {end}\n"
    )
    streams = {"closed": "2>&1 >&3 | true", "full": "2>/dev/full >&3", "absent": "2>&- >&3"}
    line = f'"$@" {streams[kind]}; exit "${{PIPESTATUS[0]}}"'
    command = ["bash", "-c", f"exec 3>&1; {line}", "bash", sys.executable, "-c", HARNESS, source, "probe"]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    expected = (1, "") if end.startswith("raise") else (0, "done\n")
    assert (finished.returncode, finished.stdout) == expected


@pytest.mark.parametrize(
    ("expression", "code", "told"),
    [
        (
            f"{ERRORS}.UsageError('what', 'why', 'fix')",
            2,
            "error: what\n  why: why\n  fix: fix\n",
        ),
        (f"{ERRORS}.ModelError('no model')", 3, "error: no model"),
        ("MemoryError()", 3, "out of memory"),
        (f"{ERRORS}.RowError('overlong', 'row 3')", 4, "row 3"),
        ("OSError(28, 'No space left on device', 'out.parquet')", 7, "no space left for out.parquet"),
        ("PermissionError(13, 'Permission denied', 'out.parquet')", 7, "cannot use out.parquet"),
        ("KeyboardInterrupt", 130, "interrupted"),
        ("ValueError('secret')", 1, "unexpected error: ValueError: secret"),
    ],
)
def test_every_failure_has_its_exit_code_and_no_traceback(expression, code, told):
    finished = probe(raising(expression))
    assert finished.returncode == code
    assert told in finished.stderr
    assert "Traceback" not in finished.stderr
    as_json = probe(raising(expression), "--json")
    document = json.loads(as_json.stdout)
    assert as_json.returncode == code
    assert (document["schema"], document["status"], document["exit_code"]) == ("grinf.probe/1", "error", code)
    assert document["error"]["message"] in as_json.stderr


@pytest.mark.parametrize("expression", ["ValueError('x')", f"{ERRORS}.UsageError('x')"])
def test_debug_shows_the_traceback(expression):
    assert "Traceback" in probe(raising(expression), "--debug").stderr


def test_a_result_decides_the_exit_code():
    source = (
        "from grinf.cli.render import CommandResult\nfrom grinf.errors import ExitCode\n"
        "def command() -> CommandResult:\n"
        "    return CommandResult('probe', {'n': 1}, exit_code=ExitCode.GATE)\n"
    )
    finished = probe(source, "--json")
    assert finished.returncode == 5
    assert json.loads(finished.stdout) == {
        "schema": "grinf.probe/1",
        "status": "gate",
        "exit_code": 5,
        "data": {"n": 1},
        "messages": [],
    }


@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_command_and_let_it_clean_up(signal_number, code, tmp_path):
    started, cleaned = tmp_path / "started", tmp_path / "cleaned"
    source = (
        "import time, pathlib\ndef command():\n    try:\n"
        f"        pathlib.Path({str(started)!r}).touch()\n        time.sleep(60)\n"
        f"    finally:\n        pathlib.Path({str(cleaned)!r}).touch()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", HARNESS, source, "probe", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal_number)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == code
    assert cleaned.exists()
    assert json.loads(out)["exit_code"] == code


def test_a_group_runs_its_own_settings_or_a_sub_command(tmp_path):
    source = (
        "import typer\nfrom grinf.cli.options import settings_command\n"
        "from grinf.cli.render import CommandResult\n"
        "from grinf.config.settings import BenchSettings\ncommand = typer.Typer()\n"
        "@command.callback(invoke_without_command=True)\n@settings_command(BenchSettings)\n"
        "def bench(settings, console):\n    'Bench.'\n    return CommandResult('bench', settings.spelled())\n"
        "@command.command()\ndef plot(run: str):\n    'Plot.'\n"
        "    return CommandResult('bench.plot', {'run': run})\n"
    )
    alone = json.loads(probe(source, "--json", "--sla", "90ms").stdout)
    assert (alone["schema"], alone["data"]["sla"]) == ("grinf.bench/1", "p99:90ms")
    below = json.loads(probe(source, "plot", "r1", "--json").stdout)
    assert (below["schema"], below["data"]) == ("grinf.bench.plot/1", {"run": "r1"})
    assert "plot" in probe(source, "--help").stdout
