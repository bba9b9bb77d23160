"""What every controller does: one row per member of ``MEMBERS``."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from hvd_adaptive.adaptation.base import Controller, NullController
from hvd_adaptive.compressors import parse
from tests.adaptation.helpers import LAYERS, controllers, gradient

MEMBERS: dict[str, Callable[[], Controller]] = {
    "adaptation": lambda: controllers("lgreco:period=8")[0],
    "signals": lambda: controllers("auto:period=8")[0],
    "exact": lambda: controllers("gravac:window=6,exact=true")[0],
    "null": NullController,
}


def interface() -> dict[str, object]:
    """Methods, properties and attributes that the protocol names."""
    members = {name: member for name, member in vars(Controller).items() if not name.startswith("_")}
    return {**members, **dict.fromkeys(Controller.__annotations__)}


@pytest.fixture(params=MEMBERS)
def controller(request: pytest.FixtureRequest) -> Controller:
    return MEMBERS[request.param]()


def test_a_controller_has_what_the_protocol_names_and_nothing_else(controller: Controller) -> None:
    public = {name for name in dir(controller) if not name.startswith("_")}
    assert public == set(interface())


def test_methods_take_the_arguments_that_the_protocol_names(controller: Controller) -> None:
    for name, member in interface().items():
        if inspect.isfunction(member):
            wanted = [*inspect.signature(member).parameters.values()][1:]
            found = [*inspect.signature(getattr(controller, name)).parameters.values()]
            assert [(each.name, each.annotation, each.default) for each in found] == [
                (each.name, each.annotation, each.default) for each in wanted
            ], name


def test_a_step_goes_through_and_its_state_can_be_loaded(controller: Controller) -> None:
    own = parse("topk:density=0.05")
    controller.attach(
        [(layer, own, "allgather") for layer in LAYERS], {"wide": 0, "tall": 1}, 0.0, False
    )
    for step in range(3):
        if controller.observes(step):
            for layer in LAYERS:
                x = gradient(layer, step)
                controller.observe(layer, x, x, step)
        collect, ready = controller.votes(step)
        if controller.exact:
            controller.decide_before_launch(step)
        controller.learn()
        controller.end_step(step, 0.1, [])
        if collect:
            controller.start_collection(step)
        if ready:
            controller.apply_decision(step)
        controller.invalidate()
    state = controller.state_dict()
    assert (state is not None) == controller.plans == (controller.recipe is not None)
    assert set(controller.assignments()) == (
        {layer.name for layer in LAYERS} if controller.plans else set()
    )
    controller.load_state_dict(state or {})
    again = controller.state_dict()
    assert str(again) == str(state)
