"""What may go wrong in a callback that only observes, without ending the training (layer L)."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from typing import Any, TypeVar, cast

from lightning_hetero.record.files import tell

RAISES = "LIGHTNING_HETERO_OBSERVERS_RAISE"
"""The environment variable with which such errors are raised, e.g. by our tests."""

_WRONG = "_gone_wrong"
Method = TypeVar("Method", bound=Callable[..., Any])


def never_raises(method: Method) -> Method:
    """Lets a method of an observer go wrong: that is reported once, with its traceback, and the method returns None.

    Such methods of this observer are not called again until `watch_again`. Not for what other ranks wait for. A
    ``RuntimeError`` or ``ConnectionError`` passes: with these torch and the engines say that a rank or device is lost.
    """

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if vars(self).get(_WRONG):
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            if isinstance(error, RuntimeError | ConnectionError) or os.environ.get(RAISES):
                raise
            vars(self)[_WRONG] = True
            told = f"{type(self).__name__} observes no more, and training goes on without it. Unless the error is in"
            tell(f"{told} your own logger or batch, please report it to lightning_hetero:\n{traceback.format_exc()}")
            return None

    return cast(Method, guarded)


def watch_again(observer: object) -> None:
    """Lets an observer try again, when a fit begins."""
    vars(observer).pop(_WRONG, None)
