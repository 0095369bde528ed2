"""The command `ecrm export`."""

from __future__ import annotations

import argparse

from ecrm.base.atomic_files import staged_file
from ecrm.base.errors import UsageError
from ecrm.base.paths import typed_path
from ecrm.base.wording import counted
from ecrm.checkpoint.export import FORMATS, export
from ecrm.checkpoint.folder import locate
from ecrm.checkpoint.manifest import as_a_run_writes


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "export", help="write the model of a checkpoint as one file, with TorchRec's names"
    )
    parser.add_argument(
        "checkpoint",
        type=typed_path,
        metavar="DIR",
        help="a checkpoint, or a run folder, whose newest checkpoint is taken",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="safetensors",
        help="safetensors (by default), or torchrec: a state_dict that torch.load reads and "
        "torchrec.models.dlrm.DLRM loads",
    )
    parser.add_argument(
        "--output",
        type=typed_path,
        required=True,
        metavar="FILE",
        help="file to write; it must not exist",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.output.exists():
        raise UsageError(f"--output {args.output}: is there already; name a new file")
    whole, refused = locate(args.checkpoint)
    for line in refused:
        print(line)
    with as_a_run_writes(whole[0].path), staged_file(args.output) as file:
        tensors, size = export(whole[0], args.format, file, args.output.parent)
    print(
        f"{args.output}: step {whole[0].step}, {counted(tensors, 'tensor')}, "
        f"{counted(size, 'byte')}"
    )
    return 0
