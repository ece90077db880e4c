"""One interface for every token method: options in a frozen dataclass, `adapt` and `restore` in place."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from tokensworth.errors import UnsupportedModelError
from tokensworth.tokens import methods
from tokensworth.tokens.vit import Swaps, ViT, find_vits

M = TypeVar("M", bound=nn.Module)

_METHODS: dict[str, type["Method"]] = {}


class Adapted(nn.Module):
    """What a method adds to one vision transformer, kept as its `token_method`.

    Args:
        method: the options.
    """

    def __init__(self, method: "Method") -> None:
        super().__init__()
        self.method = method
        self.enabled = True
        self.swaps = Swaps()
        # A method whose cost depends on the image then lets as many tokens take part as it may.
        self.most = False

    def penalty(self) -> Tensor | None:
        """What the last forward pass in training adds to the loss, a scalar; None for nothing."""
        return None

    def backbone_parameters(self) -> list[nn.Parameter]:
        """Parameters that stand for some of the model's own and are trained as those are."""
        return []


@dataclass(frozen=True)
class Method(ABC):
    """Options of a token method. A subclass that names itself is known to `list_methods`.

    Attributes:
        name: what commands and saved models call the method.
        follows_reuse: whether it can run in a cascade whose stages reuse features or relations.
        needs_training: whether what it adds must be trained before it is of use.
    """

    name: ClassVar[str]
    follows_reuse: ClassVar[bool] = False
    needs_training: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" in vars(cls):
            _METHODS[cls.name] = cls

    @property
    def keeps_grid(self) -> bool:
        """Whether every token is there, or is there again, after the last layer, as dense prediction needs."""
        return False

    @property
    def per_image(self) -> bool:
        """Whether what an image costs depends on the image."""
        return False

    @classmethod
    def settings(cls, depth: int, patches: int) -> list["Method"]:
        """Three strengths worth comparing, mild to strong, for a model of so many layers and patches."""
        return [cls()]

    @abstractmethod
    def attach(self, vit: ViT) -> Adapted:
        """Changes a vision transformer in place.

        Raises:
            UnsupportedModelError: the model lacks something; nothing has been changed then.
        """

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the method's name among them."""
        return {"name": self.name, **asdict(self)}


@cache
def _find_methods() -> None:
    """Imports every file of `tokens/methods`, so that a new method need not be named anywhere else."""
    for module in iter_modules(methods.__path__):
        import_module(f"{methods.__name__}.{module.name}")


def list_methods() -> list[str]:
    """Names of the token methods."""
    _find_methods()
    return sorted(_METHODS)


def method_class(name: str) -> type[Method]:
    """The options of a method by its name.

    Raises:
        UnsupportedModelError: no such method.
    """
    if name not in list_methods():
        raise UnsupportedModelError(f"no token method {name!r}; there are {', '.join(list_methods())}")
    return _METHODS[name]


def method_from_dict(values: Mapping[str, Any]) -> Method:
    """The inverse of `Method.to_dict`.

    Raises:
        UnsupportedModelError: an unknown method or unknown options.
    """
    options = dict(values)
    name = options.pop("name", None)
    kind = method_class(str(name))
    try:
        return kind(**options)
    except TypeError as error:
        raise UnsupportedModelError(f"options do not fit {name}: {error}") from None


def adapted_vits(model: nn.Module) -> list[tuple[ViT, Adapted]]:
    """The adapted vision transformers in a model, each with what was added to it."""
    pairs = ((part, getattr(part, "token_method", None)) for part in model.modules())
    return [(vit, added) for vit, added in pairs if isinstance(added, Adapted)]  # type: ignore[misc]


def method_penalties(model: nn.Module) -> list[Tensor]:
    """What the token methods in a model add to the loss of the last forward pass in training, scalars.

    Example:
        >>> loss = criterion(model(images), labels) + sum(method_penalties(model))  # doctest: +SKIP
    """
    found = (added.penalty() for _, added in adapted_vits(model))
    return [penalty for penalty in found if penalty is not None]


def token_keys(model: nn.Module) -> set[str]:
    """Names in a model's state dict that belong to its token method."""
    return {key for key in model.state_dict() if "token_method" in key.split(".")}


def method_of(model: nn.Module) -> Method | None:
    """The method that a model is adapted with, or None."""
    found = adapted_vits(model)
    return found[0][1].method if found else None


def adapt(model: M, method: Method) -> M:
    """Applies a token method in place to every timm `VisionTransformer` or `Eva` in a model.

    Args:
        model: a timm model, a `Cascade`, or anything that contains one.
        method: options, for example `ToSA(keep=0.8)`.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: nothing to adapt, something the method cannot follow, or already adapted.

    Example:
        >>> import timm
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=4)
        >>> _ = adapt(model, ToSA(layers=(2, 4), keep=0.8))
        >>> _ = restore(model)
    """
    known = method_of(model)
    if known is not None:
        raise UnsupportedModelError(f"the model is already adapted with {known}; restore() it first")
    for part in model.modules():
        check = getattr(part, "check_method", None)
        if check is not None:
            check(method)
    try:
        for vit in find_vits(model):
            added = method.attach(vit)
            parameter = next(vit.parameters())
            vit.token_method = added.to(parameter.device, parameter.dtype).train(vit.training)
    except UnsupportedModelError:
        restore(model)
        raise
    return model


def readapt(model: M, method: Method) -> M:
    """Changes the options of an adapted model and keeps what its method has learned, such as fitted selectors.

    Args:
        model: adapted with a method of the same kind.
        method: the new options.

    Raises:
        UnsupportedModelError: another kind of method, or options under which what was learned does not fit.
    """
    known = method_of(model)
    if known is None or known.name != method.name:
        raise UnsupportedModelError(f"the model is adapted with {known}, not with another {method.name}")
    learned = {key: value.clone() for key, value in model.state_dict().items() if key in token_keys(model)}
    adapt(restore(model), method)
    found = {key: value.shape for key, value in model.state_dict().items() if key in token_keys(model)}
    if found != {key: value.shape for key, value in learned.items()}:
        adapt(restore(model), known)
        model.load_state_dict(learned, strict=False)
        raise UnsupportedModelError(f"what {known} has learned does not fit {method}")
    model.load_state_dict(learned, strict=False)
    return model


def restore(model: M) -> M:
    """Undoes `adapt`: the same classes, the same weights, bit-equal outputs. Returns the model."""
    for vit, added in adapted_vits(model):
        added.swaps.undo()
        del vit.token_method
    return model


@contextmanager
def dense(model: nn.Module) -> Iterator[None]:
    """While it lasts, an adapted model runs as the plain one."""
    with _having(model, "enabled", False):
        yield


@contextmanager
def at_most(model: nn.Module) -> Iterator[None]:
    """While it lasts, a method whose cost depends on the image keeps as many tokens as it may: what it can cost."""
    with _having(model, "most", True):
        yield


@contextmanager
def _having(model: nn.Module, name: str, value: bool) -> Iterator[None]:
    found = adapted_vits(model)
    before = [getattr(added, name) for _, added in found]
    for _, added in found:
        setattr(added, name, value)
    try:
        yield
    finally:
        for (_, added), was in zip(found, before, strict=True):
            setattr(added, name, was)
