"""What the core remembers of trajectories, groups and engines while they live: light metadata, nothing per token.

Field names agree with `testbed.core.actions.Experience`, so that staleness measures read either. Plain slotted objects,
changed only by the core's components."""

from __future__ import annotations

from testbed.core.errors import IllegalTransition
from testbed.core.states import GROUP, TRAJECTORY


class Trajectory:
    """One rollout of a task. Times in seconds, versions are published versions."""

    __slots__ = (
        "aborting",
        "attempt",
        "completion_deployed",
        "dequeue_deployed",
        "dequeued_t",
        "dispatch_trainer_version",
        "dispatch_version",
        "dispatched_t",
        "engine",
        "environment",
        "first_token_t",
        "generated_t",
        "group",
        "home",
        "id",
        "losses",
        "lot",
        "masked_tokens",
        "member",
        "missing",
        "newest_version",
        "observation_tokens",
        "oldest_version",
        "output_tokens",
        "prompt_tokens",
        "ready_t",
        "reward",
        "state",
        "submitted_index",
        "submitted_t",
        "token_versions",
        "trained_before",
        "trainer_version",
        "turn",
        "turn_engine_version",
        "wasted_tokens",
    )
    __deletable__ = ("lot",)
    """Read by mypyc alone."""

    def __init__(self, id: int, group: Group, member: int, submitted_t: float, submitted_index: int) -> None:
        self.id = id
        self.group = group
        self.member = member
        self.submitted_t = submitted_t
        self.submitted_index = submitted_index
        self.state = "queued"
        self.turn = 0
        self.attempt = 0
        """How often this turn was sent before, whatever the reason."""
        self.losses = 0
        """How often this turn was lost without anybody having decided it."""
        self.aborting = ""
        """Why its turn is being taken back; `requeue...` sends it again (what it has generated is kept, if that was
        asked for), anything else ends the trajectory."""
        self.engine = -1
        self.home = -1
        self.environment = False
        self.prompt_tokens = group.prompt_tokens
        self.output_tokens = 0
        self.masked_tokens = 0
        self.observation_tokens = 0
        self.wasted_tokens = 0
        self.dispatch_version = -1
        self.dispatch_trainer_version = -1
        self.oldest_version = -1
        self.newest_version = -1
        self.turn_engine_version = -1
        self.dispatched_t = -1.0
        self.first_token_t = -1.0
        self.generated_t = -1.0
        self.ready_t = -1.0
        self.dequeued_t = -1.0
        self.completion_deployed = -1
        self.dequeue_deployed = -1
        self.trainer_version = -1
        self.trained_before = 0
        self.reward = 0.0
        self.missing = 0
        """Bit mask of signals that are not there yet."""
        self.token_versions: list[tuple[int, int]] | None = None
        """(version, tokens) in the order generated; neighbours differ in version. Kept where tokens may be masked for
        their version."""

    lot: Lot
    """What selection takes it in; from when its group is populated until it ends."""

    def advance(self, given: str) -> None:
        """Move by the trajectory table; raises `IllegalTransition`."""
        try:
            self.state = TRAJECTORY[self.state][given]
        except KeyError:
            raise IllegalTransition("trajectory", self.id, self.state, given, TRAJECTORY) from None


class Group:
    """Responses to compare: one task, n members."""

    __slots__ = (
        "block_tokens",
        "blocks",
        "generated",
        "held",
        "id",
        "longest",
        "lots",
        "members",
        "prompt_tokens",
        "resolved",
        "retried",
        "scored",
        "state",
        "submitted_t",
        "task",
        "why",
    )

    def __init__(self, id: int, submitted_t: float, why: str) -> None:
        self.id = id
        self.submitted_t = submitted_t
        self.why = why
        self.state = "drawing"
        self.task = -1
        self.prompt_tokens = 0
        self.blocks: tuple[int, ...] = ()
        self.block_tokens = 0
        self.members: list[Trajectory] = []
        self.generated = 0
        self.scored = 0
        """Members that have every signal that the training pool does not compute."""
        self.resolved = 0
        """Members that failed or were aborted on their own: the group does not wait for them."""
        self.lots = 0
        """Lots of this group that are still alive."""
        self.retried = False
        """Its task is to run again."""
        self.held = False
        """Its round is over: it goes on in the next one."""
        self.longest = 0
        """Output tokens of the longest member that is generated."""

    def advance(self, given: str) -> None:
        try:
            self.state = GROUP[self.state][given]
        except KeyError:
            raise IllegalTransition("group", self.id, self.state, given, GROUP) from None


class Lot:
    """What selection takes as one: a whole group where members are compared, a single trajectory otherwise."""

    __slots__ = ("group", "group_ready_t", "members", "missing", "over", "sequence", "trainable", "uses", "verdict")

    def __init__(self, group: Group, members: list[Trajectory]) -> None:
        self.group = group
        self.members = members
        self.missing = len(members)
        """Members that are not ready yet."""
        self.group_ready_t = -1.0
        self.sequence = -1
        """Order of becoming ready."""
        self.uses = 0
        self.verdict = "use"
        """Of the staleness rule, where it decides at completion."""
        self.trainable = False
        """Ready, or missing only what the training pool computes."""
        self.over = False
        """Trained, dropped, or without members."""

    @property
    def submitted_index(self) -> int:
        return self.members[0].submitted_index

    @property
    def oldest_version(self) -> int:
        return min(m.oldest_version for m in self.members)

    @property
    def dispatch_version(self) -> int:
        return min(m.dispatch_version for m in self.members)

    @property
    def output_tokens(self) -> int:
        return sum([m.output_tokens for m in self.members])

    def advance(self, given: str) -> None:
        """Move every member by the trajectory table; raises `IllegalTransition`."""
        for t in self.members:
            t.advance(given)


class Engine:
    """The core's view of one inference server."""

    __slots__ = ("in_flight", "index", "leaving", "pool", "state", "version")

    def __init__(self, index: int, pool: int) -> None:
        self.index = index
        self.pool = pool
        self.state = "serving"
        self.leaving = False
        """Its pool is about to change to training: it takes no turns and no weights."""
        self.version = 0
        """Deployed version: the published version it serves."""
        self.in_flight: dict[int, Trajectory] = {}


class Progress:
    """The counters that admission, staleness and publication policies read. Groups unless a name says otherwise."""

    __slots__ = (
        "batches_dequeued",
        "batches_trained",
        "deployed",
        "dropped",
        "generated",
        "group_size",
        "groups_per_batch",
        "interval",
        "open_groups",
        "open_trajectories",
        "publications",
        "submitted",
        "submitted_trajectories",
        "trained_trajectories",
        "trainer_busy",
        "trainer_version",
        "updating",
    )

    def __init__(self, groups_per_batch: int, group_size: int, interval: int) -> None:
        self.groups_per_batch = groups_per_batch
        self.group_size = group_size
        self.interval = interval
        self.submitted = 0
        self.submitted_trajectories = 0
        self.dropped = 0
        """Submitted groups that ended without being trained; where trajectories are taken singly, their lost
        trajectories in groups, rounded up."""
        self.generated = 0
        self.open_groups = 0
        """Submitted, not yet handed to the buffer (a full buffer keeps them open)."""
        self.open_trajectories = 0
        """Of open groups: not yet generated; all members while the buffer refuses the group."""
        self.batches_dequeued = 0
        self.batches_trained = 0
        self.trained_trajectories = 0
        self.trainer_version = 0
        """Optimizer updates."""
        self.deployed = 0
        """Published version that the participants of the last complete publication serve."""
        self.publications = 0
        """Due publications that are over: deployed (several at once, if updates are slower than training), or given up.
        """
        self.trainer_busy = False
        self.updating = False
