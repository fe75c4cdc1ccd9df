"""Makes the engine that a configuration names."""

from collections.abc import Callable, Sequence
from typing import Literal

from rl_runtime.models.base import Bundle
from rl_runtime.models.tiny import TinyLlama
from rl_runtime.rollout.engines import Ending, Engine


def make_engine(
    kind: Literal["tiny", "hf"],
    bundle: Bundle,
    *,
    slots: int,
    temperature: float,
    stop_texts: Sequence[str] = (),
    device: str = "cpu",
    beat: Callable[[], None] = lambda: None,
) -> Engine:
    """Return an engine without weights for the bundle's model; `hf` decodes with the model itself.

    A step that takes long calls `beat` now and then.
    """
    ending = Ending(bundle.tokenizer, stop_texts)
    if kind == "tiny":
        from rl_runtime.rollout.tiny import TinyEngine

        assert isinstance(bundle.model, TinyLlama)  # noqa: S101 - the settings tie the engine to [aimaster.model]
        return TinyEngine(bundle.model.shape, slots=slots, ending=ending, temperature=temperature)
    from rl_runtime.rollout.folder import FolderEngine

    return FolderEngine(bundle, slots=slots, temperature=temperature, ending=ending, device=device, beat=beat)
