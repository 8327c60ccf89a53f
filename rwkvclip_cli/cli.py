"""The command line: a command reads its options, calls one function and prints its result.

    $ rwkvclip pack ./imgs out.rec

Options derive from the dataclasses of `config`. Torch, DALI and numpy load only inside the command that needs them.
"""

import functools
import inspect
import io
import signal
import sys
import typing
from collections.abc import Callable
from typing import Any

import typer
import typer.core

from rwkvclip_cli import __version__, config, console
from rwkvclip_cli.config import LaunchConfig
from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.launch.exit_record import exit_recorded


class _HelpsAsResult:
    """What a command or group does that writes its help as any other result: to a pipe, or to nobody."""

    def get_help_option(self, ctx: Any) -> Any:
        """The same option, but for what it calls."""
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.callback = _show_help
        return option


def _show_help(context: Any, parameter: Any, value: bool) -> None:
    if value and not context.resilient_parsing:
        console.result(context.get_help())
        raise typer.Exit


class _Group(_HelpsAsResult, typer.core.TyperGroup):
    """`rwkvclip` without a command."""


class _Command(_HelpsAsResult, typer.core.TyperCommand):
    """`rwkvclip COMMAND`."""


app = typer.Typer(
    name="rwkvclip",
    cls=_Group,
    help="Pack image-text data, train RWKV-CLIP on any number of GPUs, and prove that the result is right.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # importing rich would cost --help half of its 0.3 s
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line and leave with the exit code that `console` lists."""
    for stream in (sys.stdout, sys.stderr):
        # A file name or caption that the terminal's encoding lacks is shown in escapes; it does not end a finished run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with exit_recorded():
            sys.exit(_run(sys.argv[1:]))
    except RwkvClipError as error:
        console.show_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        console.say("interrupted")
        sys.exit(console.EXIT_SIGNAL + signal.SIGINT)


# The command line library's own class, wherever this release of typer keeps it.
_WrongUsage: Any = typer.BadParameter.__base__


def _run(arguments: list[str]) -> int:
    """Run one command and return the exit code. Typer's own `app()` would hide a BrokenPipeError that is a bug."""
    group: Any = typer.main.get_command(app)
    try:
        with group.make_context("rwkvclip", arguments) as context:
            group.invoke(context)
    except typer.Exit as leaving:
        return leaving.exit_code
    except _WrongUsage as error:
        shown = io.StringIO()
        error.show(shown)
        console.say_on_any_rank(*shown.getvalue().removesuffix("\n").split("\n"))
        return console.EXIT_USAGE
    return console.EXIT_DONE


def _show_version(value: bool) -> None:
    if value:
        console.result(f"rwkvclip {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def _load_config(context: typer.Context, path: str | None) -> str | None:
    """Put the settings file's values below the command line's and above the defaults."""
    found = config.find_config(path)
    if found is not None:
        settings = config.read_config(found)
        context.default_map = settings.get(str(context.info_name), {})
        context.meta[SETTINGS_FILE] = found.absolute()
    return path


SETTINGS_FILE = "rwkvclip.settings_file"  # where the context keeps the absolute path of the file in force
CONFIG_HELP = f"Settings file (default: {config.CONFIG_FILE} in this folder)."


def command(
    name: str, options: type, help: str, *, extra_args: bool = False, with_context: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command whose options are the fields of the dataclass `options`.

    The function receives the dataclass; after it the context with `with_context`, and the arguments
    after `--` with `extra_args`.
    """
    hints = typing.get_type_hints(options)
    spellings = {
        alias: config.option_name(field)
        for field in config.option_fields(options)
        for alias in field.metadata["aliases"]
    }

    def normalize(token: str) -> str:
        dashed = token.replace("_", "-")
        return spellings.get(dashed, dashed)

    def register(function: Callable[..., None]) -> Callable[..., None]:
        def run(context: typer.Context, **values: Any) -> None:
            given = [context] if with_context else []
            rest = [list(context.args)] if extra_args else []
            function(_made(options, context, values), *given, *rest)

        parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        parameters += [_parameter(field, hints[field.name]) for field in config.option_fields(options)]
        parameters.append(
            inspect.Parameter(
                "config",
                inspect.Parameter.KEYWORD_ONLY,
                annotation=str | None,
                default=typer.Option(None, "--config", callback=_load_config, is_eager=True, help=CONFIG_HELP),
            )
        )
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        settings: dict[str, Any] = {"token_normalize_func": normalize, "help_option_names": ["-h", "--help"]}
        if extra_args:
            settings["allow_extra_args"] = True
        kind = _PassesOn if extra_args else _Command
        app.command(name, help=help, context_settings=settings, cls=kind)(run)
        return function

    return register


class _PassesOn(_Command):
    """A command that hands what follows -- to train, and says so where an option of train's comes before."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """What typer's own does, behind that look."""
        own = {name.lstrip("-") for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        of_train = {config.option_name(field) for field in config.option_fields(config.TrainConfig)} - own
        for token in args[: args.index("--") if "--" in args else len(args)]:
            name = token.removeprefix("--").partition("=")[0].replace("_", "-")
            if token.startswith("--") and name in of_train:
                raise UsageError(
                    f"--{name} is an option of train, and train's options follow --",
                    hint=f"rwkvclip {ctx.info_name} -- {token} ...",
                )
        return super().parse_args(ctx, args)


def _made(options: type, context: typer.Context, values: dict[str, Any]) -> Any:
    """The dataclass from what a command was given; the command line wins over what it excludes in the file."""
    given = {key: value for key, value in values.items() if key != "config"}
    sources = {key: getattr(context.get_parameter_source(key), "name", "") for key in given}
    typed, filed = ({key for key in given if sources[key] == name} for name in ("COMMANDLINE", "DEFAULT_MAP"))
    for key in config.overruled(options, given, typed, filed):
        del given[key]
    return options(**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})


def parse(name: str, arguments: list[str]) -> Any:
    """The options that `rwkvclip NAME ARGUMENTS` would run with, settings file included, without running it.

    Raises what the command itself would raise for wrong arguments.
    """
    group: Any = typer.main.get_command(app)
    root = typer.Context(group, info_name="rwkvclip")
    with group.commands[name].make_context(name, list(arguments), parent=root) as context:
        return _made(config.SECTIONS[name], context, context.params)


def _parameter(field: Any, hint: Any) -> inspect.Parameter:
    meta = field.metadata
    is_list = typing.get_origin(hint) is tuple
    default: Any = list(field.default) if is_list else field.default
    if meta["argument"]:
        # Of two arguments that are missing the command line would name the wrong one: an empty list is the command's.
        value = typer.Argument(... if default == "" else default, help=meta["help"])
    else:
        name = f"--{config.option_name(field)}"
        # What can be on by itself needs a word for off.
        is_switch = (hint is bool and field.default is True) or hint == bool | None
        spelled = f"{name}/--no-{config.option_name(field)}" if is_switch else name
        metavar = "|".join(meta["choices"]) or None
        show = default not in (None, "", [], False, True)
        value = typer.Option(default, spelled, help=meta["help"], metavar=metavar, show_default=show)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, annotation=list[str] if is_list else hint, default=value
    )


@command("train", config.TrainConfig, "Train one rank; torchrun or `rwkvclip launch` starts as many as needed.")
def _train(options: config.TrainConfig) -> None:
    from rwkvclip_cli.train import train

    outcome = train(options)
    if not outcome.finished:
        raise typer.Exit(console.EXIT_STOPPED)


@command("eval", config.EvalConfig, "Measure a checkpoint's retrieval on a packed data set.")
def _eval(options: config.EvalConfig) -> None:
    from rwkvclip_cli.train import evaluate

    found = evaluate.evaluate(options)
    if options.json:
        console.result_json(found.document())
    else:
        console.result(evaluate.table(found))


@command(
    "launch",
    LaunchConfig,
    "Start training on this machine's GPUs, and on other machines'. What follows -- goes to train.",
    extra_args=True,
    with_context=True,
)
def _launch(options: LaunchConfig, context: typer.Context, train_args: list[str]) -> None:
    from rwkvclip_cli.data.shards import locate
    from rwkvclip_cli.launch.torchrun import check_machine, check_usage, start

    retyped = functools.partial(config.retype, "launch", options, train_args)
    check_usage(options, retyped)
    settings = context.meta.get(SETTINGS_FILE)
    passed_on = ["--config", str(settings)] if settings and "--config" not in train_args else []
    without_gpu = retyped(gpus=None, cpus=2)
    try:
        # The ranks would all refuse wrong arguments, later and once each.
        wanted = parse("train", [*passed_on, *train_args])
        if not options.dry_run:
            try:
                locate(wanted.train_data).check_there()
            except RwkvClipError:
                check_machine(options, without_gpu=without_gpu)
                raise
    except config.MissingOptionError as error:
        if not options.dry_run:
            # Who asks for GPUs that are not there hears of them first: no train option would mend that.
            check_machine(options, without_gpu=without_gpu)
            completed = config.retype("launch", options, [*train_args, *error.hint.split()])
            raise config.MissingOptionError(error.message, completed) from None
        console.warn(error.message)
    raise typer.Exit(start(options, ("train", *passed_on, *train_args), without_gpu=without_gpu))


@command("pack", config.PackConfig, "Pack images with captions into a RecordIO data set, every record proved to train.")
def _pack(options: config.PackConfig) -> None:
    from rwkvclip_cli.data.packing.pack import pack

    summary = pack(options)
    if options.json:
        console.result_json(summary.document())
    else:
        console.result(summary.text())


@command(
    "nccl-check",
    config.NcclCheckConfig,
    "Check that the ranks' collectives are right, and measure how fast they are.",
    with_context=True,
)
def _nccl_check(options: config.NcclCheckConfig, context: typer.Context) -> None:
    from rwkvclip_cli.nccl_check import nccl_check

    raise typer.Exit(nccl_check(options, context.meta.get(SETTINGS_FILE)))


@command(
    "bench", config.BenchConfig, "Measure this machine's loader, WKV6, loss and training step; name the slowest part."
)
def _bench(options: config.BenchConfig) -> None:
    from rwkvclip_cli.bench import bench

    found = bench(options)
    if options.json:
        console.result_json(found.document())
    else:
        console.result(found.text())


@command("inspect", config.InspectConfig, "Look into a packed data set: summary, records, proof, repair, export, plan.")
def _inspect(options: config.InspectConfig) -> None:
    from rwkvclip_cli.inspect import inspect_data

    report = inspect_data(options)
    if options.json:
        console.result_json(report.document)
    else:
        console.result(report.text)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


@command("demo", config.DemoConfig, "Pack, check, train and evaluate on drawn scenes: everything once, in minutes.")
def _demo(options: config.DemoConfig) -> None:
    import tempfile
    from pathlib import Path

    from rwkvclip_cli.demo import run_demo

    if options.folder is None:
        run_demo(Path(tempfile.mkdtemp(prefix="rwkvclip-demo-")), keep=False)
    else:
        run_demo(Path(options.folder), keep=True)
