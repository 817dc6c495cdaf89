"""Launch files: they pass their linters, say what they need, and use flags, keys and extras that are there."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import jsonschema
import pytest
import yaml

from recjax.config import KEYS
from tests.training.tiny_run import TINY

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
DOCKERFILES = sorted(LAUNCH.glob("*.Dockerfile"))
JOBSET = LAUNCH / "kubernetes_jobset.yaml"


def closed(required: list[str], **properties) -> dict:
    """A JSON schema of an object with these fields and no others."""
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
COUNT = {"type": "integer", "minimum": 1}
TEXTS = {"type": "array", "items": {"type": "string"}}
CONTAINER = closed(
    ["name", "image"],
    name=NAME,
    image={"type": "string"},
    args=TEXTS,
    command=TEXTS,
    ports={"type": "array", "items": closed(["containerPort"], containerPort=COUNT)},
    resources=closed([], limits={"type": "object", "additionalProperties": COUNT}),
    volumeMounts={"type": "array", "items": closed(["name", "mountPath"], name=NAME, mountPath={"type": "string"})},
)
VOLUME = closed(
    ["name"],
    name=NAME,
    persistentVolumeClaim=closed(["claimName"], claimName=NAME),
    emptyDir=closed([], medium={"enum": ["", "Memory"]}),
)
POD = closed(
    ["restartPolicy", "containers"],
    restartPolicy={"enum": ["Never", "OnFailure"]},
    terminationGracePeriodSeconds=COUNT,
    containers={"type": "array", "items": CONTAINER, "minItems": 1},
    volumes={"type": "array", "items": VOLUME},
)
JOB = closed(
    ["template"],
    parallelism=COUNT,
    completions=COUNT,
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    backoffLimit={"type": "integer", "minimum": 0},
    template=closed(["spec"], spec=POD),
)
# What jobset.x-k8s.io/v1alpha2, batch/v1 and v1 document of the fields that the file uses.
JOBSET_SCHEMA = closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=closed(["name"], name=NAME),
    spec=closed(
        ["replicatedJobs"],
        failurePolicy=closed([], maxRestarts={"type": "integer", "minimum": 0}),
        replicatedJobs={
            "type": "array",
            "minItems": 1,
            "items": closed(["name", "template"], name=NAME, replicas=COUNT, template=closed(["spec"], spec=JOB)),
        },
    ),
)


def linted(tool: str, *arguments) -> subprocess.CompletedProcess:
    """A linter of the test extra, run."""
    tool = Path(sysconfig.get_path("scripts")) / tool
    return subprocess.run([tool, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("path", [*SCRIPTS, *DOCKERFILES, JOBSET], ids=lambda path: path.name)
def test_launch_files_are_short_and_name_their_needs(path):
    lines = path.read_text().splitlines()
    assert len(lines) < 40
    header = [line for line in lines[:12] if line.startswith("#")]
    assert any("Needs" in line for line in header)


def test_shell_scripts_pass_shellcheck():
    assert len(SCRIPTS) >= 4
    checked = linted("shellcheck", *SCRIPTS, ROOT / ".ci" / "run")
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_pass_hadolint_and_install_real_extras(path):
    checked = linted("hadolint", path)
    assert checked.returncode == 0, checked.stdout
    text = path.read_text()
    (extra,) = re.findall(r'pip install .*"\.\[(\w+)\]"', text)
    assert f'"{extra}": [' in (ROOT / "setup.py").read_text() and path.name == f"{extra}.Dockerfile"
    sources = [word for line in re.findall("^COPY (.*) .*$", text, re.MULTILINE) for word in line.split()]
    assert sources and all((ROOT / source).exists() for source in sources)
    # What setup.py reads must be in the image.
    assert {"setup.py", "README.md", "LICENSE", "recjax"} <= {*sources}


def test_the_jobsets_numbers_and_names_agree():
    jobset = yaml.safe_load(JOBSET.read_text())
    jsonschema.validate(jobset, JOBSET_SCHEMA)
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    flags = dict(zip(container["args"][0:8:2], container["args"][1:8:2], strict=True))
    assert spec["parallelism"] == spec["completions"] == int(flags["--processes"])
    assert flags["--process_id"] == "$(JOB_COMPLETION_INDEX)" and spec["completionMode"] == "Indexed"
    host, port = flags["--coordinator"].split(":")
    assert host == f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"
    assert int(port) == container["ports"][0]["containerPort"]
    assert (ROOT / flags["--config"]).is_file()
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("slurm_gpu.sh", "#SBATCH --signal=TERM@"),
        ("kubernetes_jobset.yaml", "terminationGracePeriodSeconds: "),
        ("cuda.Dockerfile", "--stop-timeout "),
        ("tpu.Dockerfile", "--stop-timeout "),
    ],
)
def test_a_stopped_run_has_time_for_a_checkpoint(name, key):
    """The defaults are 30 s of SLURM and Kubernetes, and 10 s of Docker."""
    text = (LAUNCH / name).read_text()
    (seconds,) = re.findall(rf"{key}(\d+)", text)
    assert int(seconds) >= 300
    # A requeued job would overwrite the log of its first start.
    assert ("--requeue" in text) == ("--open-mode=append" in text)


@pytest.mark.parametrize("fault", ["extra field", "wrong kind", "no container", "text for a number"])
def test_a_faulty_jobset_is_refused(fault):
    jobset = yaml.safe_load(JOBSET.read_text())
    spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    if fault == "extra field":
        spec["paralellism"] = 2
    elif fault == "wrong kind":
        jobset["kind"] = "Job"
    elif fault == "no container":
        spec["template"]["spec"]["containers"] = []
    else:
        spec["completions"] = "2"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(jobset, JOBSET_SCHEMA)


@pytest.mark.parametrize("path", [*SCRIPTS, JOBSET], ids=lambda path: path.name)
def test_configs_and_keys_in_launch_files_exist(path):
    text = path.read_text()
    assert all((ROOT / name).is_file() for name in re.findall(r"experiments/[\w/]+\.yaml", text))
    assert {*re.findall(r"\b(mesh\.\w+)=", text)} <= {*KEYS}


def local_processes(tmp_path, *options):
    """The local launch file, run on the tiny run with the Python that runs this."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    command = [LAUNCH / "local_processes.sh", tmp_path / "tiny.yaml", f"output={tmp_path / 'run'}", *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.campaign
def test_the_local_launch_trains_in_two_processes(tmp_path):
    options = ["training.steps=1", "evaluation.every=0", "evaluation.problems=4", "mesh.fsdp=4", "mesh.data=1"]
    done = local_processes(tmp_path, *options)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1


# Stands for Python: it chooses a port, or trains until it is asked to stop, and then takes a moment for a checkpoint.
SLOW_TO_STOP = """#!/usr/bin/env bash
if [ "$1" = -c ]; then echo 8476; exit; fi
trap 'sleep 3; touch "$FOLDER/saved${10}"; exit 143' TERM
touch "$FOLDER/started${10}"
while :; do sleep 0.05; done
"""


def test_the_local_launch_ends_after_all_checkpoints(tmp_path):
    (tmp_path / "python").write_text(SLOW_TO_STOP)
    (tmp_path / "python").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "FOLDER": str(tmp_path)}
    with subprocess.Popen([LAUNCH / "local_processes.sh", "tiny.yaml"], cwd=ROOT, env=environment) as script:
        while len([*tmp_path.glob("started*")]) < 2:
            assert script.poll() is None
            time.sleep(0.05)
        script.terminate()
        script.wait(60)
        assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"}


@pytest.mark.campaign
def test_a_process_that_fails_ends_the_local_one(tmp_path):
    done = local_processes(tmp_path, "model.remat=some")
    assert done.returncode == 1 and "model.remat = 'some'" in done.stderr
