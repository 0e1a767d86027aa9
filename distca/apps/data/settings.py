"""Options of the training data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

import typer


class Homes(StrEnum):
    """Ways to choose the rank that holds a token."""

    PACKED = "packed"
    PLANNED = "planned"


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Source of the documents and how they are cut; the fields are command-line options."""

    PANEL: ClassVar = "Data"

    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of text files (one document a file), or a .jsonl or .parquet file. "
            "Default: the sources of Python's standard library."
        ),
    ] = None
    text_field: Annotated[
        str, typer.Option(help="JSONL field or Parquet column that holds the text.")
    ] = "text"
    max_document_tokens: Annotated[
        int | None,
        typer.Option(
            help="Longer documents are cut into pieces of at most this many tokens. "
            "Default: what one nano-batch can hold, or two with --cut-documents."
        ),
    ] = None
    span_ranks: Annotated[
        bool,
        typer.Option(
            help="Let a document continue on the next rank instead of cutting it at a rank's end."
        ),
    ] = False
    cut_documents: Annotated[
        bool,
        typer.Option(
            help="Let a document begin in the first of two nano-batches and go on in the second, "
            "so that it can be twice as long."
        ),
    ] = False
    seed: Annotated[int, typer.Option(help="Order of the documents and first weights.")] = 0

    def __post_init__(self) -> None:
        if self.max_document_tokens is not None and self.max_document_tokens < 2:
            raise ValueError(
                f"max_document_tokens is {self.max_document_tokens}; it must be 2 or more, "
                "because a single token predicts nothing"
            )
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be 0 or more")
