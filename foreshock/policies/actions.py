"""The actions a policy may name: the typed arguments of each, and what each needs, costs and leaves behind.

`models` puts them on rungs, the engine into a `Decision`; remediation applies them. Costs are measured
where a number is given: P1 is arXiv:2606.28116, P2 is arXiv:2510.04212.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer, model_validator

from foreshock.detectors.types import Mechanism
from foreshock.policies.units import Strict, custom, word_or_names

_PARSE, _DUMP, _SCHEMA = word_or_names("affected", "model", "router", noun="parameter names")
"""A word, or names of parameters."""
Layers = Literal["affected", "all"]
"""`affected`: the diagnosed layers. `all`: every layer."""


class PrecisionUpcast(Strict):
    """Attention in float32, or with the stabilised softmax that cures the bias of P2."""

    target: Layers = "affected"
    dtype: Literal["float32", "stabilised"] = "float32"


class RouterRestore(Strict):
    """Router weights and moments from the newest healthy recovery point before the onset."""

    target: Layers = "affected"
    before: Literal["onset"] = "onset"


class RouterRescale(Strict):
    """Router rows scaled to their healthy norm, direction kept."""

    target: Layers = "affected"


class RouterReinit(Strict):
    """Seeded fresh router rows, alike on all ranks; their moments start at zero."""

    target: Layers = "affected"
    rows: Literal["all", "dead"] = "all"


class Rollback(Strict):
    """The whole run back to a healthy point before the onset's early end."""

    before: Literal["onset"] = "onset"
    skip_data: Literal["none", "window"] = "none"
    """`window`: do not replay the batches from the onset's early end to the alarm."""


class SkipData(Strict):
    """As many batches ahead are left out as there were steps in the window."""

    window: Literal["onset"] = "onset"
    """The window begins at the onset's early end and ends at the alarm."""


class LrScale(Strict):
    """The learning rate of a part of the model times `factor`, which is between 0 and 1."""

    target: Annotated[Literal["affected", "model", "router"] | tuple[str, ...], _PARSE, _DUMP, _SCHEMA] = (
        "model"
    )
    factor: Annotated[float, Field(strict=True, gt=0, lt=1, allow_inf_nan=False)]


class QkClip(Strict):
    """W_Q and W_K scaled so that the largest attention logit is at most `threshold` (no unit)."""

    target: Layers = "affected"
    threshold: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class Pause(Strict):
    """Save, then stop all ranks at one step."""


class Notify(Strict):
    """A message in the log; receivers are reached by a later version."""

    message: Annotated[str, Field(min_length=1)] | None = None


class Action(Strict):
    """Exactly one action, as YAML writes it: `{rollback: {before: onset}}`."""

    precision_upcast: PrecisionUpcast | None = None
    router_restore: RouterRestore | None = None
    router_rescale: RouterRescale | None = None
    router_reinit: RouterReinit | None = None
    rollback: Rollback | None = None
    skip_data: SkipData | None = None
    lr_scale: LrScale | None = None
    qk_clip: QkClip | None = None
    pause: Pause | None = None
    notify: Notify | None = None

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, data: Any) -> Any:
        """`pause:` with nothing behind it is `pause: {}`."""
        return {k: {} if v is None else v for k, v in data.items()} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _exactly_one(self) -> Action:
        if len(self.model_fields_set) != 1:
            raise custom(
                f"one action expected, {len(self.model_fields_set) or 'none'} given",
                "each action is its own list item: `do: [{rollback: {}}, {notify: {}}]`",
            )
        return self

    @property
    def name(self) -> str:
        return next(iter(self.model_fields_set))

    @property
    def arguments(self) -> Strict:
        """The action's own model, with typed fields."""
        arguments: Strict = getattr(self, self.name)
        return arguments

    @property
    def spec(self) -> ActionSpec:
        return ACTIONS[self.name]

    @model_serializer
    def to_json(self) -> dict[str, Any]:
        return {self.name: self.arguments.model_dump(mode="json", exclude_none=True)}


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """What an action declares before anyone may use it."""

    model: type[Strict]
    needs: frozenset[str]
    """Capabilities of the run. interception: its attention call can be replaced. points: it has some.
    rewind: points and a data position. router, sites: modules found. scheduler: the learning rate is ours."""
    touches: str
    cost: str
    undo: str
    module: Mechanism | None = None
    """The module that it repairs; None: the run as a whole."""
    changes_training: bool = True


ACTIONS: dict[str, ActionSpec] = {
    "precision_upcast": ActionSpec(
        PrecisionUpcast,
        frozenset({"interception"}),
        "the attention kernel of its layers, no weight",
        "Its layers compute attention more slowly for as long as it stands.",
        "Removed at any step; the layers return to their own kernel.",
        Mechanism.ATTENTION,
    ),
    "router_restore": ActionSpec(
        RouterRestore,
        frozenset({"router", "points"}),
        "router weights and their optimizer moments",
        "The router forgets what it learned since the recovery point.",
        "The replaced weights are kept and can be put back.",
        Mechanism.ROUTER,
    ),
    "router_rescale": ActionSpec(
        RouterRescale,
        frozenset({"router"}),
        "the norm of the router's rows",
        "One small product; routing changes a little at once.",
        "The old norms are kept and can be put back.",
        Mechanism.ROUTER,
    ),
    "router_reinit": ActionSpec(
        RouterReinit,
        frozenset({"router"}),
        "router rows and their optimizer moments",
        "The dearest remedy: the loss rises by about half a nat before it falls again.",
        "The replaced weights are kept and can be put back.",
        Mechanism.ROUTER,
    ),
    "rollback": ActionSpec(
        Rollback,
        frozenset({"rewind"}),
        "model, optimizer, scheduler, scaler, random state and data position",
        "All steps since the recovery point are trained again.",
        "Not undone: the steps that it dropped are gone.",
    ),
    "skip_data": ActionSpec(
        SkipData,
        frozenset({"rewind"}),
        "the data position",
        "The run never sees the batches that it skips.",
        "Not undone: the record keeps which batches were left out.",
    ),
    "lr_scale": ActionSpec(
        LrScale,
        frozenset({"scheduler"}),
        "the learning rate of its target",
        "The target learns more slowly for as long as it stands.",
        "Removed at any step; the schedule applies again.",
    ),
    "qk_clip": ActionSpec(
        QkClip,
        frozenset({"sites"}),
        "the query and key weights of its layers",
        "Attention changes at once where logits were above the threshold.",
        "The scales are kept and can be divided out.",
        Mechanism.ATTENTION,
    ),
    "pause": ActionSpec(
        Pause,
        frozenset(),
        "the run: it saves and stops on all ranks at one step",
        "The machines stand idle until someone starts the run again.",
        "Start the run again on the same run directory.",
    ),
    "notify": ActionSpec(
        Notify,
        frozenset(),
        "nothing in the run",
        "A person's attention.",
        "Nothing to undo.",
        changes_training=False,
    ),
}
