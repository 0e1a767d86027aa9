"""The chart's example job in a cluster, without the operator that it is written for."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from distca.report.record import StepRecord
from distca.report.step_log import StepLog
from distca.run_folder import RunFolder
from tests.helm.chart import CHART, TOOLS
from tests.kubernetes.api import Object, pods_path
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.release import VALUES, Release, wait_until

START_SECONDS = 300.0
STEP_SECONDS = 120.0

OPTIONS = (
    "--tokens-per-rank=256",
    "--min-backward-tokens=64",
    "--layers=2",
    "--checksums",
    "--verify",
)
"""Each step is compared with local attention in float64, on the same weights: losses of two runs
drift apart, as another pool sums gradients in another order, by 1e-5 in a hundred steps."""


@dataclass
class Training:
    """A training job of two pods with a rank each."""

    release: Release
    kubelets: list[Kubelet]
    name: str

    def start(self, n_steps: int) -> None:
        """Makes the objects that the JobSet operator makes of the example's JobSet: a headless
        Service, and an indexed Job whose pods have names there."""
        api, space = self.release.api, self.release.namespace
        jobset = self._rendered(n_steps)
        (replicated,) = jobset["spec"]["replicatedJobs"]
        spec = replicated["template"]["spec"]
        (folder,) = [
            argument
            for argument in spec["template"]["spec"]["containers"][0]["args"]
            if argument.startswith("--run-dir=")
        ]
        self._run = folder.rpartition("/")[2]
        example = jobset["metadata"]["name"]
        spec["template"]["spec"]["subdomain"] = example
        selector = {"job-name": f"{example}-{replicated['name']}-0"}
        service = {
            "metadata": {"name": example},
            "spec": {
                "clusterIP": "None",
                "selector": {"batch.kubernetes.io/job-name": selector["job-name"]},
                "publishNotReadyAddresses": True,
            },
        }
        job = {"metadata": {"name": selector["job-name"]}, "spec": spec}
        api.create(f"/api/v1/namespaces/{space}/services", service)
        api.create(f"/apis/batch/v1/namespaces/{space}/jobs", job)
        self._job, self._service = selector["job-name"], example

    def _rendered(self, n_steps: int) -> Object:
        arguments = ",".join([f"--steps={n_steps}", *OPTIONS])
        done = subprocess.run(
            [
                str(TOOLS / "new" / "helm"),
                "template",
                self.release.name,
                str(CHART),
                f"--namespace={self.release.namespace}",
                f"--values={VALUES}",
                "--set=exampleJob.enabled=true",
                f"--set=exampleJob.args={{{arguments}}}",
                "--set=exampleJob.resources.requests.cpu=100m",
                "--show-only=templates/example-job/jobset.yaml",
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return dict(yaml.safe_load(done.stdout))

    def pods(self) -> list[Object]:
        """Of the job."""
        path = pods_path(self.release.namespace)
        return self.release.api.items(path, labelSelector=f"job-name={self._job}")

    def steps(self) -> tuple[StepRecord, ...]:
        """The steps so far.

        Raises:
            AssertionError: a step is missing.
        """
        path = RunFolder(self._run_folder() / self._run).step_log
        if not path.exists():
            return ()
        records = StepLog(path).read()
        assert [record.step for record in records] == list(range(len(records)))
        return records

    def _run_folder(self) -> Path:
        """Where the first rank writes: the volume that its pod mounts at /runs."""
        for pod in self.pods():
            index = pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]
            if index == "0":
                for kubelet in self.kubelets:
                    run = kubelet.find(pod["metadata"]["uid"])
                    if run is not None:
                        return run.volume("runs")
        return Path("/nonexistent")

    def wait_for_steps(self, more: int) -> None:
        """Until it has made so many more steps than now.

        Raises:
            AssertionError: it fails, or takes too long.
        """
        target = len(self.steps()) + more

        def there() -> bool:
            failed = [p for p in self.pods() if p["status"].get("phase") == "Failed"]
            assert not failed, self.tell()
            return len(self.steps()) >= target

        wait_until(f"step {target}", there, START_SECONDS + more * STEP_SECONDS)

    def tell(self) -> str:
        """What its pods wrote."""
        uids = [pod["metadata"]["uid"] for pod in self.pods()]
        runs = [kubelet.find(uid) for kubelet in self.kubelets for uid in uids]
        return "\n".join(run.logs()[-4000:] for run in runs if run is not None)

    def remove(self) -> None:
        """Takes its objects away; waits until its pods are gone."""
        api, space = self.release.api, self.release.namespace
        options = {"propagationPolicy": "Background"}
        api.delete(f"/apis/batch/v1/namespaces/{space}/jobs/{self._job}", options)
        api.delete(f"/api/v1/namespaces/{space}/services/{self._service}")
        wait_until("the job's pods are gone", lambda: not self.pods(), 180.0)
