"""Launch files: they pass their linters, say what they need, and use flags, keys and extras that are there."""

import json
import os
import re
import subprocess
import sys
import sysconfig
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
def test_a_launch_file_is_short_and_names_what_it_needs(path):
    lines = path.read_text().splitlines()
    assert len(lines) < 40
    header = [line for line in lines[:12] if line.startswith("#")]
    assert any("Needs" in line for line in header)


def test_shell_scripts_pass_shellcheck():
    assert len(SCRIPTS) >= 4
    checked = linted("shellcheck", *SCRIPTS, ROOT / ".ci" / "run")
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_passes_hadolint_and_installs_an_extra_that_is_there(path):
    checked = linted("hadolint", path)
    assert checked.returncode == 0, checked.stdout
    text = path.read_text()
    (extra,) = re.findall(r'pip install .*"\.\[(\w+)\]"', text)
    assert f'"{extra}": [' in (ROOT / "setup.py").read_text() and path.name == f"{extra}.Dockerfile"
    sources = [word for line in re.findall("^COPY (.*) .*$", text, re.MULTILINE) for word in line.split()]
    assert sources and all((ROOT / source).exists() for source in sources)
    # What setup.py reads must be in the image.
    assert {"setup.py", "README.md", "LICENSE", "recjax"} <= {*sources}


def test_the_jobset_is_one_and_its_numbers_and_names_agree():
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
def test_configs_and_keys_that_a_launch_file_names_are_there(path):
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
def test_the_local_one_trains_in_two_processes_of_two_devices(tmp_path):
    options = ["training.steps=1", "evaluation.every=0", "evaluation.problems=4", "mesh.fsdp=4", "mesh.data=1"]
    done = local_processes(tmp_path, *options)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1


@pytest.mark.campaign
def test_a_process_that_fails_ends_the_local_one(tmp_path):
    done = local_processes(tmp_path, "model.remat=some")
    assert done.returncode == 1 and "model.remat = 'some'" in done.stderr
