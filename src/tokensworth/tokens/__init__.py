"""Token methods: only the tokens that matter take part."""

from tokensworth.tokens.choose import Chosen
from tokensworth.tokens.method import (
    Method,
    adapt,
    dense,
    list_methods,
    method_from_dict,
    method_of,
    method_penalties,
    readapt,
    restore,
)
from tokensworth.tokens.methods.dynamicvit import DynamicViT
from tokensworth.tokens.methods.evit import EViT
from tokensworth.tokens.methods.pitome import PiToMe
from tokensworth.tokens.methods.random import Random
from tokensworth.tokens.methods.star import Star
from tokensworth.tokens.methods.svit import SViT
from tokensworth.tokens.methods.tome import ToMe
from tokensworth.tokens.methods.topk import TopK
from tokensworth.tokens.methods.vtc_lfc import VTCLFC
from tokensworth.tokens.tosa import ToSA, set_keep

__all__ = [
    "VTCLFC",
    "Chosen",
    "DynamicViT",
    "EViT",
    "Method",
    "PiToMe",
    "Random",
    "SViT",
    "Star",
    "ToMe",
    "ToSA",
    "TopK",
    "adapt",
    "dense",
    "list_methods",
    "method_from_dict",
    "method_of",
    "method_penalties",
    "readapt",
    "restore",
    "set_keep",
]
