"""What a forward pass leaves for a later layer or for the loss."""

from typing import Any


class Notes(dict[int, Any]):
    """Notes of one forward pass by layer. A copy of the model starts without: a graph's tensors cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Notes":
        return Notes()

    def __reduce__(self) -> tuple[type["Notes"], tuple[()]]:
        return Notes, ()
