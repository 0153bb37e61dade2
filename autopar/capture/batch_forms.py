"""Answer what code asks of a tensor beside its values: how it lies in memory, what autograd keeps of it.

A capture runs on stand-ins, which lie in memory of their own and are leaves of no graph. What the user's own tensor
would say is told in their place, and `Ran.asked` remembers the question: a batch with another answer has another
program (`answers`). What no program can follow is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import FrameType, GetSetDescriptorType
from typing import Any

import torch
from torch.overrides import handle_torch_function

from autopar.capture.ops.raised_scatter import ASKING
from autopar.capture.python.ran import Ran
from autopar.capture.refusals.constructs import MEMORY_ADDRESS, WRITES_COUNTED, Construct
from autopar.capture.refusals.explain_failure import refusal
from autopar.capture.refusals.location import Line, is_user_code
from autopar.ir.ops.op_facts import FORM_QUERIES
from autopar.torch_compat import storage_of

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


# What is asked of a tensor of the batch by another name than its own method or attribute, with how it is answered.
_QUESTIONS: Mapping[str, Callable[[Tensor], Hashable]] = {
    STRIDES: Tensor.stride, "is_shared": _is_shared, "is_pinned": _is_pinned, _VIEW: _is_view,
    "has a grad_fn": lambda tensor: tensor.grad_fn is not None, "has a grad": _has_gradient,
}  # fmt: skip
Answers = tuple[tuple[str, tuple[Hashable, ...]], ...]


def answers(asked: Iterable[str], tensors: Sequence[Tensor]) -> Answers:
    """What each tensor says to each question that the code of a step asks."""
    return tuple((question, tuple(_answer(question, tensor) for tensor in tensors)) for question in sorted(asked))


def _answer(question: str, tensor: Tensor) -> Any:
    if question in _QUESTIONS:
        return _QUESTIONS[question](tensor)
    value = getattr(tensor, question)
    return value() if callable(value) else value


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
        return NotImplemented if found is None else _answer(question, found[1])

    def behind(self, question: str, tensor: Tensor) -> Any:
        """The answer of the tensor of the batch in whose memory another lies; NotImplemented if there is none."""
        self.asked.add(question)
        leaf = self._by_memory.get(storage_of(tensor))
        return NotImplemented if leaf is None else _answer(question, leaf)

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
    """What answers a raised function, by `DataFacts`, where the user's code asks; what torch's own asks, torch
    answers."""

    def handle(facts: Any, *args: Any, **kwargs: Any) -> Any:
        is_asked = facts.is_users and facts.forms is not None
        return handler(facts.forms, facts.line, *args, **kwargs) if is_asked else NotImplemented

    return handle


# Each gives a handler for a function of that name, which is told of the batch, the line that asks, and the arguments.


def _strides(_: str) -> Callable[..., Any]:
    """Stand-ins have the strides of the batch, and so what is made of them has those that it would have."""

    def handle(forms: BatchForms, *_: Any, **options: Any) -> Any:
        forms.asked.add(STRIDES)
        return NotImplemented

    return handle


def _offset(name: str) -> Callable[..., Any]:
    def handle(forms: BatchForms, _: Line | None, tensor: Tensor) -> Any:
        begin = forms.behind(name, tensor)
        return begin if begin is NotImplemented else begin + _answer(name, tensor)

    return handle


def _of_memory(name: str) -> Callable[..., Any]:
    """What all views of a tensor say alike; what a step makes lies in memory of its own, of which it is not so."""

    def handle(forms: BatchForms, _: Line | None, tensor: Tensor, *device: Any, **options: Any) -> Any:
        found = forms.behind(name, tensor)
        return False if found is NotImplemented else found

    return handle


def _of_bits(name: str) -> Callable[..., Any]:
    """Whether a tensor is shown negated, or conjugated: what is made of a stand-in turns the answer of the batch."""

    def handle(forms: BatchForms, _: Line | None, tensor: Tensor) -> Any:
        found = forms.behind(name, tensor)
        return found if found is NotImplemented else found != _answer(name, tensor)

    return handle


def _of_itself(name: str) -> Callable[..., Any]:
    return lambda forms, line, tensor, *_: forms.ask(name, tensor)


def _view(forms: BatchForms, _: Line | None, tensor: Tensor) -> Any:
    return True if _is_view(tensor) else forms.ask(_VIEW, tensor)


def _other(question: str, name: str) -> Callable[..., Any]:
    """What a tensor has beside it, if it has: another one, which is none of the step's."""

    def handle(forms: BatchForms, line: Line | None, tensor: Tensor, *_: Any) -> Any:
        is_inner = question == _VIEW and _is_view(tensor)  # of a view of a view it is what both lie in
        if (forms.behind(question, tensor) if is_inner else forms.ask(question, tensor)) is True:
            instead = "Give the step a tensor without (x.detach().clone()), or pass in what the model reads of it."
            raise refusal(Construct(f"{name} of a tensor of the batch that has one", instead), line)
        return NotImplemented

    return handle


def _refused(construct: Construct) -> Callable[..., Any]:
    def handle(forms: BatchForms, line: Line | None, *args: Any, **kwargs: Any) -> Any:
        raise refusal(construct, line)

    return handle


_KINDS: Mapping[str, Callable[[str], Callable[..., Any]]] = {
    "strides": _strides, "offset": _offset, "memory": _of_memory, "bits": _of_bits, "itself": _of_itself,
    "address": lambda _: _refused(MEMORY_ADDRESS),
}  # fmt: skip
_METHODS: Mapping[str, Callable[..., Any]] = {
    **{name: _KINDS[kind](name) for kind, names in FORM_QUERIES.items() for name in names},
    "_version": _refused(WRITES_COUNTED), "_base": _other(_VIEW, "._base"), "_is_view": _view,
    "grad_fn": _other("has a grad_fn", ".grad_fn"), "grad": _other("has a grad", ".grad"),
}  # fmt: skip


def _functions(name: str) -> Iterator[Any]:
    """What a torch function mode is told where code uses a method or an attribute of a tensor."""
    for owner in (Tensor, torch):
        found = getattr(owner, name, None)
        if found is not None:
            yield found.__get__ if isinstance(found, GetSetDescriptorType) else found


ASKED: Mapping[Any, Callable[..., Any]] = {
    **ASKING,
    **{function: _by_users(handler) for name, handler in _METHODS.items() for function in _functions(name)},
}
