"""Answer what code asks of a tensor beside its values: how it lies in memory, what autograd keeps of it.

A capture runs on stand-ins, which lie in memory of their own and are leaves of no graph. What the user's own tensor
would say is told in their place, and `Ran.asked` remembers the question: a batch with another answer has another
program (`answers`). What no program can follow is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import handle_torch_function

from autopar.capture.ops.raised_scatter import ASKING
from autopar.capture.python.ran import Ran
from autopar.capture.refusals.constructs import Construct
from autopar.capture.refusals.explain_failure import refusal
from autopar.capture.refusals.location import is_user_code
from autopar.torch_compat import storage_of

if TYPE_CHECKING:
    from autopar.capture.data_facts import DataFacts

Tensor = torch.Tensor
STRIDES, _VIEW = "strides", "is a view"


def _is_shared(tensor: Tensor) -> bool:
    return tensor.device.type != "meta" and tensor.is_shared()


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_pinned()


def _is_view(tensor: Tensor) -> bool:
    return tensor._is_view()


def _has_gradient(tensor: Tensor) -> bool:
    return (tensor.is_leaf or tensor.retains_grad) and tensor.grad is not None


# What may be asked of a tensor of the batch, with how it is answered.
_QUESTIONS: Mapping[str, Callable[[Tensor], Hashable]] = {
    STRIDES: Tensor.stride, "storage_offset": Tensor.storage_offset, "is_shared": _is_shared, "is_pinned": _is_pinned,
    "is_inference": Tensor.is_inference, "is_neg": Tensor.is_neg, "is_conj": Tensor.is_conj, _VIEW: _is_view,
    "is_leaf": lambda tensor: tensor.is_leaf, "has a grad_fn": lambda tensor: tensor.grad_fn is not None,
    "has a grad": _has_gradient, "retains_grad": lambda tensor: tensor.retains_grad,
    "output_nr": lambda tensor: tensor.output_nr,
}  # fmt: skip
Answers = tuple[tuple[str, tuple[Hashable, ...]], ...]


def answers(asked: Iterable[str], tensors: Sequence[Tensor]) -> Answers:
    """What each tensor says to each question that the code of a step asks."""
    return tuple((question, tuple(map(_QUESTIONS[question], tensors))) for question in sorted(asked))


class BatchForms:
    """The tensors of the batch behind the stand-ins of one run. ran: where questions are remembered."""

    def __init__(self, stand_ins: Sequence[Any], leaves: Sequence[Any], ran: Ran) -> None:
        pairs = [(one, leaf) for one, leaf in zip(stand_ins, leaves, strict=True) if isinstance(leaf, Tensor)]
        self._own = {id(one): (one, leaf) for one, leaf in pairs}
        self._by_memory = {storage_of(one): leaf for one, leaf in pairs}
        self._carried = [(vars(one), dict(vars(one))) for one, _ in pairs]
        self.asked, self._marked = ran.asked, ran.marked

    def end(self) -> None:
        """Note which attributes the run left on stand-ins: torch has some of its own there, too."""
        for now, before in self._carried:
            changed = {name for name in {**now, **before} if now.get(name, self) is not before.get(name, self)}
            self._marked.update(changed)

    def ask(self, question: str, tensor: Tensor) -> Any:
        """The answer of the tensor of the batch that another stands for; NotImplemented for another tensor."""
        self.asked.add(question)
        found = self._own.get(id(tensor))
        return NotImplemented if found is None else _QUESTIONS[question](found[1])

    def behind(self, question: str, tensor: Tensor) -> Any:
        """The answer of the tensor of the batch in whose memory another lies; NotImplemented if there is none."""
        self.asked.add(question)
        leaf = self._by_memory.get(storage_of(tensor))
        return NotImplemented if leaf is None else _QUESTIONS[question](leaf)


    def reads_memory(self, tensor: Tensor, *form: Any, **options: Any) -> bool:
        """Note an `as_strided`, which counts through memory. False if it counts from the beginning of that of the
        batch, which a stand-in has not whole."""
        self.asked |= {STRIDES, "storage_offset"}
        leaf = self._by_memory.get(storage_of(tensor))
        says_where = len(form) > 2 or options.get("storage_offset") is not None
        return leaf is None or not says_where or leaf.storage_offset() == 0


def is_asked_by_user(frame: FrameType | None) -> bool:
    """Whether code beside torch's and ours asks, which may decide something by the answer. frame: that calls, or that
    of torch which hands on a function written in Python."""
    if frame is not None and frame.f_code is handle_torch_function.__code__ and frame.f_back is not None:
        frame = frame.f_back.f_back
    return frame is not None and is_user_code(frame)


def _by_users(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A handler of what the user's code asks; torch answers what its own asks."""

    def handle(facts: DataFacts, *args: Any, **kwargs: Any) -> Any:
        return handler(facts, *args, **kwargs) if is_asked_by_user(facts.frame) and facts.forms else NotImplemented

    return handle


def _strides(facts: DataFacts, *args: Any, **kwargs: Any) -> Any:
    """Stand-ins have the strides of the batch, and so what is made of them has those that it would have."""
    facts.forms.asked.add(STRIDES)
    return NotImplemented


def _offset(facts: DataFacts, tensor: Tensor) -> Any:
    begin = facts.forms.behind("storage_offset", tensor)
    return begin if begin is NotImplemented else begin + tensor.storage_offset()


def _of_memory(question: str) -> Callable[..., Any]:
    """What all views of a tensor say alike; what a step makes lies in memory of its own, of which it is not so."""

    def handle(facts: DataFacts, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = facts.forms.behind(question, tensor)
        return False if found is NotImplemented else found

    return handle


def _of_bits(question: str) -> Callable[..., Any]:
    """Whether a tensor is shown negated, or conjugated: what is made of a stand-in turns the answer of the batch."""

    def handle(facts: DataFacts, tensor: Tensor) -> Any:
        found = facts.forms.behind(question, tensor)
        return found if found is NotImplemented else found != _QUESTIONS[question](tensor)

    return handle


def _of_itself(question: str) -> Callable[..., Any]:
    return lambda facts, tensor, *_: facts.forms.ask(question, tensor)


def _view(facts: DataFacts, tensor: Tensor) -> Any:
    return True if _is_view(tensor) else facts.forms.ask(_VIEW, tensor)


def _other(question: str, name: str) -> Callable[..., Any]:
    """What a tensor has beside it, if it has: another one, which is none of the step's."""

    def handle(facts: DataFacts, tensor: Tensor, *_: Any) -> Any:
        is_inner = question == _VIEW and _is_view(tensor)  # of a view of a view it is what both lie in
        found = facts.forms.behind(question, tensor) if is_inner else facts.forms.ask(question, tensor)
        if found is True:
            instead = "Give the step a tensor that has none (x.detach().clone()), or pass in what the model reads of it."
            raise refusal(Construct(f"{name} of a tensor of the batch that has one", instead), facts.line)
        return NotImplemented

    return handle


def _refused(name: str, instead: str) -> Callable[..., Any]:
    def handle(facts: DataFacts, *args: Any, **kwargs: Any) -> Any:
        raise refusal(Construct(name, instead), facts.line)

    return handle


_ADDRESS = _refused(
    "the memory of a tensor (data_ptr(), storage(), untyped_storage(), is_set_to()), which is another one at each step",
    "Whether two arguments are one tensor, `x is y` tells; what else depends on it is passed in as a Python value.",
)
_VERSION = _refused(
    "the number of writes to a tensor (x._version), which a program does not count",
    "Count in Python: a number in an attribute of the model, or one that is passed in.",
)
_GETTERS: Mapping[str, Callable[..., Any]] = {
    "_version": _VERSION, "_base": _other(_VIEW, "._base"), "is_leaf": _of_itself("is_leaf"),
    "grad_fn": _other("has a grad_fn", ".grad_fn"), "grad": _other("has a grad", ".grad"),
    "retains_grad": _of_itself("retains_grad"), "output_nr": _of_itself("output_nr"), "_cdata": _ADDRESS,
}  # fmt: skip
_METHODS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("is_contiguous", "stride", "dim_order"), _strides),
    "storage_offset": _offset, "is_shared": _of_memory("is_shared"), "is_pinned": _of_memory("is_pinned"),
    "is_inference": _of_itself("is_inference"), "is_neg": _of_bits("is_neg"), "is_conj": _of_bits("is_conj"),
    "_is_view": _view,
    **dict.fromkeys(("data_ptr", "storage", "untyped_storage", "_typed_storage", "is_set_to"), _ADDRESS),
}  # fmt: skip
_OWNERS = (Tensor, torch)
ASKED: Mapping[Any, Callable[..., Any]] = {
    **ASKING,
    **{getattr(Tensor, name).__get__: _by_users(handler) for name, handler in _GETTERS.items()},
    **{
        getattr(owner, name): _by_users(handler)
        for name, handler in _METHODS.items()
        for owner in _OWNERS
        if hasattr(owner, name)
    },
}
