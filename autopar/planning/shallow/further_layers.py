"""Equal layers of a further list of a model, as an encoder has beside its decoder, of which a program has three."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FurtherLayers:
    """Three neighbours of such a list, by their paths, and how many layers more there are that are like the second."""

    paths: tuple[str, str, str]
    more: int

    def times(self, path: str) -> int:
        """How many layers of the model a layer of the program stands for."""
        return 1 + self.more * (path == self.paths[1])

    def names(self, name: str) -> list[str]:
        """What a name of the program is in the model: that of a parameter, say. One of the second layer has many."""
        count = 1 + self.more * (self._number(name) == self._second)
        low = 0 if self._number(name) <= self._second else self.more
        return [self.moved(name, by) for by in range(low, low + count)] if self._number(name) >= 0 else [name]

    def moved(self, name: str, by: int, least: int = 0) -> str:
        """Name what is the same of the layer that stands `by` further in the list. Layers before the first of the
        three, and `least` behind it, keep their names."""
        number = self._number(name)
        if number < self._second - 1 + least:
            return name
        return f"{self._list}{number + by}{name.removeprefix(f'{self._list}{number}')}"

    def _number(self, name: str) -> int:
        """The number of a layer in the list; -1 outside of it."""
        number = name.removeprefix(self._list).partition(".")[0] if name.startswith(self._list) else ""
        return int(number) if number.isdigit() else -1

    @property
    def _second(self) -> int:
        return int(self.paths[1].rpartition(".")[2])

    @property
    def _list(self) -> str:
        return self.paths[1].removesuffix(str(self._second))
