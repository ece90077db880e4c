"""Token methods: only the tokens that matter take part."""

from tokensworth.tokens.choose import Chosen
from tokensworth.tokens.method import Method, adapt, dense, list_methods, method_from_dict, method_of, readapt, restore
from tokensworth.tokens.tosa import ToSA, set_keep

__all__ = [
    "Chosen",
    "Method",
    "ToSA",
    "adapt",
    "dense",
    "list_methods",
    "method_from_dict",
    "method_of",
    "readapt",
    "restore",
    "set_keep",
]
