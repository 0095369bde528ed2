"""Writes docs/reference/ from the code, and scripts of examples/ into the pages that show them.

    python docs/generate.py            # write every page
    python docs/generate.py --check    # change nothing; print the diff to the code and exit 1

A new page is one entry of PAGES. A page shows a script between `<!-- script: PATH -->` and
`<!-- end of script -->`.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import inspect
import itertools
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import ecrm
from ecrm import config, kernels, nn, ops
from ecrm.base import errors
from ecrm.base.fields import Field
from ecrm.cli.commands import make_parser
from ecrm.config.reference import keys_of
from ecrm.config.schema import SECTIONS
from ecrm.engine.events import EVENTS, fields_of, meaning_of
from ecrm.run import files
from ecrm.run.files import File

ROOT = Path(__file__).parent.parent
FOLDER = Path("docs") / "reference"
COMMAND = "make docs"
COLUMNS = 100


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a `|` in a cell is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def wrapped(text: str, bullet: str = "") -> str:
    """A paragraph, or one point of a list, in lines of at most COLUMNS."""
    return textwrap.fill(
        " ".join(text.split()),
        COLUMNS,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def first_line(thing: object) -> str:
    """The first line of a docstring. Raises ValueError where there is none, or it is too long."""
    line = (thing.__doc__ or "").strip().split("\n")[0]
    if not 0 < len(line) <= COLUMNS:
        raise ValueError(f"{thing}: the docstring's first line has {len(line)} columns")
    return line


def config_page() -> str:
    """Every config key."""
    blocks = [
        "# Config keys",
        wrapped(
            "A config is a TOML file, or the name of a shipped one: "
            + ", ".join(f"`{name}`" for name in config.shipped_configs())
            + ". Each key has a default, and `--set SECTION.KEY=VALUE` changes one. "
            "`ecrm config` prints this page as a TOML file. "
            "`ecrm config NAME` prints the values of one config."
        ),
        wrapped("Sections: " + ", ".join(f"[{name}](#{name})" for name in SECTIONS) + "."),
    ]
    for section, kind in SECTIONS.items():
        blocks += [f"## {section}", wrapped(kind.__doc__ or "")]
        for key in keys_of(section):
            default = "Required." if key.default is None else f"Default `{key.default}`."
            wanted = "" if key.rule.choices else f" {sentence(key.wanted)}"
            blocks += [
                f"### {section}.{key.name}",
                wrapped(with_keys_marked(key.rule.description)),
                wrapped(default + wanted),
            ]
            if key.rule.choices:
                blocks.append(
                    "\n".join(
                        wrapped(
                            f"`{choice}`" + (f": {with_keys_marked(text)}" if text else ""), "- "
                        )
                        for choice, text in key.rule.choices.items()
                    )
                )
    return "\n\n".join(blocks)


def with_keys_marked(text: str) -> str:
    """The text with every config key in it as code."""
    return re.sub(rf"\b(?:{'|'.join(SECTIONS)})\.[a-z]\w*", r"`\g<0>`", text)


def cli_page() -> str:
    """Every command with its options."""
    parser = make_parser()
    blocks = ["# Commands", wrapped(f"`{parser.prog} --version` prints the version. {HELP}")]
    for command, meaning in commands_of(parser):
        blocks += [f"## {command.prog}", wrapped(meaning), f"    {usage(command)}"]
        for group in command._mutually_exclusive_groups:
            names = " or ".join(f"`{action.option_strings[-1]}`" for action in group._group_actions)
            how = "Give" if group.required else "Give at most"
            blocks.append(wrapped(f"{how} one of {names}."))
        shown = [action for action in command._actions if action.dest != "help"]
        formatter = command._get_formatter()
        if shown:
            rows = [(f"`{named(a)}`", formatter._expand_help(a)) for a in shown]
            blocks.append(table(("argument", "meaning"), rows))
    return "\n\n".join(blocks)


HELP = "Every command takes `--help`. Exit codes are on [a page of their own](exit-codes.md)."


def commands_of(
    parser: argparse.ArgumentParser, meaning: str = ""
) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Every command that can be run, with its line of help, in the order of `--help`."""
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not below:
        yield parser, meaning
    for subparsers in below:
        helps = {action.dest: action.help or "" for action in subparsers._choices_actions}
        for name, child in subparsers.choices.items():
            yield from commands_of(child, f"{meaning} {sentence(helps[name])}".strip())


def named(action: argparse.Action) -> str:
    """An argument as it is typed."""
    value = action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else "")
    return " ".join([*action.option_strings[-1:], *([str(value)] if action.nargs != 0 else [])])


def usage(command: argparse.ArgumentParser) -> str:
    """The command with what it must have, in one line."""
    words, optional = [command.prog], False
    for action in command._actions:
        if not action.option_strings:
            more = {"+": "{0} [{0} ...]", "?": "[{0}]"}.get(str(action.nargs), "{0}")
            words.append(more.format(named(action)))
        elif action.required:
            words.append(named(action))
        else:
            optional |= action.dest != "help"
    return " ".join([*words, *(["[OPTIONS]"] if optional else [])])


def exit_codes_page() -> str:
    """Every exit code."""
    kinds = [
        thing
        for thing in vars(errors).values()
        if isinstance(thing, type) and issubclass(thing, errors.EcrmError)
    ]
    rows = [(code, "", text) for code, text in errors.ENDINGS.items()]
    rows += [(kind.exit_code, f"`{kind.__name__}`", first_line(kind)) for kind in kinds]
    return "\n\n".join(
        [
            "# Exit codes",
            wrapped(
                "An error is one line on stderr that begins with `ecrm: error:`. `ecrm launch` "
                "ends with the code of the rank that said why the run failed. Where no rank could "
                "say so, it ends with the code of mpirun if that is from 1 to 125, and else with "
                "1. An error that a script of your own raises gives 8, whatever its own code is. A "
                "model that `session.save` cannot write gives 1 or 2."
            ),
            table(
                ("code", "error in Python", "meaning"),
                [(str(code), *rest) for code, *rest in sorted(rows, key=lambda row: row[0])],
            ),
            wrapped(
                "A wrong option on the command line ends with 2 as well, and so does `ecrm doctor` "
                "where training cannot run."
            ),
        ]
    )


def events_page() -> str:
    """Every event of events.jsonl."""
    blocks = [
        "# Events",
        wrapped(
            "`events.jsonl` in the run folder has one JSON object per line. Every event has "
            "`event`, its name, and `time`, in seconds since the epoch. A number that is NaN or "
            "infinite is null, since JSON has no word for it. A rank that dies while it writes may "
            "leave a line cut short; `ecrm.run.reading.parse_events` reads such a file."
        ),
        wrapped("Events: " + ", ".join(f"[{name}](#{name})" for name in EVENTS) + "."),
    ]
    for name, event in EVENTS.items():
        rows = field_rows(fields_of(event))
        blocks += [f"## {name}", wrapped(meaning_of(event)), table(FIELD_HEADER, rows)]
    return "\n\n".join(blocks)


FIELD_HEADER = ("field", "type", "unit", "meaning")


def field_rows(fields: Mapping[str, Field], before: str = "") -> Iterator[Sequence[str]]:
    """The fields of an event, and below each the parts of it."""
    for name, field in fields.items():
        kind = field.type + (" or null" if field.null else "")
        meaning = sentence(field.meaning) + (" Not always there." if field.optional else "")
        yield f"`{before}{name}`", kind, field.unit, meaning
        within = f"{before}{name}" + ("[]." if field.type == "list" else ".")
        yield from field_rows(field.parts, within)


def files_page() -> str:
    """Every file of a run folder, a checkpoint, a dataset, a drill and an export."""
    return "\n\n".join(
        [
            "# Files",
            wrapped(
                "Names that begin with a dot are drafts: they get their name when they are "
                "complete and on disk. Killed processes may leave some; `--resume auto` removes "
                "them. The reporting rank is the lowest rank that holds the dense model. "
                "If it dies, the next one takes over."
            ),
            "## A run folder",
            wrapped("`--run-dir`, by default a new folder in `runs/`."),
            file_table(files.RUN),
            "### summary.json",
            table(FIELD_HEADER, field_rows(files.SUMMARY)),
            "### stopped.json",
            table(FIELD_HEADER, field_rows(files.STOPPED)),
            "## A checkpoint",
            wrapped("`checkpoints/step-NNNNNNNN/` in the run folder: the model after N steps."),
            file_table(files.CHECKPOINT),
            "## Mapped files",
            wrapped("`mapped/` in the run folder, or the folder that `mapped.path` names."),
            file_table(files.MAPPED),
            "## A dataset",
            wrapped(
                "The folder that `ecrm prepare criteo` makes, of N samples. It appears complete."
            ),
            file_table(files.DATASET),
            "## A table",
            wrapped("The folder that `ecrm prepare table` makes, of N rows. It appears complete."),
            file_table(files.TABLE),
            "## A drill's folder",
            wrapped("What `ecrm drill` leaves."),
            file_table(files.DRILL),
            "## An exported model",
            wrapped("What `ecrm export` writes."),
            file_table(files.EXPORT),
        ]
    )


def file_table(described: Iterable[File]) -> str:
    """The files of one folder; parts of names that vary are `*`."""
    return table(
        ("name", "format", "content", "written by, when"),
        [(f"`{file.name}`", file.format, file.content, file.written) for file in described],
    )


def api_page() -> str:
    """The public names of Python: the package, and the kernels."""
    blocks = [
        "# Python API",
        wrapped(f"{ecrm.__doc__} Names that are not on this page may change at any time."),
        "## ecrm",
    ]
    for name in ecrm.__all__:
        thing = getattr(ecrm, name)
        blocks += described(name, thing) if callable(thing) else [f"`{name}`: text."]
    for module in (nn, ops):
        blocks += [f"## {module.__name__}", *paragraphs(module)]
        for name, thing in public(module):
            blocks += described(name, thing)
    blocks += [
        "## ecrm.kernels",
        *paragraphs(kernels),
        wrapped(
            "Shapes are in brackets, with their letters in a legend. Tensors are those of torch."
        ),
    ]
    for module in kernel_modules():
        readme = Path("kernels") / module.__name__.rpartition(".")[2] / "README.md"
        more = [f"[How it works, formulas, measurements](../../{readme})"]
        blocks += [f"### {module.__name__}", *paragraphs(module)]
        blocks += more if (ROOT / readme).exists() else []
        for name, thing in public(module):
            blocks += described(name, thing)
    return "\n\n".join(blocks)


def kernel_modules() -> list[ModuleType]:
    """The packages in ecrm.kernels, one for each operation."""
    found = pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}.")
    return [importlib.import_module(module.name) for module in found if module.ispkg]


def public(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions and classes of `__all__`."""
    for name in module.__all__:
        thing = getattr(module, name)
        if callable(thing):
            yield name, thing


def described(name: str, thing: Callable[..., Any]) -> list[str]:
    """A function or class: its signature and docstring, a class's attributes and methods."""
    blocks = [f"#### {name}", f"```python\n{signature(thing)}\n```", *paragraphs(thing)]
    for attribute, meaning in attributes(thing):
        blocks += [f"##### {name}.{attribute}", wrapped(meaning)]
    for method, function in methods(thing):
        text = signature(function)
        blocks += [f"##### {name}.{method}", f"```python\n{text}\n```", *paragraphs(function)]
    return blocks


def attributes(thing: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """What `__init__` gives a class's objects and says something about, in a string below."""
    source = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    for function in source.body if isinstance(source, ast.ClassDef) else ():
        if isinstance(function, ast.FunctionDef) and function.name == "__init__":
            for line, below in itertools.pairwise(function.body):
                if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                    target = line.target if isinstance(line, ast.AnnAssign) else line.targets[0]
                    yield target.attr, below.value.value


def methods(thing: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods and properties that a class has of its own, in the order of the source."""
    for name, member in vars(thing).items() if inspect.isclass(thing) else ():
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function) and not name.startswith("_"):
            yield name, function


def signature(thing: Callable[..., Any]) -> str:
    """The head of a function, or the fields of a class, as they are in the source."""
    node = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    if isinstance(node, ast.ClassDef):
        made = [part for part in node.body if isinstance(part, ast.FunctionDef)]
        for function in made:
            if function.name == "__init__":
                return called(node.name, function.args, "")
        fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
        return "\n".join([f"class {node.name}:", *(f"    {ast.unparse(part)}" for part in fields)])
    if not isinstance(node, ast.FunctionDef):
        raise TypeError(f"{thing} is neither a function nor a class")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    if any(ast.unparse(decorator) == "property" for decorator in node.decorator_list):
        return node.name + returns.replace(" ->", ":")
    return called(node.name, node.args, returns)


def called(name: str, arguments: ast.arguments, returns: str) -> str:
    """How something is called: its name and arguments, in one line or one for each argument."""
    texts = [text.replace("'", '"') for text in argument_texts(arguments) if text != "self"]
    if len(whole := f"{name}({', '.join(texts)}){returns}") <= COLUMNS:
        return whole
    return "\n".join([f"{name}(", *(f"    {text}," for text in texts), f"){returns}"])


def argument_texts(arguments: ast.arguments) -> Iterator[str]:
    """Each argument with its type and default."""
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    for argument, default in zip(positional, defaults):
        yield ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else "")
    if arguments.vararg is not None:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        yield ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else "")
    if arguments.kwarg is not None:
        yield f"**{ast.unparse(arguments.kwarg)}"


def paragraphs(thing: object) -> list[str]:
    """The docstring, each paragraph wrapped; what follows `Args:` or begins with `- ` is a list."""
    first_line(thing)
    return [paragraph_of(text) for text in (inspect.getdoc(thing) or "").split("\n\n")]


ARGUMENTS, POINT = "Args:\n", "- "


def paragraph_of(text: str) -> str:
    """One paragraph of a docstring, or one list."""
    if text.startswith(ARGUMENTS):
        return arguments_list(text)
    if text.startswith(POINT):
        points = re.split(f"^{POINT}", text, flags=re.MULTILINE)[1:]
        return "\n".join(wrapped(point, POINT) for point in points)
    return wrapped(text)


def arguments_list(paragraph: str) -> str:
    """One point for each argument: its name, and what there is to say of it."""
    points = re.split(r"^    (?=\w)", paragraph.removeprefix(ARGUMENTS), flags=re.MULTILINE)[1:]
    named = (point.split(": ", 1) for point in points)
    return "\n".join(wrapped(f"`{name}`: {meaning}", "- ") for name, meaning in named)


def index_page() -> str:
    """The list of all pages."""
    points = [
        wrapped(f"[{name}]({name}): {first_line(make)}", "- ")
        for name, make in PAGES.items()
        if make is not index_page
    ]
    return "\n\n".join(
        [
            "# Reference",
            wrapped(f"These pages are made from the code by `{COMMAND}`; do not edit them."),
            "\n".join(points),
        ]
    )


PAGES: dict[str, Callable[[], str]] = {
    "README.md": index_page,
    "config.md": config_page,
    "cli.md": cli_page,
    "events.md": events_page,
    "files.md": files_page,
    "exit-codes.md": exit_codes_page,
    "api.md": api_page,
}


SCRIPT = re.compile(r"(<!-- script: (\S+) -->\n).*?(<!-- end of script -->)", re.DOTALL)


def with_scripts(text: str) -> str:
    """A page with every script that the page names as the script is now."""

    def shown(found: re.Match[str]) -> str:
        script = (ROOT / found[2]).read_text()
        return f"{found[1]}\n```python\n{script}```\n\n{found[3]}"

    return SCRIPT.sub(shown, text)


def pages_with_scripts(root: Path) -> dict[Path, str]:
    """The pages of docs in `root` that show scripts, with the text to be there."""
    texts = {path: path.read_text() for path in sorted((root / "docs").rglob("*.md"))}
    return {path: with_scripts(text) for path, text in texts.items() if SCRIPT.search(text)}


def diff(there: str, wanted: str, shown: str) -> str:
    """The lines of a page that the code wants otherwise."""
    lines = [text.splitlines(keepends=True) for text in (there, wanted)]
    return "".join(difflib.unified_diff(*lines, shown, f"{shown} by the code"))


def differences(root: Path = ROOT) -> list[str]:
    """The diff, page by page, from what is in `root` to what the code says."""
    found = []
    for name in sorted(PAGES.keys() | {path.name for path in (root / FOLDER).glob("*")}):
        path = root / FOLDER / name
        there = path.read_text() if path.exists() else ""
        wanted = f"{PAGES[name]()}\n" if name in PAGES else ""
        found.append(diff(there, wanted, str(FOLDER / name)))
    for path, wanted in pages_with_scripts(root).items():
        found.append(diff(path.read_text(), wanted, str(path.relative_to(root))))
    return [text for text in found if text]


def write(root: Path = ROOT) -> None:
    """Write every page and every script in a page, and remove what is none."""
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    for path in (root / FOLDER).glob("*"):
        if path.name not in PAGES:
            path.unlink()
    for name, make in PAGES.items():
        (root / FOLDER / name).write_text(f"{make()}\n")
    for path, text in pages_with_scripts(root).items():
        path.write_text(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the pages; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="print the diff, write nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="write below another folder")
    args = parser.parse_args(argv)
    if not args.check:
        write(args.root)
        return 0
    found = differences(args.root)
    if found:
        print("\n".join(found), end="")
        print(f"docs is not what the code says: type {COMMAND} and commit it")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
