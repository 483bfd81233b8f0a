"""The whole scenario: one frozen model of all sections. Nothing is decided here."""

from __future__ import annotations

from testbed.scenario.algorithm import Algorithm
from testbed.scenario.base import Section
from testbed.scenario.cluster import Cluster
from testbed.scenario.experience import Experience
from testbed.scenario.model import ModelConfig
from testbed.scenario.placement import Placement
from testbed.scenario.provenance import Provenance
from testbed.scenario.real import Real
from testbed.scenario.rollout import Rollout
from testbed.scenario.run import Run, Simulation
from testbed.scenario.training import Training
from testbed.scenario.weights import Weights
from testbed.scenario.workload import WorkloadConfig


class Scenario(Section):
    """A run that either backend can carry out."""

    name: str = "unnamed"
    question: str = ""
    """The question the scenario answers, for the head of a report."""
    provenance: Provenance | None = None
    """Of a preset: the framework whose defaults it has. null: the settings are the user's own."""
    cluster: Cluster
    model: ModelConfig
    workload: WorkloadConfig
    algorithm: Algorithm = Algorithm()
    placement: Placement
    rollout: Rollout
    experience: Experience = Experience()
    training: Training = Training()
    weights: Weights
    run: Run = Run()
    simulation: Simulation = Simulation()
    real: Real = Real()

    @property
    def members_started(self) -> int:
        """Trajectories that a group starts; `n_samples_per_prompt` of them are trained."""
        return self.algorithm.n_samples_per_prompt + self.rollout.redundant_members
