"""A Ray of this process: actors that note what they were made with, and answer as they are told to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from coordinator.cli.on_ray.kept import Order


class RayError(Exception):
    pass


class ActorUnavailableError(RayError):
    pass


class Call:
    """A reference to an answer: None until it comes, an error raises."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer


class Method:
    def __init__(self, actor: Actor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *given: Any) -> Call:
        self._actor.called.append((self._name, *given))
        return Call(self._actor.answers.get(self._name))


class Actor:
    """``answers``: of each method; none for what has no room yet."""

    def __init__(self, options: dict[str, Any], order: Order) -> None:
        self.options, self.order = options, order
        self.called: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


class FakeRay:
    """The functions of the module ``ray`` that are called, over actors in a list."""

    def __init__(self, *nodes: dict[str, float]) -> None:
        self._nodes = nodes
        self.actors: dict[str, Actor] = {}
        self.given: tuple[Any, ...] = ()
        self.refused: Exception | None = None
        self.joins: dict[str, Any] = {}  # a name's answers, from the start
        self.exceptions = SimpleNamespace(RayError=RayError, ActorUnavailableError=ActorUnavailableError)
        self.util = SimpleNamespace(
            list_named_actors=lambda: list(self.actors), get_node_ip_address=lambda: "10.0.0.9"
        )

    def init(self, address: str, namespace: str, **options: Any) -> None:
        if self.refused is not None:
            raise self.refused
        self.given = (address, namespace)

    def shutdown(self) -> None:
        self.given = ()

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeManagerAddress": f"10.0.0.{at}", "Alive": True, "Resources": resources}
            for at, resources in enumerate(self._nodes)
        ]

    def remote(self, kind: type) -> Any:
        def made(options: dict[str, Any], order: Order) -> Actor:
            actor = self.actors[options["name"]] = Actor(options, order)
            actor.answers |= self.joins.get(options["name"], {})
            return actor

        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda order: made(options, order))
        )

    def get_actor(self, name: str) -> Actor:
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def wait(self, calls: list[Call], num_returns: int = 1, timeout: float | None = None) -> tuple[Any, Any]:
        done = [call for call in calls if call.answer is not None]
        return done, [call for call in calls if call.answer is None]

    def get(self, call: Call) -> Any:
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer

    def kill(self, actor: Actor, no_restart: bool) -> None:
        assert no_restart
        self.actors = {name: each for name, each in self.actors.items() if each is not actor}
