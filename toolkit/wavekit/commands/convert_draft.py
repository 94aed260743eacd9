"""``wavekit convert-draft``: a draft head's checkpoint in another format."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wavekit.commands.export import Boundaries
from wavekit_engines.draft_formats import FORMATS, read_draft, write_draft

if TYPE_CHECKING:
    from wavekit_engines.checkpoint import Checkpoint
    from wavekit_engines.draft_spec import Draft


@click.command("convert-draft")
@click.argument("draft", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The new checkpoint's folder.")
@click.option("--to", "to_format", required=True, type=click.Choice(FORMATS), help="The format to write.")
@click.option(
    "--from",
    "from_format",
    type=click.Choice(FORMATS),
    help="The format of DRAFT, which says what its layer ids mean.  [default: seen from its files]",
)
@click.option(
    "--boundaries",
    type=Boundaries(),
    help="The boundaries that DRAFT taps, as in 2,15,27, where it does not say so or says it wrong.",
)
@click.option("--target", help="The model it drafts for: checks that the two fit, and tells how many layers there are.")
@click.option("--force", is_flag=True, help="Replace an existing folder, once the new one is complete.")
def convert_draft(
    draft: Path,
    output: Path,
    to_format: str,
    from_format: str | None,
    boundaries: tuple[int, ...] | None,
    target: str | None,
    force: bool,
) -> None:
    """Write the EAGLE-3 head in the folder DRAFT in another format; weights, map and taps stay as they are.

    \b
    The formats, and what a layer id means in them:
      eagle        SafeAILab's EAGLE: no ids; its code taps boundaries 2, N/2 and N-3
      specforge    SpecForge: outputs of layers, one less than the boundary
      modelopt     NVIDIA Model-Optimizer: the same
      speculators  vLLM's speculators: boundaries

    \b
    wavekit convert-draft ./draft -o draft-for-vllm --to speculators
    wavekit convert-draft ./EAGLE3-LLaMA3.1-Instruct-8B -o draft --to specforge --from eagle --target ./Llama-3.1-8B
    """
    from wavekit_engines.checkpoint import open_checkpoint
    from wavekit_engines.families import decoder_spec

    checkpoint = open_checkpoint(target) if target is not None else None
    head = read_draft(
        draft,
        target=decoder_spec(checkpoint.config) if checkpoint is not None else None,
        boundaries=boundaries,
        format=from_format,
    )
    if checkpoint is not None:
        head = _naming_target(head, checkpoint, target or "")
    write_draft(output, head, to_format, replace=force)
    taps = ", ".join(map(str, head.spec.boundaries))
    click.echo(
        f"{output}: {to_format}, taps at boundaries {taps}, {head.spec.draft_vocab_size} draft tokens, {head.dtype}"
    )
    if to_format in ("specforge", "modelopt") and head.spec.boundaries[0] != 2:
        click.echo(
            "note: some versions of SGLang take layer ids for boundaries unless the first is 1; if acceptance is poor "
            "there, that is why",
            err=True,
        )


def _naming_target(head: "Draft", checkpoint: "Checkpoint", name: str) -> "Draft":
    """The same head, saying what it drafts for, which the speculators format has a place for."""
    if head.carried.get("verifier", {}).get("name_or_path"):
        return head
    verifier = {"name_or_path": name, "architectures": list(checkpoint.config.get("architectures") or [])}
    return dataclasses.replace(head, carried={**head.carried, "verifier": verifier})
