"""The base of modules that run in each layer of each step."""

from __future__ import annotations

from typing import Any

from torch import nn


class QuickModule(nn.Module):
    """An nn.Module whose calls and parts take a quarter of the host's time: there are twenty of both in a layer.

    Hooks of the module run as usual, those of all modules (torch.nn.modules.module) do not. Parts are attributes too;
    they are exchanged by setting them, and never deleted.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._forward_hooks or self._forward_pre_hooks:
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_modules", ()):  # a part, or None in the place of one
            self.__dict__[name] = value  # found without nn.Module.__getattr__
