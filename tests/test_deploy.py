"""The examples in deploy/ fit the schemas of those who will read them, and hold no secret."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
SCHEMA = Path(__file__).parent / "schemas" / "trainjob.json"
KUBERNETES = "1.30"

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (pip install -r requirements.txt)")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed (pip install -r requirements.txt)")


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def check(document: dict[str, Any]) -> None:
    """Raises if it does not fit the schema of its kind; fields that are not in it are refused."""
    if document["kind"] == "TrainJob":
        jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(document)
        return
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    validator.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_fits_its_schema(path: Path) -> None:
    found = documents(path)
    assert found
    for document in found:
        check(document)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_misspelt_field_would_be_refused(path: Path) -> None:
    for document in documents(path):
        document["spec"]["numNode"] = 2
        with pytest.raises(Exception, match="numNode"):
            check(document)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_number_where_text_belongs_would_be_refused(path: Path) -> None:
    """What a value of an environment variable without quotes would be."""
    refused = 0
    for document in documents(path):
        for container in containers(document):
            container["env"][0]["value"] = 1
            with pytest.raises(Exception, match="is not of type"):
                check(document)
            refused += 1
    assert refused == 1


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document["spec"]
    if document["kind"] == "TrainJob":
        return [spec["trainer"]]
    return spec["template"]["spec"]["containers"] if document["kind"] == "Job" else []


@pytest.mark.parametrize("path", sorted((DEPLOY / "kubernetes").glob("indexed-job*.yaml")), ids=lambda path: path.name)
def test_the_ranks_of_an_indexed_job_meet_at_its_first_pod(path: Path) -> None:
    service, job = documents(path)
    name, spec = job["metadata"]["name"], job["spec"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    options = dict(word[2:].split("=") for word in spec["template"]["spec"]["containers"][0]["command"] if "=" in word)
    assert options["master-addr"] == f"{name}-0.{service['metadata']['name']}"
    assert int(options["nnodes"]) == spec["completions"] == spec["parallelism"]
    assert options["node-rank"] == "$(JOB_COMPLETION_INDEX)" and spec["completionMode"] == "Indexed"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_variable_of_ours_is_one_that_is_read(path: Path) -> None:
    code = (ROOT / "src" / "hora" / "rendezvous" / "environment.py").read_text()
    names = [entry["name"] for document in documents(path) for each in containers(document) for entry in each["env"]]
    assert names
    for name in names:
        assert f'"{name}"' in code


def test_no_file_holds_a_token() -> None:
    files = [path for path in DEPLOY.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert not re.search(r"HORA_TOKEN\b|[0-9a-f]{32}|kind: Secret", path.read_text()), path


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_the_slurm_script_makes_its_token_file_for_its_owner_alone(tmp_path: Path) -> None:
    """Run with an srun that says what it was given."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text('#!/bin/sh\necho "$HORA_TOKEN_FILE $HORA_STRATEGY $OMP_NUM_THREADS: $*"\n')
    srun.chmod(0o755)
    env = {"PATH": f"{srun.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "SLURM_CPUS_PER_TASK": "2"}
    for _ in range(2):
        done = subprocess.run(
            ["bash", DEPLOY / "slurm" / "train.sbatch"], env=env, capture_output=True, text=True, timeout=30
        )
        token = tmp_path / ".hora-token"
        assert done.stdout == f"{token} ring 2: --kill-on-bad-exit=1 python examples/digits.py\n", done.stderr
        assert token.stat().st_mode & 0o777 == 0o600 and token.stat().st_size == 32
