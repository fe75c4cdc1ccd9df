"""The rollout loop with a real engine, real segments, and a controller that answers from a script."""

import random

import pytest
import torch

from aimaster.wire.checkpoint import FetchReply, Version
from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.rollout import CompleteReply, LeaseReply, Offer, Piece, PromptLease, StreamReply
from easyckpt import Checkpointer, shm
from rl_runtime.config import RewardChoice, RolloutSettings
from rl_runtime.drills import Drills
from rl_runtime.member import Identity
from rl_runtime.models.characters import CharacterTokenizer
from rl_runtime.models.load import ModelChoice, load_model
from rl_runtime.models.tiny import Shape, TinyLlama
from rl_runtime.rewards.desk import RewardDesk
from rl_runtime.rollout.loop import RolloutLoop
from rl_runtime.rollout.make import make_engine
from rl_runtime.rollout.weights import WeightSource

SHAPE = Shape(vocab_size=CharacterTokenizer().vocab_size, hidden_size=16, intermediate_size=32)
CHOICE = ModelChoice(shape=SHAPE, max_length=32, seed=1)
MOST = 12
SETTINGS = RolloutSettings(
    model=CHOICE,
    engine="tiny",
    slots=4,
    temperature=1.0,
    most_tokens=MOST,
    reward=RewardChoice(weights={"exact": 1.0}, workers=1, deadline_seconds=1.0),
    stream_tokens=4,
    device="cpu",
    lease_factor=4.0,
    fence_leases=10.0,
    group_timeout_seconds=5.0,
)


NOTHING = Piece()


def lease(number, prefix=NOTHING, prompt=()):
    row = {"prompt": f"{100 + number}=", "answer": "1"}
    return PromptLease(
        lease_id=f"{number}.0.a.1",
        prompt_id=number,
        index=0,
        row=row,
        prefix=prefix,
        prefix_prompt_tokens=prompt,
        seed=number,
        deadline_seconds=60.0,
    )


def offer(step):
    return Offer(version=Version(0, step), state_digest="", holders={})


FIRST = (offer(0),)


class Controller:
    """Gives out its leases as there is room, offers what it is told to, stops when all completions are in or after so many questions."""

    def __init__(self, leases=(), offers=FIRST, drop=(), questions=400):
        self.waiting = list(leases)
        self.expected = len(self.waiting)
        self.offers = list(offers)
        self.drop = set(drop)
        """Leases that are another's when they are first streamed."""
        self.questions = questions
        self.asked, self.partials, self.completions = [], [], []

    def lease(self, request):
        self.asked.append(request)
        current = self.offers.pop(0) if len(self.offers) > 1 else self.offers[0]
        granted = []
        if request.version is not None:
            granted = [self.waiting.pop(0) for _ in range(min(request.capacity, len(self.waiting)))]
        stop = len(self.completions) >= self.expected > 0 or len(self.asked) > self.questions
        return LeaseReply(leases=tuple(granted), offer=current, stop=stop)

    def stream(self, request):
        self.partials += request.partials
        dropped = tuple(one.lease_id for one in request.partials if one.lease_id in self.drop)
        self.drop -= set(dropped)
        self.expected -= len(dropped)
        return StreamReply(dropped=dropped)

    def complete(self, request):
        self.completions += request.completions
        return CompleteReply(results=("admitted",) * len(request.completions))


class Agent:
    """Brings what it has when it is asked."""

    def __init__(self, bring=None):
        self.asked = []
        self.bring = bring

    def fetch(self, request):
        self.asked.append(request)
        if self.bring is not None:
            self.bring()
        return FetchReply(places=(), seconds=0.0)


def publish(folder, step, *, scale=1.0, member="policy-0"):
    """Seal a snapshot of the model in a node's folder, as a policy member does."""
    model = TinyLlama(SHAPE, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    checkpointer = Checkpointer(
        member=member, role="policy", folder=folder, flush_every=None, on_sealed=lambda _path, _header: None
    )
    checkpointer.save(step, {"model": dict(model.named_parameters())}, lineage=0)
    checkpointer.wait(10)
    checkpointer.close()


def run(folder, controller, agent=None, beats=None):
    bundle = load_model(CHOICE)
    engine = make_engine("tiny", bundle, slots=SETTINGS.slots, temperature=1.0)
    beat = (beats if beats is not None else []).append
    loop = RolloutLoop(
        Identity(member=MemberId("rollout-0"), incarnation=Incarnation(0), node="node-0"),
        SETTINGS,
        controller,
        WeightSource(folder, agent or Agent(), beat=beat),
        bundle,
        engine,
        RewardDesk({"exact": 1.0}, workers=1, deadline_seconds=1.0),
        Drills((), member="rollout-0", incarnation=0),
        beat=beat,
    )
    loop.run()
    return loop


def test_leases_become_completions(tmp_path):
    """More leases than slots: each comes back once, with its prompt tokens, log-probs, versions, text and reward."""
    publish(tmp_path, 0)
    beats = []
    controller = Controller([lease(number) for number in range(11)])
    run(tmp_path, controller, beats=beats)
    assert sorted(one.prompt_id for one in controller.completions) == list(range(11))
    tokenizer = CharacterTokenizer()
    for one in controller.completions:
        assert one.prompt_tokens == tuple(tokenizer.encode(f"{100 + one.prompt_id}="))
        assert len(one.piece.tokens) == len(one.piece.logprobs) == len(one.piece.versions) <= MOST
        assert set(one.piece.versions) == {Version(0, 0)}
        assert one.text == tokenizer.decode(one.piece.tokens)
        assert one.reward == float(one.text == "1") == one.rewards["exact"]
        assert one.finish == ("stop" if one.piece.tokens[-1] == tokenizer.eos else "length")
    assert all(request.capacity <= SETTINGS.slots for request in controller.asked)
    assert {"generate", "weights", "reward"} <= set(beats)


def test_no_lease_is_worked_on_without_weights(tmp_path):
    """Before the first snapshot there is nothing to generate with."""
    controller = Controller([lease(0)], offers=(None,), questions=3)
    run(tmp_path, controller)
    assert controller.asked[-1].version is None
    assert controller.completions == []


def test_long_completions_are_streamed_and_continued(tmp_path):
    """What was streamed is enough for another worker to end it as the first would have, with its prompt not tokenized again."""
    publish(tmp_path, 0)
    controller = Controller([lease(number) for number in range(8)])
    run(tmp_path, controller)
    whole = {one.lease_id: one for one in controller.completions}
    first = next(partial for partial in controller.partials if partial.start == 0)
    assert len(first.piece.tokens) >= SETTINGS.stream_tokens
    assert whole[first.lease_id].piece.tokens[: len(first.piece.tokens)] == first.piece.tokens
    number = whole[first.lease_id].prompt_id
    second = Controller([lease(number, prefix=first.piece, prompt=first.prompt_tokens)])
    run(tmp_path, second)
    assert second.completions[0].piece.tokens == whole[first.lease_id].piece.tokens
    assert second.completions[0].prompt_tokens == first.prompt_tokens


def test_dropped_leases_are_neither_made_nor_handed_in(tmp_path):
    """A lease that is no longer the worker's own is forgotten wherever it stands."""
    publish(tmp_path, 0)
    gone = lease(3).lease_id
    controller = Controller([lease(number) for number in range(8)], drop=[gone])
    run(tmp_path, controller)
    assert controller.drop == set()
    assert len(controller.completions) == 7
    assert gone not in {one.lease_id for one in controller.completions}


def test_a_newer_version_is_taken_from_the_nodes_memory(tmp_path):
    """The offer names a version; the newest in the folder that is at least that is loaded, and kept when the offer is older."""
    publish(tmp_path, 4)
    publish(tmp_path, 6, scale=1.1, member="policy-1")
    agent = Agent()
    controller = Controller([lease(number) for number in range(6)], offers=(offer(4), offer(5)))
    run(tmp_path, controller, agent)
    assert {request.version for request in controller.asked} == {None, Version(0, 6)}
    assert agent.asked == []


def test_weights_of_another_node_come_by_the_agent(tmp_path):
    """Nothing new enough here: the agent is asked, and what it brought is read."""
    publish(tmp_path, 1)
    agent = Agent(bring=lambda: publish(tmp_path, 9, member="policy-1"))
    controller = Controller([lease(0)], offers=(offer(9),))
    run(tmp_path, controller, agent)
    assert [request.role for request in agent.asked] == ["policy"]
    assert set(controller.completions[0].piece.versions) == {Version(0, 9)}


def test_an_agent_with_nothing_is_not_asked_again_at_once(tmp_path):
    """A fetch that brought nothing is tried again after a pause, and the weights in hand serve meanwhile."""
    publish(tmp_path, 1)
    agent = Agent()
    source = WeightSource(tmp_path, agent, beat=lambda _phase: None)
    assert source.newer(offer(1), None)[0] == Version(0, 1)
    assert [source.newer(offer(2), Version(0, 1)) for _ in range(5)] == [None] * 5
    assert len(agent.asked) == 1


def test_damaged_weights_are_not_loaded(tmp_path):
    """Bytes that do not fit their digests are never generated with."""
    publish(tmp_path, 3)
    (segment,) = (one.path for one in shm.scan(tmp_path))
    content = bytearray(segment.read_bytes())
    content[-4] ^= 0xFF
    segment.write_bytes(content)
    assert WeightSource(tmp_path, Agent(), beat=lambda _phase: None).newer(offer(3), None) is None


@pytest.mark.parametrize("length", [20, 31, 40])
def test_a_prompt_that_leaves_no_room_is_cut_at_its_beginning(tmp_path, length):
    """A row longer than the model still comes back, so that no group waits for it for ever."""
    publish(tmp_path, 0)
    prompt = "".join(random.Random(length).choice("0123456789") for _ in range(length))
    one = lease(0)
    controller = Controller(
        [
            PromptLease(
                **{field: getattr(one, field) for field in one.__struct_fields__}
                | {"row": {"prompt": prompt, "answer": "1"}}
            )
        ]
    )
    run(tmp_path, controller)
    (completion,) = controller.completions
    assert completion.piece.tokens
    assert len(completion.prompt_tokens) + len(completion.piece.tokens) <= SHAPE.max_position_embeddings
